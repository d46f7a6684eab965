"""Vector instructions for Numba: the inner loops, written as LLVM IR.

Numba vectorises simple loops only. The three loops below decide the speed of
every sparse product, so each is emitted with its registers laid out: so many
accumulators of so many lanes, never wider than the machine's own vectors.
Addresses are plain int64.
"""

import functools
from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import extending
from numba.core import cgutils, config, types


def _features() -> Mapping[str, bool]:
  """Return the allowed CPU features: Numba's setting, or all of this CPU."""
  chosen = getattr(config, "CPU_FEATURES", None)
  if not chosen:
    return llvm.get_host_cpu_features()
  return {name[1:]: name[0] == "+" for name in chosen.split(",")}


_FEATURES = _features()
AVX512 = bool(_FEATURES.get("avx512f"))
_AVX2 = bool(_FEATURES.get("avx2"))
WIDTH = 16 if AVX512 else 8 if _FEATURES.get("avx") else 4
LANES = 16

# Typed as Any: an intrinsic is called without its first argument, the typing
# context, which no checker can know.
intrinsic: Any = extending.intrinsic

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32 = ir.FloatType()


def _vector(element: Any, width: int) -> Any:
  return ir.VectorType(element, width)


def _load(b: Any, address: Any, kind: Any, align: int = 1) -> Any:
  return b.load(b.inttoptr(address, kind.as_pointer()), align=align)


def _store(b: Any, value: Any, address: Any, align: int = 4) -> None:
  b.store(value, b.inttoptr(address, value.type.as_pointer()), align=align)


def _function(b: Any, name: str, result: Any, *args: Any) -> Any:
  return cgutils.get_or_insert_function(
    b.module, ir.FunctionType(result, args), name
  )


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
  kind = x.type
  name = f"llvm.fma.v{kind.count}f32"
  return b.call(_function(b, name, kind, kind, kind, kind), [x, y, z])


def _splat(b: Any, scalar: Any, width: int) -> Any:
  kind = _vector(scalar.type, width)
  undefined = ir.Constant(kind, ir.Undefined)
  one = b.insert_element(undefined, scalar, I32(0))
  zeros = ir.Constant(_vector(I32, width), [0] * width)
  return b.shuffle_vector(one, undefined, zeros)


def _prefetch(b: Any, address: Any) -> None:
  pointer = b.inttoptr(address, I8.as_pointer())
  f = _function(
    b, "llvm.prefetch.p0", ir.VoidType(), pointer.type, I32, I32, I32
  )
  b.call(f, [pointer, I32(0), I32(2), I32(1)])


def _zero(width: int) -> Any:
  return ir.Constant(_vector(F32, width), [0.0] * width)


def memory(name: str, element: Any, kind: Any) -> Any:
  """Make `read(address)` and `write(address, value)` of one scalar type."""

  @intrinsic
  def read(_, address):
    def emit(context, b, signature, args):
      return _load(b, args[0], element)

    return kind(types.int64), emit

  @intrinsic
  def write(_, address, value):
    def emit(context, b, signature, args):
      _store(b, args[1], args[0], align=1)
      return context.get_dummy_value()

    return types.void(types.int64, kind), emit

  read.__name__, write.__name__ = f"read_{name}", f"write_{name}"
  return read, write


read_i64, write_i64 = memory("i64", I64, types.int64)
read_i32, write_i32 = memory("i32", I32, types.int32)
read_u16, _ = memory("u16", I16, types.uint16)
read_u8, _ = memory("u8", I8, types.uint8)
read_f32, write_f32 = memory("f32", F32, types.float32)


@intrinsic
def prefetch(_, address):
  """Ask for a cache line that will be read soon."""

  def emit(context, b, signature, args):
    _prefetch(b, args[0])
    return context.get_dummy_value()

  return types.void(types.int64), emit


