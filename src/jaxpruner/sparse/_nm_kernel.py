"""The product y = x @ w with N of every 4 weights, as machine code.

Two bits say which of four inputs a weight multiplies: they are the control bits
of a permutation within four lanes, so that one instruction picks the inputs of
16 weights. A task is a range of columns; its sums stay in the first cache.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from jaxpruner.sparse import _pool, _simd
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import F32, I32, I64, write_f32

jit = _pool.jit
SUPPORTED = _simd.AVX512
DTYPES = ("float32", "bfloat16")
WIDTH = 16
# Weights × batch rows below which a second thread costs more than it brings.
GRAIN = 200_000
COLUMNS = 1024  # of a task at most: their sums are 4 kB


def _slot(bf16: bool) -> Any:
  """Make the product of four inputs with one slot of a group.

  `f(x, values, words, count, y, ahead)`: y += value * x[index], for `count`
  vectors of 16 columns; a word holds 16 indices of two bits. Asks for the
  values `ahead` bytes further on: rows of slots are too far apart for the
  processor to guess.
  """
  floats, ints = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)
  size = 2 if bf16 else 4

  @_simd.intrinsic
  def f(_, x, values, words, count, y, ahead):
    def emit(context, b, signature, args):
      x, values, words, count, y, ahead = args
      few = _simd._load(b, x, ir.VectorType(F32, 4), 4)
      undefined = ir.Constant(few.type, ir.Undefined)
      lanes = ir.Constant(ints, [0, 1, 2, 3] * 4)
      inputs = b.shuffle_vector(few, undefined, lanes)
      shifts = ir.Constant(ints, list(range(0, 32, 2)))
      permute = _simd._function(
        b, "llvm.x86.avx512.vpermilvar.ps.512", floats, floats, ints
      )
      with cgutils.for_range(b, count) as loop:
        word = _simd._load(b, b.add(words, b.mul(loop.index, I64(4))), I32)
        index = b.lshr(_simd._splat(b, word, WIDTH), shifts)
        chosen = b.call(permute, [inputs, index])
        at = b.add(values, b.mul(loop.index, I64(size * WIDTH)))
        _simd._prefetch(b, b.add(at, ahead))
        weight = _simd._weights(b, at, WIDTH, bf16)
        place = b.add(y, b.mul(loop.index, I64(4 * WIDTH)))
        total = _simd._load(b, place, floats, 4)
        _simd._store(b, _simd._fma(b, chosen, weight, total), place)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit

  return f


_slot32, _slot16 = _slot(False), _slot(True)

(X, VALUES, INDICES, Y, BATCH, DEPTH, COLS, SLOTS, ITEM, STEP, FIELDS) = range(
  _pool.FIRST_FREE, _pool.FIRST_FREE + 11
)


def scratch_size(batch: int, rows: int, cols: int) -> int:
  """Return how many floats of scratch memory the kernel needs: one."""
  del batch, rows, cols
  return 1


@jit
def _columns(job, start, stop):
  """Multiply all batch rows by the columns from `start` to `stop`."""
  batch, depth, cols = field(job, BATCH), field(job, DEPTH), field(job, COLS)
  slots, item, count = field(job, SLOTS), field(job, ITEM), (stop - start) // 16
  for row in range(batch):
    for n in range(start, stop):
      write_f32(field(job, Y) + 4 * (row * cols + n), types.float32(0.0))
  ahead = 2 * item * cols
  for group in range(depth // 4):
    for slot in range(slots):
      before = (group * slots + slot) * cols + start
      values = field(job, VALUES) + item * before
      words = field(job, INDICES) + before // 4
      for row in range(batch):
        x = field(job, X) + 4 * (row * depth + 4 * group)
        y = field(job, Y) + 4 * (row * cols + start)
        if item == 2:
          _slot16(x, values, words, count, y, ahead)
        else:
          _slot32(x, values, words, count, y, ahead)


@jit
def _work(job):
  tasks, step, cols = (
    field(job, _pool.TASKS),
    field(job, STEP),
    field(job, COLS),
  )
  index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  while index < tasks:
    _columns(job, index * step, min(cols, (index + 1) * step))
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_nm_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _multiply(frame):
  x, values = _pool.argument(frame, 0), _pool.argument(frame, 1)
  y = _pool.result(frame, 0)
  depth, cols = _pool.dim(x, -1), _pool.dim(y, -1)
  batch = _pool.size(x) // max(depth, 1)
  if batch == 0 or depth == 0 or cols == 0:
    return
  threads = max(1, depth * cols * batch // GRAIN)
  if threads > 1:
    threads = min(threads, _pool.num_threads(frame))
  wanted = min(COLUMNS, (cols + 2 * threads - 1) // (2 * threads))
  step = (wanted + WIDTH - 1) // WIDTH * WIDTH
  tasks = (cols + step - 1) // step
  job = _pool.malloc(8 * (FIELDS + 1))
  set_field(job, _pool.NEXT, 0)
  set_field(job, _pool.DONE, 0)
  set_field(job, _pool.TASKS, tasks)
  set_field(job, X, _pool.data(x))
  set_field(job, VALUES, _pool.data(values))
  set_field(job, INDICES, _pool.data(_pool.argument(frame, 2)))
  set_field(job, Y, _pool.data(y))
  set_field(job, BATCH, batch)
  set_field(job, DEPTH, depth)
  set_field(job, COLS, cols)
  set_field(job, SLOTS, _pool.dim(values, 1))
  set_field(job, ITEM, _pool.item_size(values))
  set_field(job, STEP, step)
  _pool.schedule(frame, threads, _task_address(), job)
  _work(job)
  _pool.wait_for(job + 8 * _pool.DONE, tasks)
  _pool.release(job)


@cfunc(types.int64(types.int64), cache=True)
def handler(frame):
  if not _pool.is_metadata_query(frame):
    _multiply(frame)
  return 0
