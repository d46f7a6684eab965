"""A Numba function as a typed XLA FFI handler, on XLA's own threads.

XLA hands a handler one pointer to a C struct (xla/ffi/api/c_api.h, stable
since 2024); the constants below are byte offsets in it. Nothing here holds the
GIL or calls Python.
"""

import platform

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from jaxpruner.sparse._simd import (
  I32,
  I64,
  intrinsic,
  read_i32,
  read_i64,
  write_i32,
  write_i64,
)

jit = njit(nogil=True, fastmath=True, error_model="numpy", cache=True)

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _ARGS, _RETS = 8, 16, 24, 40 + 32, 80 + 32
_ARGS_SIZE = 40 + 16
# XLA_FFI_Api: the two entries for the thread pool
_SCHEDULE, _NUM_THREADS = 136, 144
# XLA_FFI_Buffer
_DTYPE, _DATA, _RANK, _DIMS = 16, 24, 32, 40
_U16, _BF16 = 7, 16

# How often a waiting thread looks before it yields its processor.
SPINS = 200

# A job is an array of int64: these, and then whatever the work needs.
NEXT, DONE, OWNERS, TASKS, FIRST_FREE = range(5)


def _external(name: str, result, *arguments):
  """Declare a C function of the process."""
  kinds = {types.int64: I64, types.int32: I32, types.void: ir.VoidType()}

  def emit(context, b, signature, args):
    kind = ir.FunctionType(kinds[result], [kinds[a] for a in arguments])
    value = b.call(cgutils.get_or_insert_function(b.module, kind, name), args)
    return context.get_dummy_value() if result == types.void else value

  if not arguments:
    return intrinsic(lambda _: (result(), emit))
  return intrinsic(lambda _, _argument: (result(*arguments), emit))


malloc = _external("malloc", types.int64, types.int64)
free = _external("free", types.void, types.int64)
yield_ = _external("sched_yield", types.int32)


@intrinsic
def atomic_add(_, address, value):
  """Add to an int64 shared between threads; return the previous value."""

  def emit(context, b, signature, args):
    pointer = b.inttoptr(args[0], I64.as_pointer())
    return b.atomic_rmw("add", pointer, args[1], "seq_cst")

  return types.int64(types.int64, types.int64), emit


@intrinsic
def look(_, address):
  """Read an int64 that other threads change."""

  def emit(context, b, signature, args):
    pointer = b.inttoptr(args[0], I64.as_pointer())
    return b.load_atomic(pointer, "acquire", 8)

  return types.int64(types.int64), emit


@intrinsic
def pause(_):
  """Let the other half of a core work while this one waits (on x86)."""

  def emit(context, b, signature, args):
    if platform.machine() not in ("x86_64", "AMD64"):
      return context.get_dummy_value()
    kind = ir.FunctionType(ir.VoidType(), [])
    name = "llvm.x86.sse2.pause"
    b.call(cgutils.get_or_insert_function(b.module, kind, name), [])
    return context.get_dummy_value()

  return types.void(), emit


@intrinsic
def _call(_, function, argument):
  """Call a C function through its address."""

  def emit(context, b, signature, args):
    kind = ir.FunctionType(I64, [I64])
    return b.call(b.inttoptr(args[0], kind.as_pointer()), [args[1]])

  return types.int64(types.int64, types.int64), emit


def symbol(name: str):
  """Make a function that returns the address of a linked symbol.

  The linker resolves it in every process, so that cached machine code never
  holds an address of the process that compiled it.
  """

  @intrinsic
  def f(_):
    def emit(context, b, signature, args):
      kind = ir.FunctionType(ir.VoidType(), [I64])
      function = cgutils.get_or_insert_function(b.module, kind, name)
      return b.ptrtoint(function, I64)

    return types.int64(), emit

  return f


@jit
def field(job, index):
  return read_i64(job + 8 * index)


@jit
def set_field(job, index, value):
  write_i64(job + 8 * index, value)


@jit
def wait_for(address, value):
  """Spin until a counter has reached `value`; soon let others work too.

  What is waited for are tasks that have begun: mostly they end in microseconds.
  """
  for _ in range(SPINS):
    if look(address) >= value:
      return
    pause()
  while look(address) < value:
    yield_()


@jit
def release(job):
  """Give up one owner's share of a job; the last one frees it."""
  if atomic_add(job + 8 * OWNERS, -1) == 1:
    free(job)


@jit
def num_threads(frame):
  """Return the size of XLA's intra-op pool."""
  call = malloc(48)
  write_i64(call, 32)
  write_i64(call + 8, 0)
  write_i64(call + 16, read_i64(frame + _CONTEXT))
  write_i64(call + 24, call + 40)
  write_i64(call + 40, 1)
  _call(read_i64(read_i64(frame + _API) + _NUM_THREADS), call)
  threads = max(1, read_i64(call + 40))
  free(call)
  return threads


@jit
def schedule(frame, threads, task, job):
  """Offer a job to `threads - 1` pool threads beside the caller.

  The caller works too, so nothing waits for a thread that never comes.
  """
  write_i64(job + 8 * OWNERS, threads)
  call = malloc(40)
  for _ in range(1, threads):
    write_i64(call, 40)
    write_i64(call + 8, 0)
    write_i64(call + 16, read_i64(frame + _CONTEXT))
    write_i64(call + 24, task)
    write_i64(call + 32, job)
    if _call(read_i64(read_i64(frame + _API) + _SCHEDULE), call) != 0:
      release(job)
  free(call)


@jit
def is_metadata_query(frame):
  """Answer XLA's question for the API version (0, 1), if it is that."""
  extension = read_i64(frame + _EXTENSION)
  if extension == 0 or read_i32(extension + 8) != 1:
    return False
  metadata = read_i64(extension + 24)
  write_i32(metadata + 24, 0)
  write_i32(metadata + 28, 1)
  write_i32(metadata + 32, 0)
  return True


@jit
def arguments(frame):
  """Return the number of operands."""
  return read_i64(frame + _ARGS_SIZE)


@jit
def argument(frame, index):
  return read_i64(read_i64(frame + _ARGS) + 8 * index)


@jit
def result(frame, index):
  return read_i64(read_i64(frame + _RETS) + 8 * index)


@jit
def data(buffer):
  return read_i64(buffer + _DATA)


@jit
def dim(buffer, axis):
  """Return the length of an axis; negative axes count from the end."""
  rank = read_i64(buffer + _RANK)
  return read_i64(read_i64(buffer + _DIMS) + 8 * (axis % rank))


@jit
def size(buffer):
  total = 1
  for axis in range(read_i64(buffer + _RANK)):
    total *= dim(buffer, axis)
  return total


@jit
def item_size(buffer):
  """Return 2 for bfloat16, 4 for float32."""
  return 2 if read_i32(buffer + _DTYPE) == _BF16 else 4


@jit
def is_u16(buffer):
  """Return whether a buffer holds unsigned 16-bit integers."""
  return read_i32(buffer + _DTYPE) == _U16
