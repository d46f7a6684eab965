"""Run a training step in a fresh process, and measure its peak memory.

The step is exported as StableHLO and its arrays are stored beside it, so the
new process needs none of the user's code: `python -m jaxpruner.kept._fresh
FOLDER` runs it three times and prints the bytes as JSON.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

CALLS = "panels product gradients rewire_random rewire_gradient".split()


def peak_of(step: Callable[..., Any], state: Any, batch: Any) -> int:
  """Return the peak memory of three steps in a process of their own.

  Args:
    step: `step(state, batch)` returns the next state; it is compiled.
    state: a tree of arrays.
    batch: a tree of arrays.

  Returns:
    Bytes, without those that the process had before it read the arrays.
  """
  leaves, treedef = jax.tree.flatten(state)
  inputs, spec = jax.tree.flatten(batch)

  def flat(leaves, inputs):
    state = treedef.unflatten(leaves)
    return jax.tree.leaves(step(state, spec.unflatten(inputs)))

  checks = [
    export.DisabledSafetyCheck.custom_call(f"jaxpruner_kept_{name}")
    for name in CALLS
  ]
  program = export.export(jax.jit(flat), disabled_checks=checks)(leaves, inputs)
  with tempfile.TemporaryDirectory() as place:
    folder = pathlib.Path(place)
    (folder / "step").write_bytes(program.serialize())
    for name, arrays in (("state", leaves), ("batch", inputs)):
      for i, array in enumerate(arrays):
        np.save(folder / f"{name}{i}.npy", _plain(array), allow_pickle=False)
    done = subprocess.run(
      [sys.executable, "-m", "jaxpruner.kept._fresh", place],
      capture_output=True,
      text=True,
    )
  if done.returncode:
    raise RuntimeError(
      "the step failed in a process of its own: " + done.stderr.strip()[-2000:]
    )
  return json.loads(done.stdout.splitlines()[-1])["bytes"]


def _plain(array: Any) -> np.ndarray:
  """Return an array that NumPy can store: others as their bytes."""
  array = np.asarray(array)
  return array if array.dtype.kind in "biuf" else array.view(np.uint8)


def _read(folder: pathlib.Path, name: str, avals: Sequence[Any]) -> list[Any]:
  out = []
  for i, aval in enumerate(avals):
    array = np.load(folder / f"{name}{i}.npy", allow_pickle=False)
    out.append(jnp.asarray(array.view(aval.dtype).reshape(aval.shape)))
  return out


def peak_memory() -> int:
  """Return the most memory in use so far, in bytes: device, else process."""
  stats = jax.devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"]
  # Not ru_maxrss: a process inherits that of the one that started it.
  status = pathlib.Path("/proc/self/status")
  if not status.exists():
    raise RuntimeError(
      "peak memory is read from /proc/self/status, which only Linux has; pass "
      "peak=False"
    )
  return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])


def main(place: str) -> None:
  """Run the step in a folder three times, and print its peak memory."""
  from jaxpruner.kept import rewiring

  rewiring.load()
  folder = pathlib.Path(place)
  program = export.deserialize(bytearray((folder / "step").read_bytes()))
  count = len(list(folder.glob("state*.npy")))
  avals = program.in_avals
  jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
  before = peak_memory()
  state = _read(folder, "state", avals[:count])
  batch = _read(folder, "batch", avals[count:])
  step = jax.jit(program.call, donate_argnums=0)
  for _ in range(3):
    state = step(state, batch)
  jax.block_until_ready(state)
  print(json.dumps({"bytes": peak_memory() - before}))


if __name__ == "__main__":
  main(sys.argv[1])