def _weights(b: Any, address: Any, count: int, bf16: bool) -> Any:
  """Load neighbouring weights as float32: bfloat16 is its upper half."""
  if not bf16:
    return _load(b, address, _vector(F32, count), 4)
  wide = b.zext(_load(b, address, _vector(I16, count)), _vector(I32, count))
  shift = ir.Constant(wide.type, [16] * count)
  return b.bitcast(b.shl(wide, shift), _vector(F32, count))


def _opaque(b: Any, value: Any) -> Any:
  """Keep LLVM from seeing that a register was loaded from memory."""
  kind = ir.FunctionType(value.type, [value.type])
  constraint = "=v,0" if AVX512 else "=x,0"
  return b.call(ir.InlineAsm(kind, "", constraint), [value])


def _lane(b: Any, vector: Any, lane: int, width: int) -> Any:
  """Spread one lane over a whole vector."""
  undefined = ir.Constant(vector.type, ir.Undefined)
  mask = ir.Constant(_vector(I32, width), [lane] * width)
  return b.shuffle_vector(vector, undefined, mask)


def axpy(vectors: int, width: int, lanes: int, bf16: bool) -> Any:
  """Make the batched product of `lanes` columns of one slice.

  `f(x, values, indices, count, columns, y, first)` does, for each of the
  lanes, y[column] (+)= sum over slots of value * x[index], where a row of x or
  y is `vectors` vectors of `width` batch entries. One load fetches the indices
  of all lanes: a load per index would saturate the load ports.
  """
  row = 4 * vectors * width
  size = 2 if bf16 else 4
  word = ir.IntType(8 * lanes)

  @intrinsic
  def f(_, x, values, indices, count, columns, y, first):
    def emit(context, b, signature, args):
      x, values, indices, count, columns, y, first = args
      kind = _vector(F32, width)
      sums, outs = [], []
      for lane in range(lanes):
        column = b.zext(_load(b, b.add(columns, I64(lane)), I8), I64)
        outs.append(b.add(y, b.mul(column, I64(row))))
        sums.append([cgutils.alloca_once(b, kind) for _ in range(vectors)])
      with b.if_else(first) as (fresh, resumed):
        with fresh:
          for total in sum(sums, []):
            b.store(_zero(width), total)
        with resumed:
          for out, totals in zip(outs, sums, strict=True):
            for v, total in enumerate(totals):
              address = b.add(out, I64(4 * width * v))
              b.store(_load(b, address, kind, 4), total)
      with cgutils.for_range(b, count) as loop:
        slot = loop.index
        weights = b.add(values, b.mul(slot, I64(size * LANES)))
        # One load and a shuffle per lane; LLVM would make it a load per lane,
        # and loads are what this loop is short of.
        weights = _opaque(b, _weights(b, weights, lanes, bf16))
        packed = _load(b, b.add(indices, b.mul(slot, I64(LANES))), word)
        for lane, totals in enumerate(sums):
          index = b.and_(b.lshr(packed, word(8 * lane)), word(255))
          index = index if lanes == 8 else b.zext(index, I64)
          source = b.add(x, b.mul(index, I64(row)))
          weight = _lane(b, weights, lane, width)
          for v, total in enumerate(totals):
            part = _load(b, b.add(source, I64(4 * width * v)), kind, 4)
            b.store(_fma(b, weight, part, b.load(total)), total)
      for out, totals in zip(outs, sums, strict=True):
        for v, total in enumerate(totals):
          _store(b, b.load(total), b.add(out, I64(4 * width * v)))
      return context.get_dummy_value()

    arguments = [types.int64] * 6 + [types.boolean]
    return types.void(*arguments), emit

  return f


