"""One step of a decoder as one call of machine code on a few threads.

XLA runs a step as some thousand operations, and hands each product to its pool
of threads anew: for one token that takes longer than reading the weights. Here
all threads walk through the layers together, and wait for each other five times
in a layer, without sleeping. What is short, norms and sums of the stream, each
thread does for itself; strips of outputs and heads are dealt out.
"""

import numpy as np
from llvmlite import ir
from numba.core import types

from jaxpruner.post_training import _step_parts as parts
from jaxpruner.sparse import _pool, _simd, _strip_simd
from jaxpruner.sparse._simd import I64
from jaxpruner.sparse._strips import GROUP, LANES, STEPS, WORDS

jit = parts.jit

# What a number in `layers` means: strips, vectors (-1: none), and others.
(QKV, QKV_COUNT, O, O_COUNT, GATED, GATED_COUNT, DOWN, DOWN_COUNT, BEFORE,
 AFTER, FF_BEFORE, FF_AFTER, Q_NORM, K_NORM, QKV_BIAS, O_BIAS, GATED_BIAS,
 DOWN_BIAS, ROPE, WINDOW, LAYER_FIELDS) = range(21)  # fmt: skip
# What a number in `sizes` means.
(DIM, HEADS, KV_HEADS, HEAD, K_AT, V_AT, ACT, BYTES, HEAD_FIRST, HEAD_COUNT,
 LAST_NORM, EMBED_FIRST, SIZE_FIELDS) = range(13)  # fmt: skip
EPS, SCALE, CAP, EMBED, REAL_FIELDS = range(5)
# What a strip's kind means: bytes of a weight, plus 8 if zeros are left out.
MASKED = 8
PRODUCTS = 4  # of a layer
_SPINS = 4000  # looks before a waiting thread offers its processor

_f4, _f4m = _strip_simd.floats(4, False), _strip_simd.floats(4, True)
_f2, _f2m = _strip_simd.floats(2, False), _strip_simd.floats(2, True)
_i1, _i1m = _strip_simd.codes(False), _strip_simd.codes(True)


@_simd.intrinsic
def _look(_, address):
  """Read a counter that other threads change."""

  def emit(context, b, signature, args):
    pointer = b.inttoptr(args[0], I64.as_pointer())
    return b.load_atomic(pointer, "acquire", 8)

  return types.int64(types.int64), emit


@_simd.intrinsic
def _pause(_):
  def emit(context, b, signature, args):
    b.call(_simd._function(b, "llvm.x86.sse2.pause", ir.VoidType()), [])
    return context.get_dummy_value()

  return types.void(), emit


@_simd.intrinsic
def _ones(_, word):
  def emit(context, b, signature, args):
    return b.call(_simd._function(b, "llvm.ctpop.i64", I64, I64), args)

  return types.int64(types.int64), emit


