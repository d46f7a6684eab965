"""Models as files: packed weights and the program that uses them.

A file is a safetensors container. Its tensors are the arrays of the weights and
the bytes of the programs (StableHLO, see `_stablehlo`); its manifest names the
programs, their inputs and the custom calls they make. Each program has a
dense twin for machines without these calls, and a program that decodes the
weights for it. Nothing in a file is imported, evaluated or unpickled.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner._tools import fingerprint
from jaxpruner.sparse import _layouts, _stablehlo, kernels
from jaxpruner.sparse import _safetensors as st
from jaxpruner.sparse.formats import Sparse

VERSION = 1
KEY = _layouts.MODEL_KEY
_DIGEST = "jaxpruner_sha256"
_MAX_PROGRAMS = 256
_FIELDS = {"inputs", "outputs", "weights", "calls", "code", "dense", "decode"}


class Part(NamedTuple):
  """A function to save: one program of a file.

  Attributes:
    function: `function(params, *inputs)`; sparse leaves are multiplied sparse.
    dense: the same for params with dense leaves only.
    params: the parameters; leaves that are no arrays become constants.
    inputs: example inputs, or their shapes.
  """

  function: Callable[..., Any]
  dense: Callable[..., Any]
  params: Any
  inputs: tuple[Any, ...]


class _Arrays:
  """The tensors of a file, each content once."""

  def __init__(self) -> None:
    self.tensors: dict[str, np.ndarray] = {}
    self.hashes: dict[str, str] = {}
    self._known: dict[tuple[Any, ...], str] = {}

  def add(self, name: str, array: np.ndarray) -> str:
    """Keep an array under its name, or one like it, and return the name."""
    digest = _sha(array)
    key = digest, array.dtype, array.shape
    if key not in self._known:
      try:
        st.check_name(name, "")
      except st.FileFormatError:
        name = "weight"
      free, count = name, 1
      while free in self.tensors:
        count += 1
        free = f"{name}#{count}"
      self._known[key] = free
      self.tensors[free], self.hashes[free] = array, digest
    return self._known[key]

  def add_bytes(self, name: str, content: bytes) -> str:
    return self.add(name, np.frombuffer(content, np.uint8))


def _sha(array: np.ndarray) -> str:
  raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return hashlib.sha256(raw.data).hexdigest()


def write(
  path: str | os.PathLike,
  parts: Sequence[Part],
  metadata: Mapping[str, Any] | None = None,
) -> None:
  """Write one file with a program for each part."""
  metadata = dict(metadata or {})
  st.check_metadata(metadata, str(path))
  arrays = _Arrays()
  programs = [_program(part, arrays) for part in parts]
  signatures = [p["inputs"] for p in programs]
  for text in signatures:
    if signatures.count(text) > 1:
      raise ValueError(
        f"two functions take the inputs {text}; a saved model chooses by the "
        "shapes and dtypes of its inputs: save them to two files"
      )
  manifest = json.dumps({
    "version": VERSION,
    "jax": jax.__version__,
    "jaxpruner": fingerprint.versions("jaxpruner")["jaxpruner"],
    "programs": programs,
    "sha256": arrays.hashes,
    "metadata": metadata,
  })  # fmt: skip
  ordered = sorted(arrays.tensors.items(), key=lambda t: -t[1].dtype.itemsize)
  largest = {name: (a.dtype, a.shape) for name, a in ordered}
  with st.Writer(path, largest, {KEY: manifest, _DIGEST: "0" * 64}) as writer:
    for name, array in ordered:
      writer.add(name, array.dtype, array.shape, [array])
    writer.metadata = {KEY: manifest}
    writer.metadata[_DIGEST] = st.header_digest(writer.entries, writer.metadata)


def _program(part: Part, arrays: _Arrays) -> dict[str, Any]:
  """Export one function; return its entry in the manifest."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(part.params)
  names = [_leaves.join(_leaves.path_names(p)) for p, _ in flat]
  leaves = [leaf for _, leaf in flat]
  where = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
  weights = [_array(names[i], leaves[i]) for i in where]

  def full(values: Sequence[Any]) -> Any:
    filled = list(leaves)
    for i, value in zip(where, values, strict=True):
      filled[i] = value
    return treedef.unflatten(filled)

  def sparse(values, *inputs):
    return part.function(full(values), *inputs)

  inputs = jax.tree.map(shape_of, part.inputs)
  shapes = [shape_of(w) for w in weights]
  code, exported = _stablehlo.write(sparse, (shapes, *inputs), ("cpu",))
  calls = _stablehlo.kernel_calls(exported)
  entry: dict[str, Any] = {
    "inputs": _spell(inputs),
    "outputs": _spell(_out_shapes(exported)),
    "calls": calls,
    "dense": None,
    "decode": None,
  }
  if calls:
    decoded = jax.tree.map(
      lambda w: shape_of(w) if isinstance(w, Sparse) else w,
      part.params,
      is_leaf=_is_sparse,
    )
    # Leaves that are no arrays are constants of this program too.
    dense_leaves, dense_tree = jax.tree.flatten(decoded)
    dense_where = [
      i for i, leaf in enumerate(dense_leaves) if hasattr(leaf, "dtype")
    ]

    def decode(values):
      tree = jax.tree.map(_decoded, full(values), is_leaf=_is_sparse)
      found = jax.tree.leaves(tree)
      return [found[i] for i in dense_where]

    def dense(values, *inputs):
      filled = list(dense_leaves)
      for i, value in zip(dense_where, values, strict=True):
        filled[i] = value
      return part.dense(dense_tree.unflatten(filled), *inputs)

    dense_shapes = [shape_of(dense_leaves[i]) for i in dense_where]
    decoder, _ = _stablehlo.write(decode, (shapes,))
    twin, _ = _stablehlo.write(dense, (dense_shapes, *inputs))
    entry["decode"] = arrays.add_bytes("programs/decode", decoder)
    entry["dense"] = arrays.add_bytes("programs/dense", twin)
  else:
    code, _ = _stablehlo.write(sparse, (shapes, *inputs))
  entry["code"] = arrays.add_bytes("programs/main", code)
  entry["weights"] = [
    arrays.add(f"weights/{names[i]}", w)
    for i, w in zip(where, weights, strict=True)
  ]
  return entry


