"""Products with kept weights as machine code that XLA calls directly.

The batch comes in panels: `width` batch rows, transposed, so that one weight
scales a row of neighbours at once. A list holds the weights that meet one index
of the result; its sums stay in registers. The gradients walk the lists of the
other side: a row of cotangents, once loaded, serves the gradient of the input
and the gradient of the weight. The results of a few lists are transposed while
they are in the nearest cache, so that what leaves has its usual layout.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from jaxpruner.sparse import _pool, _simd
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import (
  F32,
  I16,
  I32,
  I64,
  intrinsic,
  read_i32,
  write_i32,
)

jit = _pool.jit
VECTOR = _simd.WIDTH
# Vectors per panel row: registers hold two such rows and a weight.
SIZES = (1, 2, 4, 8) if _simd.AVX512 else (1, 2, 4)
# Work (weights × vectors of batch) below which a second thread costs more than
# it brings.
GRAIN = 60_000
TASKS_PER_THREAD = 8

(
  X, G, VALUES, STARTS, INDICES, SLOTS, Y, DV, PANELS, IN_SIZE, OUT_SIZE,
  BATCH, LISTS, VECTORS, WIDE, BACK, STEP, FIELDS,
) = range(_pool.FIRST_FREE, _pool.FIRST_FREE + 18)  # fmt: skip


def _entry(b: Any, values: Any, indices: Any, at: Any, wide: bool):
  """Load an entry of a list: its index, and the weight."""
  kind, size = (I32, 4) if wide else (I16, 2)
  index = _simd._load(b, b.add(indices, b.mul(at, I64(size))), kind)
  place = b.mul(at, I64(4))
  value = _simd._load(b, b.add(values, place), F32, 4)
  return b.zext(index, I64), value


def _sums(vectors: int, wide: bool) -> Any:
  """Make `f(x, values, indices, count, y)`: one list's product."""
  kind, row = ir.VectorType(F32, VECTOR), 4 * VECTOR * vectors

  @intrinsic
  def f(_, x, values, indices, count, y):
    def emit(context, b, signature, args):
      x, values, indices, count, y = args
      sums = [cgutils.alloca_once(b, kind) for _ in range(vectors)]
      for total in sums:
        b.store(_simd._zero(VECTOR), total)
      with cgutils.for_range(b, count) as loop:
        index, value = _entry(b, values, indices, loop.index, wide)
        weight = _simd._splat(b, value, VECTOR)
        source = b.add(x, b.mul(index, I64(row)))
        for v, total in enumerate(sums):
          part = _simd._load(b, b.add(source, I64(4 * VECTOR * v)), kind, 4)
          b.store(_simd._fma(b, weight, part, b.load(total)), total)
      for v, total in enumerate(sums):
        _simd._store(b, b.load(total), b.add(y, I64(4 * VECTOR * v)))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit

  return f


def _four_sums(b: Any, parts: list[Any]) -> Any:
  """Return the sums of the lanes of four vectors, as one vector of four."""
  kind = ir.VectorType(I32, VECTOR)

  def fold(x: Any, y: Any, low: tuple[int, ...], high: tuple[int, ...]) -> Any:
    """Add two choices of four lanes, made in each quarter (of 128 bits)."""
    halves = [
      ir.Constant(
        kind,
        [
          first + lane % 4 + (VECTOR if lane > 3 else 0)
          for first in range(0, VECTOR, 4)
          for lane in choice
        ],
      )
      for choice in (low, high)
    ]
    one, other = (b.shuffle_vector(x, y, mask) for mask in halves)
    return b.fadd(one, other)

  first, second = (
    fold(parts[i], parts[i + 1], (0, 4, 1, 5), (2, 6, 3, 7)) for i in (0, 2)
  )
  total, width = fold(first, second, (0, 1, 4, 5), (2, 3, 6, 7)), VECTOR
  while width > 4:
    width //= 2
    masks = (
      ir.Constant(ir.VectorType(I32, width), [*range(start, start + width)])
      for start in (0, width)
    )
    one, other = (b.shuffle_vector(total, total, mask) for mask in masks)
    total = b.fadd(one, other)
  return total


