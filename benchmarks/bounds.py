"""What one core can do at most: the ceilings of a sparse product.

  python benchmarks/bounds.py

In a product with unstructured weights every kept weight scales another row of
x, so each fused multiply-add comes with a vector load of its own. Two loops,
one without loads and one with a load from the first cache level for each
multiply-add, say what that costs on this machine.
"""

import time
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types

from jaxpruner.sparse import _simd

SUMS = 12  # independent sums, enough to hide the latency of each
WORKING_SET = 16384  # bytes, well inside the first cache level


def _loop(loads: bool) -> Any:
  kind = _simd._vector(_simd.F32, _simd.WIDTH)
  size, i64 = 4 * _simd.WIDTH, _simd.I64

  @_simd.intrinsic
  def f(_, count, x, out):
    def emit(context, b, signature, args):
      count, x, out = args
      sums = [cgutils.alloca_once(b, kind) for _ in range(SUMS)]
      scale = _simd._load(b, out, kind, 4)
      for total in sums:
        b.store(scale, total)
      place = cgutils.alloca_once_value(b, i64(0))
      with cgutils.for_range(b, count):
        at = b.load(place)
        for i, total in enumerate(sums):
          part = scale
          if loads:
            part = _simd._load(b, b.add(b.add(x, at), i64(size * i)), kind, 4)
          b.store(_simd._fma(b, scale, part, b.load(total)), total)
        at = b.and_(b.add(at, i64(size * SUMS)), i64(WORKING_SET - size))
        b.store(at, place)
      for i, total in enumerate(sums):
        _simd._store(b, b.load(total), b.add(out, i64(size * i)))
      return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit

  return f


def gigaflops(loads: bool, steps: int = 200_000, repeats: int = 15) -> float:
  """Return the best rate of multiply-adds of one core, in GFLOP/s."""
  loop = _loop(loads)
  run = numba.njit(lambda count, x, out: loop(count, x, out))
  memory = np.zeros(2 * WORKING_SET // 4 + 512, np.float32)
  x = (memory.ctypes.data + 63) // 64 * 64
  out = np.zeros(_simd.WIDTH * SUMS, np.float32)
  best = float("inf")
  for steps_now in [1] + [steps] * repeats:
    begin = time.perf_counter()
    run(steps_now, x, out.ctypes.data)
    if steps_now > 1:
      best = min(best, time.perf_counter() - begin)
  return 2 * _simd.WIDTH * SUMS * steps / best / 1e9


def bounds() -> dict[str, float]:
  """Return both ceilings in GFLOP/s of one core."""
  return {"fma": gigaflops(False), "fma_with_load": gigaflops(True)}


if __name__ == "__main__":
  print(bounds())
