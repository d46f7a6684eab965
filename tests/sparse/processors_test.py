"""Kernels for processors with narrower vectors than this one's."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, numpy as np
from jaxpruner import sparse
from jaxpruner.sparse import _simd, kernels
assert _simd.WIDTH == 8, _simd.WIDTH
assert kernels.load("bitmask") is None
rng = np.random.default_rng(0)
for shape in ((300, 150), (513, 1030)):
  dense = np.where(rng.random(shape) < 0.2, rng.standard_normal(shape), 0)
  dense = dense.astype(np.float32)
  packed = sparse.pack(dense)
  for batch in (1, 7, 16, 40, 300):
    x = rng.standard_normal((batch, shape[0])).astype(np.float32)
    g = rng.standard_normal((batch, shape[1])).astype(np.float32)
    y, pullback = jax.vjp(lambda x: sparse.matmul(x, packed), x)
    np.testing.assert_allclose(y, x @ dense, atol=1e-3)
    np.testing.assert_allclose(pullback(g)[0], g @ dense.T, atol=1e-3)
    panels = sparse.pack(dense, format="panel")
    np.testing.assert_allclose(x @ panels, x @ dense, atol=1e-3)
"""


# Skylake and Cascade Lake: AVX-512, but no bytes are expanded.
STRIP = """
import numba, numpy as np
from jaxpruner.post_training import _step_kernel
from jaxpruner.sparse import _simd, _strip_simd, _strips
assert _simd.AVX512 and not _strip_simd.BYTES
rng = np.random.default_rng(0)
weights = rng.normal(size=(16, 64)).astype(np.float32)
kept = rng.random(weights.shape) < 0.5
packed = _strips.pack(weights, "float32", kept)
x, out = rng.normal(size=64).astype(np.float32), np.zeros(16, np.float32)

@numba.njit
def run(kind, data, x, out):
  at = x.ctypes.data
  _step_kernel._strip(kind, data.ctypes.data, 1, at, at, at, out.ctypes.data)

if RUNS:
  run(12, packed.data, x, out)
  np.testing.assert_allclose(out, np.where(kept, weights, 0) @ x, atol=1e-5)
else:
  run.compile(numba.typeof((12, packed.data, x, out)).types)
"""


@pytest.mark.skipif(
  "x86_64" not in os.uname().machine, reason="features of x86 processors"
)
def test_a_step_compiles_where_no_bytes_are_expanded(tmp_path):
  _simd = pytest.importorskip("jaxpruner.sparse._simd")
  done = child(
    STRIP.replace("RUNS", str(_simd.AVX512)),
    NUMBA_CPU_NAME="cascadelake",
    NUMBA_CPU_FEATURES="+avx,+avx2,+fma,+bmi,+bmi2,+popcnt,+avx512f,+avx512vl,"
    "+avx512bw,+avx512dq,+avx512cd,+avx512vnni,-avx512vbmi2",
    NUMBA_CACHE_DIR=str(tmp_path),
  )
  assert done.returncode == 0, done.stderr


def child(program, **environment):
  return subprocess.run(
    [sys.executable, "-c", program],
    env=os.environ | environment,
    capture_output=True,
    text=True,
    timeout=500,
  )


@pytest.mark.slow
@pytest.mark.skipif(
  "x86_64" not in os.uname().machine, reason="features of x86 processors"
)
def test_an_avx2_processor_computes_the_same(tmp_path):
  done = child(
    PROGRAM,
    NUMBA_CPU_NAME="haswell",
    NUMBA_CPU_FEATURES="+avx,+avx2,+fma,+bmi,+bmi2,+popcnt,-avx512f",
    NUMBA_CACHE_DIR=str(tmp_path),
  )
  assert done.returncode == 0, done.stderr
