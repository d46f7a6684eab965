"""A Hugging Face folder: shards of safetensors, an index, and what is beside.

The folder is input from outside: shards are files of this folder, every tensor
is in one shard, and index and shards agree, or the folder is refused.
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxpruner._tools import atomic, fingerprint, regular
from jaxpruner.sparse import _layouts, _peer_config, _staging
from jaxpruner.sparse import _safetensors as st
from jaxpruner.sparse._layouts import Content, Leaf, Tensor, Written

_INDEX = ".safetensors.index.json"
MAX_JSON = 100_000_000  # bytes of an index or a configuration
MAX_SHARDS = 10_000
MAX_FILES = 10_000  # copied beside the shards
# The same weights in other formats: a copy would still be dense.
WEIGHTS = (
  ".bin .h5 .msgpack .onnx .onnx_data .gguf .pt .pth .ckpt .ot .npz .tflite "
  ".safetensors"
).split()


def read_json(path: pathlib.Path) -> Any:
  """Parse a JSON file of a folder; any failure is a `FileFormatError`."""
  if path.stat().st_size > MAX_JSON:
    raise st.FileFormatError(f"{path}: more than {MAX_JSON} bytes of JSON")
  return st.parse_json(regular.read_bytes(path), str(path))


def inside(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Return a file of the folder; refuse links that lead elsewhere.

  In the cache of huggingface_hub, files are links to `../../blobs`: these are
  followed.
  """
  path = folder / name
  real = path.resolve()
  homes = [folder.resolve()]
  if folder.resolve().parent.name == "snapshots":
    homes.append(folder.resolve().parent.parent / "blobs")
  if not any(real.is_relative_to(home) for home in homes):
    raise st.FileFormatError(
      f"{path} is a link to {real}, outside the folder; copy the file there"
    )
  return path


def _shard_of(index: pathlib.Path) -> dict[str, str]:
  """Return tensor -> shard, as an index says."""
  content = read_json(index)
  where = content.get("weight_map") if isinstance(content, dict) else None
  if not isinstance(where, dict) or not where:
    raise st.FileFormatError(
      f"{index}: weight_map must map tensors to shards; it is missing or empty"
    )
  for name, shard in where.items():
    st.check_name(name, str(index))
    if (
      not isinstance(shard, str)
      or not shard.endswith(".safetensors")
      or not shard.isprintable()
      or shard != os.path.basename(shard.replace("\\", "/"))
      or shard.startswith(".")
    ):
      raise st.FileFormatError(
        f"{index}: tensor {name!r} is said to be in {shard!r:.100}; a shard is "
        "a *.safetensors file of the same folder"
      )
  return where


def copy_files(files: Mapping[str, pathlib.Path], target: pathlib.Path) -> None:
  """Copy files into a folder, each under its name there."""
  for name, path in files.items():
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "rb") as old, atomic.replacing(target / name) as new:
      shutil.copyfileobj(old, new)


