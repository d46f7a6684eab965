"""A smaller model of the hub: some layers or experts gone, the rest renamed."""

import copy
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpruner._tools import atomic, fingerprint
from jaxpruner.post_training.models import decoder, decoder_config, hub
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.sparse import _layouts, _shards, _staging


class Reduced(NamedTuple):
  """A model with fewer layers or experts, and how it came from the whole one.

  Attributes:
    model: the smaller model, ready to run; its folder is that of the whole.
    config: its `config.json`.
    source: each tensor's name in the whole model.
    kept: what was kept, as indices: the layers, or per layer the experts or
      key-value heads.
    scores: what was decided by, in the same form.

  Example:
    >>> Reduced(None, {}, {}, [0, 2], [0.5, 0.1, 0.4]).kept
    [0, 2]
  """

  model: Any
  config: dict[str, Any]
  source: dict[str, str]
  kept: list[Any]
  scores: list[Any]


def reduced(
  model: hub.HubModel,
  config: dict[str, Any],
  name_of: Callable[[str], str],
  rows: Mapping[str, Sequence[int]],
  kept: list[Any],
  scores: list[Any],
  columns: Mapping[str, Sequence[int]] | None = None,
) -> Reduced:
  """Return the model that a new configuration describes.

  Args:
    model: the whole model.
    config: the new `config.json`.
    name_of: new name of a tensor -> its name in the whole model.
    rows: new name -> the rows that stay; others stay whole.
    kept: see `Reduced`.
    scores: see `Reduced`.
    columns: new name -> the columns that stay; others stay whole.
  """
  parsed = decoder_config.parse(config)
  source = {name: name_of(name) for name in parsed.shapes()}

  def chosen(tree: Mapping[str, Any], name: str) -> Any:
    array = tree[source[name]]
    if array is None:
      return None
    for axis, table in enumerate((rows, columns or {})):
      if name in table:
        array = array.take(np.asarray(table[name]), axis=axis)
    return array

  params, masks = (
    {name: chosen(tree, name) for name in source}
    for tree in (model.params, model.masks)
  )
  apply_fn = functools.partial(decoder.apply, parsed)
  small = hub.HubModel(apply_fn, params, masks, parsed, model.folder)
  return Reduced(small, config, source, kept, scores)


def of(model: hub.HubModel) -> tuple[Decoder, dict[str, Any]]:
  """Return the configuration of a decoder, parsed and as JSON."""
  if not isinstance(model.config, Decoder):
    raise ValueError(
      f"{model.folder}: no decoder; layers and experts are removed from "
      "decoders such as Llama or Mixtral"
    )
  return model.config, copy.deepcopy(dict(hub.read_config(model.folder)))


def save_folder(
  small: Reduced, target: str | os.PathLike, *, overwrite: bool = False
) -> None:
  """Write a smaller model as a folder that `transformers` loads.

  Tensors keep their dtypes and stay in the shard they came from; index and
  `config.json` are written anew, tokenizer and other files are copied. The
  folder appears whole or not at all.

  Args:
    small: what `prune_experts` or `drop_blocks` returned; `model.params` may
      have been pruned or trained since.
    target: the new folder.
    overwrite: replace a folder that exists.

  Example:
    >>> from jaxpruner.post_training import models
    >>> save_folder(Reduced(
    ...   models.HubModel(len, {}, {}, None, "no/such/folder"), {}, {}, [], []
    ... ), "new")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxpruner.sparse._safetensors.FileFormatError: no/such/folder: ...
  """
  if not os.path.isdir(small.model.folder):
    raise hub.FileFormatError(f"{small.model.folder}: no such folder")
  facts = {
    "config": small.config,
    "weights": fingerprint.arrays(list(small.model.params.values())),
  }
  where: dict[str, str] = {}
  with (
    _shards.Shards(small.model.folder) as file,
    _staging.replacing(target, facts, overwrite) as parts,
  ):
    for shard, stored in file.shards.items():
      tensors = []
      for name, old in small.source.items():
        if old in stored.tensors:
          shape = tuple(small.model.params[name].shape)
          dtype = stored.tensors[old].dtype
          tensors.append(_layouts.Tensor(name, (name,), dtype, shape))
      if not tensors:
        continue
      dtypes = {t.name: t.dtype for t in tensors}
      where |= dict.fromkeys(dtypes, shard)
      _layouts.write(
        parts / shard,
        tensors,
        functools.partial(_content, small, dtypes),
        layout="dense",
        metadata={"format": "pt"},
      )
    _shards.copy_files(file.other_files()[0], parts)
    size = sum(p.stat().st_size for p in parts.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": where}
    texts = {"config.json": small.config}
    if file.index:
      texts[file.index] = index
    for name, content in texts.items():
      atomic.write_bytes(parts / name, json.dumps(content, indent=2).encode())


def _content(
  small: Reduced, dtypes: Mapping[str, np.dtype], name: str
) -> _layouts.Content:
  array = np.asarray(small.model.params[name]).astype(dtypes[name])
  mask = small.model.masks.get(name)
  return _layouts.content((array, None if mask is None else np.asarray(mask)))
