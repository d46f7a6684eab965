"""The parts of a decoder's step between its products, as machine code."""

import math

from numba import njit
from numba.core import types

from jaxpruner.sparse._strip_simd import float_of_bits, nearest, truncated
from jaxpruner.sparse._strips import GROUP

jit = njit(nogil=True, fastmath=True, error_model="numpy", cache=True)
SILU, GELU_TANH, GELU, RELU = range(4)


_f = types.float32


@jit
def exp(x):
  """Return e^x within 2e-7: a loop over it becomes vector instructions.

  A power of two times a polynomial; the library's function is a call for each
  number.
  """
  x = min(max(x, _f(-87.0)), _f(88.0))
  n = nearest(x * _f(1.4426950408889634))
  r = x - n * _f(0.693359375) - n * _f(-2.12194440e-4)
  p = _f(1.9875691500e-4)
  p = p * r + _f(1.3981999507e-3)
  p = p * r + _f(8.3334519073e-3)
  p = p * r + _f(4.1665795894e-2)
  p = p * r + _f(1.6666665459e-1)
  p = p * r + _f(5.0000001201e-1)
  p = p * r * r + r + _f(1.0)
  return p * float_of_bits(types.int32((truncated(n) + 127) << 23))


@jit
def _tanh(x):
  return _f(1.0) - _f(2.0) / (exp(_f(2.0) * x) + _f(1.0))


@jit
def gate(kind, gates, ups, out, count):
  """Write activation(gate) · up."""
  if kind == SILU:
    for i in range(count):
      out[i] = gates[i] / (_f(1.0) + exp(-gates[i])) * ups[i]
  elif kind == GELU_TANH:
    for i in range(count):
      g = gates[i]
      inner = _f(0.7978845608028654) * (g + _f(0.044715) * g * g * g)
      out[i] = _f(0.5) * g * (_f(1.0) + _tanh(inner)) * ups[i]
  elif kind == GELU:
    for i in range(count):
      g = gates[i]
      half = _f(math.erf(g * _f(0.7071067811865476)))
      out[i] = _f(0.5) * g * (_f(1.0) + half) * ups[i]
  else:
    for i in range(count):
      out[i] = max(gates[i], _f(0.0)) * ups[i]


@jit
def norm(x, scale, eps, out, count):
  """Write x over its root mean square, times a scale."""
  total = _f(0.0)
  for i in range(count):
    total += x[i] * x[i]
  factor = _f(1.0) / _f(math.sqrt(total / _f(count) + eps))
  for i in range(count):
    out[i] = x[i] * factor * scale[i]


@jit
def quantize(x, codes, scales, groups):
  """Round each group of 64 inputs to a code from 1 to 255, 128 for zero."""
  for g in range(groups):
    part, target = x[g * GROUP : (g + 1) * GROUP], codes[g * GROUP :]
    most = _f(0.0)
    for i in range(GROUP):
      most = max(most, abs(part[i]))
    scales[g] = most / _f(127.0)
    inverse = _f(127.0) / most if most > 0 else _f(0.0)
    for i in range(GROUP):
      target[i] = types.uint8(truncated(nearest(part[i] * inverse)) + 128)


@jit
def larger(x, count, level, places):
  """Write where |x| is above a level; return how often."""
  found = 0
  for i in range(count):
    places[found] = i  # overwritten unless it counts: no branch to guess
    found += abs(x[i]) > level
  return found


@jit
def turn(x, table, out, size):
  """Rotate number i and i + half by the angles of a position."""
  half = size // 2
  for i in range(half):
    cos, sin = table[i], table[half + i]
    a, b = x[i], x[half + i]
    out[i] = a * cos - b * sin
    out[half + i] = b * cos + a * sin


@jit
def attend(query, key, value, keys, values, first, at, scale, cap, scores, out):
  """Write what one head finds in the tokens first … at.

  Earlier keys and values are in the cache; those of this token are given.
  """
  size = query.size
  most = _f(-1e30)
  for t in range(first, at + 1):
    dot = _f(0.0)
    if t < at:
      row = keys[t]
      for i in range(size):
        dot += query[i] * row[i]
    else:
      for i in range(size):
        dot += query[i] * key[i]
    dot *= scale
    if cap > 0:
      dot = cap * _tanh(dot / cap)
    scores[t] = dot
    most = max(most, dot)
  total = _f(0.0)
  for t in range(first, at + 1):
    scores[t] = exp(scores[t] - most)
  for t in range(first, at + 1):
    total += scores[t]
  for i in range(size):
    out[i] = scores[at] * value[i]
  for t in range(first, at):
    weight, row = scores[t], values[t]
    for i in range(size):
      out[i] += weight * row[i]
  for i in range(size):
    out[i] /= total