def _edit(
  path: pathlib.Path, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
  """Change a JSON file, if it is there; what says the same stays as it is."""
  old = read_json(path) if path.exists() else None
  if isinstance(old, dict) and (new := change(old)) != old:
    atomic.write_bytes(path, json.dumps(new, indent=2).encode())


class Shards:
  """A folder of safetensors files; tensors are decoded on request."""

  def __init__(self, path: str | os.PathLike):
    path = pathlib.Path(path)
    self.path = path if path.is_dir() else path.parent
    indexes = sorted(p.name for p in self.path.glob("*" + _INDEX))
    if path != self.path:
      indexes = [path.name]
    if len(indexes) > 1:
      raise st.FileFormatError(
        f"{self.path}: several indexes, {', '.join(indexes)}; name one of them"
      )
    self.index = indexes[0] if indexes else None
    where = None
    if self.index:
      where = _shard_of(inside(self.path, self.index))
      names = sorted(set(where.values()))
    else:
      names = sorted(p.name for p in self.path.glob("*.safetensors"))
    if len(names) > MAX_SHARDS:
      raise st.FileFormatError(f"{self.path}: more than {MAX_SHARDS} shards")
    self._open = contextlib.ExitStack()
    try:
      self.shards = {name: self._shard(name) for name in names}
      self._home = self._homes(where)
    except BaseException:
      self._open.close()
      raise
    self.tensors = {
      name: self.shards[shard].tensors[name]
      for name, shard in self._home.items()
    }
    layouts = sorted({file.layout for file in self.shards.values()})
    self.layout = layouts[0] if len(layouts) == 1 else "packed"
    self.metadata: dict[str, Any] = {}

  def _shard(self, name: str) -> _layouts.SparseFile:
    path = inside(self.path, name)
    if not path.exists():
      raise st.FileFormatError(
        f"{self.path}: the shard {name} that {self.index} names is missing; "
        "fetch it again"
      )
    return self._open.enter_context(_layouts.SparseFile(path))

  def _homes(self, where: Mapping[str, str] | None) -> dict[str, str]:
    """Return tensor -> shard, and hold the index against the shards."""
    found: dict[str, str] = {}
    for shard, file in self.shards.items():
      for name in file.tensors:
        if name in found:
          raise st.FileFormatError(
            f"{self.path}: tensor {name!r} is in {found[name]} and in {shard}; "
            "remove one of them"
          )
        found[name] = shard
    if where is not None and where == self._parts():
      return found  # as compressed-tensors writes it: part by part
    for name, shard in (where or {}).items():
      if found.get(name) != shard:
        raise st.FileFormatError(
          f"{self.path}: {self.index} says tensor {name!r} is in {shard}, it "
          f"is in {found.get(name, 'no shard')}"
        )
    if where is not None and len(found) != len(where):
      extra = sorted(found.keys() - where.keys())
      raise st.FileFormatError(
        f"{self.path}: {found[extra[0]]} holds {extra[0]!r}, which "
        f"{self.index} does not name"
      )
    return found

  def _parts(self) -> dict[str, str]:
    """Return stored entry -> shard: several entries make a sparse tensor."""
    return {
      name: shard
      for shard, file in self.shards.items()
      for name in file.reader.entries
    }

  @property
  def kind(self) -> str:
    count = len(self.shards)
    what = "1 shard" if count == 1 else f"{count} shards"
    return f"Hugging Face folder, {what}"

  def __enter__(self) -> "Shards":
    return self

  def __exit__(self, *exc: object) -> None:
    self._open.close()

  def _file(self, name: str) -> _layouts.SparseFile:
    return self.shards[self._home[name]]

  def read(self, name: str) -> Leaf:
    return self._file(name).read(name)

  def chunks(self, name: str) -> Iterator[np.ndarray]:
    return self._file(name).chunks(name)

  def content(self, name: str) -> Content:
    return self._file(name).content(name)

  def _facts(self) -> dict[str, Any]:
    rows = {}
    for name in self.shards:
      about = os.stat(self.path / name)
      # Programs may set the time of writing, and archives give all their files
      # one; the time of the last change is the system's.
      rows[name] = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
    return {"folder": str(self.path.resolve()), "shards": rows}

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
  ) -> Written:
    """Write a folder with the same names and other content, shard by shard."""
    facts = {
      "input": self._facts(),
      "settings": {"layout": layout, **(facts or {})},
      "versions": fingerprint.versions("jaxpruner"),
    }
    others, left = self.other_files()
    if "config.json" in others:
      # Edited last; a broken one is refused before anything is written.
      read_json(others["config.json"])
    found = []
    with _staging.replacing(target, facts, overwrite) as parts:
      for name, file in self.shards.items():
        if (parts / name).exists():
          found.append(name)
        else:
          file.rewrite(
            parts / name,
            read,
            layout=layout,
            metadata={**file.metadata, **metadata},
            progress=progress,
          )
      copy_files(others, parts)
      self._describe(parts, layout or self.layout)
    return Written(left, found)

  def _describe(self, parts: pathlib.Path, layout: str) -> None:
    """Tell in index and `config.json` how others find the weights."""
    theirs = layout == _peer_config.FORMAT
    size = kept = 0
    where: dict[str, str] = {}
    for name in self.shards:
      with _layouts.SparseFile(parts / name) as file:
        stored = file.reader.entries if theirs else file.tensors
        where |= dict.fromkeys(stored, name)
        for tensor in file.tensors.values() if theirs else ():
          size += tensor.size
          kept += file.stored_values(tensor)
    if self.index:
      _edit(parts / self.index, lambda old: old | {"weight_map": where})
    share = 1 - kept / max(size, 1)
    _edit(
      parts / "config.json",
      lambda old: _peer_config.described(old, layout, share),
    )

  def other_files(self) -> tuple[dict[str, pathlib.Path], list[str]]:
    """Return the files to copy (configuration, tokenizer), and the others."""
    copied: dict[str, pathlib.Path] = {}
    left = []
    for count, path in enumerate(sorted(self.path.rglob("*"))):
      if count > MAX_FILES:
        raise st.FileFormatError(f"{self.path}: more than {MAX_FILES} files")
      name = str(path.relative_to(self.path))
      hidden = any(part.startswith(".") for part in pathlib.Path(name).parts)
      if path.is_dir() or name in self.shards or hidden:
        continue
      if path.suffix in WEIGHTS or (
        name.endswith(".index.json") and name != self.index
      ):
        left.append(name)
        continue
      real = inside(self.path, name)
      if not real.is_file():
        raise st.FileFormatError(
          f"{path} is neither a file nor a folder; remove it"
        )
      copied[name] = real
    return copied, left
