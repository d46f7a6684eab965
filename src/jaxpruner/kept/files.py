"""Save and load kept weights; nothing dense is written or read."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.kept import layouts, tensors
from jaxpruner.kept.layouts import Layout
from jaxpruner.sparse import files

_KEY = "jaxpruner.kept"


def save(
  path: str | os.PathLike,
  params: Any,
  *,
  metadata: Mapping[str, Any] | None = None,
) -> None:
  """Save weights at kept size: values and positions, checked by hashes.

  Args:
    path: the file, usually `*.safetensors`.
    params: a tree with `KeptTensor` leaves.
    metadata: JSON values to store in the file.

  Example:
    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> kept.save(path, {"w": kept.from_dense(jnp.eye(3))})
    >>> kept.load(path)["w"].todense().tolist() == jnp.eye(3).tolist()
    True
  """
  forms: dict[str, Any] = {}

  def plain(where, leaf):
    if not tensors.is_kept(leaf):
      return leaf
    layout = leaf.layout
    name = jax.tree_util.keystr(where, simple=True, separator="/")
    forms[name] = [list(layout.shape), layout.split, layout.name]
    # By slot, so that a loaded model and a moment saved beside it agree.
    order = np.asarray(layout.by_row.slots)
    positions = np.empty(layout.count, np.int32)
    positions[order] = np.asarray(layout.positions())
    return {"positions": positions, "values": leaf.values}

  tree = jax.tree_util.tree_map_with_path(
    plain, params, is_leaf=tensors.is_kept
  )
  files.save(path, tree, metadata={**(metadata or {}), _KEY: forms})


def load(path: str | os.PathLike) -> Any:
  """Load weights that `save` wrote.

  Args:
    path: the file.

  Returns:
    Nested dicts with `KeptTensor` leaves.

  Raises:
    FileFormatError: if the file is truncated, altered, or not of this kind.

  Example:
    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> kept.save(path, {"w": kept.from_dense(jnp.eye(3)), "b": jnp.ones(3)})
    >>> kept.load(path)["b"].tolist()
    [1.0, 1.0, 1.0]
  """
  forms = files.read_metadata(path).get(_KEY)
  if not isinstance(forms, dict):
    raise files.FileFormatError(
      f"{path}: holds no kept weights; load it with jaxpruner.sparse.load"
    )
  tree, _ = files.load(path)
  for name, form in forms.items():
    parent, keys = tree, name.split("/")
    try:
      for key in keys[:-1]:
        parent = _child(parent, key)
      last = keys[-1] if keys[-1] in parent else int(keys[-1])
      parent[last] = _tensor(path, name, parent[last], form)
    except (KeyError, TypeError, ValueError) as error:
      raise files.FileFormatError(
        f"{path}: tensor {name!r} does not hold kept weights: {error}"
      ) from error
  return tree


def _child(tree: Any, key: str) -> Any:
  return tree[key] if key in tree else tree[int(key)]


def _tensor(path: Any, name: str, entry: Any, form: Any) -> tensors.KeptTensor:
  shape, split, own = form
  shape, positions, values = tuple(shape), entry["positions"], entry["values"]
  split = tensors.check_form(shape, values.dtype, split, name)
  inside = (positions >= 0) & (positions < int(np.prod(shape)))
  distinct = len(np.unique(positions)) == len(positions)
  if values.shape != positions.shape or not (inside.all() and distinct):
    raise files.FileFormatError(
      f"{path}: tensor {name!r}: positions must be distinct, inside shape "
      f"{shape}, one per value"
    )
  slots = jnp.arange(len(values), dtype=jnp.int32)
  layout: Layout = layouts.arrange(
    jnp.asarray(positions), slots, shape, split, own
  )
  return tensors.KeptTensor(jnp.asarray(values), layout)
