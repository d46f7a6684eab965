"""Products with sparse weights against the best that is installed.

  python benchmarks/rivals.py                  (about 4 minutes)
  python benchmarks/rivals.py --quick          (prints, writes nothing)

48 cells: three shapes, four sparsities, four batches. Ours is the format that
`accelerate` chooses. Rivals are dense XLA, NumPy's BLAS and, where installed,
ONNX Runtime (`pip install onnx onnxruntime`) on the dense product and
DeepSparse (`pip install onnx deepsparse`) on the sparse one. All take turns in
one process; each cell divides the median of the best rival by ours, so that
above 1 is ahead. The outputs are compared before anything is timed.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import page

from jaxpruner import sparse

SHAPES = [(768, 3072), (3072, 768), (4096, 4096)]
SPARSITIES = [0.5, 0.8, 0.9, 0.95]
BATCHES = [1, 8, 64, 512]


def onnx_bytes(weight: np.ndarray, batch: int) -> bytes:
  """Return an ONNX model of x @ w."""
  from onnx import TensorProto, helper, numpy_helper

  rows, cols = weight.shape
  kind = TensorProto.FLOAT
  graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])],
    "product",
    [helper.make_tensor_value_info("x", kind, [batch, rows])],
    [helper.make_tensor_value_info("y", kind, [batch, cols])],
    [numpy_helper.from_array(weight, "w")],
  )
  model = helper.make_model(
    graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
  )
  return model.SerializeToString()


def onnxruntime(weight: np.ndarray, x: np.ndarray) -> Callable[[], Any]:
  """Return the product by ONNX Runtime, dense."""
  import onnxruntime as ort

  options = ort.SessionOptions()
  # Its idle threads would spin on the cores while the others are timed.
  options.add_session_config_entry("session.intra_op.allow_spinning", "0")
  options.log_severity_level = 3
  session = ort.InferenceSession(
    onnx_bytes(weight, len(x)), options, providers=["CPUExecutionProvider"]
  )
  return lambda: session.run(None, {"x": x})[0]


def deepsparse(weight: np.ndarray, x: np.ndarray) -> Callable[[], Any]:
  """Return the product by DeepSparse, which skips zeros."""
  import tempfile

  from deepsparse import compile_model

  with tempfile.NamedTemporaryFile(suffix=".onnx", delete=False) as file:
    file.write(onnx_bytes(weight, len(x)))
  engine = compile_model(file.name, batch_size=len(x))
  return lambda: engine.run([x])[0]


def rivals() -> dict[str, Callable[[np.ndarray, np.ndarray], Any]]:
  """Return the installed ones, by name."""
  product = jax.jit(jnp.matmul)

  def xla(weight, x):
    arrays = jnp.asarray(x), jnp.asarray(weight)
    return lambda: product(*arrays)

  found: dict[str, Any] = {"XLA": xla, "BLAS": lambda w, x: lambda: x @ w}
  has_onnx = importlib.util.find_spec("onnx") is not None
  for name, make in (("onnxruntime", onnxruntime), ("deepsparse", deepsparse)):
    if has_onnx and importlib.util.find_spec(name) is not None:
      found[name] = make
  return found


def cell(
  weight: np.ndarray, x: np.ndarray, makers: dict[str, Any], repeats: int
) -> dict[str, Any]:
  """Return the format we choose, and the median seconds of all."""
  fast, report = sparse.accelerate(
    lambda w, x: x @ w, jnp.asarray(weight), jnp.asarray(x), cache=None
  )
  ours = jnp.asarray(x)
  runs = {name: make(weight, x) for name, make in makers.items()}
  runs["ours"] = lambda: fast(ours)
  want = np.asarray(runs["XLA"]())
  for name, run in runs.items():
    error = np.abs(np.asarray(run()) - want).max() / np.abs(want).max()
    if not error < 1e-4:
      raise AssertionError(f"{name} differs from XLA by {error:.1e}")
  times = page.interleave(*runs.values(), repeats=repeats)
  medians = [float(np.median(t)) for t in times]
  found: dict[str, Any] = dict(zip(runs, medians, strict=True))
  return found | {"format": report.layers[0].format}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true", help="few repeats")
  quick = parser.parse_args().quick
  start = time.time()
  makers = rivals()
  rng = np.random.default_rng(0)
  rows, ahead = [], 0
  for shape in SHAPES:
    for sparsity in SPARSITIES:
      kept = rng.random(shape) >= sparsity
      weight = np.where(kept, rng.standard_normal(shape), 0).astype("f4")
      row = ["×".join(map(str, shape)), f"{sparsity:.0%}"]
      for batch in BATCHES:
        x = rng.standard_normal((batch, shape[0]), np.float32)
        repeats = 5 if quick else 12 if batch == 512 else 60
        found = cell(weight, x, makers, repeats)
        best = min(makers, key=lambda name: found[name])
        ratio = found[best] / found["ours"]
        ahead += ratio >= 1
        row.append(f"{ratio:.2f} ({found['format']}; {best})")
        print(row[0], row[1], batch, row[-1], flush=True)
      rows.append(row)
  head = ["shape", "sparsity", *(f"batch {b}" for b in BATCHES)]
  sections = [
    f"The best of {', '.join(makers)}, divided by ours, by median time; in "
    "brackets our format and the best rival. "
    f"Ahead in **{ahead} of {len(rows) * len(BATCHES)}** cells.",
    page.table(head, rows),
  ]
  if quick:
    print("\n\n".join(sections))
  else:
    page.write(
      "rivals", "Products against the best installed", sections,
      time.time() - start,
    )  # fmt: skip


if __name__ == "__main__":
  main()
