"""The product y = x @ w with int8 weights for small batches, as machine code.

A panel of 64 columns is read once per few batch rows. Its bytes expand by the
bit mask into one vector, widen to float32 in registers, and are summed over a
group of inputs; then the scales of the group are applied. A task is a range of
panels.
"""

import llvmlite.binding as llvm
from numba import cfunc, types

from jaxpruner.sparse import _int8_simd, _pool, _simd
from jaxpruner.sparse._int8 import GROUP
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_f32, write_f32
from jaxpruner.sparse.format_bitmask import PANEL

jit = _pool.jit
SUPPORTED = _simd.AVX512
DTYPES = ("float32",)
# Batch rows that share one reading of the weights: their sums fill registers.
ROWS = 4
# Weights × batch rows below which a second thread costs more than it brings.
GRAIN = 200_000


_one, _few = _int8_simd.group(1, True), _int8_simd.group(ROWS, True)
_one_full, _few_full = _int8_simd.group(1, False), _int8_simd.group(ROWS, False)

(X, VALUES, BITS, STARTS, SCALES, Y, BATCH, DEPTH, COLS, PANELS, GROUPS,
 MASKED, STEP, FIELDS) = range(
  _pool.FIRST_FREE, _pool.FIRST_FREE + 14
)  # fmt: skip


def scratch_size(batch: int, rows: int, cols: int) -> int:
  """Return how many floats of scratch memory the kernel needs: one."""
  del batch, rows, cols
  return 1


@jit
def _rows(job, panel, row, rows, out):
  """Multiply up to ROWS batch rows by one panel."""
  depth = field(job, DEPTH)
  groups, masked = field(job, GROUPS), field(job, MASKED)
  bits = field(job, BITS) + 8 * panel * depth
  start = _simd.read_i32(field(job, STARTS) + 4 * panel)
  values = field(job, VALUES) + start
  scales = field(job, SCALES) + 2 * PANEL * panel * groups
  x, last = field(job, X) + 4 * row * depth, rows - 1
  for n in range((1 if rows == 1 else ROWS) * PANEL):
    write_f32(out + 4 * n, types.float32(0.0))
  for g in range(groups):
    k = g * GROUP
    count = min(GROUP, depth - k)
    at, word, scale = x + 4 * k, bits + 8 * k, scales + 2 * PANEL * g
    if masked:
      if rows == 1:
        values = _one(at, 4 * depth, 0, word, values, count, scale, out)
      else:
        values = _few(at, 4 * depth, last, word, values, count, scale, out)
    elif rows == 1:
      values = _one_full(at, 4 * depth, 0, word, values, count, scale, out)
    else:
      values = _few_full(at, 4 * depth, last, word, values, count, scale, out)


@jit
def _panel(job, panel, out):
  batch, cols = field(job, BATCH), field(job, COLS)
  valid = min(PANEL, cols - panel * PANEL)
  for row in range(0, batch, ROWS):
    rows = min(ROWS, batch - row)
    _rows(job, panel, row, rows, out)
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


TASK_SYMBOL = "jaxpruner_int8_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _multiply(frame):
  x, values = _pool.argument(frame, 0), _pool.argument(frame, 1)
  bits, scales = _pool.argument(frame, 2), _pool.argument(frame, 4)
  y = _pool.result(frame, 0)
  depth, cols = _pool.dim(x, -1), _pool.dim(y, -1)
  batch = _pool.size(x) // max(depth, 1)
  if batch == 0 or depth == 0 or cols == 0:
    return
  panels, groups = _pool.dim(scales, 0), _pool.dim(scales, 1)
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
  set_field(job, SCALES, _pool.data(scales))
  set_field(job, Y, _pool.data(y))
  set_field(job, BATCH, batch)
  set_field(job, DEPTH, depth)
  set_field(job, COLS, cols)
  set_field(job, PANELS, panels)
  set_field(job, GROUPS, groups)
  set_field(job, MASKED, 1 if _pool.dim(bits, 0) else 0)
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
