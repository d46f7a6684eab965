"""The batch in panels: `bw` rows, transposed, for one weight to scale at once.

Shared by the product and its transpose. "In" is what the product sums over,
"out" what it makes; each is cut into parts: tiles of rows, or blocks of columns
of the weight.
"""

from jaxpruner.sparse import _pool, _simd
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_f32, read_i32, write_f32

jit = _pool.jit
WIDTH = _simd.WIDTH
# Work (values × vectors of batch) below which a second thread costs more than
# it brings.
GRAIN = 60_000

# Batch rows per panel, small to large; registers decide how many lanes.
if WIDTH == 16:
  SMALL, MEDIUM, LARGE = (1, 8, 8), (1, 16, 8), (2, 16, 8)
elif WIDTH == 8:
  SMALL, MEDIUM, LARGE = (1, 8, 8), (2, 8, 4), (2, 8, 4)
else:
  SMALL, MEDIUM, LARGE = (2, 4, 4), (2, 4, 4), (2, 4, 4)
SMALL_BW, MEDIUM_BW, LARGE_BW = (v * w for v, w, _ in (SMALL, MEDIUM, LARGE))

NARROW = min(8, WIDTH)
_transpose, _transpose_narrow = _simd.transpose(WIDTH), _simd.transpose(NARROW)

(
  PACKED, PACKS, X, PANEL, VALUES, INDICES, STARTS, COUNTS, COLUMNS, Y,
  BATCH, ROWS, COLS, TILES, GROUPS, BLOCK, BW, SIZE, STEP, PANELS,
  IN_PART, IN_PARTS, OUT_PART, FIELDS,
) = range(_pool.FIRST_FREE, _pool.FIRST_FREE + 24)  # fmt: skip


def batch_width(batch: int) -> int:
  """Return how many batch rows a panel holds."""
  if batch <= SMALL_BW:
    return 1 if batch == 1 else SMALL_BW
  return MEDIUM_BW if batch <= MEDIUM_BW else LARGE_BW


batch_width_jit = jit(batch_width)


