"""A model from a folder of the hub: `config.json` and its weights."""

import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpruner import sparsity_distributions
from jaxpruner.post_training.models import decoder, decoder_config, encoder
from jaxpruner.post_training.models.config_fields import Fields
from jaxpruner.sparse import _safetensors, _shards, prune_command

FileFormatError = _safetensors.FileFormatError
_KINDS = {
  **dict.fromkeys(decoder_config.MODEL_TYPES, decoder),
  **dict.fromkeys(encoder.MODEL_TYPES, encoder),
}


class HubModel(NamedTuple):
  """A model of a folder.

  Attributes:
    apply_fn: `(params, inputs)`: logits of a decoder, hidden states of an
      encoder.
    params: name -> array, as in the folder.
    masks: name -> mask, None where none was saved.
    config: the kind and sizes that `config.json` told.
    folder: where it is.

  Example:
    >>> HubModel(lambda params, x: x, {}, {}, None, "folder").folder
    'folder'
  """

  apply_fn: Callable[[Any, Any], Any]
  params: dict[str, Any]
  masks: dict[str, Any]
  config: Any
  folder: str


def filter_fn(names: tuple[str, ...], leaf: Any) -> bool:
  """Accept weights that are neither embeddings nor heads nor routers.

  Args:
    names: the path of the leaf.
    leaf: the leaf.

  Returns:
    Whether the leaf is prunable.
  """
  name = names[-1]
  if prune_command.is_end(name) or is_router(name):
    return False
  return sparsity_distributions.default_filter(tuple(name.split(".")), leaf)


def is_router(name: str) -> bool:
  """Tell whether a tensor chooses experts."""
  return name.split(".")[-2:-1] in (["gate"], ["shared_expert_gate"])


def named(folder: str | os.PathLike) -> pathlib.Path:
  """Return a folder's path; an empty one is not the current folder."""
  if not os.fspath(folder):
    raise FileFormatError("the path of a model's folder is empty; give one")
  return pathlib.Path(folder)


def read_config(folder: str | os.PathLike) -> Any:
  """Return the parsed `config.json` of a folder, not yet checked."""
  path = named(folder)
  if not (path / "config.json").exists():
    raise FileFormatError(
      f"{folder}: no config.json; a model of the hub is a folder that holds one"
    )
  return _shards.read_json(_shards.inside(path, "config.json"))


def load_folder(
  folder: str | os.PathLike, dtype: Any = jnp.float32
) -> HubModel:
  """Load a model of the hub from a folder, dense or packed.

  Known are the decoders Llama, SmolLM2, Mistral, Qwen 2 and 3, Gemma 2 and 3
  (text), OPT, Mixtral, Qwen 2 and 3 MoE, and the encoders BERT, MiniLM and ViT,
  by `model_type`.

  Args:
    folder: with `config.json` and safetensors; neither is trusted.
    dtype: of the parameters in memory.

  Returns:
    The model. `apply_fn(params, tokens)` gives the logits of a decoder.

  Raises:
    FileFormatError: the folder is damaged, or its weights are not those that
      its configuration describes.

  Example:
    >>> load_folder("no/such/folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxpruner.sparse._safetensors.FileFormatError: no/such/folder: no config...
  """
  found = read_config(folder)
  where = str(pathlib.Path(folder) / "config.json")
  kind = Fields(found, where).choice("model_type", tuple(_KINDS))
  with _shards.Shards(folder) as file:
    module: Any = _KINDS[kind]
    if module is encoder:
      # A model with a head puts its encoder's name in front.
      inner = any(n.startswith(f"{kind}.embeddings.") for n in file.tensors)
      config = encoder.parse(found, where, f"{kind}." if inner else "")
    else:
      config = decoder_config.parse(found, where)
    shapes = config.shapes()
    _check(folder, shapes, file, module is encoder)
    params, masks = {}, {}
    for name in shapes:
      array, masks[name] = file.read(name)
      params[name] = jnp.asarray(array).astype(dtype)
  apply_fn = functools.partial(module.apply, config)
  return HubModel(apply_fn, params, masks, config, os.fspath(folder))


def _check(
  folder: Any, shapes: decoder_config.Shapes, file: _shards.Shards, head: bool
) -> None:
  """Hold the stored tensors against those that the configuration describes."""
  for name, shape in shapes.items():
    tensor = file.tensors.get(name)
    if tensor is None:
      raise FileFormatError(
        f"{folder}: tensor {name!r} is missing; config.json describes it with "
        f"shape {shape}"
      )
    if tensor.shape != shape:
      raise FileFormatError(
        f"{folder}: tensor {name!r} has shape {tensor.shape}, config.json "
        f"describes {shape}"
      )
    if not jnp.issubdtype(tensor.dtype, np.floating):
      raise FileFormatError(
        f"{folder}: tensor {name!r} is {tensor.dtype}; weights are numbers of "
        "floating point (quantised folders are not known here)"
      )
  # A tied head may be stored beside the embedding; an encoder may have any.
  extra = sorted(file.tensors.keys() - shapes.keys() - {"lm_head.weight"})
  extra = [n for n in extra if not n.endswith("rotary_emb.inv_freq")]
  if extra and not head:
    raise FileFormatError(
      f"{folder}: config.json does not describe tensor {extra[0]!r} (of "
      f"{len(extra)} such)"
    )
