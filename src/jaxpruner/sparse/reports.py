"""What `accelerate` did to a model, and why."""

import dataclasses


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

  def __str__(self) -> str:
    head = ("weight", "shape", "sparsity", "format", "bytes", "speed", "rule")
    rows: list[tuple[str, ...]] = [head]
    for l in self.layers:
      speed = "" if l.speedup is None else f"{l.speedup:.2f}x"
      size = f"{l.bytes / l.dense_bytes:.3f}x" if l.dense_bytes else ""
      shape = "x".join(map(str, l.shape))
      rows.append(
        (l.name, shape, f"{l.sparsity:.1%}", l.format, size, speed, l.rule)
      )
    widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
    lines = [
      "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip()
      for r in rows
    ]
    ratio = self.bytes / self.dense_bytes if self.dense_bytes else 1.0
    lines.append(
      f"whole function: {self.dense_seconds * 1e3:.3f} ms dense, "
      f"{self.seconds * 1e3:.3f} ms now, {self.speedup:.2f}x; weights "
      f"{ratio:.3f}x; {self.rule}"
    )
    return "\n".join(lines)
