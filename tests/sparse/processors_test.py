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


@pytest.mark.slow
@pytest.mark.skipif(
  "x86_64" not in os.uname().machine, reason="features of x86 processors"
)
def test_an_avx2_processor_computes_the_same(tmp_path):
  environment = os.environ | {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+bmi,+bmi2,+popcnt,-avx512f",
    "NUMBA_CACHE_DIR": str(tmp_path),
  }
  done = subprocess.run(
    [sys.executable, "-c", PROGRAM],
    env=environment,
    capture_output=True,
    text=True,
    timeout=500,
  )
  assert done.returncode == 0, done.stderr
