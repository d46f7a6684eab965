"""The format of each weight: what its uses allow, then what is fastest."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpruner.sparse import _choose, formats
from jaxpruner.sparse._parts import Parts
from jaxpruner.sparse._recording import Use
from jaxpruner.sparse._taps import Taps
from jaxpruner.sparse.formats import Sparse
from jaxpruner.sparse.reports import LayerReport


@dataclasses.dataclass(frozen=True)
class Leaf:
  """A weight to be replaced.

  Attributes:
    name: its path.
    value: the array.
    mask: 1 = kept; None keeps the nonzero weights.
    uses: how the program consumes it.
  """

  name: str
  value: Any
  mask: Any
  uses: Sequence[Use]

  @property
  def masked(self) -> Any:
    """The dense weight, without what the mask removes."""
    if self.mask is None:
      return self.value
    return jax.numpy.where(self.mask, self.value, 0)

  def stays(self, rule: str, sparsity: float = 0.0, times: Any = None) -> Any:
    """Return the weight as it is, and the reason."""
    shape = tuple(getattr(self.value, "shape", ()))
    size = getattr(self.value, "nbytes", 0)
    report = LayerReport(
      self.name, shape, sparsity, "dense", rule, size, size, times or {}
    )
    return self.masked, [report]


@dataclasses.dataclass(frozen=True)
class Clock:
  """How products are timed.

  Attributes:
    timings: those that are known.
    timer: measures the others.
    cold: whether the model is larger than the processor's cache.
  """

  timings: _choose.Timings
  timer: _choose.Timer
  cold: bool


def replace(leaf: Leaf, clock: Clock) -> tuple[Any, list[LayerReport]]:
  """Return the weight in its fastest format, and the report of each piece."""
  value = leaf.value
  if not hasattr(value, "dtype") or not leaf.uses:
    return leaf.stays("not used by the function")
  if not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
    return leaf.stays("not a floating array")
  if value.ndim < 2:
    return leaf.stays("a vector: nothing to gain")
  if all(use.piece is None for use in leaf.uses):
    return _whole(leaf, clock)
  pieces = _pieces(leaf)
  if isinstance(pieces, str):
    return leaf.stays(pieces, _sparsity(leaf))
  found = [replace(piece, clock) for piece in pieces]
  reports = [report for _, part in found for report in part]
  if not any(isinstance(new, Sparse) for new, _ in found):
    if len({report.rule for report in reports}) == 1:
      return leaf.stays(reports[0].rule, _sparsity(leaf))
    return leaf.masked, reports
  axis = _axis(leaf.uses)
  return Parts(tuple(new for new, _ in found), axis), reports


def _sparsity(leaf: Leaf) -> float:
  kept = leaf.value != 0 if leaf.mask is None else leaf.mask
  return 1 - float(np.asarray(kept).astype(bool).mean())


def _axis(uses: Sequence[Use]) -> int:
  """Return the axis along which the uses take pieces."""
  use = next(use for use in uses if use.piece is not None)
  assert use.piece is not None
  return use.piece.axis + use.stacked


def _pieces(leaf: Leaf) -> list[Leaf] | str:
  """Cut a weight into the pieces that are used, or return why not."""
  refused = _refusal(leaf.uses)
  if refused is not None:
    return refused
  if any(use.piece is None for use in leaf.uses):
    return "used whole and in pieces"
  found = {use.piece for use in leaf.uses if use.piece is not None}
  if len({(p.axis, u.stacked) for p in found for u in leaf.uses}) > 1:
    return "sliced along different axes"
  axis = _axis(leaf.uses)
  ranges = sorted((p.start, p.stop) for p in found)
  for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False):
    if start < stop:
      return "sliced into pieces that overlap"
  return [
    _piece(leaf, axis, *bounds)
    for bounds in _covering(ranges, leaf.value.shape[axis])
  ]


def _covering(
  ranges: list[tuple[int, int]], size: int
) -> list[tuple[int, int]]:
  """Return the ranges with those between them.

  >>> _covering([(2, 4)], 5)
  [(0, 2), (2, 4), (4, 5)]
  """
  ends = sorted({0, size, *(end for pair in ranges for end in pair)})
  return list(zip(ends, ends[1:], strict=False))


def _piece(leaf: Leaf, axis: int, start: int, stop: int) -> Leaf:
  where = (slice(None),) * axis + (slice(start, stop),)
  mask = None if leaf.mask is None else np.asarray(leaf.mask)[where]
  uses = [
    dataclasses.replace(use, piece=None)
    for use in leaf.uses
    if use.piece is not None and use.piece[1:] == (start, stop)
  ]
  name = f"{leaf.name}[{':, ' * axis}{start}:{stop}]"
  return Leaf(name, leaf.value[where], mask, uses)


def _whole(leaf: Leaf, clock: Clock) -> tuple[Any, list[LayerReport]]:
  """Time the formats of a weight that is used whole; return the fastest."""
  dense = np.asarray(leaf.value)
  kept = dense != 0 if leaf.mask is None else np.asarray(leaf.mask).astype(bool)
  sparsity = 1 - float(kept.mean()) if kept.size else 0.0
  why = _unfit(dense, leaf.uses)
  if why is not None:
    return leaf.stays(why, sparsity)
  if leaf.uses[0].operation == "taps":
    return _depthwise(leaf, kept, sparsity, clock)
  products = [u for u in leaf.uses if u.operation != "take"]
  use = max(products, key=lambda u: int(np.prod(u.x.shape)))
  sample = kept[0] if use.stacked else kept
  folded = formats.fold(sample, use.contract)
  out = jax.eval_shape(
    use.run, use.x, jax.numpy.zeros(sample.shape, dense.dtype)
  )
  batch = int(np.prod(out.shape)) // folded.shape[1]
  taken = len(products) < len(leaf.uses)
  tried = _choose.candidates(folded, batch, use.stacked, taken)
  if not tried:
    return leaf.stays("too dense, or no structure to use", sparsity)
  key = _choose.key(dense, kept, use, tried, clock.cold)
  times = clock.timings.get(key, ("dense", *tried))
  if times is None:
    times = _choose.time_formats(
      dense, kept, use, tried, clock.timer, clock.cold
    )
    clock.timings.table[key] = times
  best = _choose.fastest(times)
  if best == "dense":
    return leaf.stays(f"dense is fastest of {len(times)}", sparsity, times)
  new = _choose.pack(dense, kept, best, use.contract, use.stacked, tried[best])
  rule = f"fastest of {len(times)} measured"
  return new, [
    LayerReport(
      leaf.name, dense.shape, sparsity, best, rule, dense.nbytes, new.nbytes,
      times,
    )
  ]  # fmt: skip


def _depthwise(
  leaf: Leaf, kept: np.ndarray, sparsity: float, clock: Clock
) -> tuple[Any, list[LayerReport]]:
  """Time a depthwise convolution by XLA and tap by tap."""
  use = max(leaf.uses, key=lambda u: int(np.prod(u.x.shape)))
  value = jax.numpy.asarray(leaf.masked)
  key = _choose.key(value, kept, use, {"taps": {}}, False)
  times = clock.timings.get(key, ("dense", "taps"))
  if times is None:
    x = jax.random.normal(jax.random.key(0), use.x.shape).astype(use.x.dtype)
    product = jax.jit(use.run)
    times = clock.timer(
      {
        "dense": lambda: product(x, value),
        "taps": lambda: product(x, Taps(value)),
      }
    )
    clock.timings.table[key] = times
  if _choose.fastest(times) == "dense":
    return leaf.stays("dense is fastest of 2", sparsity, times)
  size = value.nbytes
  return Taps(value), [
    LayerReport(
      leaf.name, value.shape, sparsity, "taps",
      "depthwise: a dense sum over the taps is faster", size, size, times,
    )
  ]  # fmt: skip


def _refusal(uses: Sequence[Use]) -> str | None:
  """Return why some use needs the weight whole and dense, or None."""
  products = any(u.operation in ("dot", "conv") for u in uses)
  refused = sorted({u.why for u in uses if not u.operation})
  if not refused:
    return None
  return ("also " if products else "") + "; ".join(refused)


def _unfit(dense: np.ndarray, uses: Sequence[Use]) -> str | None:
  """Return the reason why the products of a weight stay dense, or None."""
  refused = _refusal(uses)
  if refused is not None:
    return refused
  kinds = {u.operation for u in uses}
  if "taps" in kinds:
    several = "used by a depthwise convolution and in other ways"
    return several if len(kinds) > 1 else None
  products = [u for u in uses if u.operation in ("dot", "conv")]
  if not products:
    return "only looked up: rows are read one at a time, nothing is multiplied"
  if dense.size < _choose.MIN_SIZE:
    return f"fewer than {_choose.MIN_SIZE} weights"
  if len({(u.contract, u.stacked) for u in products}) > 1:
    return "contracted along different axes"
  summed = {(frozenset(u.contract), u.stacked) for u in uses}
  if len(summed) > 1:
    return "looked up along the axis that its product sums over"
  return None
