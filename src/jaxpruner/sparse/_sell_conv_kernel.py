"""A convolution with a SELL kernel that finds its windows itself.

Image and result are stored channel by channel, so that neighbouring positions
are neighbours in memory. A panel holds `bw` positions of the result; each of
its rows, one channel seen through one tap of the window, is copied from pieces
of lines of the padded image. Nothing is transposed, and no matrix of windows is
ever written. Tasks are some panels × some blocks of the result's channels.
"""

import llvmlite.binding as llvm
from numba import cfunc, types

from jaxpruner.sparse import _panels, _pool, _simd
from jaxpruner.sparse._panels import (
  BATCH,
  BLOCK,
  BW,
  COLS,
  GROUPS,
  LARGE_BW,
  PANEL,
  PANELS,
  ROWS,
  STEP,
  TILES,
  WIDTH,
  X,
  Y,
)  # fmt: skip
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._sell_kernel import (
  MAX_BLOCKS,
  MAX_PANELS,
  TASKS_PER_THREAD,
  sum_blocks,
)
from jaxpruner.sparse._simd import read_f32, read_i32, write_f32, write_i64
from jaxpruner.sparse.format_sell import TILE

jit = _pool.jit
SUPPORTED = True
DTYPES = ("float32", "bfloat16")
# The operand after the weight, int32: these, then the offset of each tap.
CHANNELS, PLANE, IMAGE, LINE, HIGH, WIDE, DOWN, ALONG, TAPS, OFFSETS = range(10)
# Positions that a result has at least: those of the widest panel.
LEAST = 32

_copy, _copy_even = _simd.copy(1), _simd.copy(2)


def scratch_size(batch: int, rows: int, cols: int) -> int:
  """Return how many floats XLA keeps for the kernel: none, and 0 is no size."""
  del batch, rows, cols
  return 1


@jit
def _number(job, index):
  """Return a number of the convolution's geometry."""
  return int(read_i32(field(job, PANEL) + 4 * index))


@jit
def _first(job, panel):
  """Return the first position of a panel; the last one ends with the image."""
  bw = field(job, BW)
  return min(panel * bw, field(job, BATCH) - bw)


@jit
def _pieces(job, first, last, table):
  """List the pieces of lines of some panels; return how many there are.

  A piece is at most one vector: where it begins in a channel of the image and
  in the first row of the panels, in bytes, and its length.
  """
  bw, high, wide = field(job, BW), _number(job, HIGH), _number(job, WIDE)
  count = 0
  for p in range(first, last):
    position, lane = _first(job, p), 0
    base = (p - first) * field(job, TILES) * TILE * bw
    while lane < bw:
      column, line = position % wide, position // wide
      start = line // high * _number(job, IMAGE)
      start += line % high * _number(job, DOWN) * _number(job, LINE)
      start += column * _number(job, ALONG)
      length = min(wide - column, bw - lane, WIDTH)
      write_i64(table + 24 * count, 4 * start)
      write_i64(table + 24 * count + 8, 4 * (base + lane))
      write_i64(table + 24 * count + 16, length)
      position, lane, count = position + length, lane + length, count + 1
  return count


@jit
def _pack(job, first, last, target, table):
  """Copy the windows of some panels, lanes and rows ascending.

  Whole vectors are copied: what a piece writes beyond its end is overwritten by
  what comes next. So the last row is copied exactly, as is what ends the image.
  """
  along, taps = _number(job, ALONG), _number(job, TAPS)
  channels, plane = _number(job, CHANNELS), _number(job, PLANE)
  count = _pieces(job, first, last, table)
  reach = 0
  for i in range(count):
    reach = max(reach, field(table, 3 * i) + 4 * WIDTH * along)
  end = field(job, X) + 4 * channels * plane - reach
  for tap in range(taps):
    for channel in range(channels):
      source = channel * plane + _number(job, OFFSETS + tap)
      source = field(job, X) + 4 * source
      exact = tap == taps - 1 and channel == channels - 1
      if along > 2 or source > end or exact:
        for i in range(count):
          begin = source + field(table, 3 * i)
          to = target + field(table, 3 * i + 1)
          for lane in range(field(table, 3 * i + 2)):
            write_f32(to + 4 * lane, read_f32(begin + 4 * along * lane))
      elif along == 2:
        for i in range(count):
          to = target + field(table, 3 * i + 1)
          _copy_even(source + field(table, 3 * i), to)
      else:
        for i in range(count):
          to = target + field(table, 3 * i + 1)
          _copy(source + field(table, 3 * i), to)
      target += 4 * field(job, BW)


