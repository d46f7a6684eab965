"""Save and load kept weights; nothing dense is written or read."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.kept import layouts, tensors
from jaxpruner.kept.blocks import BlockLayout, grid_of
from jaxpruner.kept.places import fold
from jaxpruner.sparse import _safetensors, files
from jaxpruner.sparsity_types import Block

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
    block = layout.kind.spec() if isinstance(layout, BlockLayout) else None
    forms[name] = [
      list(layout.shape), layout.split, layout.name, block, layout.axis
    ]  # fmt: skip
    # By slot, so that a loaded model and a moment saved beside it agree.
    positions = np.asarray(layout.over(lambda one: one.at_slots()))
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
    except (IndexError, KeyError, TypeError, ValueError) as error:
      raise files.FileFormatError(
        f"{path}: tensor {name!r} does not hold kept weights: {error}"
      ) from error
  return tree


def _child(tree: Any, key: str) -> Any:
  return tree[key] if key in tree else tree[int(key)]


def _tensor(path: Any, name: str, entry: Any, form: Any) -> tensors.KeptTensor:
  shape, split, own, block, axis = _checked(form)
  if not isinstance(entry, dict):
    raise ValueError("it is one array, not positions and values")
  positions, values = entry["positions"], entry["values"]
  if isinstance(positions, dict | list) or isinstance(values, dict | list):
    raise ValueError("its positions and its values must be one array each")
  kind = None if block is None else Block.from_spec(block)
  if (kind is None) != (block is None) or not isinstance(kind, Block | None):
    raise ValueError(f"block={block!r} is unknown")
  split = tensors.check_form(shape, values.dtype, split, name, kind, axis)
  inner = tuple(d for i, d in enumerate(shape) if i != axis)
  grid = size = fold(inner, split)
  if kind is not None:
    grid = grid_of(size, kind.block_shape)
  units = int(np.prod(grid))
  lead = () if axis is None else (shape[axis],)
  rows = positions.reshape(*(lead or (1,)), -1)
  inside = (positions >= 0) & (positions < units)
  distinct = all(len(np.unique(row)) == len(row) for row in rows)
  wanted = positions.shape + (() if kind is None else kind.block_shape)
  fits = positions.ndim == len(lead) + 1 and positions.shape[:-1] == lead
  if not (fits and values.shape == wanted and inside.all() and distinct):
    raise files.FileFormatError(
      f"{path}: tensor {name!r}: positions must be distinct, inside shape "
      f"{shape}, one per value (or block)"
    )
  places = [_layout(row, inner, split, own, kind) for row in rows]
  layout = places[0]
  if axis is not None:
    stacked: Any = jax.tree.map(lambda *a: jnp.stack(a), *places)
    layout = tensors.restack(stacked, shape, axis)
  return tensors.KeptTensor(jnp.asarray(values), layout)


def _checked(form: Any) -> tuple[tuple[int, ...], int, str, Any, Any]:
  """Return shape, split, name, block and axis, or raise ValueError."""
  if not isinstance(form, list) or not 3 <= len(form) <= 5:
    raise ValueError(f"its form {form!r:.60} must be a list of 3 to 5 entries")
  # Files of single weights may end before the block and the axis.
  shape, split, own, block, axis = [*form, None, None][:5]
  whole = lambda n: type(n) is int
  if (
    not isinstance(shape, list)
    or len(shape) > _safetensors.MAX_RANK
    or not all(whole(n) and 0 <= n <= layouts.LIMIT for n in shape)
  ):
    raise ValueError(f"shape {shape!r:.60} must be a list of whole numbers")
  if not (
    whole(split)
    and isinstance(own, str)
    and isinstance(block, str | None)
    and (axis is None or whole(axis))
  ):
    raise ValueError(
      f"split={split!r:.20}, name={own!r:.20}, block={block!r:.20}, "
      f"axis={axis!r:.20} must be an integer, two texts and an integer"
    )
  return tuple(shape), split, own, block, axis


def _layout(positions, shape, split, name, kind) -> Any:
  """Return the layout of one layer from the positions of its slots."""
  at = jnp.asarray(positions)
  if kind is None:
    slots = jnp.arange(len(positions), dtype=jnp.int32)
    return layouts.arrange(at, slots, shape, split, name)
  columns = grid_of(fold(shape, split), kind.block_shape)[1]
  return BlockLayout(at // columns, at % columns, shape, split, name, kind)
