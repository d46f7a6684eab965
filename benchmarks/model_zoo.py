"""Whole models for `models.py`, written once for JAX and for ONNX.

A model is a function of `ops` and an input. `ops.weight(name, shape)` is a
parameter; the other methods are layers. `Onnx` writes the same model as an ONNX
file: images are NHWC in JAX and NCHW there. This module does not import JAX, so
that the process of a rival, in an environment of its own, can import it.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Weights of layers that stay dense, as in published sparse networks.
KEPT_DENSE = ("stem", "depthwise", "bias", "scale")


def resnet50(o: Any, x: Any) -> Any:
  """ResNet-50 at 224×224, batch norms folded into the convolutions."""
  x = o.max_pool(o.relu(o.conv(x, "stem", 7, 64, 2)))
  width = 64
  for stage, blocks in enumerate((3, 4, 6, 3)):
    for i in range(blocks):
      name = f"stage{stage}/block{i}"
      stride = 2 if stage and not i else 1
      y = o.relu(o.conv(x, f"{name}/a", 1, width))
      y = o.relu(o.conv(y, f"{name}/b", 3, width, stride))
      y = o.conv(y, f"{name}/c", 1, 4 * width)
      if not i:
        x = o.conv(x, f"{name}/shortcut", 1, 4 * width, stride)
      x = o.relu(o.add(x, y))
    width *= 2
  return o.dense(o.mean_pool(x), "head", 1000)


def mobilenet(o: Any, x: Any) -> Any:
  """MobileNet v2 at 224×224, batch norms folded into the convolutions."""
  x, width = o.relu(o.conv(x, "stem", 3, 32, 2)), 32
  plan = [
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
    (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
  ]  # fmt: skip
  for stage, (factor, out, blocks, stride) in enumerate(plan):
    for i in range(blocks):
      name, inner, y = f"stage{stage}/block{i}", factor * width, x
      if factor > 1:
        y = o.relu(o.conv(y, f"{name}/expand", 1, inner))
      step = 1 if i else stride
      y = o.relu(o.conv(y, f"{name}/depthwise", 3, inner, step, inner))
      y = o.conv(y, f"{name}/project", 1, out)
      x = o.add(x, y) if step == 1 and width == out else y
      width = out
  return o.dense(o.mean_pool(o.relu(o.conv(x, "last", 1, 1280))), "head", 1000)


def unet(o: Any, x: Any) -> Any:
  """A U-Net at 128×128, widths 64 to 512, two convolutions per level."""

  def level(x, name, width):
    x = o.relu(o.conv(x, f"{name}/a", 3, width))
    return o.relu(o.conv(x, f"{name}/b", 3, width))

  sides = []
  x = o.relu(o.conv(x, "stem", 3, 64))
  for i, width in enumerate((64, 128, 256)):
    x = level(x, f"down{i}", width)
    sides.append(x)
    x = o.max_pool(x, 2)
  x = level(x, "middle", 512)
  for i, width in reversed(list(enumerate((64, 128, 256)))):
    x = o.concat(o.upsample(x), sides[i])
    x = level(x, f"up{i}", width)
  return o.conv(x, "out", 1, 8)


def bert(o: Any, x: Any) -> Any:
  """Four of BERT-base's blocks on 128 tokens: width 768, hidden 3072."""
  width, heads = 768, 12
  for i in range(4):
    name = f"block{i}"
    parts = [o.dense(x, f"{name}/{c}", width) for c in "qkv"]
    y = o.dense(o.attention(*parts, heads), f"{name}/o", width)
    x = o.norm(o.add(x, y), f"{name}/norm1")
    y = o.gelu(o.dense(x, f"{name}/up", 4 * width))
    x = o.norm(o.add(x, o.dense(y, f"{name}/down", width)), f"{name}/norm2")
  return x


def bert_vector(o: Any, x: Any) -> Any:
  """Four of BERT-base's blocks on one token."""
  return bert(o, x)


# Name: the model, and the shape of its input in JAX.
MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
  "resnet50": (resnet50, (1, 224, 224, 3)),
  "mobilenet": (mobilenet, (1, 224, 224, 3)),
  "unet": (unet, (1, 128, 128, 3)),
  "bert-1": (bert_vector, (1, 768)),
  "bert-128": (bert, (128, 768)),
}


def product(o: Any, x: Any) -> Any:
  """A single product, for `rivals.py`."""
  return o.matmul(x, "w")


# What a rival's process may be asked for.
LAYERS: dict[str, Callable[..., Any]] = {
  "product": product, **{name: model for name, (model, _) in MODELS.items()}
}  # fmt: skip


