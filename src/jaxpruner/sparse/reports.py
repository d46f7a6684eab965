"""What `accelerate` did to a model, and why."""

import dataclasses
import re
import statistics
from typing import Any

from jaxpruner import _tools


@dataclasses.dataclass(frozen=True)
class LayerReport:
  """The format that `accelerate` chose for one weight, and the reason.

  Attributes:
    name: path of the weight.
    shape: its shape.
    sparsity: fraction removed.
    format: the chosen format, or "dense".
    rule: why this format was chosen.
    dense_bytes: bytes of the dense weight.
    bytes: bytes of the weight as stored.
    times: seconds of the product by format, "dense" included; empty if nothing
      was timed.

  Example:
    >>> layer = LayerReport(
    ...   "w", (64, 64), 0.9, "sell", "fastest of 2 measured", 16384, 2560,
    ...   {"dense": 4e-5, "sell": 1e-5})
    >>> layer.speedup
    4.0
  """

  name: str
  shape: tuple[int, ...]
  sparsity: float
  format: str
  rule: str
  dense_bytes: int
  bytes: int
  times: dict[str, float]

  @property
  def speedup(self) -> float | None:
    """Time of the dense product over the time in the chosen format."""
    if not self.times:
      return None
    return self.times["dense"] / self.times[self.format]


@dataclasses.dataclass(frozen=True)
class Report:
  """The decisions of `accelerate`; `print(report)` shows them as a table.

  Attributes:
    layers: one `LayerReport` per leaf.
    dense_seconds: time of one call of the dense function.
    seconds: time of one call of the returned function.
    rule: why the sparse or the dense function was returned.

  Example:
    >>> report = Report((), 2e-3, 1e-3, "sparse where measured faster")
    >>> report.speedup
    2.0
    >>> print(str(report).splitlines()[-1][:51])
    whole function: 2.000 ms dense, 1.000 ms now, 2.00x
  """

  layers: tuple[LayerReport, ...]
  dense_seconds: float
  seconds: float
  rule: str

  @property
  def speedup(self) -> float:
    """Time of the dense function over the time of the returned one."""
    return self.dense_seconds / self.seconds

  @property
  def dense_bytes(self) -> int:
    return sum(layer.dense_bytes for layer in self.layers)

  @property
  def bytes(self) -> int:
    return sum(layer.bytes for layer in self.layers)

  def kinds(self) -> list["LayerKind"]:
    """Return the layers by kind: equal but for the numbers in their names.

    Returns:
      One `LayerKind` per name pattern, shape, format and reason, in the order
      of the first layer of each.
    """
    found: dict[tuple[Any, ...], list[LayerReport]] = {}
    for layer in self.layers:
      name = re.sub(r"\d+", "*", layer.name)
      key = name, layer.shape, layer.format, layer.rule
      found.setdefault(key, []).append(layer)
    return [LayerKind(tuple(layers)) for layers in found.values()]

  def __str__(self) -> str:
    head = [
      "weight", "shape", "sparsity", "format", "bytes", "speed", "ms", "rule",
    ]  # fmt: skip
    rows = [head, *(kind.row() for kind in self.kinds())]
    lines = _tools.align_columns(rows, ())
    ratio = self.bytes / self.dense_bytes if self.dense_bytes else 1.0
    lines.append(
      f"whole function: {self.dense_seconds * 1e3:.3f} ms dense, "
      f"{self.seconds * 1e3:.3f} ms now, {self.speedup:.2f}x; weights "
      f"{ratio:.3f}x; {self.rule}"
    )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """Layers that differ in the numbers of their names alone.

  Attributes:
    layers: their reports.

  Example:
    >>> layers = [
    ...   LayerReport(f"block_{i}/up", (64, 64), 0.9, "sell", "fastest of 2",
    ...               16384, 2560, {"dense": 4e-5, "sell": 1e-5})
    ...   for i in range(12)]
    >>> (kind,) = Report(tuple(layers), 2e-3, 1e-3, "").kinds()
    >>> kind.name, kind.bytes, kind.seconds["sell"]
    ('block_*/up (12)', 30720, 1e-05)
  """

  layers: tuple[LayerReport, ...]

  @property
  def name(self) -> str:
    """The name of a single layer, or the pattern and how many there are."""
    if len(self.layers) == 1:
      return self.layers[0].name
    pattern = re.sub(r"\d+", "*", self.layers[0].name)
    return f"{pattern} ({len(self.layers)})"

  @property
  def dense_bytes(self) -> int:
    """Bytes of the dense weights, all layers together."""
    return sum(layer.dense_bytes for layer in self.layers)

  @property
  def bytes(self) -> int:
    """Bytes of the weights as stored, all layers together."""
    return sum(layer.bytes for layer in self.layers)

  @property
  def seconds(self) -> dict[str, float]:
    """Mean seconds of one layer's product, by format, "dense" included."""
    timed = [layer.times for layer in self.layers if layer.times]
    names = dict.fromkeys(name for times in timed for name in times)
    return {n: statistics.fmean(t[n] for t in timed if n in t) for n in names}

  def row(self) -> list[str]:
    """Return the cells of this kind's line in the printed report."""
    layer, seconds = self.layers[0], self.seconds
    sparsity = statistics.fmean(l.sparsity for l in self.layers)
    size = f"{self.bytes / self.dense_bytes:.3f}x" if self.dense_bytes else ""
    speed = ""
    if seconds:
      speed = f"{seconds['dense'] / seconds[layer.format]:.2f}x"
    times = ", ".join(f"{n} {t * 1e3:.3g}" for n, t in seconds.items())
    shape = "x".join(map(str, layer.shape))
    return [
      self.name, shape, f"{sparsity:.1%}", layer.format, size, speed, times,
      layer.rule,
    ]  # fmt: skip