def _gradients(vectors: int, wide: bool) -> Any:
  """Make both gradients of one list.

  `f(x, g, values, indices, count, dx, dv, first)`: x is the list's own row;
  `first` says that dv has no sum of earlier panels yet.
  """
  kind, row = ir.VectorType(F32, VECTOR), 4 * VECTOR * vectors

  @intrinsic
  def f(_, x, g, values, indices, count, dx, dv, first):
    def emit(context, b, signature, args):
      x, g, values, indices, count, dx, dv, first = args
      own = [
        _simd._load(b, b.add(x, I64(4 * VECTOR * v)), kind, 4)
        for v in range(vectors)
      ]
      sums = [cgutils.alloca_once(b, kind) for _ in range(vectors)]
      for total in sums:
        b.store(_simd._zero(VECTOR), total)
      reduce = _simd._function(
        b, f"llvm.vector.reduce.fadd.v{VECTOR}f32", F32, F32, kind
      )

      def entry(at):
        """Add to the gradient of x; return that of the weight, by lanes."""
        index, value = _entry(b, values, indices, at, wide)
        weight = _simd._splat(b, value, VECTOR)
        source = b.add(g, b.mul(index, I64(row)))
        dot: Any = None
        for v, total in enumerate(sums):
          part = _simd._load(b, b.add(source, I64(4 * VECTOR * v)), kind, 4)
          b.store(_simd._fma(b, weight, part, b.load(total)), total)
          if dot is None:
            dot = b.fmul(own[v], part)
          else:
            dot = _simd._fma(b, own[v], part, dot)
        return dot

      def add(at, found):
        target, zero = b.add(dv, b.mul(at, I64(4))), F32(0.0)
        if found.type != F32:
          zero = _simd._zero(4)
        before = _simd._load(b, target, found.type, 4)
        before = b.select(first, zero, before)
        _simd._store(b, b.fadd(before, found), target)

      # The lanes of four entries are added in one go.
      fours = b.lshr(count, I64(2))
      with cgutils.for_range(b, fours) as loop:
        at = b.shl(loop.index, I64(2))
        add(at, _four_sums(b, [entry(b.add(at, I64(i))) for i in range(4)]))
      done = b.shl(fours, I64(2))
      with cgutils.for_range(b, b.sub(count, done)) as loop:
        at = b.add(done, loop.index)
        add(at, b.call(reduce, [F32(0.0), entry(at)], fastmath=("fast",)))
      for v, total in enumerate(sums):
        _simd._store(b, b.load(total), b.add(dx, I64(4 * VECTOR * v)))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 7, types.boolean), emit

  return f


_sums1, _sums2, _sums4, _sums8 = (_sums(v, False) for v in (1, 2, 4, 8))
_wide_sums1, _wide_sums2, _wide_sums4 = (_sums(v, True) for v in (1, 2, 4))
_grad1, _grad2, _grad4, _grad8 = (_gradients(v, False) for v in (1, 2, 4, 8))
_wide_grad1, _wide_grad2, _wide_grad4 = (_gradients(v, True) for v in (1, 2, 4))
_transpose = _simd.transpose(VECTOR)


@jit
def _flush(job, tile, first, lists, panel):
  """Write the results of some lists, from a tile, where the batch has them."""
  vectors, columns = field(job, VECTORS), field(job, OUT_SIZE)
  width = VECTOR * vectors
  rows = min(width, field(job, BATCH) - panel * width)
  target = field(job, Y) + 4 * (panel * width * columns + first)
  if lists == VECTOR:
    for row in range(0, rows, VECTOR):
      _transpose(
        tile + 4 * row, 4 * width, VECTOR,
        target + 4 * row * columns, 4 * columns, rows - row,
      )  # fmt: skip
    return
  for row in range(rows):
    for i in range(lists):
      place = target + 4 * (row * columns + i)
      write_i32(place, read_i32(tile + 4 * (i * width + row)))


@jit
def _product_tile(job, begin, end, panel, tile, values):
  """Multiply the lists begin … end - 1 by a panel."""
  vectors, wide = field(job, VECTORS), field(job, WIDE)
  row, item = 4 * VECTOR * vectors, 4 if wide else 2
  indices, starts = field(job, INDICES), field(job, STARTS)
  x = field(job, X) + panel * field(job, IN_SIZE) * row
  at = int(read_i32(starts + 4 * begin))
  for i in range(begin, end):
    last = int(read_i32(starts + 4 * i + 4))
    args = (
      x, values, indices + item * at, last - at, tile + (i - begin) * row,
    )  # fmt: skip
    if wide == 0:
      if vectors == 8:
        _sums8(*args)
      elif vectors == 4:
        _sums4(*args)
      elif vectors == 2:
        _sums2(*args)
      else:
        _sums1(*args)
    elif vectors == 4:
      _wide_sums4(*args)
    elif vectors == 2:
      _wide_sums2(*args)
    else:
      _wide_sums1(*args)
    values += 4 * (last - at)
    at = last


@jit
def _gradient_tile(job, begin, end, panel, tile, values, dv):
  """Make both gradients of the lists begin … end - 1, of a panel."""
  vectors, wide = field(job, VECTORS), field(job, WIDE)
  row, item = 4 * VECTOR * vectors, 4 if wide else 2
  indices, starts = field(job, INDICES), field(job, STARTS)
  x = field(job, X) + panel * field(job, OUT_SIZE) * row
  g = field(job, G) + panel * field(job, IN_SIZE) * row
  at = int(read_i32(starts + 4 * begin))
  for i in range(begin, end):
    last = int(read_i32(starts + 4 * i + 4))
    args = (
      x + i * row, g, values, indices + item * at, last - at,
      tile + (i - begin) * row, dv, panel == 0,
    )  # fmt: skip
    if wide == 0:
      if vectors == 8:
        _grad8(*args)
      elif vectors == 4:
        _grad4(*args)
      elif vectors == 2:
        _grad2(*args)
      else:
        _grad1(*args)
    elif vectors == 4:
      _wide_grad4(*args)
    elif vectors == 2:
      _wide_grad2(*args)
    else:
      _wide_grad1(*args)
    values += 4 * (last - at)
    dv += 4 * (last - at)
    at = last


