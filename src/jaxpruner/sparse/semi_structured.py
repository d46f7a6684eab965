"""Hand 2:4 weights over to the sparse matrix units of NVIDIA GPUs."""

from typing import Any

import jax.numpy as jnp
import numpy as np

# cuSPARSELt's least multiples of outputs and inputs, by dtype.
_MULTIPLES = {"float16": 16, "bfloat16": 16, "int8": 32, "float32": 8}


def to_semi_structured(kernel: Any, dtype: Any = "float16") -> np.ndarray:
  """Return a 2:4 kernel as cuSPARSELt and PyTorch take it.

  The libraries want the matrix dense, with zeros, as (outputs, inputs) in
  row-major order, at most 2 of 4 neighbours along the inputs not zero, and
  sizes that are multiples of 16 (32 for int8, 8 for float32). They pack it on
  the GPU: `torch.sparse.to_sparse_semi_structured(torch.tensor(array).cuda())`,
  or `cusparseLtSpMMACompress`, which needs no pruning step before it.

  Args:
    kernel: a matrix (inputs, outputs), pruned with the sparsity type "2:4".
    dtype: float16, bfloat16, float32, or int8 for a kernel of integers.

  Returns:
    The transposed matrix, contiguous, in this dtype.

  Raises:
    ValueError: if the kernel is not 2:4 along its inputs, has other sizes, or
      a value does not fit the dtype.

  Example:
    >>> import jaxpruner
    >>> kernel = np.random.default_rng(0).normal(size=(32, 16))
    >>> mask = jaxpruner.NByM(2, 4).mask(abs(kernel), 0.5)
    >>> kernel = np.where(mask, kernel, 0)
    >>> matrix = to_semi_structured(kernel)
    >>> matrix.shape, matrix.dtype.name, int((matrix != 0).sum())
    ((16, 32), 'float16', 256)
  """
  array = np.asarray(kernel)
  kind = jnp.dtype(dtype)
  if kind.name not in _MULTIPLES:
    raise ValueError(
      f"dtype={kind.name} must be one of {', '.join(_MULTIPLES)}"
    )
  multiple = _MULTIPLES[kind.name]
  if array.ndim != 2 or any(n == 0 or n % multiple for n in array.shape):
    raise ValueError(
      f"kernel has shape {array.shape}; cuSPARSELt takes matrices whose sizes "
      f"are multiples of {multiple} for {kind.name}: pad it, or keep it dense"
    )
  matrix = np.ascontiguousarray(array.T)
  crowded = np.count_nonzero(matrix.reshape(-1, 4), 1) > 2
  if crowded.any():
    row, column = divmod(int(np.argmax(crowded)) * 4, matrix.shape[1])
    raise ValueError(
      f"kernel is not 2:4 along its inputs: {int(crowded.sum())} groups have "
      f"more than 2 weights, the first at inputs {column} to {column + 3} of "
      f'output {row}; prune it with sparsity_type="2:4"'
    )
  with np.errstate(over="ignore"):
    result = matrix.astype(kind)
  whole = np.isfinite(result.astype(np.float64))
  exact = kind.name != "int8" or (result == matrix).all()
  if not whole.all() or not exact:
    raise ValueError(
      f"kernel has values that {kind.name} cannot hold; choose bfloat16 or "
      "float32, or quantize it to int8 first"
    )
  return result
