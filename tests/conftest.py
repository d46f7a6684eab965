"""Test settings: eight virtual CPU devices, Hypothesis profiles, a cache."""

import contextlib
import ctypes
import gc
import os
import pathlib
import resource
import sys
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
import numpy as np
import pytest

_COMMON = dict(
  deadline=None,
  suppress_health_check=list(hypothesis.HealthCheck),
  print_blob=True,
)
hypothesis.settings.register_profile("ci", max_examples=200, **_COMMON)
hypothesis.settings.register_profile("quick", max_examples=20, **_COMMON)
hypothesis.settings.register_profile("nightly", max_examples=10_000, **_COMMON)
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(_PROFILE)


def pytest_collection_finish():
  """Collect garbage rarely: what is imported by now stays to the end."""
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def tables_are_restored():
  """Undo what a test, a page or an example registers."""
  from jaxpruner._tools import registry

  with registry.restored():
    yield


@pytest.fixture(autouse=True)
def every_test_draws_the_same(request, monkeypatch):
  """Start a module's `RNG` anew: workers share tests out by chance."""
  if hasattr(request.module, "RNG"):
    monkeypatch.setattr(request.module, "RNG", np.random.default_rng(0))


@pytest.fixture(autouse=True)
def figures_are_closed():
  """Close what a test, a page or an example drew: pyplot warns of many."""
  yield
  if pyplot := sys.modules.get("matplotlib.pyplot"):
    pyplot.close("all")


# Rooms that promise something of the machine code itself: exact thresholds, one
# result on every device layout, speed.
_OPTIMIZED = ("engine", "kept", "sparse")


@pytest.fixture(autouse=True, scope="module")
def compiled_quickly(request):
  """Leave out LLVM's optimizations, a third of the suite's time.

  Rooms whose laws are about the machine code have them, and at night all tests
  do: there programs are compiled as users compile them.
  """
  room = pathlib.Path(request.path).relative_to(pathlib.Path(__file__).parent)
  quickly = room.parts[0] not in _OPTIMIZED and _PROFILE != "nightly"
  if jax.config.read("jax_disable_most_optimizations") != quickly:
    jax.clear_caches()  # the setting is in no key
    jax.config.update("jax_disable_most_optimizations", quickly)


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