def packed_rows(batch: int) -> int:
  """Return the rows of a packed batch of 2 or more, on the widest processor.

  A saved program brings the room for them along, and may have been made on
  another processor.
  """
  width = 8 if batch <= 8 else 16 if batch <= 16 else 32
  return -(-batch // width) * width


@jit
def _square(wide, source, source_row, sources, target, target_row, targets):
  if wide:
    _transpose(source, source_row, sources, target, target_row, targets)
  else:
    _transpose_narrow(source, source_row, sources, target, target_row, targets)


@jit
def pack(job, index, target):
  """Transpose `bw` batch rows of one part of x; past the end, repeat."""
  bw, rows, parts = field(job, BW), field(job, ROWS), field(job, IN_PARTS)
  begin = index % parts * field(job, IN_PART)
  length = min(field(job, IN_PART), rows - begin)
  wide = bw >= WIDTH
  width = WIDTH if wide else NARROW
  for strip in range(0, bw, width):
    last = field(job, BATCH) - 1
    row = min(index // parts * bw + strip, last)
    sources = min(width, last + 1 - row)
    source = field(job, X) + 4 * (row * rows + begin)
    if length < width:
      for i in range(width):
        for k in range(length):
          value = read_f32(source + 4 * (min(i, sources - 1) * rows + k))
          write_f32(target + 4 * (k * bw + strip + i), value)
    else:
      for start in range(0, length, width):
        k = min(start, length - width)
        _square(
          wide,
          source + 4 * k,
          4 * rows,
          sources,
          target + 4 * (k * bw + strip),
          4 * bw,
          width,
        )


@jit
def unpack(job, scratch, panel, part):
  """Transpose one part of the sums into the result."""
  bw, cols, size = field(job, BW), field(job, COLS), field(job, OUT_PART)
  length = min(size, cols - part * size)
  wide = bw >= WIDTH
  width = WIDTH if wide else NARROW
  for strip in range(0, bw, width):
    row = panel * bw + strip
    targets = min(width, field(job, BATCH) - row)
    target = field(job, Y) + 4 * (row * cols + part * size)
    if length < width:
      for i in range(targets):
        for n in range(length):
          value = read_f32(scratch + 4 * (n * bw + strip + i))
          write_f32(target + 4 * (i * cols + n), value)
    elif targets > 0:
      for start in range(0, length, width):
        n = min(start, length - width)
        _square(
          wide,
          scratch + 4 * (n * bw + strip),
          4 * bw,
          width,
          target + 4 * n,
          4 * cols,
          targets,
        )


@jit
def new_job(frame, bw):
  """Start a job from the operands: x, the five arrays of w; y, room."""
  x, values = _pool.argument(frame, 0), _pool.argument(frame, 1)
  columns, y = _pool.argument(frame, 5), _pool.result(frame, 0)
  job = _pool.malloc(8 * (FIELDS + 1))
  set_field(job, _pool.NEXT, 0)
  set_field(job, _pool.DONE, 0)
  set_field(job, PACKED, 0)
  set_field(job, X, _pool.data(x))
  set_field(job, PANEL, _pool.data(_pool.result(frame, 1)))
  set_field(job, VALUES, _pool.data(values))
  set_field(job, INDICES, _pool.data(_pool.argument(frame, 2)))
  set_field(job, STARTS, _pool.data(_pool.argument(frame, 3)))
  set_field(job, COUNTS, _pool.data(_pool.argument(frame, 4)))
  set_field(job, COLUMNS, _pool.data(columns))
  set_field(job, Y, _pool.data(y))
  set_field(job, ROWS, _pool.dim(x, -1))
  set_field(job, COLS, _pool.dim(y, -1))
  set_field(job, BATCH, _pool.size(x) // _pool.dim(x, -1))
  set_field(job, GROUPS, _pool.dim(columns, 0))
  set_field(job, TILES, _pool.dim(columns, 1))
  set_field(job, BLOCK, _pool.dim(columns, 2))
  set_field(job, SIZE, _pool.item_size(values))
  set_field(job, BW, bw)
  return job


@jit
def tile_data(job, tile, lanes):
  """Return where a tile's values, indices, counts and columns begin."""
  size, block = field(job, SIZE), field(job, BLOCK)
  start = read_i32(field(job, STARTS) + 4 * tile) * lanes
  return (
    field(job, VALUES) + size * start,
    field(job, INDICES) + start,
    field(job, COUNTS) + 2 * tile * block,
    field(job, COLUMNS) + tile * block,
  )


@jit
def pack_all(job):
  """Take packing tasks while there are any; return the next task.

  Whoever holds an unfinished panel is running, so the wait at the end ends.
  """
  packs = field(job, PACKS)
  stride = 4 * field(job, IN_PART) * field(job, BW)
  index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  while index < packs:
    pack(job, index, field(job, PANEL) + index * stride)
    _pool.atomic_add(job + 8 * PACKED, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  if index < field(job, _pool.TASKS):
    _pool.wait_for(job + 8 * PACKED, packs)
  return index


@jit
def share(frame, job, threads, tasks, task):
  """Offer a job's tasks to the pool."""
  set_field(job, _pool.TASKS, field(job, PACKS) + tasks)
  _pool.schedule(frame, threads, task, job)


@jit
def finish(job):
  """Wait for the tasks that other threads took."""
  tasks = field(job, _pool.TASKS) - field(job, PACKS)
  _pool.wait_for(job + 8 * _pool.DONE, tasks)
  _pool.release(job)


@jit
def num_threads(frame, batch):
  """Return how many threads the work is worth."""
  values = _pool.argument(frame, 1)
  work = _pool.size(values) * ((batch + 15) // 16)
  threads = max(1, work // GRAIN)
  return min(threads, _pool.num_threads(frame)) if threads > 1 else 1
