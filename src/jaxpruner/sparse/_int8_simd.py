"""The inner loop of the int8 product, written as LLVM IR: see `_simd`."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from jaxpruner.sparse import _simd
from jaxpruner.sparse._simd import F32, I1, I8, I16, I32, I64
from jaxpruner.sparse.format_bitmask import PANEL

AHEAD = 1024  # bytes of values that are asked for early
WIDTH, PARTS = 16, PANEL // 16
_FLOATS, _INTS = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)
_BYTES, _FLAGS = ir.VectorType(I8, WIDTH), ir.VectorType(I1, WIDTH)


def _ones(b: Any, word: Any) -> Any:
  return b.call(_simd._function(b, "llvm.ctpop.i64", I64, I64), [word])


def _expanded(b: Any, packed: Any, word: Any, part: int) -> Any:
  f = _simd._function(
    b, "llvm.x86.avx512.mask.expand.v16i32", _INTS, _INTS, _INTS, _FLAGS
  )
  bits = b.trunc(b.lshr(word, I64(WIDTH * part)), I16)
  zeros = ir.Constant(_INTS, [0] * WIDTH)
  return b.call(f, [packed, zeros, b.bitcast(bits, _FLAGS)])


def _weights(b: Any, start: Any, word: Any) -> list:
  """Return a row of the panel as floats: 16 bytes widen, then expand.

  Widened first: expanding 64 bytes at once takes longer than four times 16
  integers.
  """
  found = []
  for p in range(PARTS):
    place = I64(WIDTH * p)
    if word is not None:
      # The weights before this part: counted from the word, not chained.
      place = _ones(b, b.and_(word, I64((1 << WIDTH * p) - 1)))
    wide = b.sext(_simd._load(b, b.add(start, place), _BYTES), _INTS)
    if word is not None:
      wide = _expanded(b, wide, word, p)
    found.append(b.sitofp(wide, _FLOATS))
  return found


def _row(b: Any, bits: Any, index: Any, cursor: Any, masked: bool) -> list:
  """Return the weights of a row, and move the cursor to the next one's."""
  start = b.load(cursor)
  _simd._prefetch(b, b.add(start, I64(AHEAD)))
  word, step = None, I64(PANEL)
  if masked:
    word = _simd._load(b, b.add(bits, b.mul(index, I64(8))), I64)
    step = _ones(b, word)
  b.store(b.add(start, step), cursor)
  return _weights(b, start, word)


def _add_scaled(b: Any, sums: list, scales: Any, out: Any) -> None:
  """Add the sums of a group, times its scales, to those in memory."""
  for p in range(PARTS):
    scale = _simd._weights(b, b.add(scales, I64(2 * WIDTH * p)), WIDTH, True)
    for r, totals in enumerate(sums):
      place = b.add(out, I64(4 * (PANEL * r + WIDTH * p)))
      old = _simd._load(b, place, _FLOATS, 4)
      _simd._store(b, _simd._fma(b, scale, b.load(totals[p]), old), place)


def group(rows: int, masked: bool) -> Any:
  """Make the product of `rows` batch rows with one group of a panel.

  `f(x, stride, last, bits, values, count, scales, out)` adds to `rows` × 64
  sums in `out`; row i of the batch is at x + min(i, last) * stride. Returns the
  address of the next value.
  """

  @_simd.intrinsic
  def f(_, x, stride, last, bits, values, count, scales, out):
    def emit(context, b, signature, args):
      x, stride, last, bits, values, count, scales, out = args
      starts = _simd.batch_rows(b, rows, x, stride, last)
      sums = [
        [cgutils.alloca_once(b, _FLOATS) for _ in range(PARTS)]
        for _ in range(rows)
      ]
      for total in sum(sums, []):
        b.store(_simd._zero(WIDTH), total)
      cursor = cgutils.alloca_once_value(b, values)
      with cgutils.for_range(b, count) as loop:
        weights = _row(b, bits, loop.index, cursor, masked)
        offset = b.mul(loop.index, I64(4))
        for begin, totals in zip(starts, sums, strict=True):
          one = _simd._load(b, b.add(begin, offset), F32, 4)
          scale = _simd._splat(b, one, WIDTH)
          for weight, total in zip(weights, totals, strict=True):
            b.store(_simd._fma(b, scale, weight, b.load(total)), total)
      _add_scaled(b, sums, scales, out)
      return b.load(cursor)

    return types.int64(*[types.int64] * 8), emit

  return f
