"""What checkpoints of other formats have in common: dense leaves by name."""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxpruner.sparse import _layouts
from jaxpruner.sparse._layouts import Content, Leaf, Tensor, Written


def patched(content: Content) -> Iterator[np.ndarray]:
  """Yield the pieces of a tensor with +0.0 where they are not kept."""
  return map(_layouts.select, content.pieces())


# What the name of a file says that it holds.
_NAMED = {
  ".safetensors": "safetensors file",
  ".npz": "NumPy archive (.npz)",
  ".msgpack": "Flax msgpack file",
}


def _check_suffix(target: str | os.PathLike, kind: str) -> None:
  """Raise if a file's name says that it holds another format."""
  suffix = pathlib.Path(target).suffix
  if _NAMED.get(suffix, kind) != kind:
    raise ValueError(
      f"{os.fspath(target)} would be a {kind}, not what its name ends in; "
      "name it otherwise, or choose another --layout"
    )


class Foreign:
  """A checkpoint of another format; subclasses read and write its tensors."""

  kind = ""
  layout = "dense"

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    self.tensors: dict[str, Tensor] = {}
    self.metadata: dict[str, Any] = {}

  def __enter__(self) -> "Foreign":
    return self

  def __exit__(self, *exc: object) -> None:
    pass

  def array(self, name: str) -> np.ndarray:
    """Return one tensor."""
    raise NotImplementedError

  def write(
    self,
    target: str | os.PathLike,
    read: Callable[[str], Content],
    tensors: Iterable[Tensor],
    overwrite: bool,
  ) -> None:
    """Write a checkpoint of the same format."""
    raise NotImplementedError

  def read(self, name: str) -> Leaf:
    return self.array(name), None

  def content(self, name: str) -> Content:
    return _layouts.content(self.read(name))

  def chunks(self, name: str) -> Iterator[np.ndarray]:
    for values, kept in self.content(name).pieces():
      del kept
      yield values

  def rewrite(
    self,
    target: str | os.PathLike,
    read: Callable[[str], Content],
    *,
    layout: str | None = None,
    metadata: Mapping[str, Any],
    progress: Callable[[list[Tensor]], Iterable[Tensor]] = iter,
    overwrite: bool = False,
    facts: Mapping[str, Any] | None = None,
  ) -> Written | None:
    """Write the same format if dense, a safetensors file otherwise."""
    del facts
    tensors = list(self.tensors.values())
    is_same = layout in (None, "dense")
    _check_suffix(target, self.kind if is_same else "safetensors file")
    if is_same:
      self.write(target, read, progress(tensors), overwrite)
    else:
      _layouts.write(
        target, tensors, read, layout=layout, metadata=metadata,
        progress=progress,
      )  # fmt: skip
