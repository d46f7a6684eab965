"""The product of one strip of outputs, written as LLVM IR: see `_simd`.

A strip is 16 outputs, one for each lane; `_strips` says how its bytes follow
each other. Weights are read once, front to back, and decoded in registers.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types

from jaxpruner.sparse import _simd
from jaxpruner.sparse._simd import F32, I1, I8, I16, I32, I64
from jaxpruner.sparse._strips import GROUP, LANES, STEPS, WORDS

AHEAD = 2048  # bytes that are asked for early
# Expanding and multiplying bytes: Ice Lake and Zen 4, or later.
BYTES = _simd.AVX512 and all(
  _simd._FEATURES.get(f) for f in ("avx512bw", "avx512vbmi2", "avx512vnni")
)
_FLOATS, _INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
_SHORTS = ir.VectorType(I16, LANES)
_CODES = ir.VectorType(I8, LANES * STEPS)


def _ones(b: Any, word: Any) -> Any:
  return b.call(_simd._function(b, "llvm.ctpop.i64", I64, I64), [word])


def _expand(b: Any, values: Any, mask: Any) -> Any:
  """Put each of the first integers where its bit is; zeros elsewhere."""
  kind = values.type
  flags = ir.VectorType(I1, kind.count)
  name = f"llvm.x86.avx512.mask.expand.v{kind.count}i{kind.element.width}"
  f = _simd._function(b, name, kind, kind, kind, flags)
  zeros = ir.Constant(kind, [0] * kind.count)
  return b.call(f, [values, zeros, b.bitcast(mask, flags)])


def _dot_bytes(b: Any, total: Any, x: Any, w: Any) -> Any:
  """Add to each lane four products of an unsigned and a signed byte."""
  # LLVM 21 changed the operands from integers to bytes.
  kind = _CODES if llvm.llvm_version_info[0] >= 21 else _INTS
  name = "llvm.x86.avx512.vpdpbusd.512"
  f = _simd._function(b, name, _INTS, _INTS, kind, kind)
  return b.call(f, [total, b.bitcast(x, kind), b.bitcast(w, kind)])


def _scalar(result: Any, kind: Any, emitted: Any) -> Any:
  """Make an intrinsic of one scalar."""

  def emit(context, b, signature, args):
    return emitted(b, args[0])

  return _simd.intrinsic(lambda _, _argument: (result(kind), emit))


ones = _scalar(types.int64, types.int64, _ones)  # bits that are set
float_of_bits = _scalar(
  types.float32, types.int32, lambda b, x: b.bitcast(x, F32)
)
truncated = _scalar(types.int32, types.float32, lambda b, x: b.fptosi(x, I32))
nearest = _scalar(  # integer, ties to even
  types.float32,
  types.float32,
  lambda b, x: b.call(_simd._function(b, "llvm.rint.f32", F32, F32), [x]),
)


class _Strip:
  """Where a loop over the groups of a strip reads and sums."""

  def __init__(self, b: Any, address: Any, masked: bool, sums: int):
    self.b, self.masked = b, masked
    self.cursor = cgutils.alloca_once_value(b, address)
    self.sums = [cgutils.alloca_once(b, _FLOATS) for _ in range(sums)]
    for total in self.sums:
      b.store(_simd._zero(LANES), total)

  def skip(self, count: int) -> Any:
    """Return the address of the next bytes, and go behind them."""
    start = self.b.load(self.cursor)
    self.b.store(self.b.add(start, I64(count)), self.cursor)
    return start

  def masks(self) -> list:
    """Return the masks of the words of a group; none if all are kept."""
    if not self.masked:
      return [None] * WORDS
    start = self.skip(8 * WORDS)
    return [
      _simd._load(self.b, self.b.add(start, I64(8 * j)), I64)
      for j in range(WORDS)
    ]

  def word(self, mask: Any, size: int) -> Any:
    """Return where a word's values begin, and go behind them."""
    b = self.b
    start = b.load(self.cursor)
    _simd._prefetch(b, b.add(start, I64(AHEAD)))
    count = I64(GROUP) if mask is None else _ones(b, mask)
    b.store(b.add(start, b.mul(count, I64(size))), self.cursor)
    return start

  def finish(self, out: Any) -> None:
    b, total = self.b, None
    for each in self.sums:
      one = b.load(each)
      total = one if total is None else b.fadd(total, one)
    _simd._store(b, total, out)


