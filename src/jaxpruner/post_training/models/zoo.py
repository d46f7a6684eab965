"""The built-in models by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import sparsity_distributions
from jaxpruner.archives import Package, Source
from jaxpruner.post_training.models import (
  cifar10_cnn,
  llama,
  minilm,
  resnet50,
)


def _inner(*dense: str) -> Callable[[tuple[str, ...], Any], bool]:
  """Take weights but those of these layers: first ones, embeddings, heads."""

  def filter_fn(names: tuple[str, ...], leaf: Any) -> bool:
    return names[0] not in dense and sparsity_distributions.default_filter(
      names, leaf
    )

  return filter_fn


class Model(NamedTuple):
  """A pretrained model and what is needed to prune and judge it."""

  apply_fn: Callable[[Any, Any], Any]
  params: Any
  filter_fn: Callable[[tuple[str, ...], Any], bool]
  kind: str  # "text", "image" or "sentence"
  tokenizer: Any = None
  window: int = 0  # tokens it sees at once
  # (rows, seed) -> token ids; of a model that knows only its own kind of text.
  sample: Callable[[int, int], np.ndarray] | None = None


class Entry(NamedTuple):
  """How a model is fetched and loaded."""

  what: str
  package: Package
  load: Callable[[str | None], Model]


def _language(loader: Callable[..., Any], window: int):
  def load(folder: str | None) -> Model:
    apply_fn, params, tokenizer = loader(folder)
    filter_fn = _inner("embed")
    return Model(apply_fn, params, filter_fn, "text", tokenizer, window)

  return load


def _stories(folder: str | None) -> Model:
  model = _language(llama.load_stories, 256)(folder)
  apply_fn: Any = model.apply_fn
  (config,) = apply_fn.args

  def sample(rows: int, seed: int) -> np.ndarray:
    key, window = jax.random.key(seed), model.window
    return np.asarray(llama.sample(config, model.params, key, rows, window))

  return model._replace(sample=sample)


def _resnet50(folder: str | None) -> Model:
  params = resnet50.load(folder)
  return Model(resnet50.apply, params, _inner("conv1", "fc1000"), "image")


def _cifar10_cnn(folder: str | None) -> Model:
  params = cifar10_cnn.load(folder)
  return Model(cifar10_cnn.apply, params, _inner("conv0", "dense2"), "image")


def _minilm(folder: str | None) -> Model:
  params, tokenizer = minilm.load(folder)
  filter_fn = _inner("words", "positions", "types")
  return Model(minilm.apply, params, filter_fn, "sentence", tokenizer, 128)


MODELS = {
  "stories15M": Entry(
    "Llama, 15.2 M weights, f32",
    llama.STORIES,
    _stories,
  ),
  "SmolLM2-135M": Entry(
    "SmolLM2-135M-Instruct, GGUF",
    llama.SMOLLM2,
    _language(llama.load_smollm2, 512),
  ),
  "ResNet-50": Entry("ImageNet, 25.6 M weights", resnet50.RESNET50, _resnet50),
  "CIFAR-10-CNN": Entry("0.97 M weights, HDF5", cifar10_cnn.CNN, _cifar10_cnn),
  "MiniLM-L6": Entry(
    "all-MiniLM-L6-v2, 22.7 M weights", minilm.MINILM, _minilm
  ),
}


def load(name: str, folder: str | None = None) -> Model:
  """Load a built-in model, its archive verified.

  Args:
    name: one of `MODELS`.
    folder: where its package lies; by default $JAXPRUNER_DATA or a user cache.

  Raises:
    DataError: the package is missing (the message says how to get it), altered
      or malformed.
  """
  if name not in MODELS:
    raise ValueError(f"model {name!r} is unknown; choose from {list(MODELS)}")
  return MODELS[name].load(folder)


SOURCES = {
  name: Source("oneshot", entry.what, entry.package.command, entry.package.find)
  for name, entry in MODELS.items()
} | {
  "photos": Source(
    "oneshot", "20 photos of ImageNet", resnet50.PHOTOS.command,
    resnet50.PHOTOS.find,
  )
}  # fmt: skip