def spread(vectors: int, width: int, bf16: bool) -> Any:
  """Make the transposed product of one column.

  `f(row, values, indices, count, sums)`: add value * row to the row of sums
  that each index names; rows are `vectors` vectors of `width`.
  """
  size = 2 if bf16 else 4
  kind = _vector(F32, width)

  @intrinsic
  def f(_, row, values, indices, count, sums):
    def emit(context, b, signature, args):
      row, values, indices, count, sums = args
      parts = [
        _load(b, b.add(row, I64(4 * width * v)), kind, 4)
        for v in range(vectors)
      ]
      with cgutils.for_range(b, count) as loop:
        slot = b.mul(loop.index, I64(LANES))
        address = b.add(values, b.mul(slot, I64(size)))
        weight = _lane(b, _weights(b, address, 1, bf16), 0, width)
        index = b.zext(_load(b, b.add(indices, slot), I8), I64)
        target = b.add(sums, b.mul(index, I64(4 * width * vectors)))
        for v, part in enumerate(parts):
          place = b.add(target, I64(4 * width * v))
          total = _load(b, place, kind, 4)
          _store(b, _fma(b, weight, part, total), place)
      return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit

  return f


def _lookup(b: Any, table: list, packed: Any) -> Any:
  """Pick from 256 floats held in registers, by one-byte indices.

  Eight two-register permutes use the low five bits, and three rounds of blends
  the high ones: less than half the time of a gather.
  """
  index = b.zext(packed, _vector(I32, 16))
  kind = table[0].type
  permute = _function(
    b, "llvm.x86.avx512.vpermi2var.ps.512", kind, kind, index.type, kind
  )
  found = [
    b.call(permute, [low, index, high])
    for low, high in zip(table[::2], table[1::2], strict=True)
  ]
  for bit in (32, 64, 128):
    masked = b.and_(index, ir.Constant(index.type, [bit] * 16))
    upper = b.icmp_unsigned("!=", masked, ir.Constant(index.type, [0] * 16))
    found = [
      b.select(upper, high, low)
      for low, high in zip(found[::2], found[1::2], strict=True)
    ]
  return found[0]


def _gather(b: Any, x: Any, packed: Any) -> Any:
  """Load x[index] for a vector of one-byte indices."""
  width = packed.type.count
  kind = _vector(F32, width)
  index = b.zext(packed, _vector(I32, width))
  if _AVX2 and width == 8:
    base = b.inttoptr(x, I8.as_pointer())
    mask = b.bitcast(ir.Constant(index.type, [-1] * 8), kind)
    f = _function(
      b,
      "llvm.x86.avx2.gather.d.ps.256",
      kind,
      kind,
      base.type,
      index.type,
      kind,
      I8,
    )
    return b.call(f, [_zero(8), base, index, mask, I8(4)])
  result = ir.Constant(kind, ir.Undefined)
  for lane in range(width):
    one = b.zext(b.extract_element(index, I32(lane)), I64)
    part = _load(b, b.add(x, b.mul(one, I64(4))), F32, 4)
    result = b.insert_element(result, part, I32(lane))
  return result


def dot(bf16: bool, ahead: int) -> Any:
  """Make the batch-1 product of one slice of 16 columns.

  `f(x, values, indices, count, out)` writes 16 sums to `out`; x is 256 floats.
  It prefetches `ahead` slots: the weights are read once, from main memory if
  they are large.
  """
  size = 2 if bf16 else 4
  parts = LANES // WIDTH
  kind = _vector(F32, WIDTH)

  def step(b: Any, pick: Any, values: Any, indices: Any, sums: list) -> None:
    for p, total in enumerate(sums):
      weights = b.add(values, I64(size * WIDTH * p))
      weight = _weights(b, weights, WIDTH, bf16)
      packed = _load(b, b.add(indices, I64(WIDTH * p)), _vector(I8, WIDTH))
      b.store(_fma(b, weight, pick(packed), b.load(total)), total)

  @intrinsic
  def f(_, x, values, indices, count, out):
    def emit(context, b, signature, args):
      x, values, indices, count, out = args
      if AVX512:
        table = [_load(b, b.add(x, I64(64 * i)), kind, 4) for i in range(16)]
        pick = functools.partial(_lookup, b, table)
      else:
        pick = functools.partial(_gather, b, x)
      # Two sets of sums: one's latency hides behind the other's.
      sums = [
        [cgutils.alloca_once(b, kind) for _ in range(parts)] for _ in range(2)
      ]
      for total in sums[0] + sums[1]:
        b.store(_zero(WIDTH), total)
      pairs = b.lshr(count, I64(1))
      with cgutils.for_range(b, pairs) as loop:
        slot = b.shl(loop.index, I64(1))
        v = b.add(values, b.mul(slot, I64(size * LANES)))
        i = b.add(indices, b.mul(slot, I64(LANES)))
        _prefetch(b, b.add(v, I64(size * LANES * ahead)))
        if not bf16:
          _prefetch(b, b.add(v, I64(size * LANES * (ahead + 1))))
        _prefetch(b, b.add(i, I64(LANES * ahead)))
        step(b, pick, v, i, sums[0])
        step(
          b, pick, b.add(v, I64(size * LANES)), b.add(i, I64(LANES)), sums[1]
        )
      with b.if_then(b.trunc(count, I1)):
        slot = b.sub(count, I64(1))
        v = b.add(values, b.mul(slot, I64(size * LANES)))
        step(b, pick, v, b.add(indices, b.mul(slot, I64(LANES))), sums[0])
      for p in range(parts):
        total = b.fadd(b.load(sums[0][p]), b.load(sums[1][p]))
        _store(b, total, b.add(out, I64(4 * WIDTH * p)))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit

  return f


