"""Mask updates in machine code: drop, grow, write the lists, leaf by leaf.

Leaves are shared among threads, since a good part of an update cannot be; a
thread that has no leaf helps to search the rows of others. Nothing here has the
size of the dense weight: the largest temporary array has 8 bytes per kept
weight.
"""

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, types

from jaxpruner.kept._rewire_lists import by_column, by_row
from jaxpruner.kept._rewire_scores import (
  BATCH,
  COLUMNS,
  FIELDS,
  GROUP,
  INDICES,
  OFFSET,
  PANEL,
  ROW_COUNT,
  START,
  STARTS,
  STAY,
  STEP,
  WIDE,
  WORDS,
  G,
  X,
  write_u8,
)  # fmt: skip
from jaxpruner.kept._rewire_search import LOW, grow_keys, kth_key
from jaxpruner.sparse import _pool
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_i32

__all__ = ["GROUP", "PANEL", "rewire_gradient", "rewire_random"]

jit = _pool.jit
# Operands and results of a leaf.
RANDOM, GRADIENT, RESULTS = 6, 7, 8
FRAME, OPERANDS, JOB = range(_pool.FIRST_FREE, _pool.FIRST_FREE + 3)


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
  least = kth_key(keys, number, left)
  for i in range(number):
    write_u8(stay + i, 1 if field(keys, i) >= least else 0)
  _pool.free(keys)


@jit
def _search_of(leaf_operands, frame, first):
  """Return a new search of a leaf: its lists, and where its scores are from."""
  arg = _pool.argument
  spec = _pool.malloc(8 * (FIELDS + 1))
  for i in range(FIELDS):
    set_field(spec, i, 0)
  set_field(spec, STARTS, _pool.data(arg(frame, first)))
  set_field(spec, INDICES, _pool.data(arg(frame, first + 1)))
  if leaf_operands == GRADIENT:
    x = arg(frame, first + 5)
    set_field(spec, X, _pool.data(x))
    set_field(spec, BATCH, _pool.dim(x, 1))
    set_field(spec, G, _pool.data(arg(frame, first + 6)))
  else:
    words = _pool.data(arg(frame, first + 5))
    set_field(spec, START, np.int64(read_i32(words)))
    set_field(spec, STEP, np.int64(read_i32(words + 4)) | 1)
    set_field(spec, OFFSET, np.int64(read_i32(words + 8)))
  return spec


@jit
def _lists_at(frame, first):
  """Return the addresses of starts, indices and slots among the results."""
  ret = _pool.result
  return (
    _pool.data(ret(frame, first)),
    _pool.data(ret(frame, first + 1)),
    _pool.data(ret(frame, first + 2)),
  )


@jit
def _leaf(frame, operands, leaf):
  """Rewire one leaf.

  Operands: starts, indices, slots (by row), values, left (int32), and the two
  words of `updater.draw` and the index of the first weight, or x (rows / 4,
  batch, 4) and g (panels, batch, 64).
  Results: the lists by row, the lists by column, moved (uint8 per slot), and
  whether all scores are finite (uint8).
  """
  first, out = operands * leaf, RESULTS * leaf
  arg, ret = _pool.argument, _pool.result
  slots = _pool.data(arg(frame, first + 2))
  left = np.int64(read_i32(_pool.data(arg(frame, first + 4))))
  moved, finite = (
    _pool.data(ret(frame, out + 6)),
    _pool.data(ret(frame, out + 7)),
  )
  number = _pool.size(arg(frame, first)) - 1
  columns = _pool.size(ret(frame, out + 3)) - 1
  old = _pool.size(arg(frame, first + 2))
  count = _pool.size(ret(frame, out + 2))
  wide = 0 if _pool.is_u16(ret(frame, out + 1)) else 1
  stay = _pool.malloc(max(1, old))
  _drop(_pool.data(arg(frame, first + 3)), slots, old, left, stay)
  spec = _search_of(operands, frame, first)
  set_field(spec, WIDE, wide)
  set_field(spec, STAY, stay)
  set_field(spec, ROW_COUNT, number)
  set_field(spec, COLUMNS, columns)
  set_field(spec, WORDS, (columns + PANEL - 1) // PANEL)
  grow, keys = count - left, 0
  write_u8(finite, 1)
  if grow:
    keys = grow_keys(frame, spec, grow, number * columns - left)
    if keys == 0:  # as it was
      write_u8(finite, 0)
      grow = 0
      for i in range(old):
        write_u8(stay + i, 1)
  rows = _lists_at(frame, out)
  by_row(spec, slots, keys, grow, count, rows, moved)
  other = 0 if _pool.is_u16(ret(frame, out + 4)) else 1
  across = _lists_at(frame, out + 3)
  by_column(rows, wide, number, columns, across, other, count)
  if keys:
    _pool.free(keys)
  _pool.free(stay)
  _pool.free(spec)


@jit
def _work(job):
  """Take leaves until there are none."""
  leaves = field(job, _pool.TASKS)
  leaf = _pool.atomic_add(job + 8 * _pool.NEXT, 1)
  while leaf < leaves:
    _leaf(field(job, FRAME), field(job, OPERANDS), leaf)
    _pool.atomic_add(job + 8 * _pool.DONE, 1)
    leaf = _pool.atomic_add(job + 8 * _pool.NEXT, 1)


@cfunc(types.void(types.int64), cache=True)
def _task(job):
  _work(job)
  _pool.release(job)


TASK_SYMBOL = "jaxpruner_kept_rewire_leaves"
llvm.add_symbol(TASK_SYMBOL, _task.address)
_task_address = _pool.symbol(TASK_SYMBOL)


@jit
def _run(frame, operands):
  """Rewire all leaves: so many operands each, one leaf after the other."""
  job = _pool.malloc(8 * JOB)
  leaves = _pool.arguments(frame) // operands
  set_field(job, _pool.NEXT, 0)
  set_field(job, _pool.DONE, 0)
  set_field(job, _pool.TASKS, leaves)
  set_field(job, FRAME, frame)
  set_field(job, OPERANDS, operands)
  threads = min(leaves, _pool.num_threads(frame))
  _pool.schedule(frame, threads, _task_address(), job)
  _work(job)
  _pool.wait_for(job + 8 * _pool.DONE, leaves)
  _pool.release(job)


@cfunc(types.int64(types.int64), cache=True)
def rewire_random(frame):
  if not _pool.is_metadata_query(frame):
    _run(frame, RANDOM)
  return 0


@cfunc(types.int64(types.int64), cache=True)
def rewire_gradient(frame):
  if not _pool.is_metadata_query(frame):
    _run(frame, GRADIENT)
  return 0
