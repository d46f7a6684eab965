"""The process of a rival for `models.py`, in an environment of its own.

  python benchmarks/rival_models.py NAME WEIGHTS.npz FOLDER THREADS RIVAL

It writes the model as ONNX, compiles it with the rival (`onnxruntime` or
`deepsparse`), stores its output in FOLDER, and then runs it once for each line
that comes, answering with the seconds.
"""

import contextlib
import pathlib
import sys
import time

import model_zoo
import numpy as np


def onnxruntime(path, threads):
  """Dense, with its idle threads asleep while others are timed."""
  import onnxruntime as ort

  options = ort.SessionOptions()
  options.intra_op_num_threads = threads
  options.add_session_config_entry("session.intra_op.allow_spinning", "0")
  options.log_severity_level = 3
  session = ort.InferenceSession(
    path, options, providers=["CPUExecutionProvider"]
  )
  return lambda x: session.run(None, {"x": x})[0]


def deepsparse(path, threads):
  """DeepSparse, which skips zeros."""
  from deepsparse import Engine

  engine = Engine(model=path, batch_size=1, num_cores=threads)
  return lambda x: engine.run([x])[0]


RIVALS = {"onnxruntime": onnxruntime, "deepsparse": deepsparse}


def main() -> None:
  name, weights, place, threads, rival = sys.argv[1:]
  folder = pathlib.Path(place)
  model, shape = model_zoo.MODELS[name]
  arrays = dict(np.load(weights))
  x = arrays.pop("x")
  if x.ndim == 4:
    x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
  path = str(folder / f"{rival}.onnx")
  # Only answers may go to the standard output.
  answers = sys.stdout
  with contextlib.redirect_stdout(sys.stderr):
    model_zoo.Onnx(arrays).save(model, shape, path)
    run = RIVALS[rival](path, int(threads))
    y = run(x)
    if y.ndim == 4:
      y = y.transpose(0, 2, 3, 1)
    np.save(folder / f"{rival}.npy", y)
  print("ready", file=answers, flush=True)
  for _ in sys.stdin:
    start = time.perf_counter()
    run(x)
    print(time.perf_counter() - start, file=answers, flush=True)


if __name__ == "__main__":
  main()
