"""One step of a decoder as one call of machine code on a few threads.

XLA runs a step as some thousand operations, and hands each product to its pool
of threads anew: for one token that takes longer than reading the weights. Here
all threads walk through the layers together, and wait for each other five times
in a layer, without sleeping. What is short, norms and sums of the stream, each
thread does for itself; strips of outputs and heads are dealt out.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.core import types

from jaxpruner.post_training import _step_parts as parts
from jaxpruner.sparse import _pool, _simd, _strip_simd
from jaxpruner.sparse._strip_simd import float_of_bits, ones
from jaxpruner.sparse._strips import (
  GROUP,
  LANES,
  MASKED,
  SKIPS,
  STEPS,
  TILE_HEAD,
  WORDS,
)

jit = parts.jit

# What a number in `layers` means: strips, vectors (-1: none), and others.
(QKV, QKV_COUNT, O, O_COUNT, GATED, GATED_COUNT, DOWN, DOWN_COUNT, BEFORE,
 AFTER, FF_BEFORE, FF_AFTER, Q_NORM, K_NORM, QKV_BIAS, O_BIAS, GATED_BIAS,
 DOWN_BIAS, ROPE, WINDOW, LAYER_FIELDS) = range(21)  # fmt: skip
# What a number in `sizes` means.
(DIM, HEADS, KV_HEADS, HEAD, K_AT, V_AT, ACT, BYTES, HEAD_FIRST, HEAD_COUNT,
 LAST_NORM, EMBED_FIRST, HIDDEN, SIZE_FIELDS) = range(14)  # fmt: skip
EPS, SCALE, CAP, EMBED, REAL_FIELDS = range(5)
PRODUCTS = 4  # of a layer
_SPINS = 4000  # looks before a waiting thread offers its processor

_f4, _f4m = _strip_simd.floats(4, False), _strip_simd.floats(4, True)
_f2, _f2m = _strip_simd.floats(2, False), _strip_simd.floats(2, True)
_r4, _r2 = _strip_simd.row(False), _strip_simd.row(True)


@jit
def _absent(address, groups, codes, scales, out):
  """Stand in for what this processor has no instructions for."""


# LLVM gives up the whole process over an instruction that it does not have.
_i1 = _strip_simd.codes(False) if _strip_simd.BYTES else _absent
_i1m = _strip_simd.codes(True) if _strip_simd.BYTES else _absent


class Team(NamedTuple):
  """Threads that do a step together.

  Attributes:
    threads: how many.
    counters: zeros, (products, threads): what each has taken of its share.
    meeting: a zero: how often a thread has arrived somewhere.
  """

  threads: int
  counters: Any
  meeting: Any


class Weights(NamedTuple):
  """All strips, and the norms and biases one after the other.

  Attributes:
    data: the bytes of all strips.
    starts: the first byte of each.
    kinds: what each holds, see `_strips.MASKED`.
    vectors: norms and biases.
    ropes: cosines and sines, (kinds of rotation, positions, size).
    levels: (layers, 4): inputs of each product up to this size are skipped, if
      it is stored as tiles.
  """

  data: Any
  starts: Any
  kinds: Any
  vectors: Any
  ropes: Any
  levels: Any


class Room(NamedTuple):
  """Where a step computes.

  Attributes:
    shared: rows for queries, keys and values, mixed heads, hidden units and
      outputs, zero behind what is used of them.
    private: (threads, 6, widest), for the stream, inputs, outputs, and three
      heads.
    codes: (threads, widest), inputs rounded to bytes.
    scales: (threads, groups).
    scores: (threads, positions).
    places: (threads, widest), inputs that are not skipped.
    tiles: (threads, outputs of a tile).
  """

  shared: Any
  private: Any
  codes: Any
  scales: Any
  scores: Any
  places: Any
  tiles: Any


@jit
def _meet(team, met):
  """Wait until all threads have come here; return the arrivals so far."""
  met += team.threads
  counter, spins = team.meeting.ctypes.data, 0
  _pool.atomic_add(counter, 1)
  while _pool.look(counter) < met:
    spins += 1
    if spins < _SPINS:
      _pool.pause()
    else:
      _pool.yield_()
  return met


@jit
def _strip(kind, address, groups, x, codes, scales, out):
  """Multiply one strip."""
  if kind == 1:
    _i1(address, groups, codes, scales, out)
  elif kind == 1 + MASKED:
    _i1m(address, groups, codes, scales, out)
  elif kind == 4:
    _f4(address, groups, x, out)
  elif kind == 4 + MASKED:
    _f4m(address, groups, x, out)
  elif kind == 2:
    _f2(address, groups, x, out)
  else:
    _f2m(address, groups, x, out)


@jit
def _pair(weights, n, groups, x, codes, scales, two, bias, act, out):
  """Multiply a strip of gates and one of what they open; write 16 numbers."""
  t = two.ctypes.data
  for i in range(2):
    start = weights.data.ctypes.data + weights.starts[n + i]
    kind, target = weights.kinds[n + i], t + 4 * LANES * i
    _strip(kind, start, groups, x, codes, scales, target)
  if bias.size:
    for i in range(2 * LANES):
      two[i] += bias[i]
  parts.gate(act, two, two[LANES:], out, LANES)


@jit
def _tile(kind, at, inputs, places, count, sums, bias, act, out):
  """Multiply a tile by those inputs whose places are given."""
  vectors = types.int64(_simd.read_i32(at + 4))
  first = types.int64(_simd.read_i32(at + 8)) * LANES
  table, target = at + 4 * TILE_HEAD, sums.ctypes.data
  for i in range(vectors * LANES):
    sums[i] = 0
  for n in range(count):
    # The processor cannot guess which input is next.
    ahead = table + 4 * types.int64(places[min(n + 2, count - 1)])
    for line in range(_simd.read_i32(ahead), _simd.read_i32(ahead + 4), 64):
      _simd.prefetch(at + line)
    i = types.int64(places[n])
    start = at + _simd.read_i32(table + 4 * i)
    if kind == 4 + SKIPS:
      _r4(start, vectors, inputs[i], target)
    else:
      _r2(start, vectors, inputs[i], target)
  if act < 0:
    for i in range(vectors * LANES):
      out[first + i] = sums[i]
    return
  for i in range(min(bias.size, vectors * LANES)):
    sums[i] += bias[first + i]
  for i in range(0, vectors * LANES, 2 * LANES):
    here, there = sums[i:], out[(first + i) // 2 :]
    parts.gate(act, here, here[LANES:], there, LANES)


@jit
def product(me, team, which, weights, first, count, inputs, groups, quantized,
            room, out, act, bias, level):  # fmt: skip
  """Multiply strips: those of this thread, then what others have left.

  With `act` >= 0 strips of gates and of what they open alternate, and `out` is
  their activated product: 16 numbers for two strips. Of tiles, inputs up to
  `level` are skipped.
  """
  codes, scales = room.codes[me], room.scales[me]
  skips = weights.kinds[first] & SKIPS
  active, places, sums = 0, room.places[me], room.tiles[me]
  if skips:
    size = _simd.read_i32(weights.data.ctypes.data + weights.starts[first])
    active = parts.larger(inputs, size, level, places)
  elif quantized:
    parts.quantize(inputs, codes, scales, groups)
  x, c, s = inputs.ctypes.data, codes.ctypes.data, scales.ctypes.data
  two = np.empty(2 * LANES, np.float32)
  units = count // 2 if act >= 0 and not skips else count
  for turn in range(team.threads):
    owner = (me + turn) % team.threads
    begin = units * owner // team.threads
    end = units * (owner + 1) // team.threads
    chunk = max(1, (end - begin) // 8)
    counter = team.counters[which].ctypes.data + 8 * owner
    at = begin + chunk * _pool.atomic_add(counter, 1)
    while at < end:
      for i in range(at, min(end, at + chunk)):
        if skips:
          start = weights.data.ctypes.data + weights.starts[first + i]
          _tile(weights.kinds[first + i], start, inputs, places, active, sums,
                bias, act, out)  # fmt: skip
        elif act >= 0:
          own = bias[2 * LANES * i :] if bias.size else bias
          _pair(weights, first + 2 * i, groups, x, c, s, two, own, act,
                out[LANES * i :])  # fmt: skip
        else:
          start = weights.data.ctypes.data + weights.starts[first + i]
          target = out.ctypes.data + 4 * LANES * i
          _strip(weights.kinds[first + i], start, groups, x, c, s, target)
      at = begin + chunk * _pool.atomic_add(counter, 1)


@jit
def gather(weights, first, row, groups, out):
  """Write a row of a matrix of strips, decoded: the embedding of a token."""
  strip, lane = first + row // LANES, row % LANES
  kind = weights.kinds[strip]
  at = weights.data.ctypes.data + weights.starts[strip]
  size, masked = kind & 7, kind & MASKED
  for g in range(groups):
    scale = np.float32(1.0)
    if size == 1:
      bits = types.int32(_simd.read_u16(at + 2 * lane)) << 16
      scale = float_of_bits(types.int32(bits))
      at += 2 * LANES
    masks = at
    at += 8 * WORDS if masked else 0
    for j in range(WORDS):
      mask = _simd.read_i64(masks + 8 * j) if masked else types.int64(-1)
      for i in range(STEPS):
        bit = lane * STEPS + i if size == 1 else i * LANES + lane
        below = mask & ((types.int64(1) << bit) - 1)
        place = at + size * ones(below)
        value = np.float32(0.0)
        if (mask >> bit) & 1:
          if size == 1:
            value = np.float32(types.int8(_simd.read_u8(place)))
          elif size == 2:
            wide = types.int32(_simd.read_u16(place)) << 16
            value = float_of_bits(types.int32(wide))
          else:
            value = _simd.read_f32(place)
        out[g * GROUP + j * STEPS + i] = value * scale
      at += size * ones(mask)


@jit
def _vector(vectors, at):
  return vectors[max(at, 0) :] if at >= 0 else vectors[:0]


@jit
def _heads(me, threads, layer, sizes, reals, weights, cache, at, room):
  """Turn queries and keys, attend, and keep keys and values."""
  qkv, mixed, scores = room.shared[0], room.shared[1], room.scores[me]
  vectors, three = weights.vectors, room.private[me, 3:]
  heads, kv_heads, size = sizes[HEADS], sizes[KV_HEADS], sizes[HEAD]
  q, k, v = three[0], three[1], three[2]
  table = weights.ropes[layer[ROPE], at]
  first = max(0, at + 1 - layer[WINDOW]) if layer[WINDOW] else 0
  group = heads // kv_heads
  bias = _vector(vectors, layer[QKV_BIAS])
  for head in range(heads * me // threads, heads * (me + 1) // threads):
    kv = head // group
    starts = (head * size, sizes[K_AT] + kv * size, sizes[V_AT] + kv * size)
    for which in range(3):
      for i in range(size):
        three[which, i] = qkv[starts[which] + i]
      if bias.size:
        for i in range(size):
          three[which, i] += bias[starts[which] + i]
    if layer[Q_NORM] >= 0:
      parts.norm(q, vectors[layer[Q_NORM] :], reals[EPS], q, size)
      parts.norm(k, vectors[layer[K_NORM] :], reals[EPS], k, size)
    parts.turn(q, table, q, size)
    parts.turn(k, table, k, size)
    if head % group == 0:
      for i in range(size):
        cache[0, kv, at, i] = k[i]
        cache[1, kv, at, i] = v[i]
    parts.attend(
      q[:size], k[:size], v[:size], cache[0, kv], cache[1, kv], first, at,
      reals[SCALE], reals[CAP], scores, mixed[head * size :],
    )  # fmt: skip


@jit
def _add(x, y, scale, eps, bias, dim):
  """Add to the stream, normed first if the model does that."""
  if bias.size:
    for i in range(dim):
      y[i] += bias[i]
  if scale.size:
    parts.norm(y, scale, eps, y, dim)
  for i in range(dim):
    x[i] += y[i]


@jit
def _groups(count):
  return (count + GROUP - 1) // GROUP


@jit
def _layer(me, team, l, layer, sizes, reals, weights, cache, at, room, met):
  """Run one layer; return the arrivals so far."""
  dim, eps, quantized = sizes[DIM], reals[EPS], sizes[BYTES]
  qkv, mixed, hidden, out = (
    room.shared[0], room.shared[1], room.shared[2], room.shared[3],
  )  # fmt: skip
  x, h, y = room.private[me, 0], room.private[me, 1], room.private[me, 2]
  vectors, which, levels = weights.vectors, PRODUCTS * l, weights.levels[l]
  none = vectors[:0]
  parts.norm(x, vectors[layer[BEFORE] :], eps, h, dim)
  product(me, team, which, weights, layer[QKV], layer[QKV_COUNT], h,
          _groups(dim), quantized, room, qkv, -1, none, levels[0])  # fmt: skip
  met = _meet(team, met)
  _heads(me, team.threads, layer, sizes, reals, weights, cache, at, room)
  met = _meet(team, met)
  product(me, team, which + 1, weights, layer[O], layer[O_COUNT], mixed,
          _groups(sizes[HEADS] * sizes[HEAD]), quantized, room, out, -1,
          none, levels[1])  # fmt: skip
  met = _meet(team, met)
  y[:dim] = out[:dim]
  bias = _vector(vectors, layer[O_BIAS])
  _add(x, y, _vector(vectors, layer[AFTER]), eps, bias, dim)
  parts.norm(x, vectors[layer[FF_BEFORE] :], eps, h, dim)
  bias = _vector(vectors, layer[GATED_BIAS])
  product(me, team, which + 2, weights, layer[GATED], layer[GATED_COUNT], h,
          _groups(dim), quantized, room, hidden, sizes[ACT], bias,
          levels[2])  # fmt: skip
  met = _meet(team, met)
  units = sizes[HIDDEN]
  product(me, team, which + 3, weights, layer[DOWN], layer[DOWN_COUNT], hidden,
          _groups(units), quantized, room, out, -1, none,
          levels[3])  # fmt: skip
  met = _meet(team, met)
  y[:dim] = out[:dim]
  bias = _vector(vectors, layer[DOWN_BIAS])
  _add(x, y, _vector(vectors, layer[FF_AFTER]), eps, bias, dim)
  return met


@jit
def step(me, team, token, at, sizes, reals, layers, weights, cache, room,
         logits):  # fmt: skip
  """Run one thread's share of one step; write logits.

  `me` is the number of this thread; `token` enters at position `at`. `sizes`,
  `reals` and `layers` are read by the names above. `cache` is (layers, 2,
  heads, positions, size).
  """
  dim, vectors, met = sizes[DIM], weights.vectors, 0
  x, h = room.private[me, 0], room.private[me, 1]
  gather(weights, sizes[EMBED_FIRST], token, _groups(dim), x)
  for i in range(dim):
    x[i] *= reals[EMBED]
  for l in range(len(layers)):
    met = _layer(me, team, l, layers[l], sizes, reals, weights, cache[l], at,
                 room, met)  # fmt: skip
  parts.norm(x, vectors[sizes[LAST_NORM] :], reals[EPS], h, dim)
  product(me, team, PRODUCTS * len(layers), weights, sizes[HEAD_FIRST],
          sizes[HEAD_COUNT], h, _groups(dim), sizes[BYTES], room, logits, -1,
          vectors[:0], np.float32(0))  # fmt: skip
  _meet(team, met)
