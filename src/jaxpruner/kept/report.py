"""How many bytes training takes: kept, against dense."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxpruner import _leaves
from jaxpruner.kept.states import KeptState, find_kept_state, layouts_of
from jaxpruner.program.owners import Owners


@dataclasses.dataclass(frozen=True)
class LayerBytes:
  """Bytes of one leaf.

  Attributes:
    name: its path.
    shape: the shape of the dense leaf.
    weights: bytes of its values.
    gradients: bytes of their gradients.
    moments: bytes of what the optimizer holds for it.
    indices: bytes of the positions; 0 for a dense leaf.
    dense: bytes of weights, gradients and moments if it were dense.

  Example:
    >>> LayerBytes("w", (4, 4), 8, 8, 16, 12, 256).total
    44
  """

  name: str
  shape: tuple[int, ...]
  weights: int
  gradients: int
  moments: int
  indices: int
  dense: int

  @property
  def total(self) -> int:
    """Bytes of weights, gradients, moments and indices."""
    return self.weights + self.gradients + self.moments + self.indices


@dataclasses.dataclass(frozen=True)
class TrainingBytes:
  """Bytes of a training state; `print` shows them as a table.

  Attributes:
    layers: one `LayerBytes` per leaf.

  Example:
    >>> row = LayerBytes("w", (4, 4), 8, 8, 16, 12, 256)
    >>> TrainingBytes((row,)).ratio
    0.171875
  """

  layers: tuple[LayerBytes, ...]

  @property
  def total(self) -> int:
    """Bytes of weights, gradients, moments and indices."""
    return sum(layer.total for layer in self.layers)

  @property
  def dense(self) -> int:
    """Bytes of the same state, dense."""
    return sum(layer.dense for layer in self.layers)

  @property
  def ratio(self) -> float:
    """Kept bytes over dense bytes."""
    return self.total / self.dense

  def __str__(self) -> str:
    head = ("leaf", "shape", "weights", "gradients", "moments", "indices", "")
    rows: list[tuple[str, ...]] = [head]
    for l in self.layers:
      numbers = (l.weights, l.gradients, l.moments, l.indices)
      rows.append(
        (
          l.name,
          "x".join(map(str, l.shape)),
          *map(str, numbers),
          f"{l.total / max(l.dense, 1):.3f}x",
        )
      )
    total = f"total: {self.total} bytes, dense {self.dense}, {self.ratio:.3f}x"
    return aligned(rows) + "\n" + total


def aligned(rows: list[tuple[str, ...]]) -> str:
  """Return rows of cells as lines, each column as wide as its widest cell."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
    for row in rows
  )


def training_bytes(params: Any, opt_state: KeptState) -> TrainingBytes:
  """Count the bytes of weights, gradients, moments and indices.

  Args:
    params: the parameters, kept leaves as vectors of values.
    opt_state: the state of `KeptUpdater.wrap_optax`.

  Returns:
    A `TrainingBytes`, against a dense run with the same optimizer.

  Example:
    >>> import jax, jaxpruner, optax
    >>> from jaxpruner import kept
    >>> pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
    >>> weights = {"w": kept.create(jax.random.key(0), (512, 512), 0.9)}
    >>> state = pruner.wrap_optax(optax.adam(0.1)).init(weights)
    >>> report = kept.training_bytes(kept.split(weights)[0], state)
    >>> report.ratio <= 0.19
    True
  """

  rows, _ = _leaves.flatten_with_names(params)
  opt_state = find_kept_state(opt_state)
  places = layouts_of(params, opt_state)
  owners = Owners(params)
  moments = [0] * len(rows)
  inner = jax.tree_util.tree_leaves_with_path(opt_state.inner_state)
  for path, leaf in inner:
    owner = owners.find(path)
    if owner is not None:
      moments[owner] += leaf.nbytes
  layers = []
  for (names, leaf), layout, moment in zip(rows, places, moments, strict=True):
    shape = leaf.shape if layout is None else layout.shape
    scale = int(np.prod(shape)) / max(leaf.size, 1)
    layers.append(
      LayerBytes(
        _leaves.join(names),
        tuple(shape),
        leaf.nbytes,
        leaf.nbytes,
        moment,
        0 if layout is None else layout.nbytes,
        round(scale * (2 * leaf.nbytes + moment)),
      )
    )
  return TrainingBytes(tuple(layers))
