"""Thresholds below which the inputs of a decoder's matrices are skipped."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training.models import decoder
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.post_training.models.hub import HubModel
from jaxpruner.sparsity_types import check_sparsity

# Attention, OPT's attention, MLPs; not experts, which see few of the tokens.
_NAMES = re.compile(
  r".*layers\.\d+\.(self_attn\.\w+|mlp\.\w+_proj|fc[12])\.weight"
)


def input_thresholds(
  model: HubModel, batches: Iterable[Any], *, sparsity: float
) -> dict[str, float]:
  """Return the size below which each matrix's inputs are skipped.

  When one token is written, a matrix times a vector need not read the weights
  of inputs that are nearly zero. The threshold of a matrix is the quantile of
  |x| over the numbers x that enter it (TEAL: Liu et al., "Training-Free
  Activation Sparsity in Large Language Models", 2024), the mean of those of the
  batches. `Writer(thresholds=...)` applies them, to weights that are pruned or
  not: what is read is what is kept of both.

  Args:
    model: a decoder that `models.load_folder` loaded.
    batches: token ids (rows, time).
    sparsity: the fraction of inputs to skip, 0 ≤ sparsity < 1.

  Returns:
    name of a matrix of attention or an MLP -> threshold. Matrices with the same
    inputs have the same. Embeddings, heads and experts are not among them.

  Example:
    >>> model = HubModel(len, {}, {}, None, "folder")
    >>> input_thresholds(model, [], sparsity=0.5)
    Traceback (most recent call last):
    ValueError: folder: no decoder; inputs of decoders such as Llama are skipped
  """
  config = model.config
  if not isinstance(config, Decoder):
    raise ValueError(
      f"{model.folder}: no decoder; inputs of decoders such as Llama are "
      "skipped"
    )
  level = float(check_sparsity(sparsity))
  run = jax.jit(functools.partial(_quantiles, config, level))
  found = [run(model.params, jnp.asarray(rows)) for rows in batches]
  if not found:
    raise ValueError("batches is empty; give at least one batch of token ids")
  return {
    name: float(np.mean([float(one[name]) for one in found]))
    for name in found[0]
  }


def _quantiles(
  config: Any, level: float, params: Mapping[str, Any], tokens: Any
) -> dict[str, jax.Array]:
  found: dict[str, jax.Array] = {}
  seen: dict[str, Any] = dict(params)
  for name, array in params.items():
    if array.ndim == 2 and _NAMES.fullmatch(name):
      seen[name] = _Tap(array, functools.partial(_note, found, level, name))
  decoder.apply(config, seen, tokens)
  return found


def _note(found: dict[str, jax.Array], level: float, name: str, x: Any) -> None:
  found[name] = jnp.quantile(jnp.abs(x).astype(jnp.float32), level)


class _Tap:
  """A weight that tells what it is multiplied by."""

  def __init__(self, array: Any, note: Any):
    self._array, self._note = array, note

  @property
  def T(self) -> "_Tap":
    return self

  def __rmatmul__(self, x: Any) -> Any:
    self._note(x)
    return x @ self._array.T
