"""A mask update of one leaf in machine code: drop, grow, arrange the lists.

Scores are computed a tile at a time, 4 rows by 64 columns, and compared with a
threshold while they are in the nearest cache. A threshold from a sample of
tiles leaves few candidates, which are ranked exactly; if it leaves too few or
too many, the exact threshold is found by counting. Nothing here has the size of
the dense weight: the largest temporary array has 8 bytes per kept weight.

A key is one integer that orders candidates: the bits of the score, and below
them the complement of the position, so that the lower of equals comes first.
"""

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from jaxpruner.sparse import _pool, _simd
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import I16, I32, I64, intrinsic, read_i32, read_u16

jit = _pool.jit
VECTOR = _simd.WIDTH
# Rows and columns of a tile: its columns are one word of a bitmap.
GROUP, PANEL = 4, 64
# Rows of a task.
ROWS = 32
# Vectors of a row of a tile that registers hold for all its rows.
_HELD = 4 if _simd.AVX512 else 2
SAMPLED_TILES = 512
# Keys that a task collects before it hands them over.
HITS = 4096
INFINITY = 0x7F800000
LOW = 0xFFFFFFFF

(
  STARTS, INDICES, WIDE, STAY, ROW_COUNT, COLUMNS, WORDS, X, G, BATCH, STEP,
  START, OFFSET, THRESHOLD, SHIFT, PREFIX, ROOM, KEYS, FOUND, BAD, COUNTS,
  FIELDS,
) = range(_pool.FIRST_FREE, _pool.FIRST_FREE + 22)  # fmt: skip

_, write_u16 = _simd.memory("u16", I16, types.uint16)
_, write_i32 = _simd.memory("i32", I32, types.int32)
read_u8, write_u8 = _simd.memory("u8", _simd.I8, types.uint8)


@intrinsic
def _trailing_zeros(_, word):
  def emit(context, b, signature, args):
    f = _simd._function(b, "llvm.cttz.i64", I64, I64, _simd.I1)
    return b.call(f, [args[0], _simd.I1(0)])

  return types.int64(types.int64), emit