def transpose(width: int) -> Any:
  """Make the transposition of `width` × `width` floats.

  `f(source, source_row, sources, target, target_row, targets)`: rows are so
  many bytes apart, `sources` rows may be read and `targets` be written; the
  last readable row stands in for those beyond it.
  """
  kind = _vector(F32, width)

  def exchange(b: Any, rows: list, step: int) -> None:
    low = [l if not l & step else width + l - step for l in range(width)]
    high = [l + step if not l & step else width + l for l in range(width)]
    masks = [ir.Constant(_vector(I32, width), m) for m in (low, high)]
    for i in range(width):
      if not i & step:
        pair = rows[i], rows[i + step]
        rows[i], rows[i + step] = (b.shuffle_vector(*pair, m) for m in masks)

  @intrinsic
  def f(_, source, source_row, sources, target, target_row, targets):
    def emit(context, b, signature, args):
      source, source_row, sources, target, target_row, targets = args
      last = b.sub(sources, I64(1))
      rows = []
      for i in range(width):
        row = b.select(b.icmp_signed("<", I64(i), last), I64(i), last)
        rows.append(_load(b, b.add(source, b.mul(source_row, row)), kind, 4))
      step = 1
      while step < width:
        exchange(b, rows, step)
        step *= 2
      for i, row in enumerate(rows):
        with b.if_then(b.icmp_signed("<", I64(i), targets), likely=True):
          _store(b, row, b.add(target, b.mul(target_row, I64(i))))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 6), emit

  return f


def copy(stride: int) -> Any:
  """Make `f(source, target)`: copy one vector of every `stride`-th float.

  It reads `stride` whole vectors.
  """
  kind = _vector(F32, WIDTH)

  @intrinsic
  def f(_, source, target):
    def emit(context, b, signature, args):
      source, target = args
      parts = [
        _load(b, b.add(source, I64(4 * WIDTH * i)), kind, 4)
        for i in range(stride)
      ]
      value = parts[0]
      if stride == 2:
        even = ir.Constant(_vector(I32, WIDTH), list(range(0, 2 * WIDTH, 2)))
        value = b.shuffle_vector(*parts, even)
      _store(b, value, target)
      return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit

  return f


def batch_rows(b: Any, rows: int, x: Any, stride: Any, last: Any) -> list:
  """Return where each row of a batch begins; the last stands in for others."""
  starts = []
  for r in range(rows):
    row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
    starts.append(b.add(x, b.mul(row, stride)))
  return starts


def _expanded_f32(b: Any, pointer: Any, bits: Any) -> Any:
  """Load the kept values, and put each where its bit is."""
  kind, flags = _vector(F32, 16), _vector(I1, 16)
  f = _function(
    b, "llvm.masked.expandload.v16f32",
    kind, F32.as_pointer(), flags, kind,
  )  # fmt: skip
  pointer = b.inttoptr(pointer, F32.as_pointer())
  return b.call(f, [pointer, b.bitcast(bits, flags), _zero(16)])


