"""Blocks that are done, in a folder, so that a long run can go on."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner.post_training.prune_report import Layer
from jaxpruner.sparse import _staging, files


class Finished:
  """The finished blocks of one job; without a folder, none are kept.

  Args:
    folder: where they are kept, or None.
    facts: what decides the result; a folder with other facts is refused.
  """

  def __init__(
    self, folder: str | os.PathLike | None, facts: Mapping[str, Any]
  ):
    self._folder = None if folder is None else pathlib.Path(folder)
    if self._folder is not None:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._job = _staging.claim(self._folder, facts)

  def _file(self, block: int) -> pathlib.Path:
    assert self._folder is not None
    return self._folder / f"block-{block}.safetensors"

  def save(
    self,
    block: int,
    leaves: Mapping[int, Any],
    masks: Mapping[int, Any],
    layers: list[Layer],
  ) -> None:
    """Keep a block: its parameters by index, their masks, its report."""
    if self._folder is None:
      return
    files.save(
      self._file(block),
      {str(i): leaf for i, leaf in leaves.items()},
      {str(i): mask for i, mask in masks.items()},
      metadata={
        "job": self._job, "layers": [dataclasses.asdict(l) for l in layers],
      },
    )  # fmt: skip

  def load(
    self, block: int, like: Mapping[int, Any]
  ) -> tuple[dict[int, Any], dict[int, Any], list[Layer]] | None:
    """Return what was saved of a block, or None."""
    if self._folder is None or not self._file(block).exists():
      return None
    path = self._file(block)
    cure = "delete it, and only this block is computed again"
    try:
      leaves, masks = files.load(path)
      about = files.read_metadata(path)
    except files.FileFormatError as e:
      raise files.FileFormatError(f"{e}; {cure}") from e
    if about.get("job") != self._job or leaves.keys() != set(map(str, like)):
      raise files.FileFormatError(f"{path} is a block of another job; {cure}")
    layers = [
      Layer(**row | {"shape": tuple(row["shape"])}) for row in about["layers"]
    ]
    return (
      {i: np.asarray(leaves[str(i)]) for i in like},
      {i: masks[str(i)] for i in like},
      layers,
    )