class Onnx:
  """Writes a model as an ONNX file.

  Args:
    weights: arrays by name, as JAX has them.
  """

  def __init__(self, weights: dict[str, np.ndarray]):
    self.weights = weights
    self.nodes: list[Any] = []
    self.constants: list[Any] = []
    self.shapes: dict[str, tuple[int, ...]] = {}

  def content(self, model: Callable[..., Any], shape: tuple[int, ...]) -> bytes:
    """Return the file of the model for inputs of one shape, NCHW."""
    import onnx
    from onnx import TensorProto, helper

    self.shapes["x"] = shape
    y = model(self, "x")
    kind = TensorProto.FLOAT
    graph = helper.make_graph(
      self.nodes,
      "model",
      [helper.make_tensor_value_info("x", kind, shape)],
      [helper.make_tensor_value_info(y, kind, self.shapes[y])],
      self.constants,
    )
    made = helper.make_model(
      graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    )
    onnx.checker.check_model(made)
    return made.SerializeToString()

  def _node(
    self, kind: str, *inputs: str, shape: Any = None, **attributes: Any
  ) -> str:
    from onnx import helper

    name = f"{kind}_{len(self.nodes)}"
    self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
    self.shapes[name] = self.shapes[inputs[0]] if shape is None else shape
    return name

  def _constant(self, value: Any, dtype: Any = np.float32) -> str:
    from onnx import numpy_helper

    name = f"constant_{len(self.constants)}"
    value = np.ascontiguousarray(np.asarray(value, dtype))
    self.constants.append(numpy_helper.from_array(value, name))
    self.shapes[name] = value.shape
    return name

  def conv(self, x, name, size, out, stride=1, groups=1):
    kernel = self.weights[name].transpose(3, 2, 0, 1)
    batch, _, rows, cols = self.shapes[x]
    shape = (batch, out, -(-rows // stride), -(-cols // stride))
    return self._node(
      "Conv", x, self._constant(kernel),
      self._constant(self.weights[f"{name}/bias"]), shape=shape,
      kernel_shape=[size, size], strides=[stride, stride], group=groups,
      pads=[size // 2] * 4,
    )  # fmt: skip

  def matmul(self, x, name):
    w = self.weights[name]
    shape = (*self.shapes[x][:-1], w.shape[-1])
    return self._node("MatMul", x, self._constant(w), shape=shape)

  def dense(self, x, name, out):
    del out  # that of the weight
    y = self.matmul(x, name)
    return self.add(y, self._constant(self.weights[f"{name}/bias"]))

  def relu(self, x):
    return self._node("Relu", x)

  def add(self, x, y):
    return self._node("Add", x, y)

  def max_pool(self, x, size=3):
    batch, width, rows, cols = self.shapes[x]
    return self._node(
      "MaxPool", x, shape=(batch, width, rows // 2, cols // 2),
      kernel_shape=[size, size], strides=[2, 2], pads=[(size - 1) // 2] * 4,
    )  # fmt: skip

  def mean_pool(self, x):
    batch, width, *_ = self.shapes[x]
    y = self._node("GlobalAveragePool", x, shape=(batch, width, 1, 1))
    return self._reshape(y, (batch, width))

  def upsample(self, x):
    batch, width, rows, cols = self.shapes[x]
    scales = self._constant([1, 1, 2, 2])
    return self._node(
      "Resize", x, "", scales, shape=(batch, width, 2 * rows, 2 * cols),
      mode="nearest", coordinate_transformation_mode="asymmetric",
      nearest_mode="floor",
    )  # fmt: skip

  def concat(self, x, y):
    batch, width, *space = self.shapes[x]
    shape = (batch, width + self.shapes[y][1], *space)
    return self._node("Concat", x, y, shape=shape, axis=1)

  def _reshape(self, x, shape):
    return self._node("Reshape", x, self._constant(shape, "i8"), shape=shape)

  def attention(self, q, k, v, heads):
    tokens, width = self.shapes[q]
    head = width // heads

    def split(x, order):
      x = self._reshape(x, (tokens, heads, head))
      shape = tuple((tokens, heads, head)[d] for d in order)
      return self._node("Transpose", x, shape=shape, perm=order)

    q, v = split(q, (1, 0, 2)), split(v, (1, 0, 2))
    k = split(k, (1, 2, 0))
    a = self._node("MatMul", q, k, shape=(heads, tokens, tokens))
    a = self._node("Div", a, self._constant(math.sqrt(head)))
    a = self._node("Softmax", a, axis=-1)
    y = self._node("MatMul", a, v, shape=(heads, tokens, head))
    y = self._node("Transpose", y, shape=(tokens, heads, head), perm=(1, 0, 2))
    return self._reshape(y, (tokens, width))

  def norm(self, x, name):
    def mean(x):
      shape = (*self.shapes[x][:-1], 1)
      return self._node("ReduceMean", x, shape=shape, axes=[-1])

    x = self._node("Sub", x, mean(x))
    spread = self._node("Mul", x, x)
    spread = self._node("Add", mean(spread), self._constant(1e-6))
    x = self._node("Div", x, self._node("Sqrt", spread))
    x = self._node("Mul", x, self._constant(self.weights[f"{name}/scale"]))
    return self.add(x, self._constant(self.weights[f"{name}/bias"]))

  def gelu(self, x):
    y = self._node("Erf", self._node("Div", x, self._constant(math.sqrt(2))))
    y = self._node("Add", y, self._constant(1.0))
    return self._node("Mul", self._node("Mul", x, y), self._constant(0.5))
