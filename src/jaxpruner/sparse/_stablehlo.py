"""Functions as bytes: StableHLO through `jax.export`, with checked calls."""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import export
from jax.extend import mlir
from jax.extend.mlir import ir

from jaxpruner.sparse import formats, kernels
from jaxpruner.sparse._safetensors import FileFormatError

ANYWHERE = ("cpu", "cuda", "rocm", "tpu")

# Custom calls of JAX itself that a stored program may contain: marks without an
# effect, and numeric routines whose handlers check their operands. A call into
# Python is not among them.
_ALLOWED = frozenset(
  """ApproxTopK Eigh LuDecomposition ProductOfElementaryHouseholderReflectors Qr
  SPMDFullToShardShape SPMDShardToFullShape Sharding annotate_device_placement
  cu_threefry2x32_ffi hip_threefry2x32_ffi shape_assertion""".split()
)
_PREFIXES = ("lapack_", "cusolver_", "hipsolver_")

_locations = threading.Lock()


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
  """Keep the paths of source files out of a program that is traced."""
  with _locations:
    option = "jax_traceback_in_locations_limit"
    limit = getattr(jax.config, option)
    jax.config.update(option, 0)
    try:
      yield
    finally:
      jax.config.update(option, limit)


@functools.cache
def register_trees() -> None:
  """Let `jax.export` store functions that take or return sparse weights."""
  from jaxpruner.sparse import _parts, _taps  # which need `kernels`

  kinds = {
    "tensor": formats.SparseTensor,
    "stacked": _parts.Stacked,
    "parts": _parts.Parts,
    "taps": _taps.Taps,
  }
  kinds |= {f"format.{name}": kind for name, kind in formats.FORMATS.items()}
  for name, kind in kinds.items():
    export.register_pytree_node_serialization(
      kind,
      serialized_name=f"jaxpruner.{name}",
      serialize_auxdata=lambda static: json.dumps(static).encode(),
      deserialize_auxdata=lambda text: _tuples(json.loads(text)),
    )


def _tuples(value: Any) -> Any:
  if isinstance(value, list):
    return tuple(map(_tuples, value))
  return value


def write(
  function: Callable[..., Any],
  args: Sequence[Any],
  platforms: Sequence[str] = ANYWHERE,
) -> tuple[bytes, export.Exported]:
  """Trace a function and return it as bytes, and as JAX exported it.

  Args:
    function: a function of arrays in dicts, lists and tuples.
    args: its arguments, or their shapes.
    platforms: where the program will run.
  """
  ours = [
    export.DisabledSafetyCheck.custom_call(kernels.target(name))
    for name in kernels.KERNELS
  ]
  with _without_locations():
    # JAX keeps what it traced before, with the paths of that time: a new
    # function object is traced anew.
    traced = jax.jit(lambda *args: function(*args))
    exported = export.export(traced, platforms=platforms, disabled_checks=ours)(
      *args
    )
  try:
    content = bytes(exported.serialize())
  except ImportError as e:  # JAX wraps the ModuleNotFoundError
    raise _needs_flatbuffers() from e
  except (TypeError, ValueError) as e:
    raise ValueError(
      "the inputs and outputs of a saved function are arrays in dicts, lists "
      f"and tuples, which any process can build; {e}. Save a function that "
      "takes and returns those, or register the type with jax.export in both "
      "processes"
    ) from e
  refused = sorted(t for t in calls(exported) if not _is_allowed(t))
  if refused:
    raise ValueError(
      f"the function calls {', '.join(refused)}, which another process may "
      "not have; save a function without it"
    )
  return content, exported


def read(content: bytes, where: str, made_with: str) -> export.Exported:
  """Return a stored program whose custom calls are all known ones.

  Args:
    content: what `write` returned.
    where: the file, for errors.
    made_with: the version of JAX that wrote it, for errors.

  Raises:
    FileFormatError: this JAX cannot read it, or it calls what it should not.
  """
  try:
    exported = export.deserialize(bytearray(content))
    targets = calls(exported)
  except ImportError as e:  # JAX wraps the ModuleNotFoundError
    raise _needs_flatbuffers() from e
  except Exception as e:  # of flatbuffers, of MLIR, of JAX
    text = str(e).splitlines() or [""]
    raise FileFormatError(
      f"{where}: JAX {jax.__version__} cannot read the program, which JAX "
      f"{made_with} wrote ({type(e).__name__}: {text[0][:200]}); use that "
      "version of JAX, or save the model again"
    ) from e
  refused = sorted(t for t in targets if not _is_allowed(t))
  if refused:
    raise FileFormatError(
      f"{where}: the program calls {', '.join(map(repr, refused))[:200]}, "
      "which saved models never do: hostile, or made by a newer jaxpruner"
    )
  return exported


def calls(exported: export.Exported) -> set[str]:
  """Return the targets of all custom calls of a program."""
  found: set[str] = set()

  def walk(operation: Any) -> None:
    if operation.name.endswith("custom_call"):
      target = operation.attributes["call_target_name"]
      found.add(ir.StringAttr(target).value)
    for region in operation.regions:
      for block in region:
        for inner in block:
          walk(inner.operation)

  with ir.Context():
    module = mlir.deserialize_portable_artifact(exported.mlir_module_serialized)
    walk(module.operation)
  return found


def kernel_calls(exported: export.Exported) -> dict[str, int]:
  """Return the compiled products that a program calls, and their versions."""
  versions = {kernels.target(n): v for n, v in kernels.KERNELS.items()}
  return {t: versions[t] for t in sorted(calls(exported)) if t in versions}


def _is_allowed(target: str) -> bool:
  ours = {kernels.target(name) for name in kernels.KERNELS}
  return target in _ALLOWED | ours or target.startswith(_PREFIXES)


def _needs_flatbuffers() -> ImportError:
  return ImportError(
    "jax.export needs the package flatbuffers to store programs; "
    "pip install 'jaxpruner[serve]'"
  )