@jit
def _some_lists(job, begin, end, tile):
  """Do the lists begin … end - 1, panel by panel."""
  starts, back = field(job, STARTS), field(job, BACK)
  origin = int(read_i32(starts + 4 * begin))
  count = int(read_i32(starts + 4 * end)) - origin
  slots = field(job, SLOTS) + 4 * origin
  values = _pool.malloc(max(4, (8 if back else 4) * count))
  dv, source, target = values + 4 * count, field(job, VALUES), field(job, DV)
  for i in range(count):
    place = source + 4 * int(read_i32(slots + 4 * i))
    write_i32(values + 4 * i, read_i32(place))
  for panel in range(field(job, PANELS)):
    for first in range(begin, end, VECTOR):
      last = min(first + VECTOR, end)
      skip = 4 * (int(read_i32(starts + 4 * first)) - origin)
      if back:
        _gradient_tile(
          job, first, last, panel, tile, values + skip, dv + skip
        )  # fmt: skip
      else:
        _product_tile(job, first, last, panel, tile, values + skip)
      _flush(job, tile, first, last - first, panel)
  if back:
    for i in range(count):
      place = target + 4 * int(read_i32(slots + 4 * i))
      write_i32(place, read_i32(dv + 4 * i))
  _pool.free(values)


@jit
def _lists(job, begin, end):
  """Do the lists of a task; with one panel, few at a time."""
  tile = _pool.malloc(4 * VECTOR * VECTOR * field(job, VECTORS))
  some = VECTOR if field(job, PANELS) == 1 else end - begin
  for first in range(begin, end, some):
    _some_lists(job, first, min(first + some, end), tile)
  _pool.free(tile)


@jit
def _work(job):
  """Take tasks until there are none."""
  tasks, step, lists = (
    field(job, _pool.TASKS),
    field(job, STEP),
    field(job, LISTS),
  )
  index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  while index < tasks:
    begin, end = index * step, min(lists, (index + 1) * step)
    _lists(job, begin, end)
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_kept_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _run(frame, back):
  """Cut the lists into tasks and share them.

  Operands: x panels (P, K, width), [g panels,] values, starts, indices, slots.
  Results: y (batch, lists) [, dv].
  """
  y = _pool.result(frame, 0)
  if _pool.size(y) == 0:
    return
  x, more = _pool.argument(frame, 0), 1 if back else 0
  values, starts, indices, slots = (
    _pool.argument(frame, 1 + more),
    _pool.argument(frame, 2 + more),
    _pool.argument(frame, 3 + more),
    _pool.argument(frame, 4 + more),
  )
  job = _pool.malloc(8 * (FIELDS + 1))
  set_field(job, _pool.NEXT, 0)
  set_field(job, _pool.DONE, 0)
  set_field(job, X, _pool.data(x))
  set_field(job, VALUES, _pool.data(values))
  set_field(job, STARTS, _pool.data(starts))
  set_field(job, INDICES, _pool.data(indices))
  set_field(job, SLOTS, _pool.data(slots))
  set_field(job, Y, _pool.data(y))
  set_field(job, BACK, more)
  lists = _pool.dim(y, 1)
  panels, vectors = _pool.dim(x, 0), _pool.dim(x, 2) // VECTOR
  set_field(job, LISTS, lists)
  set_field(job, OUT_SIZE, lists)
  set_field(job, BATCH, _pool.dim(y, 0))
  set_field(job, PANELS, panels)
  set_field(job, VECTORS, vectors)
  set_field(job, WIDE, 0 if _pool.is_u16(indices) else 1)
  inner = x
  if back:
    inner = _pool.argument(frame, 1)
    set_field(job, G, _pool.data(inner))
    set_field(job, DV, _pool.data(_pool.result(frame, 1)))
  set_field(job, IN_SIZE, _pool.dim(inner, 1))
  work = _pool.size(slots) * panels * vectors
  threads = max(1, work // GRAIN)
  if threads > 1:
    threads = min(threads, _pool.num_threads(frame))
  parts = 1 if threads == 1 else TASKS_PER_THREAD * threads
  step = (lists + parts - 1) // parts
  step = (step + VECTOR - 1) // VECTOR * VECTOR  # whole tiles
  set_field(job, STEP, step)
  set_field(job, _pool.TASKS, (lists + step - 1) // step)
  _pool.schedule(frame, threads, _task_address(), job)
  _work(job)
  _pool.wait_for(job + 8 * _pool.DONE, field(job, _pool.TASKS))
  _pool.release(job)


@cfunc(types.int64(types.int64), cache=True)
def product(frame):
  if not _pool.is_metadata_query(frame):
    _run(frame, False)
  return 0


@cfunc(types.int64(types.int64), cache=True)
def gradients(frame):
  if not _pool.is_metadata_query(frame):
    _run(frame, True)
  return 0
