"""The facts that decide a result, and what differs between two sets of them.

What outlives a process (a folder of finished layers, a run, a checkpoint, a
cache) keeps the facts it was made of, as a JSON object of named entries: hashes
of functions, parameters and data, the method, its options, versions, and the
JAX settings that change numbers. Whoever wants to continue from it compares
them with his own, and a refusal names each entry that differs.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The settings of JAX under which the same program gives other numbers.
SETTINGS = (
  "jax_enable_x64",
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
  "jax_random_seed_offset",
  "jax_default_dtype_bits",
  "jax_disable_jit",
)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
# Flags that change where things run or what is written, not the numbers.
_HARMLESS_FLAG = re.compile(r"--xla_(force_host_platform_device_count|dump_)")


class Digest:
  """A SHA-256 of trees of arrays, fed one tree at a time.

  Example:
    >>> import numpy as np
    >>> one, other = Digest(), Digest()
    >>> one.update({"w": np.zeros(2)}), other.update({"w": -np.zeros(2)})
    (None, None)
    >>> one.hexdigest() == other.hexdigest()
    False
  """

  def __init__(self) -> None:
    self._sha = hashlib.sha256()

  def update(self, tree: Any) -> None:
    """Add paths, dtypes, shapes and bytes of every leaf."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
      self._add(jax.tree_util.keystr(path).encode())
      self._leaf(leaf)

  def _leaf(self, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
      self._add(describe(leaf).encode())
      return
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
      self._add(str(dtype).encode())
      leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf, order="C")
    self._add(f"{array.dtype.str} {array.dtype} {array.shape}".encode())
    # A byte view without a copy: memoryview knows nothing of bfloat16.
    self._add(array.reshape(-1).view(np.uint8).data)

  def _add(self, part: Any) -> None:
    # With its length, so that two parts never read like two others.
    self._sha.update(len(part).to_bytes(8, "little"))
    self._sha.update(part)

  def hexdigest(self) -> str:
    return self._sha.hexdigest()


def arrays(tree: Any) -> str:
  """Return the SHA-256 of a tree: its paths, dtypes, shapes and bytes."""
  digest = Digest()
  digest.update(tree)
  return digest.hexdigest()


def text(value: str) -> str:
  """Return the SHA-256 of a text, memory addresses left out."""
  value = _ADDRESS.sub("0x", value)
  return hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()


def function(fn: Callable[..., Any], *args: Any) -> str:
  """Return the SHA-256 of what `fn` computes: its jaxpr and constants.

  Args:
    fn: a function that JAX can trace.
    *args: arguments, or their shapes.
  """
  closed = jax.make_jaxpr(fn)(*args)
  return text(f"{closed.jaxpr} {arrays(list(closed.consts))}")


def source(thing: Any) -> str:
  """Return the SHA-256 of the source of a module, class or function.

  Where there is no source (a prompt, an extension) the bytecode counts, and
  the name alone where there is none either.
  """
  try:
    return text(inspect.getsource(thing))
  except (OSError, TypeError):
    code = getattr(thing, "__code__", None)
    if code is None:
      return text(getattr(thing, "__qualname__", repr(thing)))
    return text(f"{code.co_code.hex()} {code.co_consts} {code.co_names}")


def describe(value: Any, depth: int = 8) -> str:
  """Return a text that is the same in every process for equal values.

  Functions are spelled by their name, source and what they close over, down
  to `depth` levels: a function may close over itself.
  """
  if not depth:
    return type(value).__name__
  say = functools.partial(describe, depth=depth - 1)
  if isinstance(value, functools.partial):
    return f"partial{say([value.func, value.args, value.keywords])}"
  if isinstance(value, types.FunctionType):
    held = [_held(value), value.__defaults__, value.__kwdefaults__]
    return f"{value.__qualname__}:{source(value)[:12]}:{say(held)}"
  if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
    return f"{getattr(value, '__module__', '')}.{value.__name__}"
  if dataclasses.is_dataclass(value):
    fields = [(f.name, getattr(value, f.name)) for f in _fields(value)]
    return f"{type(value).__name__}{say(fields)}"
  if isinstance(value, Mapping):
    rows = sorted(f"{say(k)}: {say(v)}" for k, v in value.items())
    return "{" + ", ".join(rows) + "}"
  if isinstance(value, list | tuple):
    return "(" + ", ".join(map(say, value)) + ")"
  if isinstance(value, np.ndarray | jax.Array):
    return f"{value.dtype}{value.shape}:{arrays(value)[:12]}"
  return _ADDRESS.sub("0x", repr(value))


def _fields(value: Any) -> tuple[Any, ...]:
  return dataclasses.fields(value)


def _held(fn: types.FunctionType) -> list[Any]:
  """Return what a function closes over; None for what is not set yet."""
  held = []
  for cell in fn.__closure__ or ():
    try:
      held.append(cell.cell_contents)
    except ValueError:
      held.append(None)
  return held


def versions(*packages: str) -> dict[str, str | None]:
  """Return the versions of installed packages, None for missing ones."""
  found: dict[str, str | None] = {}
  for name in packages or ("jaxpruner", "jax", "jaxlib", "numpy", "optax"):
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found


def settings() -> dict[str, Any]:
  """Return the JAX settings that change numbers, and the kind of device."""
  found = {name: getattr(jax.config, name, None) for name in SETTINGS}
  flags = os.environ.get("XLA_FLAGS", "").split()
  found["XLA_FLAGS"] = sorted(f for f in flags if not _HARMLESS_FLAG.match(f))
  found["backend"] = jax.default_backend()
  return json.loads(json.dumps(found, default=str))


def differences(
  found: Any, mine: Mapping[str, Any], under: str = ""
) -> list[str]:
  """Return a phrase for each fact that differs, named by its path.

  Args:
    found: what was stored; anything JSON holds.
    mine: the facts now.
    under: the path of both.

  Example:
    >>> differences({"data": "a", "options": {"refit": True}},
    ...             {"data": "a", "options": {"refit": False}})
    ['options.refit is True there, False here']
  """
  found = found if isinstance(found, Mapping) else {}
  # As JSON holds it, as the stored side went: tuples become lists.
  mine = json.loads(json.dumps(mine))
  phrases: list[str] = []
  for key in sorted(found.keys() | mine.keys(), key=str):
    old, new = found.get(key, _MISSING), mine.get(key, _MISSING)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
      phrases += differences(old, new, f"{under}{key}.")
    elif old != new or type(old) is not type(new):
      phrases.append(f"{under}{key} is {_short(old)} there, {_short(new)} here")
  return phrases


class _Missing:
  def __repr__(self) -> str:
    return "missing"


_MISSING = _Missing()


def _short(value: Any) -> str:
  if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
    return value[:12] + "…"
  spelled = repr(value)
  return spelled if len(spelled) <= 100 else spelled[:97] + "…"
