"""Find the weights that grow: the best of all free scores, in machine code.

A threshold from a sample of tiles leaves few candidates, which are ranked
exactly; if it leaves too few or too many, the exact threshold is found by
counting. The rows are searched by all threads.

A key is one integer that orders candidates: the bits of the score, and below
them the complement of the position, so that the lower of equals comes first.
"""

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc, types

from jaxpruner.kept._rewire_scores import (
  BAD,
  COLUMNS,
  COUNTS,
  FIELDS,
  FOUND,
  GROUP,
  KEYS,
  PANEL,
  PREFIX,
  ROOM,
  ROW_COUNT,
  SHIFT,
  THRESHOLD,
  WORDS,
  X,
  at_least,
  free_words,
  sample,
  score,
  trailing_zeros,
)  # fmt: skip
from jaxpruner.sparse import _pool
from jaxpruner.sparse._pool import field, set_field
from jaxpruner.sparse._simd import read_i32

jit = _pool.jit
# Rows of a task.
ROWS = 32
# Keys that a task collects before it hands them over.
HITS = 4096
INFINITY = 0x7F800000
LOW = 0xFFFFFFFF


@jit
def _collect(first, word, scores, hits, number):
  """Add the keys of 64 scores' hits to a buffer; return its new length."""
  while word:
    place = trailing_zeros(word)
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
    place = trailing_zeros(free)
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
      bad |= at_least(own, INFINITY)
    word = at_least(own, threshold) & field(masks, words * i + panel)
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
    free_words(job, row, masks + 8 * words * (row - first))
  number = 0
  for panel in range(words):
    for group in range(first // GROUP, (last + GROUP - 1) // GROUP):
      own = masks + 8 * words * (group * GROUP - first)
      score(job, group, panel, scores)
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
def kth_key(keys, number, k):
  """Return a key that the k highest of distinct keys reach, and no other.

  Digits of eleven bits are counted, the highest first. Keys that share the
  digits found go on, until all of them are among the k highest.
  """
  counts = _pool.malloc(8 * 2048)
  own, prefix, above, need = 0, 0, 63, k
  while True:
    shift = max(0, above - 11)
    digits = (1 << (above - shift)) - 1
    for i in range(digits + 1):
      set_field(counts, i, 0)
    for i in range(number):
      at = (field(keys, i) >> shift) & digits
      set_field(counts, at, field(counts, at) + 1)
    at = digits
    while field(counts, at) < need:
      need -= field(counts, at)
      at -= 1
    prefix = (prefix << (above - shift)) | at
    if field(counts, at) == need:
      break
    fewer, left = _pool.malloc(8 * field(counts, at)), 0
    for i in range(number):
      if field(keys, i) >> shift == prefix:
        set_field(fewer, left, field(keys, i))
        left += 1
    if own:
      _pool.free(own)
    own = keys = fewer
    number, above = left, shift
  if own:
    _pool.free(own)
  _pool.free(counts)
  return prefix << shift


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
    free_words(spec, row, masks)
    for panel in range(words):
      score(spec, row // GROUP, panel, scores)
      own = scores + 4 * PANEL * (row % GROUP)
      above = at_least(own, threshold + 1) & field(masks, panel)
      equal = at_least(own, threshold) & field(masks, panel) & ~above
      at = row * field(spec, COLUMNS) + panel * PANEL
      number = _collect(at, above, own, keys, number)
      while equal and ties:
        number = _collect(at, equal & -equal, own, keys, number)
        equal &= equal - 1
        ties -= 1
  _pool.free(masks)
  _pool.free(scores)


@jit
def grow_keys(frame, spec, grow, free):
  """Return an array of `grow` keys, or 0 if a score is not finite."""
  if field(spec, X):
    share = (1.15 * grow + 3 * grow**0.5 + 16) / free
    threshold = sample(spec, min(1.0, share))
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
    least = kth_key(keys, found, grow)
    number = 0
    for i in range(found):
      if field(keys, i) >= least:
        set_field(keys, number, field(keys, i))
        number += 1
  else:
    _in_order(spec, _exact(frame, spec, grow))
  return keys
