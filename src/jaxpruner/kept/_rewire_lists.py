"""Write the lists of a leaf after a mask update, in machine code."""

import numpy as np

from jaxpruner.kept._rewire_scores import (
  COLUMNS,
  INDICES,
  ROW_COUNT,
  STARTS,
  STAY,
  WIDE,
  WORDS,
  index,
  put_index,
  read_u8,
  trailing_zeros,
  write_i32,
  write_u8,
)  # fmt: skip
from jaxpruner.kept._rewire_search import LOW
from jaxpruner.sparse import _pool
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_i32

jit = _pool.jit


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
    column = index(indices, at, wide)
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
def by_row(spec, slots, keys, grow, count, rows, moved):
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
        column = 64 * i + trailing_zeros(word)
        word &= word - 1
        slot = read_i32(at_column + 4 * column)
        put_index(rows[1], out, wide, column)
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
def by_column(rows, wide, number, columns, out, out_wide, count):
  """Write the lists by column from those by row."""
  starts = out[0]
  for i in range(columns + 1):
    write_i32(starts + 4 * i, 0)
  for i in range(count):
    at = starts + 4 * (index(rows[1], i, wide) + 1)
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
      place = starts + 4 * index(rows[1], i, wide)
      at = np.int64(read_i32(place))
      write_i32(place, at + 1)
      put_index(out[1], at, out_wide, row)
      write_i32(out[2] + 4 * at, read_i32(rows[2] + 4 * i))
  for i in range(columns, 0, -1):
    write_i32(starts + 4 * i, read_i32(starts + 4 * i - 4))
  write_i32(starts, 0)