@jit
def _unpack(job, sums, first, last, groups, group):
  """Copy the sums of some panels and one block into the result."""
  bw, block, batch = field(job, BW), field(job, BLOCK), field(job, BATCH)
  start = group * block
  stride = 4 * groups * block * bw
  for n in range(min(block, field(job, COLS) - start)):
    line = field(job, Y) + 4 * (start + n) * batch
    for p in range(first, last):
      target = line + 4 * _first(job, p)
      source = sums + (p - first) * stride + 4 * n * bw
      for lane in range(0, bw, WIDTH):
        _copy(source + 4 * lane, target + 4 * lane)


@jit
def _panel_count(job):
  return (field(job, BATCH) + field(job, BW) - 1) // field(job, BW)


@jit
def _room(job):
  """Return the bytes of the packed panels of one task."""
  return 4 * field(job, PANELS) * field(job, TILES) * TILE * field(job, BW)


@jit
def _compute(job, index, packed, sums, table):
  """Do one task."""
  bw, block, groups = field(job, BW), field(job, BLOCK), field(job, GROUPS)
  step, per_task = field(job, STEP), field(job, PANELS)
  across = (groups + step - 1) // step
  first = index // across * per_task
  last = min(_panel_count(job), first + per_task)
  stop = min(groups, (index % across + 1) * step)
  _pack(job, first, last, packed, table)
  for begin in range(index % across * step, stop, MAX_BLOCKS):
    end = min(stop, begin + MAX_BLOCKS)
    sum_blocks(job, packed, first, last, begin, end, sums)
    for group in range(begin, end):
      mine = sums + 4 * (group - begin) * block * bw
      _unpack(job, mine, first, last, end - begin, group)


@jit
def _work(job):
  """Take tasks until there are none."""
  tasks = field(job, _pool.TASKS)
  index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  if index >= tasks:
    return
  bw = field(job, BW)
  room = _room(job)
  sums = 4 * MAX_BLOCKS * field(job, PANELS) * field(job, BLOCK) * bw
  memory = _pool.malloc(room + sums + 24 * bw * field(job, PANELS) + 64)
  packed = (memory + 63) // 64 * 64
  while index < tasks:
    _compute(job, index, packed, packed + room, packed + room + sums)
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  _pool.free(memory)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_sell_conv_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _multiply(frame):
  """Cut the work into tasks and share it."""
  y = _pool.result(frame, 0)
  if _pool.size(y) == 0:
    return
  job = _panels.new_job(frame, LARGE_BW)
  set_field(job, PANEL, _pool.data(_pool.argument(frame, 6)))
  set_field(job, COLS, _pool.dim(y, 0))
  set_field(job, ROWS, _number(job, CHANNELS) * _number(job, TAPS))
  batch = _pool.size(y) // _pool.dim(y, 0)
  set_field(job, BATCH, batch)
  threads = _panels.num_threads(frame, batch)
  panels, step = _panel_count(job), field(job, GROUPS)
  # Enough tasks that no thread idles while another finishes a long one.
  enough = 1 if threads == 1 else TASKS_PER_THREAD * threads
  per_task = max(1, min(MAX_PANELS, panels // enough))
  rows = (panels + per_task - 1) // per_task
  while step > 1 and rows * ((field(job, GROUPS) + step - 1) // step) < enough:
    step = (step + 1) // 2
  set_field(job, STEP, step)
  set_field(job, PANELS, per_task)
  set_field(job, _panels.PACKS, 0)
  tasks = rows * ((field(job, GROUPS) + step - 1) // step)
  _panels.share(frame, job, threads, tasks, _task_address())
  _work(job)
  _panels.finish(job)


@cfunc(types.int64(types.int64), cache=True)
def handler(frame):
  if not _pool.is_metadata_query(frame):
    _multiply(frame)
  return 0
