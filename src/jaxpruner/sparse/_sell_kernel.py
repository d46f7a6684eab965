"""The SELL product y = x @ w as machine code that XLA calls directly.

The batch is packed into panels of `bw` rows, transposed, so that one weight
scales `bw` neighbours at once. Tasks are first the panels, then blocks of the
result; any thread takes the next one, and the first block waits for the last
panel.
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
  IN_PART,
  IN_PARTS,
  LARGE,
  LARGE_BW,
  MEDIUM,
  MEDIUM_BW,
  OUT_PART,
  PACKS,
  PANEL,
  PANELS,
  ROWS,
  SIZE,
  SMALL,
  STEP,
  TILES,
  X,
  Y,
)  # fmt: skip
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import (
  prefetch,
  read_f32,
  read_u8,
  read_u16,
  write_f32,
)
from jaxpruner.sparse.format_sell import LANES, TILE

jit = _pool.jit
SUPPORTED = True
DTYPES = ("float32", "bfloat16")
# Slots between a prefetch and its use.
AHEAD = 96
# Panels, and blocks of columns, worked on together: a panel serves all the
# blocks from the first cache level, a tile's weights all the panels from the
# second.
MAX_PANELS, MAX_BLOCKS = 4, 4
TASKS_PER_THREAD = 4

SMALL_LANES, MEDIUM_LANES, LARGE_LANES = SMALL[2], MEDIUM[2], LARGE[2]
_small, _small_half = (_simd.axpy(*SMALL, bf16) for bf16 in (False, True))
_medium, _medium_half = (_simd.axpy(*MEDIUM, bf16) for bf16 in (False, True))
_large, _large_half = (_simd.axpy(*LARGE, bf16) for bf16 in (False, True))
_dot, _dot_half = (_simd.dot(bf16, AHEAD) for bf16 in (False, True))


def scratch_size(batch: int, rows: int, cols: int) -> int:
  """Return how many floats the packed batch takes."""
  del cols
  if batch <= 1:
    return 1
  return _panels.packed_rows(batch) * -(-rows // TILE) * TILE


@jit
def _tile(job, tile, panel, sums):
  """Add one tile's contribution to the sums of one block, `bw` at a time."""
  bw, size, block = field(job, BW), field(job, SIZE), field(job, BLOCK)
  half = size == 2
  values, indices, counts, columns = _panels.tile_data(job, tile, LANES)
  first = tile % field(job, TILES) == 0
  lanes = SMALL_LANES
  if bw == LARGE_BW:
    lanes = LARGE_LANES
  elif bw == MEDIUM_BW:
    lanes = MEDIUM_LANES
  for _ in range(block // LANES):
    count = int(read_u16(counts + 2 * (LANES - 1)))
    # Wide panels take so long per slot that the hardware fetches in time.
    for slot in range(0 if bw == LARGE_BW else count):
      prefetch(values + size * LANES * (AHEAD + slot))
      if slot & 3 == 0:
        prefetch(indices + LANES * (AHEAD + slot))
    for lane in range(0, LANES, lanes):
      args = (
        panel,
        values + size * lane,
        indices + lane,
        count,
        columns + lane,
        sums,
        first,
      )
      if bw == LARGE_BW:
        _large_half(*args) if half else _large(*args)
      elif bw == MEDIUM_BW:
        _medium_half(*args) if half else _medium(*args)
      else:
        _small_half(*args) if half else _small(*args)
    values += size * LANES * count
    indices += LANES * count
    counts += 2 * LANES
    columns += LANES


@jit
def _row_tile(job, tile, x, sums, lanes):
  """Add one tile's contribution to the sums of one block, for one row."""
  size, block = field(job, SIZE), field(job, BLOCK)
  values, indices, counts, columns = _panels.tile_data(job, tile, LANES)
  for _ in range(block // LANES):
    count = int(read_u16(counts + 2 * (LANES - 1)))
    if size == 2:
      _dot_half(x, values, indices, count, lanes)
    else:
      _dot(x, values, indices, count, lanes)
    for lane in range(LANES):
      target = sums + 4 * int(read_u8(columns + lane))
      write_f32(target, read_f32(target) + read_f32(lanes + 4 * lane))
    values += size * LANES * count
    indices += LANES * count
    counts += 2 * LANES
    columns += LANES


@jit
def _row_blocks(job, begin, end, scratch):
  """Compute blocks of columns for a single row."""
  tiles, block = field(job, TILES), field(job, BLOCK)
  lanes = scratch + 4 * block
  # The kernel reads whole tiles: the last one is copied, not overrun.
  last = lanes + 4 * LANES
  rest = field(job, ROWS) - (tiles - 1) * TILE
  for k in range(rest):
    value = read_f32(field(job, X) + 4 * ((tiles - 1) * TILE + k))
    write_f32(last + 4 * k, value)
  for group in range(begin, end):
    for n in range(block):
      write_f32(scratch + 4 * n, 0)
    for t in range(tiles):
      x = field(job, X) + 4 * t * TILE if t < tiles - 1 else last
      _row_tile(job, group * tiles + t, x, scratch, lanes)
    target = field(job, Y) + 4 * group * block
    for n in range(min(block, field(job, COLS) - group * block)):
      write_f32(target + 4 * n, read_f32(scratch + 4 * n))


@jit
def sum_blocks(job, panels, first, last, begin, end, scratch):
  """Sum blocks of columns for the packed panels first … last - 1."""
  bw, tiles, block = field(job, BW), field(job, TILES), field(job, BLOCK)
  for t in range(tiles):
    for p in range(first, last):
      panel = panels + 4 * ((p - first) * tiles + t) * TILE * bw
      for group in range(begin, end):
        at = (p - first) * (end - begin) + group - begin
        sums = scratch + 4 * at * block * bw
        _tile(job, group * tiles + t, panel, sums)


@jit
def _blocks(job, panels, first, last, begin, end, scratch):
  """Compute blocks of columns for the packed panels first … last - 1."""
  bw, block = field(job, BW), field(job, BLOCK)
  sum_blocks(job, panels, first, last, begin, end, scratch)
  for p in range(first, last):
    for group in range(begin, end):
      at = (p - first) * (end - begin) + group - begin
      _panels.unpack(job, scratch + 4 * at * block * bw, p, group)


@jit
def _compute(job, index, scratch):
  """Do one task: all blocks of a few panels, or some blocks of them."""
  bw, tiles, groups = field(job, BW), field(job, TILES), field(job, GROUPS)
  step, per_task = field(job, STEP), field(job, PANELS)
  if bw == 1:
    _row_blocks(job, index * step, min(groups, (index + 1) * step), scratch)
    return
  panels = (field(job, BATCH) + bw - 1) // bw
  stride = 4 * TILE * bw
  if field(job, PACKS) == 0:
    first = index * per_task
    last = min(panels, first + per_task)
    private = scratch + 4 * per_task * step * field(job, BLOCK) * bw
    for i in range(first * tiles, last * tiles):
      _panels.pack(job, i, private + (i - first * tiles) * stride)
    for begin in range(0, groups, step):
      end = min(groups, begin + step)
      _blocks(job, private, first, last, begin, end, scratch)
  else:
    across = (groups + step - 1) // step
    first = index // across * per_task
    begin = index % across * step
    shared = field(job, PANEL) + first * tiles * stride
    last = min(panels, first + per_task)
    end = min(groups, begin + step)
    _blocks(job, shared, first, last, begin, end, scratch)


@jit
def _work(job):
  """Take tasks until there are none."""
  packs, tasks = field(job, PACKS), field(job, _pool.TASKS)
  index = _panels.pack_all(job)
  if index >= tasks:
    return
  bw = field(job, BW)
  sums = 4 * field(job, BLOCK) * bw * field(job, STEP)
  size = field(job, PANELS) * (sums + 4 * TILE * bw * field(job, TILES))
  memory = _pool.malloc(size + 4 * (LANES + TILE) + 64)
  scratch = (memory + 63) // 64 * 64
  while index < tasks:
    _compute(job, index - packs, scratch)
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  _pool.free(memory)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_sell_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _tasks(groups, step, panels, per_task):
  return (groups + step - 1) // step * ((panels + per_task - 1) // per_task)


@jit
def _multiply(frame):
  """Cut the work into tasks and share it."""
  if _pool.size(_pool.result(frame, 0)) == 0:
    return
  x = _pool.argument(frame, 0)
  batch = _pool.size(x) // _pool.dim(x, -1)
  bw = _panels.batch_width_jit(batch)
  job = _panels.new_job(frame, bw)
  groups, tiles = field(job, GROUPS), field(job, TILES)
  threads = _panels.num_threads(frame, batch)
  panels = (batch + bw - 1) // bw
  per_task = min(panels, MAX_PANELS)
  step = MAX_BLOCKS
  # Enough tasks that no thread idles while another finishes a long one.
  enough = 1 if threads == 1 else TASKS_PER_THREAD * threads
  if bw > 1 and panels >= 2 * enough:
    # A large batch: each task packs its own panels, which stay in its cache.
    per_task = min(per_task, panels // enough)
    packs, tasks = 0, (panels + per_task - 1) // per_task
  else:
    # A small one: all share the panels, and the blocks are dealt out, then
    # the panels.
    while step > 1 and _tasks(groups, step, panels, per_task) < enough:
      step //= 2
    while per_task > 1 and _tasks(groups, step, panels, per_task) < enough:
      per_task //= 2
    packs = 0 if bw == 1 else panels * tiles
    tasks = _tasks(groups, step, panels, per_task)
  set_field(job, PACKS, packs)
  set_field(job, STEP, step)
  set_field(job, PANELS, per_task)
  set_field(job, IN_PART, TILE)
  set_field(job, IN_PARTS, tiles)
  set_field(job, OUT_PART, field(job, BLOCK))
  _panels.share(frame, job, threads, tasks, _task_address())
  _work(job)
  _panels.finish(job)


@cfunc(types.int64(types.int64), cache=True)
def handler(frame):
  if not _pool.is_metadata_query(frame):
    _multiply(frame)
  return 0
