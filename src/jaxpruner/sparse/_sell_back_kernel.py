"""The transposed SELL product x @ w.T, for gradients with respect to inputs.

Here x has w's columns. A task makes one tile of the result for one panel: each
column's row of the panel, held in registers, is scaled by the column's weights
and added to the rows of the result that they name.
"""

import llvmlite.binding as llvm
from numba import cfunc, types

from jaxpruner.sparse import _panels, _pool, _simd
from jaxpruner.sparse._panels import (
  BLOCK,
  BW,
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
  SIZE,
  SMALL,
  TILES,
)  # fmt: skip
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_u8, read_u16, write_f32
from jaxpruner.sparse.format_sell import LANES, TILE

jit = _pool.jit
SUPPORTED = True
DTYPES = ("float32", "bfloat16")
# No single-row variant: one row is padded to the smallest panel.
SMALL_BW = _panels.SMALL_BW

_small, _small_half = (_simd.spread(*SMALL[:2], bf16) for bf16 in (False, True))
_medium, _medium_half = (
  _simd.spread(*MEDIUM[:2], bf16) for bf16 in (False, True)
)
_large, _large_half = (_simd.spread(*LARGE[:2], bf16) for bf16 in (False, True))


def scratch_size(batch: int, rows: int, cols: int) -> int:
  """Return how many floats the packed batch takes."""
  del rows
  # A block has at most 256 columns.
  return _panels.packed_rows(max(batch, 2)) * (cols + 256)


@jit
def _tile(job, tile, panel, sums):
  """Add one tile of the weight, for one block of its columns."""
  bw, size, block = field(job, BW), field(job, SIZE), field(job, BLOCK)
  values, indices, counts, columns = _panels.tile_data(job, tile, LANES)
  for place in range(block):
    lane = place % LANES
    count = int(read_u16(counts + 2 * place))
    row = panel + 4 * bw * int(read_u8(columns + place))
    args = (row, values + size * lane, indices + lane, count, sums)
    if bw == LARGE_BW:
      _large_half(*args) if size == 2 else _large(*args)
    elif bw == MEDIUM_BW:
      _medium_half(*args) if size == 2 else _medium(*args)
    else:
      _small_half(*args) if size == 2 else _small(*args)
    if lane == LANES - 1:
      # The last lane of a slice is its longest.
      values += size * LANES * count
      indices += LANES * count


@jit
def _work(job):
  """Take tasks until there are none."""
  packs, tasks = field(job, PACKS), field(job, _pool.TASKS)
  index = _panels.pack_all(job)
  if index >= tasks:
    return
  bw, tiles, groups = field(job, BW), field(job, TILES), field(job, GROUPS)
  part = 4 * field(job, BLOCK) * bw
  memory = _pool.malloc(4 * TILE * bw + 64)
  sums = (memory + 63) // 64 * 64
  while index < tasks:
    panel, tile = (index - packs) // tiles, (index - packs) % tiles
    for i in range(TILE * bw):
      write_f32(sums + 4 * i, 0)
    for group in range(groups):
      source = field(job, PANEL) + (panel * groups + group) * part
      _tile(job, group * tiles + tile, source, sums)
    _panels.unpack(job, sums, panel, tile)
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  _pool.free(memory)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_sell_back_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _multiply(frame):
  """Cut the work into tasks and share it."""
  if _pool.size(_pool.result(frame, 0)) == 0:
    return
  x = _pool.argument(frame, 0)
  batch = _pool.size(x) // _pool.dim(x, -1)
  bw = max(SMALL_BW, _panels.batch_width_jit(batch))
  job = _panels.new_job(frame, bw)
  panels = (batch + bw - 1) // bw
  threads = _panels.num_threads(frame, batch)
  set_field(job, PACKS, panels * field(job, GROUPS))
  set_field(job, IN_PART, field(job, BLOCK))
  set_field(job, IN_PARTS, field(job, GROUPS))
  set_field(job, OUT_PART, TILE)
  tasks = panels * field(job, TILES)
  _panels.share(frame, job, threads, tasks, _task_address())
  _work(job)
  _panels.finish(job)


@cfunc(types.int64(types.int64), cache=True)
def handler(frame):
  if not _pool.is_metadata_query(frame):
    _multiply(frame)
  return 0
