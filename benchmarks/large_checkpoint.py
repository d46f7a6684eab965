"""A checkpoint larger than memory should be: pruned, killed, and gone on with.

    python benchmarks/large_checkpoint.py [--gigabytes 5] [--folder DIR]

A Hugging Face folder of float32 shards with an index is written, and pruned by
`jaxpruner prune`. The first two runs are killed (SIGKILL), each when it has
finished another shard; the third goes on from what is there. Expected: a peak
of memory below 1.5 times the largest tensor + 500 MB, and every tensor pruned
as if nothing had happened. It needs twice the size on disk.
"""

import argparse
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import page

from jaxpruner import sparse

LARGEST = (16384, 16384)  # 1.07 GB
USUAL = (8192, 8192)  # 0.27 GB
SPARSITY = 0.5
# The peak of this process image; ru_maxrss would include the parent's.
CHILD = """
import pathlib, sys
from jaxpruner import cli
code = cli.main(sys.argv[1:])
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
print("KIB", next(x.split()[1] for x in lines if x.startswith("VmHWM")))
raise SystemExit(code)
"""


def write(folder: pathlib.Path, size: float) -> dict[str, tuple[int, ...]]:
  """Write the checkpoint; return its tensors' shapes."""
  rng = np.random.default_rng(0)
  block = rng.standard_normal(1 << 22, np.float32)
  groups, left = [[("layers.0.mlp.up.weight", LARGEST)]], size
  left -= 4 * np.prod(LARGEST)
  while left > 0:
    at = len(groups)
    names = [f"layers.{at}.mlp.{part}.weight" for part in ("up", "down")]
    groups.append([(name, USUAL) for name in names])
    left -= 2 * 4 * np.prod(USUAL)
  weight_map = {}
  for at, group in enumerate(groups, 1):
    shard = f"model-{at:05}-of-{len(groups):05}.safetensors"
    # Drawn numbers over and over, each time with another factor.
    tensors = {
      name: np.resize(block, shape) * np.float32(at + 0.1 * i)
      for i, (name, shape) in enumerate(group)
    }
    sparse.save(folder / shard, tensors, layout="dense")
    weight_map |= dict.fromkeys(tensors, shard)
  index = {"metadata": {}, "weight_map": weight_map}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  (folder / "config.json").write_text('{"model_type": "synthetic"}')
  return {name: shape for group in groups for name, shape in group}


def killed(command: list[str], parts: pathlib.Path, shards: int) -> int:
  """Kill the command when so many shards are there; return how many are."""
  running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  count = lambda: len(list(parts.glob("*.safetensors")))
  while count() < shards:
    if running.poll() is not None:
      raise RuntimeError(f"the command ended with {running.returncode}")
    time.sleep(0.02)
  running.kill()
  running.wait()
  return count()


def finished(command: list[str]) -> tuple[str, str]:
  """Run to the end on a terminal; return its output and what it showed."""
  ours, theirs = pty.openpty()
  shown = []

  def read() -> None:
    try:
      while piece := os.read(ours, 4096):
        shown.append(piece)
    except OSError:  # the other end is closed
      pass

  reader = threading.Thread(target=read)
  reader.start()
  done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs)
  os.close(theirs)
  reader.join()
  os.close(ours)
  text = b"".join(shown).decode("utf-8", "replace")
  if done.returncode:
    raise RuntimeError(f"the command ended with {done.returncode}: {text}")
  return done.stdout.decode(), text


def check(old: pathlib.Path, new: pathlib.Path, shapes: dict) -> None:
  """Refuse a tensor that is not pruned by magnitude, or not kept as it was."""
  index = "model.safetensors.index.json"
  shards = json.loads((new / index).read_text())["weight_map"]
  assert shards.keys() == shapes.keys()
  for name, shape in shapes.items():
    pair = [sparse.load(side / shards[name])[0][name] for side in (old, new)]
    before, after = pair
    assert after.shape == tuple(shape) and after.dtype == np.float32
    kept = after != 0
    assert int(kept.sum()) == round(kept.size * (1 - SPARSITY)), name
    assert (after[kept] == before[kept]).all(), name
    size = np.abs(before)
    assert size[kept].min() >= size[~kept].max(), name


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--gigabytes", type=float, default=5)
  parser.add_argument("--folder", help="for the checkpoints; default: /tmp")
  args = parser.parse_args()
  start = time.perf_counter()
  with tempfile.TemporaryDirectory(dir=args.folder) as name:
    old, new = pathlib.Path(name) / "old", pathlib.Path(name) / "new"
    old.mkdir()
    shapes = write(old, 1e9 * args.gigabytes)
    size = sum(path.stat().st_size for path in old.iterdir())
    command = [sys.executable, "-c", CHILD, "prune", str(old), "--sparsity"]
    command += [str(SPARSITY), "-o", str(new)]
    parts = pathlib.Path(f"{new}.parts")
    there = [killed(command, parts, shards) for shards in (1, 3)]
    assert not new.exists()
    began = time.perf_counter()
    out, shown = finished(command)
    seconds = time.perf_counter() - began
    peak = 1024 * int(out.split()[-1])
    steps = sorted({int(p) for p in re.findall(r"(\d+) ?%", shown)})
    resumed = next(line for line in out.splitlines() if "interrupted" in line)
    check(old, new, shapes)
  largest = 4 * int(np.prod(LARGEST))
  bound = 1.5 * largest + 500e6
  rows = [
    ("checkpoint, float32", f"{size / 1e9:.2f} GB"),
    ("shards, tensors", f"{len(shapes) // 2 + 1}, {len(shapes)}"),
    ("largest tensor", f"{largest / 1e9:.2f} GB"),
    ("shards there at the two kills", ", ".join(map(str, there))),
    ("the third run said", f"`{resumed.strip()}`"),
    ("its progress bar", f"{steps[0]} to {steps[-1]} %, {len(steps)} steps"),
    ("its time", f"{seconds:.0f} s"),
    ("its peak of memory", f"{peak / 1e6:.0f} MB"),
    ("asked for, at most", f"{bound / 1e6:.0f} MB"),
  ]  # fmt: skip
  sections = [
    f"`jaxpruner prune --sparsity {SPARSITY}` of a folder whose runs are "
    "killed twice. Afterwards every tensor had exactly the weights of largest "
    "magnitude, bit for bit.",
    page.table(("", ""), rows),
  ]
  seconds = time.perf_counter() - start
  page.write("large_checkpoint", "A large checkpoint", sections, seconds)
  if peak >= bound:
    raise SystemExit(f"peak of {peak} bytes; at most {bound:.0f} were allowed")


if __name__ == "__main__":
  main()
