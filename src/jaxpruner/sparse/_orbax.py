"""Orbax checkpoints: a tree of arrays, restored and saved by Orbax itself.

Orbax writes a tree in one call, so the whole tree is in memory once.
"""

import os
import pathlib
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxpruner import _leaves
from jaxpruner.sparse import _foreign, _staging
from jaxpruner.sparse import _safetensors as st
from jaxpruner.sparse._layouts import Content, Tensor


def _package() -> Any:
  try:
    import orbax.checkpoint as ocp
  except ImportError as e:
    raise ValueError(
      "an Orbax checkpoint is read by Orbax: pip install orbax-checkpoint"
    ) from e
  return ocp


class Orbax(_foreign.Foreign):
  """A folder written by `StandardCheckpointer` or `PyTreeCheckpointer`."""

  kind = "Orbax checkpoint"

  def __init__(self, path: str | os.PathLike):
    super().__init__(path)
    ocp = _package()
    absolute = pathlib.Path(os.path.abspath(path))
    try:
      with ocp.PyTreeCheckpointer() as checkpointer:
        about = checkpointer.metadata(absolute)
        about = getattr(about, "item_metadata", about)
        tree = getattr(about, "tree", about)
        args = jax.tree.map(
          lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )
        self._tree = checkpointer.restore(
          absolute, args=ocp.args.PyTreeRestore(restore_args=args)
        )
    except Exception as e:  # whatever a damaged folder makes Orbax raise
      raise st.FileFormatError(
        f"{path}: Orbax cannot restore it ({type(e).__name__}: {e!s:.300})"
      ) from e
    flat, self._treedef = jax.tree_util.tree_flatten_with_path(self._tree)
    self._arrays: dict[str, np.ndarray] = {}
    self._order: list[Any] = []
    for keys, leaf in flat:
      names = _leaves.path_names(keys)
      name = _leaves.join(names)
      self._order.append((name, leaf))
      if isinstance(leaf, np.ndarray) and leaf.dtype in st.DTYPE_NAMES:
        st.check_name(name, str(path))
        self._arrays[name] = leaf
        self.tensors[name] = Tensor(
          name, tuple(names), leaf.dtype, leaf.shape, stored_bytes=leaf.nbytes
        )

  def array(self, name: str) -> np.ndarray:
    return self._arrays[name]

  def write(
    self,
    target: str | os.PathLike,
    read: Callable[[str], Content],
    tensors: Iterable[Tensor],
    overwrite: bool,
  ) -> None:
    ocp = _package()
    for tensor in tensors:
      new = np.empty(tensor.size, tensor.dtype)
      at = 0
      for piece in _foreign.patched(read(tensor.name)):
        new[at : at + piece.size] = piece
        at += piece.size
      self._arrays[tensor.name] = new.reshape(tensor.shape)
    leaves = [self._arrays.get(name, leaf) for name, leaf in self._order]
    tree = self._treedef.unflatten(leaves)
    facts = {"input": str(self.path.resolve())}
    with _staging.replacing(target, facts, overwrite) as parts:
      for entry in parts.iterdir():  # of a run that was interrupted
        if entry.is_dir():
          shutil.rmtree(entry)
        elif entry.name != "job.json":
          entry.unlink()
      # Orbax insists on a folder of its own.
      with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(parts / "new", tree, force=True)
      for entry in (parts / "new").iterdir():
        entry.rename(parts / entry.name)
      (parts / "new").rmdir()
