"""2:4 kernels leave as the sparse matrix units want them, or not at all."""

import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparse

RNG = np.random.default_rng(0)


def pruned(*shape):
  kernel = RNG.standard_normal(shape).astype(np.float32)
  return np.where(jaxpruner.NByM(2, 4).mask(abs(kernel), 0.5), kernel, 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_outputs_are_rows_and_two_of_four_inputs_stay(dtype):
  kernel = pruned(64, 48)
  matrix = sparse.to_semi_structured(kernel, dtype)
  assert matrix.shape == (48, 64) and matrix.flags.c_contiguous
  assert (np.count_nonzero(matrix.reshape(48, 16, 4), -1) == 2).all()
  np.testing.assert_allclose(matrix.astype(np.float32), kernel.T, rtol=1e-2)


def test_integers_stay_as_they_are():
  kernel = np.round(pruned(64, 32) * 20)
  np.testing.assert_array_equal(
    sparse.to_semi_structured(kernel, "int8"), kernel.T
  )


def test_torch_packs_it():
  torch = pytest.importorskip("torch")
  from torch.sparse import _semi_structured_conversions as conversions

  kernel = pruned(128, 64)
  dense = torch.tensor(sparse.to_semi_structured(kernel))
  packed = conversions.sparse_semi_structured_from_dense_cutlass(dense)
  back = conversions.sparse_semi_structured_to_dense_cutlass(*packed)
  assert torch.equal(back, dense)


@pytest.mark.parametrize(
  "kernel, dtype, text",
  [
    (RNG.standard_normal((64, 32)), "float16", r"more than 2 weights.*2:4"),
    (pruned(64, 32).T.copy(), "float16", "not 2:4 along its inputs"),
    (pruned(60, 32), "float16", r"\(60, 32\).*multiples of 16.*pad it"),
    (pruned(64, 48), "int8", r"\(64, 48\).*multiples of 32"),
    (pruned(64, 32), "int8", "int8 cannot hold"),
    (pruned(64, 32) * 1e6, "float16", "float16 cannot hold"),
    (pruned(64, 32) * np.nan, "float16", "more than 2 weights"),
    (pruned(64, 32), "float64", "dtype=float64 must be one of"),
    (pruned(64, 32)[None], "float16", "takes matrices"),
  ],
)
def test_what_the_units_cannot_take_is_refused(kernel, dtype, text):
  with pytest.raises(ValueError, match=text):
    sparse.to_semi_structured(kernel, dtype)