def _array(name: str, leaf: Any) -> np.ndarray:
  # Through JAX, so that the dtype is the one the function sees.
  leaf = jnp.asarray(leaf)
  array = None
  if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    array = np.asarray(leaf)
  if array is None or array.dtype not in st.DTYPE_NAMES:
    raise ValueError(
      f"params[{name!r}] has dtype {leaf.dtype}, which a file cannot hold; "
      "pass jax.random.key_data in the place of keys, or cast it to one of "
      f"{list(st.DTYPES)}"
    )
  return array


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
  """Return shape and dtype of an array, a number or a sparse weight."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return x
  weak = isinstance(x, int | float | complex) and not isinstance(x, bool)
  sparse = isinstance(x, Sparse)
  dtype = getattr(x, "dtype", None) if sparse else jnp.result_type(x)
  return jax.ShapeDtypeStruct(np.shape(x), dtype, weak_type=weak)


def _out_shapes(exported: Any) -> Any:
  shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.out_avals]
  return jax.tree.unflatten(exported.out_tree, shapes)


def _spell(tree: Any) -> str:
  """Spell a tree of shapes, such as `float32[8], {'mask': bool[8]}`."""
  words = jax.tree.map(_Words, tree)
  if isinstance(words, tuple):
    return ", ".join(map(repr, words))
  return repr(words)


class _Words:
  """A shape that prints as `float32[1,8]`."""

  def __init__(self, shape: Any):
    sides = ",".join(map(str, shape.shape))
    self._text = f"{shape.dtype}[{sides}]"

  def __repr__(self) -> str:
    return self._text


def _is_sparse(value: Any) -> bool:
  return isinstance(value, Sparse)


def _decoded(value: Any) -> Any:
  return value.todense() if isinstance(value, Sparse) else value


class _Program:
  """One program of a file, ready to be called."""

  def __init__(self, exported: Any, weights: list[jax.Array], fast: bool):
    self.exported, self.weights, self.fast = exported, weights, fast
    args, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    self.inputs = tuple(
      jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args[1:])
    )
    self.key = _key(self.inputs)


def _key(inputs: Any) -> tuple[Any, ...]:
  flat, treedef = jax.tree.flatten(inputs)
  return treedef, tuple((np.shape(x), jnp.result_type(x)) for x in flat)


class LoadedModel:
  """A model from a file; call it as `model(*inputs)`.

  `load_model` returns it. The program is chosen by the shapes and dtypes of the
  inputs; others than those that were saved are refused.

  Attributes:
    path: the file.
    metadata: what was given to `save`.
    inputs: the inputs of each program, as trees of `jax.ShapeDtypeStruct`.
    fast: whether each program runs as it was saved; False where this machine
      lacks a compiled product and the weights were decoded for dense ones.

  Example:
    >>> import pathlib, tempfile
    >>> from jaxpruner import sparse
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "double.jaxpruner"
    >>> double = sparse.Accelerated(
    ...   lambda w, x: x @ w, 2 * jnp.eye(3), (jnp.ones((1, 3)),))
    >>> double.save(path, metadata={"units": "m"})
    >>> model = sparse.load_model(path)
    >>> model(jnp.ones((1, 3))).tolist(), model.metadata
    ([[2.0, 2.0, 2.0]], {'units': 'm'})
    >>> model.inputs[0][0].shape, model.fast
    ((1, 3), True)
  """

  def __init__(
    self, path: str, metadata: dict[str, Any], programs: list[_Program]
  ):
    self.path = path
    self.metadata = metadata
    self._programs = {p.key: p for p in programs}
    self.inputs = [p.inputs for p in programs]
    self.fast = all(p.fast for p in programs)
    self._weights = [p.weights for p in programs]
    order = {p.key: i for i, p in enumerate(programs)}

    # One function for all programs: JAX's own cache, in C++, then chooses.
    def call(weights, *inputs):
      key = _key(inputs)
      if key not in order:
        raise ValueError(
          f"{path} has no program for the inputs {_spell(_shapes(inputs))}; "
          f"it has {' | '.join(_spell(p.inputs) for p in programs)}: cast or "
          "pad to one of them, or save with such an example"
        )
      chosen = order[key]
      return programs[chosen].exported.call(weights[chosen], *inputs)

    self._jitted = jax.jit(call)

  def __call__(self, *inputs: Any) -> Any:
    return self._jitted(self._weights, *inputs)

  def __reduce__(self) -> Any:
    return load_model, (os.path.abspath(self.path), not self.fast)

  def __repr__(self) -> str:
    rows = [
      f"  {_spell(p.inputs)} -> {_spell(_out_shapes(p.exported))}"
      f" ({'as saved' if p.fast else 'dense fallback'})"
      for p in self._programs.values()
    ]
    return "\n".join([f"LoadedModel({self.path!r})", *rows])


def _shapes(tree: Any) -> Any:
  return jax.tree.map(shape_of, tree)


def load_model(path: str | os.PathLike, dense: bool = False) -> LoadedModel:
  """Load a model that `Accelerated.save` or `Shrunk.save` wrote.

  It needs jaxpruner and JAX, and none of the code that made the model. On a
  machine without the compiled products (no Numba, another processor or an
  accelerator) the weights are decoded once, and dense products are used.

  A model is a program. Every byte is checked against SHA-256 sums that the file
  itself contains, which finds damage, not malice; a program calls only
  numeric routines that are known, never Python. Load files whose makers you
  would trust with that.

  Args:
    path: the file.
    dense: decode the weights although the compiled products are available.

  Returns:
    The model, to be called with inputs of the shapes that were saved.

  Raises:
    FileFormatError: the file is truncated, altered, hostile, of another kind or
      of a newer version.

  Example:
    >>> import pathlib, tempfile
    >>> from jaxpruner import sparse
    >>> params = {"up": np.eye(3, 4), "down": np.ones((4, 2))}
    >>> mlp = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    >>> small = sparse.shrink(mlp, params, np.ones((1, 3), np.float32))
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "small.jaxpruner"
    >>> small.save(path)
    >>> model = load_model(path)
    >>> bool((model(jnp.ones((1, 3))) == small.fn(
    ...   small.params, jnp.ones((1, 3)))).all())
    True
  """
  with st.Reader(path) as reader:
    manifest = read_manifest(reader)
    where = str(reader.path)
    names = list(reader.entries)

    def tensor(name: str) -> np.ndarray:
      array = reader.read(name)
      if _sha(array) != manifest["sha256"][name]:
        raise st.FileFormatError(
          f"{where}: {name!r} does not match its SHA-256: damaged or altered"
        )
      return array

    with ThreadPoolExecutor(os.cpu_count()) as pool:
      tensors = dict(zip(names, pool.map(tensor, names), strict=True))
  loader = _Loader(where, manifest, tensors)
  programs = [loader.program(p, dense) for p in manifest["programs"]]
  return LoadedModel(str(path), manifest["metadata"], programs)


class _Loader:
  """Makes programs of checked tensors; equal weights are placed once."""

  def __init__(self, where: str, manifest: Any, tensors: Mapping[str, Any]):
    self._where, self._jax = where, manifest["jax"]
    self._tensors = tensors
    self._placed: dict[str, jax.Array] = {}
    self._decoded: dict[Any, list[jax.Array]] = {}

  def _read(self, name: str) -> Any:
    content = self._tensors[name].tobytes()
    return _stablehlo.read(content, self._where, self._jax)

  def _weights(self, names: Sequence[str]) -> list[jax.Array]:
    for name in names:
      if name not in self._placed:
        self._placed[name] = jnp.asarray(self._tensors[name])
    return [self._placed[name] for name in names]

  def program(self, entry: Mapping[str, Any], dense: bool) -> _Program:
    """Return a program as saved if it runs here, else its dense twin."""
    if entry["calls"] and (dense or not _runs_here(entry["calls"])):
      key = entry["decode"], tuple(entry["weights"])
      if key not in self._decoded:
        weights = self._weights(entry["weights"])
        decode = self._checked(entry["decode"], weights)
        self._decoded[key] = list(jax.jit(decode.call)(weights))
        for name in entry["weights"]:  # the packed ones are needed no more
          self._placed.pop(name, None)
      weights = self._decoded[key]
      return _Program(self._checked(entry["dense"], weights), weights, False)
    weights = self._weights(entry["weights"])
    return _Program(self._checked(entry["code"], weights), weights, True)

  def _checked(self, name: str, weights: Sequence[jax.Array]) -> Any:
    """Read a program and compare its first argument with the weights."""
    exported = self._read(name)
    try:
      args, keywords = jax.tree.unflatten(exported.in_tree, exported.in_avals)
      wants = [(tuple(a.shape), np.dtype(a.dtype)) for a in args[0]]
      sound = isinstance(args[0], list) and not keywords
    except (TypeError, ValueError, AttributeError, IndexError):
      wants, sound = [], False
    has = [(w.shape, np.dtype(w.dtype)) for w in weights]
    if not sound or wants != has:
      if any(jax.dtypes.canonicalize_dtype(d) != d for _, d in wants):
        raise ValueError(
          f"{self._where} was saved with jax_enable_x64; enable it to load it"
        )
      raise st.FileFormatError(
        f"{self._where}: the program {name!r} does not take the weights that "
        "the manifest names: damaged or altered"
      )
    return exported


def _runs_here(calls: Mapping[str, int]) -> bool:
  """Tell whether this machine has the custom calls, in these versions."""
  if jax.default_backend() != "cpu":
    return False
  here = kernels.register_kernels()
  return all(here.get(name) == version for name, version in calls.items())


def read_manifest(reader: st.Reader) -> dict[str, Any]:
  """Return the checked manifest of a model file."""
  where = str(reader.path)
  metadata = dict(reader.metadata)
  if KEY not in metadata:
    raise st.FileFormatError(
      f"{where}: holds tensors, but no program; read it with "
      "jaxpruner.sparse.load, or save a model with Accelerated.save"
    )
  manifest = st.parse_json(metadata[KEY], f"{where}: metadata")
  version = manifest.get("version") if isinstance(manifest, dict) else None
  if version != VERSION:
    raise st.FileFormatError(
      f"{where}: a model in version {str(version)[:40]}, this jaxpruner reads "
      f"version {VERSION}; upgrade jaxpruner"
    )
  digest = metadata.pop(_DIGEST, None)
  if digest != st.header_digest(reader.entries, metadata):
    raise st.FileFormatError(
      f"{where}: the header does not match its SHA-256: damaged or altered"
    )
  fault = _fault(manifest, reader.entries)
  if fault is not None:
    raise st.FileFormatError(f"{where}: malformed manifest: {fault}")
  st.check_metadata(manifest["metadata"], where)
  return manifest


def _fault(manifest: dict[str, Any], entries: Mapping[str, st.Entry]) -> Any:
  """Return what is wrong with a manifest, or None."""
  programs, hashes = manifest.get("programs"), manifest.get("sha256")
  if not isinstance(manifest.get("jax"), str):
    return "jax must be a version"
  if not isinstance(manifest.get("metadata"), dict):
    return "metadata must be an object"
  if not isinstance(hashes, dict) or set(hashes) != set(entries):
    return "sha256 and the stored tensors differ"
  if (
    not isinstance(programs, list)
    or not 0 < len(programs) <= _MAX_PROGRAMS
    or not all(isinstance(p, dict) and set(p) == _FIELDS for p in programs)
  ):
    return f"programs must be 1 to {_MAX_PROGRAMS} objects of {sorted(_FIELDS)}"
  for program in programs:
    calls, weights = program["calls"], program["weights"]
    if not isinstance(calls, dict) or not all(map(st.is_count, calls.values())):
      return "calls must map names to versions"
    if not isinstance(weights, list) or not all(
      isinstance(w, str) and w in entries for w in weights
    ):
      return "weights must be names of stored tensors"
    codes = [program["code"]]
    if calls:
      codes += [program["dense"], program["decode"]]
    for code in codes:
      entry = entries.get(code) if isinstance(code, str) else None
      if entry is None or entry.dtype != np.uint8 or len(entry.shape) != 1:
        return f"{str(code)[:40]!r} must be the bytes of a program"
  return None