@jit
def _meet(counter, target):
  """Wait until all threads have come here: `target` arrivals in total."""
  _pool.atomic_add(counter, 1)
  spins = 0
  while _look(counter) < target:
    spins += 1
    if spins < _SPINS:
      _pause()
    else:
      _pool._yield()


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
def _product(me, threads, counters, data, strips, first, count, groups,
             inputs, codes, scales, out, act, pairs, bias):  # fmt: skip
  """Multiply strips first … first + count - 1: own ones, then the others'.

  With `pairs` strips of gates and of what they open alternate, and `out` is
  their activated product: 16 numbers for two strips.
  """
  x, c, s = inputs.ctypes.data, codes.ctypes.data, scales.ctypes.data
  base, starts, kinds = data.ctypes.data, strips[0], strips[1]
  two = np.empty(2 * LANES, np.float32) if pairs else inputs
  units = count // 2 if pairs else count
  for turn in range(threads):
    owner = (me + turn) % threads
    begin, end = units * owner // threads, units * (owner + 1) // threads
    chunk = max(1, (end - begin) // 8)
    while True:
      at = begin + chunk * _pool.atomic_add(
        counters.ctypes.data + 8 * owner, 1
      )
      if at >= end:
        break
      for i in range(at, min(end, at + chunk)):
        if pairs:
          n = first + 2 * i
          t = two.ctypes.data
          _strip(kinds[n], base + starts[n], groups, x, c, s, t)
          _strip(kinds[n + 1], base + starts[n + 1], groups, x, c, s, t + 64)
          if bias.size:
            for k in range(2 * LANES):
              two[k] += bias[2 * LANES * i + k]
          parts.gate(act, two, two[LANES:], out[LANES * i :], LANES)
        else:
          n = first + i
          target = out.ctypes.data + 4 * LANES * i
          _strip(kinds[n], base + starts[n], groups, x, c, s, target)


@jit
def gather(data, starts, kinds, first, row, groups, out):
  """Write a row of a matrix of strips, decoded: the embedding of a token."""
  strip, lane = first + row // LANES, row % LANES
  kind, at = kinds[strip], data.ctypes.data + starts[strip]
  size, masked = kind & 7, kind & MASKED
  for g in range(groups):
    scale = np.float32(1.0)
    if size == 1:
      bits = types.int32(_simd.read_u16(at + 2 * lane)) << 16
      scale = parts._float_of_bits(types.int32(bits))
      at += 2 * LANES
    masks = at
    at += 8 * WORDS if masked else 0
    for j in range(WORDS):
      mask = _simd.read_i64(masks + 8 * j) if masked else types.int64(-1)
      for i in range(STEPS):
        bit = lane * STEPS + i if size == 1 else i * LANES + lane
        below = mask & ((types.int64(1) << bit) - 1)
        place = at + size * _ones(below)
        value = np.float32(0.0)
        if (mask >> bit) & 1:
          if size == 1:
            value = np.float32(types.int8(_simd.read_u8(place)))
          elif size == 2:
            wide = types.int32(_simd.read_u16(place)) << 16
            value = parts._float_of_bits(types.int32(wide))
          else:
            value = _simd.read_f32(place)
        out[g * GROUP + j * STEPS + i] = value * scale
      at += size * _ones(mask)


@jit
def _vector(vectors, at):
  return vectors[max(at, 0) :] if at >= 0 else vectors[:0]


@jit
def _heads(me, threads, layer, sizes, reals, vectors, ropes, cache, at, qkv,
           room, scores, mixed):  # fmt: skip
  """Turn queries and keys, attend, and keep keys and values."""
  heads, kv_heads, size = sizes[HEADS], sizes[KV_HEADS], sizes[HEAD]
  q, k, v = room[0], room[1], room[2]
  table = ropes[layer[ROPE], at]
  first = max(0, at + 1 - layer[WINDOW]) if layer[WINDOW] else 0
  group = heads // kv_heads
  bias = _vector(vectors, layer[QKV_BIAS])
  for head in range(heads * me // threads, heads * (me + 1) // threads):
    kv = head // group
    starts = (head * size, sizes[K_AT] + kv * size, sizes[V_AT] + kv * size)
    for which in range(3):
      for i in range(size):
        room[which, i] = qkv[starts[which] + i]
      if bias.size:
        for i in range(size):
          room[which, i] += bias[starts[which] + i]
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
def step(me, threads, token, at, sizes, reals, layers, data, starts, kinds,
         vectors, ropes, cache, counters, meeting, shared, private, codes,
         scales, scores, logits):  # fmt: skip
  """Run one thread's share of one step; write logits.

  Args:
    me: the number of this thread, of `threads`.
    token: the token that enters, at position `at`.
    sizes, reals, layers: see the names above.
    data, starts, kinds: all strips; vectors: norms and biases.
    ropes: (kinds of rotation, positions, cosines and sines).
    cache: (layers, 2, heads, positions, size).
    counters: zeros, one for each product and thread; meeting: a zero.
    shared: rows qkv, mixed, hidden and output.
    private: (threads, 6, widest): stream, input, output, and three heads.
    codes, scales, scores: (threads, widest) each.
    logits: (vocabulary, rounded up to strips).
  """
  dim, eps, quantized = sizes[DIM], reals[EPS], sizes[BYTES]
  qkv, mixed, hidden, out = shared[0], shared[1], shared[2], shared[3]
  x, h, y, room = private[me, 0], private[me, 1], private[me, 2], private[me, 3:]
  codes, scales, scores = codes[me], scales[me], scores[me]
  strips = starts, kinds
  none = vectors[:0]
  wide, narrow = (dim + GROUP - 1) // GROUP, 0
  act, met = sizes[ACT], 0
  gather(data, starts, kinds, sizes[EMBED_FIRST], token, wide, x)
  for i in range(dim):
    x[i] *= reals[EMBED]
  for l in range(len(layers)):
    layer, counts = layers[l], counters[PRODUCTS * l :]
    parts.norm(x, vectors[layer[BEFORE] :], eps, h, dim)
    if quantized:
      parts.quantize(h, codes, scales, wide)
    _product(me, threads, counts[0], data, strips, layer[QKV],
             layer[QKV_COUNT], wide, h, codes, scales, qkv, act, False, none)  # fmt: skip
    met += threads
    _meet(meeting.ctypes.data, met)
    _heads(me, threads, layer, sizes, reals, vectors, ropes, cache[l], at, qkv,
           room, scores, mixed)  # fmt: skip
    met += threads
    _meet(meeting.ctypes.data, met)
    narrow = (sizes[HEADS] * sizes[HEAD] + GROUP - 1) // GROUP
    if quantized:
      parts.quantize(mixed, codes, scales, narrow)
    _product(me, threads, counts[1], data, strips, layer[O], layer[O_COUNT],
             narrow, mixed, codes, scales, out, act, False, none)  # fmt: skip
    met += threads
    _meet(meeting.ctypes.data, met)
    y[:dim] = out[:dim]
    _add(x, y, _vector(vectors, layer[AFTER]), eps,
         _vector(vectors, layer[O_BIAS]), dim)  # fmt: skip
    parts.norm(x, vectors[layer[FF_BEFORE] :], eps, h, dim)
    if quantized:
      parts.quantize(h, codes, scales, wide)
    _product(me, threads, counts[2], data, strips, layer[GATED],
             layer[GATED_COUNT], wide, h, codes, scales, hidden, act, True,
             _vector(vectors, layer[GATED_BIAS]))  # fmt: skip
    met += threads
    _meet(meeting.ctypes.data, met)
    narrow = (layer[GATED_COUNT] // 2 * LANES + GROUP - 1) // GROUP
    if quantized:
      parts.quantize(hidden, codes, scales, narrow)
    _product(me, threads, counts[3], data, strips, layer[DOWN],
             layer[DOWN_COUNT], narrow, hidden, codes, scales, out, act, False,
             none)  # fmt: skip
    met += threads
    _meet(meeting.ctypes.data, met)
    y[:dim] = out[:dim]
    _add(x, y, _vector(vectors, layer[FF_AFTER]), eps,
         _vector(vectors, layer[DOWN_BIAS]), dim)  # fmt: skip
  parts.norm(x, vectors[sizes[LAST_NORM] :], eps, h, dim)
  if quantized:
    parts.quantize(h, codes, scales, wide)
  _product(me, threads, counters[PRODUCTS * len(layers)], data, strips,
           sizes[HEAD_FIRST], sizes[HEAD_COUNT], wide, h, codes, scales,
           logits, act, False, none)  # fmt: skip
  met += threads
  _meet(meeting.ctypes.data, met)
