"""Model files: bits and kept values in one checked `.safetensors`."""

import itertools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpruner import _leaves
from jaxpruner.inspect.summary import warn_if_contradicted
from jaxpruner.sparse import _layouts, _safetensors, checkpoints

FileFormatError = _safetensors.FileFormatError


def _key(entry: Any) -> str | int:
  """Return one key of a path as JSON can hold it; integers stay integers."""
  for attribute in ("key", "idx"):
    if type(getattr(entry, attribute, None)) is int:
      return getattr(entry, attribute)
  return _leaves.path_names([entry])[0]


def _flatten(tree: Any) -> tuple[list[tuple[str, tuple, Any]], Any]:
  """Return (name, keys, leaf) of every leaf, and the treedef."""
  flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
  rows, seen = [], set()
  for path, leaf in flat:
    names = _leaves.path_names(path)
    name = _leaves.join(names)
    if name in seen:
      raise ValueError(
        f"two leaves are named {name!r}; rename a key so that names differ"
      )
    seen.add(name)
    rows.append((name, tuple(map(_key, path))[: len(names)], leaf))
  return rows, treedef


def _array(name: str, leaf: Any) -> np.ndarray:
  try:
    array = np.asarray(leaf)
  except TypeError:  # a typed PRNG key
    array = np.asarray(None)
  array = array.astype(array.dtype.newbyteorder("="), copy=False)
  if array.dtype not in _safetensors.DTYPE_NAMES:
    raise ValueError(
      f"params[{name!r}] is {type(leaf).__name__} of dtype {array.dtype}, "
      "which a safetensors file cannot hold; save arrays only "
      "(jax.random.key_data for keys, eqx.filter(model, eqx.is_array) for "
      f"modules), of dtypes {list(_safetensors.DTYPES)}"
    )
  return array


def _mask(name: str, mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
  if mask is None:
    return None
  mask = np.asarray(mask)
  if mask.shape != shape or not (
    mask.dtype == np.bool_ or np.issubdtype(mask.dtype, np.integer)
  ):
    raise ValueError(
      f"masks[{name!r}] is {mask.dtype} of shape {mask.shape}; expected "
      f"uint8 of the parameter's shape {shape} (unpack packed masks first)"
    )
  return mask


def save(
  path: str | os.PathLike,
  params: Any,
  masks: Any = None,
  *,
  layout: str = "packed",
  metadata: Mapping[str, Any] | None = None,
) -> None:
  """Save the kept weights: one bit per weight and the kept values.

  A tensor of `n` weights of `b` bytes at sparsity `s` takes
  `n/8 + (1 - s)·n·b` bytes. Removed weights are loaded as exact +0.0, kept
  weights bit for bit, kept zeros included. A leaf without a mask is packed in
  the same way if its zeros make that smaller. The file is written under a
  temporary name in the same folder and renamed when complete.

  Args:
    path: the file, usually `*.safetensors`.
    params: any pytree of arrays.
    masks: a tree like `params` of uint8 masks (1 = kept) or None.
    layout: "packed"; "int8", which rounds matrices to one byte per kept weight
      and a scale per 64 neighbours along the last axis; "dense" for plain
      safetensors that any tool reads; or "sparse-bitmask", the layout of
      compressed-tensors. The latter two hold no hashes, and "dense" holds no
      masks.
    metadata: JSON values to store in the file, for example a configuration.

  Example:
    >>> import tempfile, pathlib, numpy as np
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save(path, {"w": np.array([[0.0, 2.0]])}, metadata={"step": 3})
    >>> params, masks = load(path)
    >>> params["w"].tolist(), masks, read_metadata(path)
    ([[0.0, 2.0]], {'w': None}, {'step': 3})
  """
  rows, _ = _flatten(params)
  mask_leaves = _leaves.align(params, masks)
  warn_if_contradicted(params, masks, "save")
  tensors, leaves = [], {}
  for (name, keys, leaf), mask in zip(rows, mask_leaves, strict=True):
    array = _array(name, leaf)
    leaves[name] = (array, _mask(name, mask, array.shape))
    tensors.append(_layouts.Tensor(name, keys, array.dtype, array.shape))
  _layouts.write(
    path,
    tensors,
    lambda name: _layouts.content(leaves[name]),
    layout=layout,
    metadata=metadata,
  )


def load(path: str | os.PathLike, like: Any = None) -> tuple[Any, Any]:
  """Load parameters and masks from a checkpoint, and check its content.

  Args:
    path: a file written by `save`, plain safetensors, a file of
      compressed-tensors, or anything else that `open_checkpoint` reads.
    like: a pytree with the structure of the result. Shapes and dtypes are those
      of the file, so a shrunk model loads into the structure of the original.
      By default the result is nested dicts with the keys of the saved tree;
      names in files of other programs are split at "/".

  Returns:
    `(params, masks)`: NumPy arrays (`jax.device_put` places them on devices),
    and a tree of the same structure with a uint8 mask where one was saved, None
    elsewhere.

  Raises:
    FileFormatError: if the file is truncated, altered or malformed.

  Example:
    >>> import tempfile, pathlib, numpy as np
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save(path, {"w": np.array([0.0, 2.0])}, {"w": np.array([0, 1], "u1")})
    >>> params, masks = load(path)
    >>> params["w"].tolist(), masks["w"].tolist()
    ([0.0, 2.0], [0, 1])
  """
  with checkpoints.open_checkpoint(path) as file:
    names = list(file.tensors)
    # Hashing and copying release the interpreter lock.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      leaves = dict(zip(names, pool.map(file.read, names), strict=True))
    if like is None:
      return _nest(file, leaves)
  rows, treedef = _flatten(like)
  wanted = [name for name, _, _ in rows]
  missing = sorted(set(wanted) - set(names))
  extra = sorted(set(names) - set(wanted))
  if missing or extra:
    raise ValueError(
      f"{path} does not fit `like`: missing in the file {missing[:5]}, "
      f"unknown to `like` {extra[:5]}; load without `like` to see its tree"
    )
  params, masks = ([leaves[n][i] for n in wanted] for i in (0, 1))
  return treedef.unflatten(params), treedef.unflatten(masks)


def _insert(tree: Any, path: tuple[str | int, ...], leaf: Any) -> bool:
  """Put a leaf at a path of nested dicts; tell whether there was room.

  Keys of one dict are all names or all numbers: JAX sorts them.
  """
  for i, key in enumerate(path):
    if not isinstance(tree, dict) or any(
      type(other) is not type(key) for other in itertools.islice(tree, 1)
    ):
      return False
    if i + 1 < len(path):
      tree = tree.setdefault(key, {})
    elif key in tree:
      return False
    else:
      tree[key] = leaf
  return True


def _nest(file: checkpoints.Checkpoint, leaves: dict) -> tuple[Any, Any]:
  params: Any = {}
  masks: Any = {}
  for name, tensor in file.tensors.items():
    if not tensor.path:
      return leaves[name]
    for tree, leaf in zip((params, masks), leaves[name], strict=True):
      if not _insert(tree, tensor.path, leaf):
        raise FileFormatError(
          f"{file.path}: tensor {name!r} and another tensor have the same key "
          "in nested dicts; pass `like`"
        )
  return params, masks


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
  """Return the metadata that `save` stored in a file.

  Args:
    path: a file written by `save`.

  Returns:
    The metadata; empty if there is none.

  Example:
    >>> import tempfile, pathlib, numpy as np
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save(path, {"w": np.ones(2)}, metadata={"step": 3})
    >>> read_metadata(path)
    {'step': 3}
  """
  with _layouts.SparseFile(path) as file:
    return file.metadata
