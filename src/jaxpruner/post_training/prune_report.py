"""The report of pruning after training, layer by layer."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layer:
  """The result of pruning one weight.

  Attributes:
    name: path of the weight.
    shape: its shape.
    sparsity: fraction removed.
    error: ‖x (w - w_dense)‖² / ‖x w_dense‖² on the calibration data; None if
      the method used no data.
    seconds: time to prune it.

  Example:
    >>> Layer("up/kernel", (8, 16), 0.5, 0.01, 0.2).sparsity
    0.5
  """

  name: str
  shape: tuple[int, ...]
  sparsity: float
  error: float | None
  seconds: float


@dataclasses.dataclass(frozen=True)
class PruneReport:
  """The report of `prune`; `print(report)` shows it as a table.

  Attributes:
    layers: one `Layer` per pruned weight.
    skipped: path of each weight that stayed dense -> the reason.
    seconds: time of the whole call.

  Example:
    >>> up = Layer("up", (8, 8), 0.5, 0.25, 0.1)
    >>> down = Layer("down", (8, 8), 0.75, None, 0.1)
    >>> skipped = {"table": "not used by a product"}
    >>> report = PruneReport((up, down), skipped, 0.2)
    >>> report.sparsity
    0.625
    >>> print(str(report).splitlines()[-1])
    table: dense, not used by a product
  """

  layers: tuple[Layer, ...]
  skipped: Mapping[str, str]
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


# The former name; `jaxpruner.sparse` has another class `Report`.
Report = PruneReport
