"""The inner loop of products with dense panels, written as LLVM IR."""

import itertools
from typing import Any

from numba.core import cgutils, types

from jaxpruner.sparse import _simd
from jaxpruner.sparse._simd import F32, I1, I64, WIDTH, batch_rows, intrinsic


def multiply(rows: int, parts: int, bf16: bool, panel: int = 64) -> Any:
  """Make the product of `rows` batch rows with a strip of a dense panel.

  `f(x, stride, last, values, count, out)`: row i of the batch is at x + min(i,
  last) * stride; each of `count` rows of the panel has 64 weights, of which
  `parts` vectors are multiplied; `out` receives the sums, 64 floats apart.
  """
  size = 2 if bf16 else 4
  kind = _simd._vector(F32, WIDTH)
  # A single row has too few sums to hide the latency of one behind another.
  turns = 2 if rows == 1 else 1

  def step(b: Any, starts: list, values: Any, index: Any, sums: list) -> None:
    line = b.add(values, b.mul(index, I64(size * panel)))
    weights = [
      _simd._weights(b, b.add(line, I64(size * WIDTH * p)), WIDTH, bf16)
      for p in range(parts)
    ]
    for begin, totals in zip(starts, sums, strict=True):
      x = _simd._load(b, b.add(begin, b.mul(index, I64(4))), F32, 4)
      scale = _simd._splat(b, x, WIDTH)
      for weight, total in zip(weights, totals, strict=True):
        b.store(_simd._fma(b, scale, weight, b.load(total)), total)

  @intrinsic
  def f(_, x, stride, last, values, count, out):
    def emit(context, b, signature, args):
      x, stride, last, values, count, out = args
      starts = batch_rows(b, rows, x, stride, last)
      sums = [
        [[cgutils.alloca_once(b, kind) for _ in range(parts)] for _ in starts]
        for _ in range(turns)
      ]
      for total in sum(sum(sums, []), []):
        b.store(_simd._zero(WIDTH), total)
      with cgutils.for_range(b, b.udiv(count, I64(turns))) as loop:
        first = b.mul(loop.index, I64(turns))
        ahead = b.add(values, b.mul(b.add(first, I64(16)), I64(size * panel)))
        for line in range(0, turns * size * WIDTH * parts, 64):
          _simd._prefetch(b, b.add(ahead, I64(line)))
        for turn in range(turns):
          step(b, starts, values, b.add(first, I64(turn)), sums[turn])
      if turns == 2:
        with b.if_then(b.trunc(count, I1)):
          step(b, starts, values, b.sub(count, I64(1)), sums[0])
      for r, p in itertools.product(range(rows), range(parts)):
        total = b.load(sums[0][r][p])
        if turns == 2:
          total = b.fadd(total, b.load(sums[1][r][p]))
        _simd._store(b, total, b.add(out, I64(4 * (panel * r + WIDTH * p))))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit

  return f
