"""Measured inference time of each trained network, relative to dense.

Each network runs with the library's fastest formats for its masks, found by
`jaxpruner.sparse.accelerate`; a layer may stay dense. Without numba there are
fewer formats. A network that cannot be rewritten runs as a masked dense one.
"""

import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import jaxpruner
from jaxpruner.compare import files, networks, outcomes
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.given import trained_state
from jaxpruner.compare.records import Latency
from jaxpruner.compare.settings import ComparisonSettings


def measure_all(
  path: pathlib.Path,
  settings: ComparisonSettings,
  pending: list[Cell],
  emit: Callable[[Latency], None],
) -> None:
  """Measure cells relative to the dense one; skip cells without weights.

  Args:
    path: the run folder.
    settings: the comparison.
    pending: the cells.
    emit: receives each measurement.
  """
  file_of = lambda cell: path / "weights" / f"{cell.id}.npz"
  for reference in dict.fromkeys(cell.dense for cell in pending):
    if not file_of(reference).exists():
      continue
    dense = _runner(reference, settings, file_of(reference))
    for cell in pending:
      if cell.dense != reference or not file_of(cell).exists():
        continue
      if cell == reference:
        emit(Latency(cell.id, 1.0, "dense"))
        continue
      runner = _runner(cell, settings, file_of(cell))
      ratio, seconds = ratio_of(runner.call, dense.call)
      emit(Latency(cell.id, ratio, runner.path, seconds))


class _Runner(NamedTuple):
  call: Callable[[], Any]
  path: str


def _runner(cell, settings, file) -> _Runner:
  task = networks.cell_task(cell, settings)
  options = networks.task_options(settings, cell.options)
  data = networks.load_data(settings.task, settings.data, options)
  inputs = task.example(data)
  arrays = files.unpack_arrays(file)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  params = outcomes.filled(shapes, arrays, "param")
  masks = outcomes.filled(shapes, arrays, "mask", optional=True)
  apply = networks.forward_fn(task, trained_state(task, arrays) or None)
  fast = _accelerated(apply, params, masks, inputs)
  if fast is not None:
    return _Runner(lambda: fast(inputs), "accelerate")
  compiled = jax.jit(apply)
  return _Runner(lambda: compiled(params, inputs), "masked dense")


def _accelerated(apply, params, masks, inputs) -> Callable | None:
  """Return `inputs -> outputs` with sparse kernels, or None."""
  if not jax.tree.leaves(masks):
    return None
  try:
    accelerate = jaxpruner.sparse.accelerate
  except (AttributeError, ImportError):
    return None
  try:
    fast, _ = accelerate(apply, params, inputs, masks=masks)
  except (TypeError, ValueError, NotImplementedError):
    return None  # a network that it cannot rewrite runs as a masked dense one
  return fast


def ratio_of(
  ours: Callable[[], Any], reference: Callable[[], Any], rounds: int = 40
) -> tuple[float, float]:
  """Return (time of `ours` / time of `reference`, seconds of `ours`).

  The two are called in turn, so that other load of the machine affects both,
  and their fastest rounds are compared, because interruptions only add time.

  Args:
    ours: the function to measure.
    reference: the function to compare it with.
    rounds: the number of rounds.

  Returns:
    The ratio, and the seconds of one call of `ours`.
  """
  jax.block_until_ready((ours(), reference()))
  # Repeat short calls: the clock is too coarse for a single one.
  began = time.perf_counter()
  jax.block_until_ready(reference())
  repeats = max(1, min(200, int(2e-3 / (time.perf_counter() - began + 1e-9))))
  times: tuple[list[float], list[float]] = ([], [])
  for _ in range(rounds):
    for call, bucket in zip((ours, reference), times, strict=True):
      began, result = time.perf_counter(), None
      for _ in range(repeats):
        result = call()
      jax.block_until_ready(result)
      bucket.append((time.perf_counter() - began) / repeats)
  mine, theirs = map(min, times)
  return mine / theirs, mine
