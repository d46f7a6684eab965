"""What pruning after training did, layer by layer."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layer:
  """What happened to one weight.

  `error` is ‖x (w - w_dense)‖² / ‖x w_dense‖² on the calibration data; None if
  the method saw no data.
  """

  name: str
  shape: tuple[int, ...]
  sparsity: float
  error: float | None
  seconds: float


@dataclasses.dataclass(frozen=True)
class PruneReport:
  """What `prune` did; `print(report)` shows it as a table."""

  layers: tuple[Layer, ...]
  skipped: Mapping[str, str]  # path of a weight left dense -> why
  seconds: float

  @property
  def sparsity(self) -> float:
    """The fraction removed of all pruned weights."""
    sizes = [int(np.prod(layer.shape)) for layer in self.layers]
    removed = [s * l.sparsity for s, l in zip(sizes, self.layers, strict=True)]
    return sum(removed) / sum(sizes)

  def __str__(self) -> str:
    lines = [f"{'weight':40} {'shape':>16} {'sparsity':>8} {'error':>8}"]
    for l in self.layers:
      error = "" if l.error is None else f"{l.error:.4f}"
      shape = "x".join(map(str, l.shape))
      lines.append(f"{l.name:40} {shape:>16} {l.sparsity:8.2%} {error:>8}")
    lines += [f"{name}: dense, {why}" for name, why in self.skipped.items()]
    return "\n".join(lines)


# As it was called first; `jaxpruner.sparse` has a report of its own.
Report = PruneReport
