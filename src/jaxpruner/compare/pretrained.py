"""`--init`: the weights of a checkpoint, matched to a task's parameters."""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _tools
from jaxpruner.compare.tasks.base import Task
from jaxpruner.inspect import cost
from jaxpruner.sparse import checkpoints

PyTree = Any


def read(path: str, task: Task) -> tuple[PyTree, PyTree]:
  """Return (params, state) of a checkpoint, in the structure of a task.

  A leaf `a/kernel` of the task is found under this name, or behind one prefix
  that all leaves share, such as `params/a/kernel`. Dots in names count as
  slashes. The state (batch statistics) is optional, under its own prefix.

  Args:
    path: safetensors, an Orbax folder, msgpack, npz, or a model folder.
    task: the task.

  Returns:
    The parameters and the state; None if the file has no state.

  Raises:
    ValueError: the file cannot be read, or a leaf is missing, has another shape
      or is not finite.
  """
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  try:
    with checkpoints.open_checkpoint(path) as opened:
      names = {name.replace(".", "/"): name for name in opened.tensors}
      load = lambda name: np.asarray(opened.read(names[name])[0])
      params = matched(path, shapes, names, load)
      state = None
      if task.has_state:
        like = jax.eval_shape(task.init_state, jax.random.key(0))
        if all(_found(like, names).values()):
          state = matched(path, like, names, load)
  except (OSError, checkpoints.FileFormatError) as error:
    raise ValueError(f"--init {path}: {error}") from error
  return params, state


def _found(shapes: PyTree, names: Mapping[str, str]) -> dict[str, str]:
  """Return leaf -> its name in the file, or "", with one common prefix."""
  wanted = [
    cost.path_name(path)
    for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]
  ]
  first = wanted[0] if wanted else ""
  prefixes = [n.removesuffix(first) for n in names if n.endswith(first)]
  prefixes = [p for p in prefixes if not p or p.endswith("/")] or [""]
  hits = lambda prefix: sum(prefix + name in names for name in wanted)
  best = max(sorted(prefixes, key=len), key=hits)
  return {name: best + name if best + name in names else "" for name in wanted}


def matched(
  path: str, shapes: PyTree, names: Mapping[str, str], load: Any
) -> PyTree:
  """Return a tree like `shapes` with the arrays of a checkpoint.

  Args:
    path: the checkpoint, for error messages.
    shapes: the tree to fill.
    names: the names in the checkpoint, with slashes.
    load: name -> array.

  Returns:
    The tree, in the dtypes of `shapes`.

  Raises:
    ValueError: a leaf is missing, has another shape or is not finite.

  Example:
    >>> shapes = {"a": jax.ShapeDtypeStruct((2,), "float32")}
    >>> tree = matched("x", shapes, {"params/a": ""}, lambda name: np.ones(2))
    >>> tree["a"].tolist()
    [1.0, 1.0]
  """
  where = _found(shapes, names)

  def leaf(place, like):
    name = cost.path_name(place)
    if not where[name]:
      hint = _tools.nearest(name, names)
      raise ValueError(f"--init {path}: has no {name!r}; {hint}")
    array = load(where[name])
    if array.shape != like.shape:
      raise ValueError(
        f"--init {path}: {where[name]!r} is {array.shape}, the task's "
        f"{name!r} is {like.shape}; set the task's options (--set width=...) "
        "to those of the checkpoint"
      )
    array = jnp.asarray(array, like.dtype)
    if not bool(jnp.isfinite(array).all()):
      raise ValueError(f"--init {path}: {where[name]!r} is not finite")
    return array

  return jax.tree_util.tree_map_with_path(leaf, shapes)


def digest(path: str) -> str:
  """Return the SHA-256 of a checkpoint: of a file, or of all files in a folder.

  Args:
    path: the checkpoint.

  Returns:
    The hash; "" for no checkpoint.

  Example:
    >>> digest("")
    ''
  """
  if not path:
    return ""
  root = pathlib.Path(path)
  if not root.exists():
    raise ValueError(f"--init {path}: there is no such file or folder")
  total = hashlib.sha256()
  for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
    if file.is_file():
      total.update(f"{file.relative_to(root)}\n".encode())
      with open(file, "rb") as opened:
        total.update(hashlib.file_digest(opened, "sha256").digest())
  return total.hexdigest()