def _expanded_bf16(b: Any, pointer: Any, bits: Any) -> Any:
  """Expand packed bfloat16 values to float32: load the kept, widen, expand."""
  ints, flags = _vector(I32, 16), _vector(I1, 16)
  count = b.call(_function(b, "llvm.ctpop.i16", I16, I16), [bits])
  # As many low bits as there are values: what follows them is never read.
  low = b.sub(b.shl(I32(1), b.zext(count, I32)), I32(1))
  kind = _vector(I16, 16)
  load = _function(
    b, "llvm.masked.load.v16i16.p0v16i16",
    kind, kind.as_pointer(), I32, flags, kind,
  )  # fmt: skip
  few = b.call(load, [
    b.inttoptr(pointer, kind.as_pointer()), I32(2),
    b.bitcast(b.trunc(low, I16), flags), ir.Constant(kind, [0] * 16),
  ])  # fmt: skip
  wide = b.shl(b.zext(few, ints), ir.Constant(ints, [16] * 16))
  name = "llvm.x86.avx512.mask.expand.v16i32"
  f = _function(b, name, ints, ints, ints, flags)
  zeros = ir.Constant(ints, [0] * 16)
  wide = b.call(f, [wide, zeros, b.bitcast(bits, flags)])
  return b.bitcast(wide, _vector(F32, 16))


def expand(rows: int, panel: int = 64, bf16: bool = False) -> Any:
  """Make the product of `rows` batch rows with one panel of a bit mask.

  `f(x, stride, last, bits, values, count, out)`: row i of the batch is at x +
  min(i, last) * stride; each of `count` rows of the panel has 64 bits, and
  `values` holds the kept weights one after the other; `out` receives `rows` ×
  64 sums. Needs AVX-512: nothing else expands packed values at speed.
  """
  width, parts = 16, panel // 16
  kind = _vector(F32, width)
  item = 2 if bf16 else 4

  expanded = _expanded_bf16 if bf16 else _expanded_f32

  def ones(b: Any, bits: Any) -> Any:
    count = b.call(_function(b, "llvm.ctpop.i64", I64, I64), [bits])
    return b.mul(count, I64(item))

  @intrinsic
  def f(_, x, stride, last, bits, values, count, out):
    def emit(context, b, signature, args):
      x, stride, last, bits, values, count, out = args
      starts = batch_rows(b, rows, x, stride, last)
      sums = [
        [cgutils.alloca_once(b, kind) for _ in range(parts)]
        for _ in range(rows)
      ]
      for total in sum(sums, []):
        b.store(_zero(width), total)
      cursor = cgutils.alloca_once_value(b, values)
      with cgutils.for_range(b, count) as loop:
        word = _load(b, b.add(bits, b.mul(loop.index, I64(8))), I64)
        start = b.load(cursor)
        _prefetch(b, b.add(start, I64(2560)))
        _prefetch(b, b.add(start, I64(2624)))
        weights = []
        for p in range(parts):
          # The weights before this part: counted from the word, not chained.
          before = b.and_(word, I64((1 << 16 * p) - 1))
          part = b.trunc(b.lshr(word, I64(16 * p)), I16)
          weights.append(expanded(b, b.add(start, ones(b, before)), part))
        b.store(b.add(start, ones(b, word)), cursor)
        offset = b.mul(loop.index, I64(4))
        for begin, totals in zip(starts, sums, strict=True):
          scale = _splat(b, _load(b, b.add(begin, offset), F32, 4), width)
          for weight, total in zip(weights, totals, strict=True):
            b.store(_fma(b, scale, weight, b.load(total)), total)
      for r, totals in enumerate(sums):
        for p, total in enumerate(totals):
          _store(b, b.load(total), b.add(out, I64(4 * (panel * r + 16 * p))))
      return context.get_dummy_value()

    return types.void(*[types.int64] * 7), emit

  return f
