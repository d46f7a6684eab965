"""The product y = x @ w of dense panels for small batches, as machine code.

A panel of 64 columns is multiplied by a few batch rows at a time, whose sums
fill the registers. A task is a range of panels.
"""

import llvmlite.binding as llvm
from numba import cfunc, types

from jaxpruner.sparse import _pool, _simd, _simd_panel
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_f32, write_f32
from jaxpruner.sparse.format_panel import PANEL

jit = _pool.jit
SUPPORTED = True
DTYPES = ("float32", "bfloat16")
# Batch rows that share one reading of the weights, and vectors of a strip: the
# sums of all of them fill the registers.
FEW, MANY = 4, 6
PARTS = 4 if _simd.WIDTH == 16 else 2
STRIP = PARTS * _simd.WIDTH
# Eight rows at once read the weights once, half a strip at a time. Without 32
# registers they are twice four.
EIGHT = 8 if _simd.WIDTH == 16 else FEW
HALF = PARTS * FEW // EIGHT
# Weights × groups of rows below which a second thread costs more than it
# brings.
GRAIN = 200_000

_one, _one_half = (
  _simd_panel.multiply(1, PARTS, half) for half in (False, True)
)
_few, _few_half = (
  _simd_panel.multiply(FEW, PARTS, half) for half in (False, True)
)
_many, _many_half = (
  _simd_panel.multiply(MANY, PARTS, half) for half in (False, True)
)
_eight, _eight_half = (
  _simd_panel.multiply(EIGHT, HALF, half) for half in (False, True)
)

(X, VALUES, Y, BATCH, DEPTH, COLS, PANELS, STEP, SIZE, FIELDS) = range(
  _pool.FIRST_FREE, _pool.FIRST_FREE + 10
)


def scratch_size(batch: int, rows: int, cols: int) -> int:
  """Return how many floats of scratch memory the kernel needs: one."""
  del batch, rows, cols
  return 1


@jit
def _rows(job, x, last, values, out):
  """Multiply up to `EIGHT` batch rows by a panel."""
  depth, size = field(job, DEPTH), field(job, SIZE)
  strip = STRIP if last < MANY else HALF * _simd.WIDTH
  for start in range(0, PANEL, strip):
    args = (x, 4 * depth, last, values + size * start, depth, out + 4 * start)
    if last == 0:
      _one_half(*args) if size == 2 else _one(*args)
    elif last < FEW:
      _few_half(*args) if size == 2 else _few(*args)
    elif last < MANY:
      _many_half(*args) if size == 2 else _many(*args)
    else:
      _eight_half(*args) if size == 2 else _eight(*args)


@jit
def _panel(job, panel, out):
  batch, depth, cols = field(job, BATCH), field(job, DEPTH), field(job, COLS)
  values = field(job, VALUES) + field(job, SIZE) * panel * depth * PANEL
  valid = min(PANEL, cols - panel * PANEL)
  row = 0
  while row < batch:
    rest = batch - row
    # Seven and eight rows are not six and the rest.
    rows = min(rest, EIGHT if rest in (7, 8) else MANY)
    _rows(job, field(job, X) + 4 * row * depth, rows - 1, values, out)
    for r in range(rows):
      target = field(job, Y) + 4 * ((row + r) * cols + panel * PANEL)
      for n in range(valid):
        write_f32(target + 4 * n, read_f32(out + 4 * (r * PANEL + n)))
    row += rows


@jit
def _work(job):
  tasks, step = field(job, _pool.TASKS), field(job, STEP)
  index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  if index >= tasks:
    return
  out = _pool.malloc(4 * max(EIGHT, MANY) * PANEL)
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


TASK_SYMBOL = "jaxpruner_panel_task"
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
  panels = _pool.dim(values, 0)
  threads = max(1, depth * cols * ((batch + FEW - 1) // FEW) // GRAIN)
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
  set_field(job, SIZE, _pool.item_size(values))
  set_field(job, Y, _pool.data(y))
  set_field(job, BATCH, batch)
  set_field(job, DEPTH, depth)
  set_field(job, COLS, cols)
  set_field(job, PANELS, panels)
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
