"""The bit-mask product y = x @ w for small batches, as machine code.

A panel of 64 columns is read once per few batch rows; the kept values expand
into vectors as they are read. A task is a range of panels.
"""

import llvmlite.binding as llvm
from numba import cfunc, types

from jaxpruner.sparse import _pool, _simd
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_f32, read_i32, write_f32
from jaxpruner.sparse.format_bitmask import PANEL

jit = _pool.jit
SUPPORTED = _simd.AVX512
DTYPES = ("float32", "bfloat16")
# Batch rows that share one reading of the weights: their sums fill registers.
ROWS = 4
# Weights × batch rows below which a second thread costs more than it brings.
GRAIN = 200_000

_one, _few = _simd.expand(1), _simd.expand(ROWS)
_one16, _few16 = _simd.expand(1, bf16=True), _simd.expand(ROWS, bf16=True)

(X, VALUES, BITS, STARTS, Y, BATCH, DEPTH, COLS, PANELS, STEP, ITEM, FIELDS) = (
  range(_pool.FIRST_FREE, _pool.FIRST_FREE + 12)
)


def scratch_size(batch: int, rows: int, cols: int) -> int:
  """Return how many floats of scratch memory the kernel needs: one."""
  del batch, rows, cols
  return 1


@jit
def _panel(job, panel, out):
  batch, depth, cols = field(job, BATCH), field(job, DEPTH), field(job, COLS)
  bits = field(job, BITS) + 8 * panel * depth
  start = read_i32(field(job, STARTS) + 4 * panel)
  values = field(job, VALUES) + field(job, ITEM) * start
  valid = min(PANEL, cols - panel * PANEL)
  for row in range(0, batch, ROWS):
    x = field(job, X) + 4 * row * depth
    rows = min(ROWS, batch - row)
    if field(job, ITEM) == 2:
      if rows == 1:
        _one16(x, 4 * depth, 0, bits, values, depth, out)
      else:
        _few16(x, 4 * depth, rows - 1, bits, values, depth, out)
    elif rows == 1:
      _one(x, 4 * depth, 0, bits, values, depth, out)
    else:
      _few(x, 4 * depth, rows - 1, bits, values, depth, out)
    for r in range(rows):
      target = field(job, Y) + 4 * ((row + r) * cols + panel * PANEL)
      for n in range(valid):
        write_f32(target + 4 * n, read_f32(out + 4 * (r * PANEL + n)))


@jit
def _work(job):
  tasks, step = field(job, _pool.TASKS), field(job, STEP)
  index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  if index >= tasks:
    return
  out = _pool.malloc(4 * ROWS * PANEL)
  while index < tasks:
    last = min(field(job, PANELS), (index + 1) * step)
    for panel in range(index * step, last):
      _panel(job, panel, out)
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  _pool.free(out)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_bitmask_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _multiply(frame):
  x, values = _pool.argument(frame, 0), _pool.argument(frame, 1)
  bits, y = _pool.argument(frame, 2), _pool.result(frame, 0)
  depth, cols = _pool.dim(x, -1), _pool.dim(y, -1)
  batch = _pool.size(x) // max(depth, 1)
  if batch == 0 or depth == 0 or cols == 0:
    return
  panels = _pool.dim(bits, 0)
  threads = max(1, depth * cols * ((batch + ROWS - 1) // ROWS) // GRAIN)
  if threads > 1:
    threads = min(threads, _pool.num_threads(frame))
  step = max(1, panels // (8 * threads))
  tasks = (panels + step - 1) // step
  job = _pool.malloc(8 * (FIELDS + 1))
  set_field(job, _pool.NEXT, 0)
  set_field(job, _pool.DONE, 0)
  set_field(job, _pool.TASKS, tasks)
  set_field(job, X, _pool.data(x))
  set_field(job, VALUES, _pool.data(values))
  set_field(job, BITS, _pool.data(bits))
  set_field(job, STARTS, _pool.data(_pool.argument(frame, 3)))
  set_field(job, Y, _pool.data(y))
  set_field(job, BATCH, batch)
  set_field(job, DEPTH, depth)
  set_field(job, COLS, cols)
  set_field(job, PANELS, panels)
  set_field(job, STEP, step)
  set_field(job, ITEM, _pool.item_size(values))
  _pool.schedule(frame, threads, _task_address(), job)
  _work(job)
  _pool.wait_for(job + 8 * _pool.DONE, tasks)
  _pool.release(job)


@cfunc(types.int64(types.int64), cache=True)
def handler(frame):
  if not _pool.is_metadata_query(frame):
    _multiply(frame)
  return 0
