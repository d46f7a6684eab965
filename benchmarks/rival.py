"""What products and models are measured against, each in its own process.

A rival's process is stopped while it is not its turn: idle threads of ONNX
Runtime, DeepSparse and BLAS spin, and would take a core from whoever is timed.
This module is both sides. Imported, `Rival` starts a process and asks it:

  rival = Rival(PYTHON, "deepsparse", cores=2)
  y = rival.load("resnet50", "w.npz", x)   # None if it does not run here
  seconds = rival.spell(0.05)              # a list: run for 50 ms

Run as a script by the interpreter PYTHON, it answers. That environment needs
`numpy`, and of `onnx` with `onnxruntime`, `onnx` with `deepsparse`, and `mkl`
those that are to be measured; it does not need JAX.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import model_zoo
import numpy as np

NAMES = ("onnxruntime", "deepsparse", "blas", "mkl")
# Runs before a spell is timed: the caches are those of who ran before.
WARM = 2


class Rival:
  """A rival's process.

  Args:
    python: its interpreter.
    name: one of `NAMES`.
    cores: how many threads.
  """

  def __init__(self, python: str, name: str, cores: int):
    self.name = name
    self._folder = tempfile.TemporaryDirectory()
    self._log = pathlib.Path(self._folder.name, "log")
    command = [python, __file__, name, str(cores)]
    with self._log.open("w") as log:
      self._process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": str(cores),
                                     "MKL_NUM_THREADS": str(cores)},
      )  # fmt: skip

  def _ask(self, *request: Any) -> Any:
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    try:
      self._process.send_signal(signal.SIGCONT)
      print(json.dumps(request), file=self._process.stdin, flush=True)
      answer = self._process.stdout.readline()
      self._process.send_signal(signal.SIGSTOP)
    except (BrokenPipeError, ProcessLookupError):
      return None
    return json.loads(answer) if answer else None

  def load(
    self, model: str, weights: str | pathlib.Path, x: np.ndarray
  ) -> np.ndarray | None:
    """Give it a model; return the model's output, or None if it cannot."""
    folder = pathlib.Path(self._folder.name)
    np.save(folder / "x.npy", x)
    if self._ask("load", model, str(weights), str(folder)) is None:
      print(f"{self.name}: {self._log.read_text()[-300:]}", file=sys.stderr)
      return None
    return np.load(folder / "y.npy")

  def spell(self, seconds: float) -> list[float]:
    """Run the model for a while; return the seconds of each run."""
    taken = self._ask("spell", seconds)
    if taken is None:
      raise RuntimeError(f"{self.name} died: {self._log.read_text()[-300:]}")
    return taken

  def __enter__(self) -> "Rival":
    return self

  def __exit__(self, *_: Any) -> None:
    self._process.kill()
    self._process.wait()
    self._folder.cleanup()


def spell(run: Callable[[], Any], seconds: float) -> list[float]:
  """Run a function for a while; return the seconds of each run."""
  for _ in range(WARM):
    run()
  taken: list[float] = []
  end = time.perf_counter() + seconds
  while not taken or time.perf_counter() < end:
    start = time.perf_counter()
    run()
    taken.append(time.perf_counter() - start)
  return taken


def onnxruntime(model, weights, x, threads):
  """Dense."""
  import onnxruntime as ort

  options = ort.SessionOptions()
  options.intra_op_num_threads = threads
  options.log_severity_level = 3
  session = ort.InferenceSession(
    _onnx(model, weights, x), options, providers=["CPUExecutionProvider"]
  )
  return lambda: session.run(None, {"x": x})[0]


def deepsparse(model, weights, x, threads):
  """DeepSparse, which skips zeros."""
  from deepsparse import Engine

  with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
    file.write(_onnx(model, weights, x))
    file.flush()
    engine = Engine(model=file.name, batch_size=len(x), num_cores=threads)
  return lambda: engine.run([x])[0]


def _onnx(model: str, weights: Any, x: np.ndarray) -> bytes:
  return model_zoo.Onnx(weights).content(model_zoo.LAYERS[model], x.shape)


def blas(model, weights, x, threads):
  """NumPy's BLAS, products only."""
  del threads
  assert model == "product"
  return lambda: x @ weights["w"]


def mkl(model, weights, x, threads):
  """Intel's BLAS, products only."""
  del threads  # by the environment
  assert model == "product"
  name = "libmkl_rt.so.3"
  place = pathlib.Path(sys.prefix, "lib")
  found = sorted(place.glob("libmkl_rt.so*"))
  library = ctypes.CDLL(str(found[0]) if found else name)
  w = np.ascontiguousarray(weights["w"])
  batch, (rows, cols) = len(x), w.shape
  y = np.empty((batch, cols), np.float32)
  as_c = lambda a: a.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
  one, zero = ctypes.c_float(1), ctypes.c_float(0)

  def run():  # row-major, neither operand transposed
    library.cblas_sgemm(
      101, 111, 111, batch, cols, rows, one, as_c(x), rows, as_c(w), cols,
      zero, as_c(y), cols,
    )  # fmt: skip
    return y

  return run


_MAKERS: dict[str, Any] = {
  "onnxruntime": onnxruntime, "deepsparse": deepsparse,
  "blas": blas, "mkl": mkl,
}  # fmt: skip


def main() -> None:
  if sys.platform == "linux":  # stopped, it would not see its parent end
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
  name, threads = sys.argv[1], int(sys.argv[2])
  answers, run = sys.stdout, None
  # Only answers may go to the standard output.
  with contextlib.redirect_stdout(sys.stderr):
    for line in sys.stdin:
      what, *request = json.loads(line)
      if what == "load":
        model, weights, folder = request
        arrays = dict(np.load(weights))
        x = np.load(pathlib.Path(folder, "x.npy"))
        images = x.ndim == 4  # NHWC in JAX, NCHW in ONNX
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2) if images else x)
        run = _MAKERS[name](model, arrays, x, threads)
        y = run()
        y = y.transpose(0, 2, 3, 1) if y.ndim == 4 else y
        np.save(pathlib.Path(folder, "y.npy"), y)
        answer: Any = "loaded"
      else:
        assert run is not None
        answer = spell(run, *request)
      print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
  main()