@intrinsic
def _hashes(_, first, step, start, out):
  """Write the upper 24 bits of `updater.draw.at` for 64 neighbours."""
  kind = ir.VectorType(I32, VECTOR)
  same = lambda n: ir.Constant(kind, [n] * VECTOR)

  def emit(context, b, signature, args):
    first, step, start, out = args
    spread = lambda a: _simd._splat(b, b.trunc(a, I32), VECTOR)
    step, start, first = spread(step), spread(start), spread(first)
    for v in range(PANEL // VECTOR):
      lanes = ir.Constant(kind, [VECTOR * v + l for l in range(VECTOR)])
      bits = b.xor(b.mul(b.add(first, lanes), step), start)
      for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = b.mul(b.xor(bits, b.lshr(bits, same(shift))), same(factor))
      bits = b.lshr(b.xor(bits, b.lshr(bits, same(16))), same(8))
      _simd._store(b, bits, b.add(out, I64(4 * VECTOR * v)))
    return context.get_dummy_value()

  return types.void(*[types.int64] * 4), emit


@intrinsic
def _products(_, x, g, batch, out):
  """Write the bits of |x.T @ g| of a tile: x (batch, 4), g (batch, 64)."""
  kind = ir.VectorType(_simd.F32, VECTOR)
  whole = ir.VectorType(I32, VECTOR)
  positive = ir.Constant(whole, [0x7FFFFFFF] * VECTOR)

  def emit(context, b, signature, args):
    x, g, batch, out = args
    for begin in range(0, PANEL // VECTOR, _HELD):
      sums = [
        [cgutils.alloca_once(b, kind) for _ in range(_HELD)]
        for _ in range(GROUP)
      ]
      for total in sum(sums, []):
        b.store(_simd._zero(VECTOR), total)
      with cgutils.for_range(b, batch) as loop:
        row = b.add(g, b.mul(loop.index, I64(4 * PANEL)))
        left = b.add(x, b.mul(loop.index, I64(4 * GROUP)))
        parts = [
          _simd._load(b, b.add(row, I64(4 * VECTOR * (begin + v))), kind, 4)
          for v in range(_HELD)
        ]
        for i, totals in enumerate(sums):
          scalar = _simd._load(b, b.add(left, I64(4 * i)), _simd.F32, 4)
          scale = _simd._splat(b, scalar, VECTOR)
          for part, total in zip(parts, totals, strict=True):
            b.store(_simd._fma(b, scale, part, b.load(total)), total)
      for i, totals in enumerate(sums):
        for v, total in enumerate(totals):
          bits = b.and_(b.bitcast(b.load(total), whole), positive)
          place = 4 * (PANEL * i + VECTOR * (begin + v))
          _simd._store(b, bits, b.add(out, I64(place)))
    return context.get_dummy_value()

  return types.void(*[types.int64] * 4), emit


@intrinsic
def _at_least(_, scores, threshold):
  """Return one bit for each of 64 scores that reaches a threshold."""
  kind = ir.VectorType(I32, VECTOR)

  def emit(context, b, signature, args):
    scores, threshold = args
    threshold = _simd._splat(b, b.trunc(threshold, I32), VECTOR)
    word: Any = I64(0)
    for v in range(PANEL // VECTOR):
      bits = _simd._load(b, b.add(scores, I64(4 * VECTOR * v)), kind, 4)
      flags = b.icmp_unsigned(">=", bits, threshold)
      flags = b.zext(b.bitcast(flags, ir.IntType(VECTOR)), I64)
      word = b.or_(word, b.shl(flags, I64(VECTOR * v)))
    return word

  return types.int64(types.int64, types.int64), emit


@jit
def _index(base, at, wide):
  if wide:
    return np.int64(read_i32(base + 4 * at))
  return np.int64(read_u16(base + 2 * at))


@jit
def _put_index(base, at, wide, value):
  if wide:
    write_i32(base + 4 * at, value)
  else:
    write_u16(base + 2 * at, value)


@jit
def _free_words(job, row, words):
  """Note which columns of a row may grow: all but those that stay."""
  columns, count = field(job, COLUMNS), field(job, WORDS)
  for i in range(count):
    set_field(words, i, -1)
  if columns % PANEL:
    set_field(words, count - 1, (1 << columns % PANEL) - 1)
  if row >= field(job, ROW_COUNT):  # a row that fills up the last tile
    for i in range(count):
      set_field(words, i, 0)
    return
  starts, indices, stay = (
    field(job, STARTS),
    field(job, INDICES),
    field(job, STAY),
  )
  wide = field(job, WIDE)
  for at in range(read_i32(starts + 4 * row), read_i32(starts + 4 * row + 4)):
    if read_u8(stay + at):
      column = _index(indices, at, wide)
      word = field(words, column >> 6)
      set_field(words, column >> 6, word & ~(1 << (column & 63)))


@jit
def _score(job, group, panel, out):
  """Write the scores of a tile."""
  if field(job, X) == 0:
    for i in range(GROUP):
      row = group * GROUP + i
      first = row * field(job, COLUMNS) + panel * PANEL + field(job, OFFSET)
      _hashes(first, field(job, STEP), field(job, START), out + 4 * PANEL * i)
    return
  batch = field(job, BATCH)
  x = field(job, X) + group * batch * GROUP * 4
  g = field(job, G) + panel * batch * PANEL * 4
  _products(x, g, batch, out)


@jit
def _sample(job, wanted):
  """Return a threshold that about this share of the free scores reaches."""
  groups = (field(job, ROW_COUNT) + GROUP - 1) // GROUP
  words = field(job, WORDS)
  panels = min(words, (SAMPLED_TILES + groups - 1) // groups)
  step = max(1, groups * panels // SAMPLED_TILES)
  scores = _pool.malloc(4 * GROUP * PANEL)
  masks = _pool.malloc(8 * words)
  bins = 1 << 16
  counts = _pool.malloc(8 * bins)
  for i in range(bins):
    set_field(counts, i, 0)
  seen = 0
  for group in range(0, groups, step):
    for k in range(panels):
      # Another panel for each group: the sample sees all rows and columns.
      panel = (group * 7919 + k * words // panels) % words
      _score(job, group, panel, scores)
      for i in range(GROUP):
        _free_words(job, group * GROUP + i, masks)
        word = field(masks, panel)
        while word:
          place = _trailing_zeros(word)
          word &= word - 1
          bits = np.int64(read_i32(scores + 4 * (PANEL * i + place)))
          at = bits >> 15
          set_field(counts, at, field(counts, at) + 1)
          seen += 1
  goal = wanted * seen
  total, at = 0, bins
  while at > 0 and total < goal:
    at -= 1
    total += field(counts, at)
  _pool.free(counts)
  _pool.free(masks)
  _pool.free(scores)
  return at << 15


@jit
def _collect(first, word, scores, hits, number):
  """Add the keys of 64 scores' hits to a buffer; return its new length."""
  while word:
    place = _trailing_zeros(word)
    word &= word - 1
    bits = np.int64(read_i32(scores + 4 * place))
    set_field(hits, number, (bits << 32) | (LOW - (first + place)))
    number += 1
  return number


@jit
def _flush(job, hits, number):
  """Append a task's keys to those of all, as far as there is room."""
  at = _pool.atomic_add(job + 8 * FOUND, number)
  keys, room = field(job, KEYS), field(job, ROOM)
  for i in range(min(number, max(0, room - at))):
    set_field(keys, at + i, field(hits, i))


@jit
def _count(job, free, scores, counts):
  """Add the free scores under PREFIX to a histogram of bits above SHIFT."""
  shift, prefix = field(job, SHIFT), field(job, PREFIX)
  while free:
    place = _trailing_zeros(free)
    free &= free - 1
    bits = np.int64(read_i32(scores + 4 * place))
    if bits >> (shift + 11) == prefix:
      at = (bits >> shift) & 2047
      set_field(counts, at, field(counts, at) + 1)


@jit
def _count_tile(job, panel, masks, scores, counts):
  """Count the scores of a tile; `masks` are those of its first row."""
  words = field(job, WORDS)
  for i in range(GROUP):
    free = field(masks, words * i + panel)
    _count(job, free, scores + 4 * PANEL * i, counts)


@jit
def _collect_tile(job, group, panel, masks, scores, hits, number):
  """Collect what reaches THRESHOLD; return the new length of `hits`."""
  words, threshold = field(job, WORDS), field(job, THRESHOLD)
  bad = 0
  for i in range(GROUP):
    own = scores + 4 * PANEL * i
    if field(job, X):
      bad |= _at_least(own, INFINITY)
    word = _at_least(own, threshold) & field(masks, words * i + panel)
    if word:
      at = (group * GROUP + i) * field(job, COLUMNS) + panel * PANEL
      number = _collect(at, word, own, hits, number)
  if bad:
    _pool.atomic_add(job + 8 * BAD, 1)
  if number > HITS:
    _flush(job, hits, number)
    number = 0
  return number


@jit
def _rows(job, index):
  """Search the rows of one task.

  With COUNTS, add the scores to that histogram; else collect the keys of those
  that reach THRESHOLD.
  """
  first = index * ROWS
  last = min(first + ROWS, field(job, ROW_COUNT))
  words, counting = field(job, WORDS), field(job, COUNTS)
  scores = _pool.malloc(4 * GROUP * PANEL)
  masks = _pool.malloc(8 * ROWS * words)
  hits = _pool.malloc(8 * (HITS + GROUP * PANEL))
  for i in range(2048):
    set_field(hits, i, 0)
  for row in range(first, first + ROWS):
    _free_words(job, row, masks + 8 * words * (row - first))
  number = 0
  for panel in range(words):
    for group in range(first // GROUP, (last + GROUP - 1) // GROUP):
      own = masks + 8 * words * (group * GROUP - first)
      _score(job, group, panel, scores)
      if counting:
        _count_tile(job, panel, own, scores, hits)
      else:
        number = _collect_tile(job, group, panel, own, scores, hits, number)
  if counting:
    for i in range(2048):
      if field(hits, i):
        _pool.atomic_add(counting + 8 * i, field(hits, i))
  else:
    _flush(job, hits, number)
  _pool.free(hits)
  _pool.free(masks)
  _pool.free(scores)


@jit
def _work(job):
  """Take tasks until there are none."""
  tasks = field(job, _pool.TASKS)
  index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  while index < tasks:
    _rows(job, index)
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    index = _pool.atomic_add(job + 8 * _pool.NEXT, 1)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_kept_rewire_task"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _search(frame, spec):
  """Search all rows as `spec` says; note FOUND and BAD in it."""
  job = _pool.malloc(8 * (FIELDS + 1))
  for i in range(FIELDS):
    set_field(job, i, field(spec, i))
  set_field(job, _pool.NEXT, 0)
  set_field(job, _pool.DONE, 0)
  set_field(job, FOUND, 0)
  set_field(job, BAD, 0)
  tasks = (field(job, ROW_COUNT) + ROWS - 1) // ROWS
  set_field(job, _pool.TASKS, tasks)
  threads = min(tasks, _pool.num_threads(frame))
  _pool.schedule(frame, threads, _task_address(), job)
  _work(job)
  _pool.wait_for(job + 8 * _pool.DONE, tasks)
  set_field(spec, FOUND, field(job, FOUND))
  set_field(spec, BAD, field(job, BAD))
  _pool.release(job)


@jit
def _kth_key(keys, number, k):
  """Return a key that the k highest of distinct keys reach, and no other.

  Digits of eleven bits are counted, the highest first, until all keys that
  share the digits found are among the k highest.
  """
  counts = _pool.malloc(8 * 2048)
  prefix, above, need = 0, 63, k
  while True:
    shift = max(0, above - 11)
    digits = (1 << (above - shift)) - 1
    for i in range(digits + 1):
      set_field(counts, i, 0)
    for i in range(number):
      key = field(keys, i)
      if key >> above == prefix:
        at = (key >> shift) & digits
        set_field(counts, at, field(counts, at) + 1)
    at = digits
    while field(counts, at) < need:
      need -= field(counts, at)
      at -= 1
    prefix = (prefix << (above - shift)) | at
    if field(counts, at) == need:
      _pool.free(counts)
      return prefix << shift
    above = shift


@jit
def _exact(frame, spec, grow):
  """Set THRESHOLD to the score of the last that grows; return how many tie.

  Returns the number of scores equal to the threshold that grow.
  """
  counts = _pool.malloc(8 * 2048)
  set_field(spec, COUNTS, counts)
  prefix, need = 0, grow
  for shift in (22, 11, 0):
    for i in range(2048):
      set_field(counts, i, 0)
    set_field(spec, SHIFT, shift)
    set_field(spec, PREFIX, prefix)
    _search(frame, spec)
    at = 2047
    while field(counts, at) < need:
      need -= field(counts, at)
      at -= 1
    prefix = (prefix << 11) | at
  set_field(spec, COUNTS, 0)
  set_field(spec, THRESHOLD, prefix)
  _pool.free(counts)
  return need


@jit
def _in_order(spec, ties):
  """Collect in the order of positions, as many equal to THRESHOLD as asked."""
  words, threshold = field(spec, WORDS), field(spec, THRESHOLD)
  scores = _pool.malloc(4 * GROUP * PANEL)
  masks = _pool.malloc(8 * words)
  number, keys = 0, field(spec, KEYS)
  for row in range(field(spec, ROW_COUNT)):
    _free_words(spec, row, masks)
    for panel in range(words):
      _score(spec, row // GROUP, panel, scores)
      own = scores + 4 * PANEL * (row % GROUP)
      above = _at_least(own, threshold + 1) & field(masks, panel)
      equal = _at_least(own, threshold) & field(masks, panel) & ~above
      at = row * field(spec, COLUMNS) + panel * PANEL
      number = _collect(at, above, own, keys, number)
      while equal and ties:
        number = _collect(at, equal & -equal, own, keys, number)
        equal &= equal - 1
        ties -= 1
  _pool.free(masks)
  _pool.free(scores)


@jit
def _grow(frame, spec, grow, free):
  """Return an array of `grow` keys, or 0 if a score is not finite."""
  if field(spec, X):
    share = (1.15 * grow + 3 * grow**0.5 + 16) / free
    threshold = _sample(spec, min(1.0, share))
  else:  # uniform scores: six deviations more than are wanted
    share = (grow + 6 * grow**0.5 + 16) / free
    threshold = max(0, int((1 - min(1.0, share)) * (1 << 24)))
  room = int(1.5 * grow) + 4096
  keys = _pool.malloc(8 * room)
  set_field(spec, KEYS, keys)
  set_field(spec, ROOM, room)
  set_field(spec, THRESHOLD, threshold)
  _search(frame, spec)
  if field(spec, BAD):
    _pool.free(keys)
    return 0
  found = field(spec, FOUND)
  if grow <= found <= room:
    least = _kth_key(keys, found, grow)
    number = 0
    for i in range(found):
      if field(keys, i) >= least:
        set_field(keys, number, field(keys, i))
        number += 1
  else:
    _in_order(spec, _exact(frame, spec, grow))
  return keys


@jit
def _drop(values, slots, number, left, stay):
  """Note which entries stay: the largest |value|, the earlier of equals."""
  if left == number or left == 0:
    for i in range(number):
      write_u8(stay + i, 1 if left else 0)
    return
  keys = _pool.malloc(8 * number)
  for i in range(number):
    bits = np.int64(read_i32(values + 4 * read_i32(slots + 4 * i))) & 0x7FFFFFFF
    set_field(keys, i, (bits << 32) | (LOW - i))
  least = _kth_key(keys, number, left)
  for i in range(number):
    write_u8(stay + i, 1 if field(keys, i) >= least else 0)
  _pool.free(keys)


@jit
def _buckets(keys, grow, number, columns):
  """Return where the grown columns of each row begin, and these columns."""
  begins = _pool.malloc(8 * (number + 2))
  for i in range(number + 2):
    set_field(begins, i, 0)
  for i in range(grow):
    row = (LOW - (field(keys, i) & LOW)) // columns
    set_field(begins, row + 2, field(begins, row + 2) + 1)
  for i in range(2, number + 2):
    set_field(begins, i, field(begins, i) + field(begins, i - 1))
  grown = _pool.malloc(4 * max(1, grow))
  for i in range(grow):
    position = LOW - (field(keys, i) & LOW)
    row = position // columns
    at = field(begins, row + 1)
    write_i32(grown + 4 * at, position - row * columns)
    set_field(begins, row + 1, at + 1)
  return begins, grown


@jit
def _note_row(spec, row, slots, begins, grown, bits, at_column, freed, n_freed):
  """Note the new columns of a row in `bits`, and their slots; grown: -1.

  Returns the number of `freed` slots, with those of this row.
  """
  starts, indices, stay, wide = (
    field(spec, STARTS),
    field(spec, INDICES),
    field(spec, STAY),
    field(spec, WIDE),
  )
  first, last = (
    np.int64(read_i32(starts + 4 * row)),
    np.int64(read_i32(starts + 4 * row + 4)),
  )
  for at in range(field(begins, row), field(begins, row + 1)):
    column = np.int64(read_i32(grown + 4 * at))
    word = column >> 6
    set_field(bits, word, field(bits, word) | (1 << (column & 63)))
    write_i32(at_column + 4 * column, -1)
  for at in range(first, last):
    column = _index(indices, at, wide)
    word, bit = column >> 6, 1 << (column & 63)
    slot = read_i32(slots + 4 * at)
    if read_u8(stay + at):
      set_field(bits, word, field(bits, word) | bit)
      write_i32(at_column + 4 * column, slot)
    elif field(bits, word) & bit:  # dropped and grown again: it stays
      write_i32(at_column + 4 * column, slot)
    else:
      write_i32(freed + 4 * n_freed, slot)
      n_freed += 1
  return n_freed


@jit
def _by_row(spec, slots, keys, grow, count, rows, moved):
  """Write the lists by row: those that stay and those that grow.

  `rows` are the addresses of starts, indices and slots. A slot whose weight is
  removed is given to a grown one, both in the order of their positions; slots
  beyond the old ones are new.
  """
  wide, words, columns = (
    field(spec, WIDE),
    field(spec, WORDS),
    field(spec, COLUMNS),
  )
  number = field(spec, ROW_COUNT)
  old = np.int64(read_i32(field(spec, STARTS) + 4 * number))
  begins, grown = _buckets(keys, grow, number, columns)
  bits = _pool.malloc(8 * words)
  at_column = _pool.malloc(4 * 64 * words)
  freed, holes = _pool.malloc(4 * max(1, old)), _pool.malloc(4 * max(1, grow))
  n_freed, n_holes, out = 0, 0, 0
  for i in range(words):
    set_field(bits, i, 0)
  for row in range(number):
    write_i32(rows[0] + 4 * row, out)
    n_freed = _note_row(
      spec, row, slots, begins, grown, bits, at_column, freed, n_freed
    )
    for i in range(words):
      word = field(bits, i)
      set_field(bits, i, 0)
      while word:
        column = 64 * i + _trailing_zeros(word)
        word &= word - 1
        slot = read_i32(at_column + 4 * column)
        _put_index(rows[1], out, wide, column)
        write_i32(rows[2] + 4 * out, slot)
        if slot < 0:
          write_i32(holes + 4 * n_holes, out)
          n_holes += 1
        out += 1
  write_i32(rows[0] + 4 * number, out)
  for i in range(count):
    write_u8(moved + i, 0)
  for i in range(n_holes):
    slot = old + i - n_freed
    if i < n_freed:
      slot = np.int64(read_i32(freed + 4 * i))
    write_i32(rows[2] + 4 * np.int64(read_i32(holes + 4 * i)), slot)
    write_u8(moved + slot, 1)
  _pool.free(holes)
  _pool.free(freed)
  _pool.free(at_column)
  _pool.free(bits)
  _pool.free(grown)
  _pool.free(begins)


@jit
def _by_column(rows, wide, number, columns, out, out_wide, count):
  """Write the lists by column from those by row."""
  starts = out[0]
  for i in range(columns + 1):
    write_i32(starts + 4 * i, 0)
  for i in range(count):
    at = starts + 4 * (_index(rows[1], i, wide) + 1)
    write_i32(at, read_i32(at) + 1)
  for i in range(columns):
    at = starts + 4 * i
    write_i32(at + 4, read_i32(at + 4) + read_i32(at))
  # `starts` moves on as lists fill up, and back at the end.
  for row in range(number):
    first, last = (
      read_i32(rows[0] + 4 * row),
      read_i32(rows[0] + 4 * row + 4),
    )
    for i in range(first, last):
      place = starts + 4 * _index(rows[1], i, wide)
      at = np.int64(read_i32(place))
      write_i32(place, at + 1)
      _put_index(out[1], at, out_wide, row)
      write_i32(out[2] + 4 * at, read_i32(rows[2] + 4 * i))
  for i in range(columns, 0, -1):
    write_i32(starts + 4 * i, read_i32(starts + 4 * i - 4))
  write_i32(starts, 0)


@jit
def _run(frame, by_gradient):
  """Rewire one leaf.

  Operands: starts, indices, slots (by row), values, left (int32), and the two
  words of `updater.draw` and the index of the first weight, or x (rows / 4,
  batch, 4) and g (panels, batch, 64).
  Results: the lists by row, the lists by column, moved (uint8 per slot), and
  whether all scores are finite (uint8).
  """
  arg, ret = _pool.argument, _pool.result
  starts, slots = _pool.data(arg(frame, 0)), _pool.data(arg(frame, 2))
  values, left = (
    _pool.data(arg(frame, 3)),
    np.int64(read_i32(_pool.data(arg(frame, 4)))),
  )
  rows = (
    _pool.data(ret(frame, 0)),
    _pool.data(ret(frame, 1)),
    _pool.data(ret(frame, 2)),
  )
  by_column = (
    _pool.data(ret(frame, 3)),
    _pool.data(ret(frame, 4)),
    _pool.data(ret(frame, 5)),
  )
  moved, finite = _pool.data(ret(frame, 6)), _pool.data(ret(frame, 7))
  number = _pool.size(arg(frame, 0)) - 1
  columns = _pool.size(ret(frame, 3)) - 1
  old, count = _pool.size(arg(frame, 2)), _pool.size(ret(frame, 2))
  wide = 0 if _pool.is_u16(ret(frame, 1)) else 1
  spec = _pool.malloc(8 * (FIELDS + 1))
  for i in range(FIELDS):
    set_field(spec, i, 0)
  stay = _pool.malloc(max(1, old))
  _drop(values, slots, old, left, stay)
  set_field(spec, STARTS, starts)
  set_field(spec, INDICES, _pool.data(arg(frame, 1)))
  set_field(spec, WIDE, wide)
  set_field(spec, STAY, stay)
  set_field(spec, ROW_COUNT, number)
  set_field(spec, COLUMNS, columns)
  set_field(spec, WORDS, (columns + PANEL - 1) // PANEL)
  if by_gradient:
    set_field(spec, X, _pool.data(arg(frame, 5)))
    set_field(spec, G, _pool.data(arg(frame, 6)))
    set_field(spec, BATCH, _pool.dim(arg(frame, 5), 1))
  else:
    words = _pool.data(arg(frame, 5))
    set_field(spec, START, np.int64(read_i32(words)))
    set_field(spec, OFFSET, np.int64(read_i32(words + 8)))
    set_field(spec, STEP, np.int64(read_i32(words + 4)) | 1)
  grow, keys = count - left, 0
  write_u8(finite, 1)
  if grow:
    keys = _grow(frame, spec, grow, number * columns - left)
    if keys == 0:  # as it was
      write_u8(finite, 0)
      grow = 0
      for i in range(old):
        write_u8(stay + i, 1)
  _by_row(spec, slots, keys, grow, count, rows, moved)
  other = 0 if _pool.is_u16(ret(frame, 4)) else 1
  _by_column(rows, wide, number, columns, by_column, other, count)
  if keys:
    _pool.free(keys)
  _pool.free(stay)
  _pool.free(spec)


@cfunc(types.int64(types.int64), cache=True)
def rewire_random(frame):
  if not _pool.is_metadata_query(frame):
    _run(frame, False)
  return 0


@cfunc(types.int64(types.int64), cache=True)
def rewire_gradient(frame):
  if not _pool.is_metadata_query(frame):
    _run(frame, True)
  return 0
