"""Test settings: eight virtual CPU devices, Hypothesis profiles, a cache."""

import contextlib
import ctypes
import gc
import os
import pathlib
import resource
import tempfile

# Must be set before JAX starts its backend.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  str(pathlib.Path(tempfile.gettempdir()) / f"jaxpruner-jit-{os.getuid()}"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis
import jax
import pytest

_COMMON = dict(
  deadline=None,
  suppress_health_check=list(hypothesis.HealthCheck),
  print_blob=True,
)
hypothesis.settings.register_profile("ci", max_examples=200, **_COMMON)
hypothesis.settings.register_profile("quick", max_examples=20, **_COMMON)
hypothesis.settings.register_profile("nightly", max_examples=10_000, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def tables_are_restored():
  """Undo what a test, a page or an example registers."""
  from jaxpruner._tools import registry

  with registry.restored():
    yield


_MOST_MEMORY = 2.5 * 2**30  # of a worker, in bytes


# Between modules: within one, tests share compiled steps and count traces.
@pytest.fixture(autouse=True, scope="module")
def memory_is_bounded():
  """Drop compiled programs when they take much memory: 8 GiB must do."""
  yield
  if _resident() > _MOST_MEMORY:
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
      ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed


def _resident() -> int:
  try:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  except OSError:  # not Linux
    return 0
  return pages * resource.getpagesize()
