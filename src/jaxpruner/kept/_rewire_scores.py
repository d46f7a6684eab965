"""Growth scores of a tile, 4 rows by 64 columns, in machine code.

A search is an array of int64, whose fields are named here. Scores are drawn or
multiplied while they are in the nearest cache; none is ever stored for long.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from jaxpruner.sparse import _pool, _simd
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import I16, I32, I64, intrinsic, read_i32, read_u16

jit = _pool.jit
VECTOR = _simd.WIDTH
# Rows and columns of a tile: its columns are one word of a bitmap.
GROUP, PANEL = 4, 64
# Vectors of a row of a tile that registers hold for all its rows.
_HELD = 4 if _simd.AVX512 else 2
SAMPLED_TILES = 512

(
  STARTS, INDICES, WIDE, STAY, ROW_COUNT, COLUMNS, WORDS, X, G, BATCH, STEP,
  START, OFFSET, THRESHOLD, SHIFT, PREFIX, ROOM, KEYS, FOUND, BAD, COUNTS,
  FIELDS,
) = range(_pool.FIRST_FREE, _pool.FIRST_FREE + 22)  # fmt: skip

_, write_u16 = _simd.memory("u16", I16, types.uint16)
_, write_i32 = _simd.memory("i32", I32, types.int32)
read_u8, write_u8 = _simd.memory("u8", _simd.I8, types.uint8)


@intrinsic
def trailing_zeros(_, word):
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
def at_least(_, scores, threshold):
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
def index(base, at, wide):
  if wide:
    return np.int64(read_i32(base + 4 * at))
  return np.int64(read_u16(base + 2 * at))


@jit
def put_index(base, at, wide, value):
  if wide:
    write_i32(base + 4 * at, value)
  else:
    write_u16(base + 2 * at, value)


@jit
def free_words(job, row, words):
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
      column = index(indices, at, wide)
      word = field(words, column >> 6)
      set_field(words, column >> 6, word & ~(1 << (column & 63)))


@jit
def _free_word(job, row, panel):
  """Return which columns of a row and a panel may grow, one bit for each."""
  columns, wide = field(job, COLUMNS), field(job, WIDE)
  if row >= field(job, ROW_COUNT):  # a row that fills up the last tile
    return 0
  word = -1
  if (panel + 1) * PANEL > columns:
    word = (1 << columns % PANEL) - 1
  starts, indices = field(job, STARTS), field(job, INDICES)
  low = np.int64(read_i32(starts + 4 * row))
  end = np.int64(read_i32(starts + 4 * row + 4))
  high = end
  while low < high:  # the first entry of the panel
    middle = (low + high) // 2
    if index(indices, middle, wide) < panel * PANEL:
      low = middle + 1
    else:
      high = middle
  while low < end:
    place = index(indices, low, wide) - panel * PANEL
    if place >= PANEL:
      break
    if read_u8(field(job, STAY) + low):
      word &= ~(1 << place)
    low += 1
  return word


@jit
def score(job, group, panel, out):
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
def sample(job, wanted):
  """Return a threshold that about this share of the free scores reaches."""
  groups = (field(job, ROW_COUNT) + GROUP - 1) // GROUP
  words = field(job, WORDS)
  panels = min(words, (SAMPLED_TILES + groups - 1) // groups)
  step = max(1, groups * panels // SAMPLED_TILES)
  scores = _pool.malloc(4 * GROUP * PANEL)
  bins = 1 << 16
  counts = _pool.malloc(8 * bins)
  for i in range(bins):
    set_field(counts, i, 0)
  seen = 0
  for group in range(0, groups, step):
    for k in range(panels):
      # Another panel for each group: the sample sees all rows and columns.
      panel = (group * 7919 + k * words // panels) % words
      score(job, group, panel, scores)
      for i in range(GROUP):
        word = _free_word(job, group * GROUP + i, panel)
        while word:
          place = trailing_zeros(word)
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
  _pool.free(scores)
  return at << 15
