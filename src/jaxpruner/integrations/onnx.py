"""ONNX: store the weights of an exported model as sparse initializers.

`jax2onnx.to_onnx` turns a JAX function into ONNX with its weights as dense
initializers. Those with many zeros become `sparse_initializer`s: the kept
values and their indices, which runtimes expand when they load the model.
"""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def sparsify(model: Any) -> Any:
  """Return the model with initializers stored sparse where that is smaller.

  ONNX stores an index in 8 bytes, so a float32 weight must have more than two
  thirds zeros. Values are stored exactly, with +0.0 elsewhere; tensors that
  contain -0.0 stay dense.

  Args:
    model: an ONNX model, a `ModelProto`; it is not changed.

  Returns:
    A new `ModelProto`.

  Example:
    >>> weight = np.zeros((4, 4), np.float32)
    >>> weight[0, 1] = 3.0
    >>> graph = helper.make_graph(
    ...   [], "g", [], [], [numpy_helper.from_array(weight, "w")])
    >>> sparse = sparsify(helper.make_model(graph)).graph
    >>> len(sparse.initializer), len(sparse.sparse_initializer)
    (0, 1)
    >>> numpy_helper.to_array(sparse.sparse_initializer[0].indices).tolist()
    [1]
  """
  result = onnx.ModelProto()
  result.CopyFrom(model)
  graph = result.graph
  dense = list(graph.initializer)
  del graph.initializer[:]
  for tensor in dense:
    array = numpy_helper.to_array(tensor)
    flat = np.ascontiguousarray(array).reshape(-1)
    places = np.flatnonzero(flat)
    size = len(places) * (8 + flat.itemsize)
    lossy = flat.dtype.kind != "f" or np.signbit(flat[flat == 0]).any()
    if size >= flat.nbytes or lossy or not len(places):
      graph.initializer.append(tensor)
      continue
    values = numpy_helper.from_array(flat[places], tensor.name)
    indices = numpy_helper.from_array(places.astype(np.int64), "")
    graph.sparse_initializer.append(
      helper.make_sparse_tensor(values, indices, list(array.shape))
    )
  return result
