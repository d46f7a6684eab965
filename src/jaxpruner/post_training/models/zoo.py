"""The built-in models by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import sparsity_distributions
from jaxpruner.datasets.archives import Package, Source
from jaxpruner.post_training.models import (
  cifar10_cnn,
  llama,
  minilm,
  resnet50,
)


def _inner(*dense: str) -> Callable[[tuple[str, ...], Any], bool]:
  """Return a filter that takes all weights except those of these layers."""

  def filter_fn(names: tuple[str, ...], leaf: Any) -> bool:
    return names[0] not in dense and sparsity_distributions.default_filter(
      names, leaf
    )

  return filter_fn


class Model(NamedTuple):
  """A pretrained model with the functions to prune and evaluate it.

  Attributes:
    apply_fn: `(params, batch) -> outputs`.
    params: its parameters.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    kind: "text", "image" or "sentence".
    tokenizer: text -> token ids, for models of text.
    window: tokens per input.
    sample: `(rows, seed) -> token ids`, for a model that was trained only on
      synthetic text and is calibrated on its own samples.

  Example:
    >>> model = Model(
    ...   lambda params, x: x @ params["w"], {"w": np.ones((2, 1))},
    ...   filter_fn=lambda names, param: True, kind="image")
    >>> model.apply_fn(model.params, np.ones((1, 2))).tolist()
    [[2.0]]
  """

  apply_fn: Callable[[Any, Any], Any]
  params: Any
  filter_fn: Callable[[tuple[str, ...], Any], bool]
  kind: str
  tokenizer: Any = None
  window: int = 0
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
  """Load a built-in model and verify its archive.

  Args:
    name: one of `MODELS`.
    folder: the folder of its package; by default $JAXPRUNER_DATA or a user
      cache.

  Returns:
    The model with its parameters.

  Raises:
    DataError: the package is missing (the message says how to get it), altered
      or malformed.
    ValueError: there is no model of this name.

  Example:
    >>> load("ResNet50")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: model 'ResNet50' is unknown; choose from [...'ResNet-50', ...]
    >>> from jaxpruner.post_training.models import MODELS
    >>> MODELS["ResNet-50"].what
    'ImageNet, 25.6 M weights'
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
