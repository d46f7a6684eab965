"""What `jaxpruner compare` adds to bare training.

  python benchmarks/harness.py [--task fashion] [--algorithm rigl]

Two programs train the same seeds on the same batches in turns, one chunk (a
twentieth of the training) at a time: the comparison's own, with snapshots of
masks, churn and exploration, records appended and synced to disk, and the
progress bar; and a loop of nothing but steps. Each is measured with one thread,
as workers of the command run, and with all, as `compare.run` does with
functions. The ratio of processor times says what is computed more; another load
on the machine hardly changes it, as it does that of wall times.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import optax
import page

import jaxpruner
from jaxpruner.compare import (
  cell_run,
  files,
  networks,
  outcomes,
  terminal,
  training,
)
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.settings import ComparisonSettings


def bare_program(task, updater):
  """Steps and nothing else, batched over seeds as the task asks."""
  tx = updater.wrap_optax(task.optimizer())

  def step(params, state, env_state, data, key, t):
    batch_key, loss_key = jax.random.split(jax.random.fold_in(key, 2))
    env_state, batch = task.interact(env_state, params, data, batch_key, t)
    key = jax.random.fold_in(loss_key, t)
    _, grads = task.gradient(task.loss, params, batch, key)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, env_state

  def train(carry, key, data, first, count):
    body = lambda i, c: step(*c, data, key, first + i)
    return jax.lax.fori_loop(0, count, body, carry)

  def all_seeds(carry, keys, data, first, count):
    one = lambda pair: train(*pair, data, first, count)
    if task.in_turn:
      return jax.lax.map(one, (carry, keys))
    return jax.vmap(lambda c, k: one((c, k)))(carry, keys)

  return jax.jit(all_seeds, donate_argnums=0)


def measure(name: str, algorithm: str, seeds: int, repeats: int) -> dict:
  settings = ComparisonSettings(task=name, seeds=seeds)
  cell = Cell(algorithm, 0.9)
  task = networks.cell_task(cell, settings)
  data = networks.load_data(name, "")
  config = networks.updater_config(task, cell)
  updater = jaxpruner.create_updater_from_config(config)
  keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
  built, bare = training.build(task, updater, data), bare_program(task, updater)
  length = -(-task.steps // cell_run.CHUNKS)
  carry = built.start(keys, data)
  lean = jax.tree.map(
    jnp.copy, (carry.params, carry.opt_state, carry.env_state)
  )
  lean = jax.tree.map(
    lambda x: jnp.broadcast_to(x, (seeds,)) if x.ndim == 0 else x, lean
  )
  first = task.steps // 2
  with tempfile.TemporaryDirectory() as place:
    path = pathlib.Path(place) / "steps.jsonl"
    with terminal.Progress(1, 0, task.metric) as progress:

      def harnessed():
        nonlocal carry
        carry, losses, taken = built.train(
          carry, keys, data, first, length, length
        )
        chunk = outcomes.chunk_of(
          cell, task.steps, first, length, losses, taken
        )
        files.append_line(path, chunk.to_json())
        progress.advance(chunk)
        return carry.params

      def plain():
        nonlocal lean
        lean = bare(lean, keys, data, first, length)
        return lean[0]

      jax.block_until_ready((harnessed(), plain()))
      wall, processor = in_turns(harnessed, plain, repeats)
  return {
    "task": name,
    "algorithm": algorithm,
    "seeds": seeds,
    "steps": length,
    "seconds": min(wall[1]),
    "ratio": page.ratio(*wall),
    "processor": page.ratio(*processor),
  }


def in_turns(ours, bare, repeats: int):
  """Return (wall times, processor times) of both, one after the other."""
  wall, processor = ([], []), ([], [])
  for _ in range(repeats):
    for i, run in enumerate((ours, bare)):
      began = time.perf_counter(), time.process_time()
      jax.block_until_ready(run())
      wall[i].append(time.perf_counter() - began[0])
      processor[i].append(time.process_time() - began[1])
  return wall, processor


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--task", default="fashion")
  parser.add_argument("--algorithm", default="rigl")
  parser.add_argument("--seeds", type=int, default=1)
  parser.add_argument("--repeats", type=int, default=7)
  parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.one:
    row = measure(
      options.task, options.algorithm, options.seeds, options.repeats
    )
    print(json.dumps(row))
    return
  start = time.perf_counter()
  head = ["threads", "task", "algorithm", "seeds", "steps", "bare, s"]
  lines = []
  for threads in ("1", str(os.cpu_count())):
    # XLA reads the number of threads once, when it starts.
    done = subprocess.run(
      [sys.executable, *sys.argv, "--one"],
      env=os.environ | {"NPROC": threads},
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    )
    row = json.loads(done.stdout.splitlines()[-1])
    values = [row[name] for name in ("task", "algorithm", "seeds", "steps")]
    lines.append(
      [threads, *map(str, values), f"{row['seconds']:.2f}"]
      + [f"{row['ratio']:.3f}", f"{row['processor']:.3f}"]
    )
  head += ["harness ÷ bare", "of processor time"]
  text = page.table(head, lines)
  page.write(
    "harness", "What the comparison adds", [text], time.perf_counter() - start
  )


if __name__ == "__main__":
  main()