def _floats_word(s: _Strip, mask: Any, x: Any, size: int) -> None:
  """Add the products of four inputs, each with its own sum."""
  b = s.b
  start = s.word(mask, size)
  if size == 4:
    _simd._prefetch(b, b.add(start, I64(AHEAD + 64)))
  for i, total in enumerate(s.sums):
    place = I64(LANES * i)
    if mask is not None:
      # The weights before these: counted from the word, not chained.
      place = _ones(b, b.and_(mask, I64((1 << LANES * i) - 1)))
    at = b.add(start, b.mul(place, I64(size)))
    if size == 4:
      wide = _simd._load(b, at, _INTS)
    else:
      wide = b.zext(_simd._load(b, at, _SHORTS), _INTS)
      wide = b.shl(wide, ir.Constant(_INTS, [16] * LANES))
    if mask is not None:
      wide = _expand(b, wide, b.trunc(b.lshr(mask, I64(LANES * i)), I16))
    one = _simd._load(b, b.add(x, I64(4 * i)), F32, 4)
    weight = b.bitcast(wide, _FLOATS)
    scale = _simd._splat(b, one, LANES)
    b.store(_simd._fma(b, scale, weight, b.load(total)), total)


def floats(size: int, masked: bool) -> Any:
  """Make the product with a strip of float32 (size 4) or bfloat16 (2).

  `f(address, groups, x, out)` writes 16 sums to `out`; x is 64 floats for each
  group.
  """

  @_simd.intrinsic
  def f(_, address, groups, x, out):
    def emit(context, b, signature, args):
      address, groups, x, out = args
      s = _Strip(b, address, masked, STEPS)
      with cgutils.for_range(b, groups) as loop:
        at = b.add(x, b.mul(loop.index, I64(4 * GROUP)))
        for j, mask in enumerate(s.masks()):
          _floats_word(s, mask, b.add(at, I64(4 * STEPS * j)), size)
      s.finish(out)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit

  return f


def codes(masked: bool) -> Any:
  """Make the product of int8 inputs with a strip of int8 weights.

  `f(address, groups, x, scales, out)`: x is 64 bytes for each group, a code
  plus 128 each, and scales one float for each group.
  """

  @_simd.intrinsic
  def f(_, address, groups, x, scales, out):
    def emit(context, b, signature, args):
      address, groups, x, scales, out = args
      s = _Strip(b, address, masked, 1)
      zero = ir.Constant(_INTS, [0] * LANES)
      all_ones = ir.Constant(_INTS, [0x01010101] * LANES)
      with cgutils.for_range(b, groups) as loop:
        own = _simd._weights(b, s.skip(2 * LANES), LANES, True)
        at = b.add(x, b.mul(loop.index, I64(GROUP)))
        dots, counts = [zero, zero], [zero, zero]
        for j, mask in enumerate(s.masks()):
          w = _simd._load(b, s.word(mask, 1), _CODES)
          w = w if mask is None else _expand(b, w, mask)
          four = _simd._load(b, b.add(at, I64(STEPS * j)), I32, 4)
          four = _simd._splat(b, four, LANES)
          dots[j % 2] = _dot_bytes(b, dots[j % 2], four, w)
          counts[j % 2] = _dot_bytes(b, counts[j % 2], all_ones, w)
        # 128 was added to each input, so 128 times the weights are too much.
        extra = b.shl(b.add(*counts), ir.Constant(_INTS, [7] * LANES))
        dot = b.sitofp(b.sub(b.add(*dots), extra), _FLOATS)
        scale = b.add(scales, b.mul(loop.index, I64(4)))
        scale = _simd._splat(b, _simd._load(b, scale, F32, 4), LANES)
        total = s.sums[0]
        b.store(_simd._fma(b, dot, b.fmul(own, scale), b.load(total)), total)
      s.finish(out)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit

  return f


def row(bf16: bool) -> Any:
  """Make what one input adds to a tile of outputs.

  `f(address, vectors, x, out)`: at the address are a mask of 16 bits for each
  vector, then the kept weights; x times the weights is added to `out`.
  """
  size = 2 if bf16 else 4
  expanded = _simd._expanded_bf16 if bf16 else _simd._expanded_f32

  @_simd.intrinsic
  def f(_, address, vectors, x, out):
    def emit(context, b, signature, args):
      address, vectors, x, out = args
      scale = _simd._splat(b, x, LANES)
      start = b.add(address, b.mul(vectors, I64(2)))
      cursor = cgutils.alloca_once_value(b, start)
      with cgutils.for_range(b, vectors) as loop:
        bits = _simd._load(b, b.add(address, b.mul(loop.index, I64(2))), I16)
        at = b.load(cursor)
        weight = expanded(b, at, bits)
        count = _ones(b, b.zext(bits, I64))
        b.store(b.add(at, b.mul(count, I64(size))), cursor)
        place = b.add(out, b.mul(loop.index, I64(4 * LANES)))
        total = _simd._load(b, place, _FLOATS, 4)
        _simd._store(b, _simd._fma(b, scale, weight, total), place)
      return context.get_dummy_value()

    kinds = types.int64, types.int64, types.float32, types.int64
    return types.void(*kinds), emit

  return f
