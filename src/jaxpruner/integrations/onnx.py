"""ONNX: store the weights of an exported model as sparse initializers.

`jax2onnx.to_onnx` turns a JAX function into ONNX with its weights as dense
initializers. Those with many zeros become `sparse_initializer`s: the kept
values and their places, which runtimes expand when they load the model.
"""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


def sparsify(model: Any) -> Any:
  """Return the model with initializers stored sparse where that is smaller.

  ONNX holds a place in 8 bytes, so a float32 weight must be more than two
  thirds zeros. Exact: every kept bit, and +0.0 elsewhere; tensors that hold
  -0.0 are kept as they are.
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
