"""Prune block by block, and train each block on its dense output."""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import program as _program
from jaxpruner._tools import fingerprint, recent
from jaxpruner.config import codec
from jaxpruner.post_training import (
  _blocks,
  calibration,
  fixed_masks,
  pruning,
  solve_layer,
)
from jaxpruner.post_training.calibration import ApplyFn, FilterFn
from jaxpruner.post_training.contrib import _finished
from jaxpruner.post_training.prune_report import PruneReport
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.program import Program
from jaxpruner.sparsity_distributions import default_filter

_FLOOR = 1e-3  # of the mean square: vectors near zero are not blown up
# Functions of blocks: equal blocks, and calls that train otherwise, share them.
_compiled = recent.Recent(32)


def prune_blocks(
  apply_fn: ApplyFn,
  params: Any,
  batches: Iterable[Any],
  *,
  method: str | Solver | Callable[..., Any] = "sparsegpt",
  sparsity: float | None = None,
  sparsity_type: Any = None,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: Mapping[Any, float | None] | None = None,
  allocation: str = "uniform",
  epochs: int = 5,
  learning_rate: float = 1e-3,
  span: int = 2,
  seed: int = 0,
  refine: int = 0,
  damping: float = 0.01,
  block_size: int = 128,
  folder: str | os.PathLike | None = None,
  progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Any, Any, PruneReport]:
  """Prune a trained model block by block; fit each to its dense output.

  Each block of the traced function is pruned with `method` on the outputs of
  the blocks before it, which are pruned already. Then its kept weights, and the
  biases and norm scales that only it reads, are trained with Adam (cosine decay
  to zero) so that from these inputs it computes what the dense model computes
  there. So a block also makes up for the errors of those before it. The loss is
  the mean of ‖y - y_dense‖² / ‖y_dense‖² over the vectors along the last axis.
  Labels are not used, and no gradient passes from block to block (block-wise
  reconstruction: Li et al., "BRECQ", 2021; Guo et al., "EBFT", 2024).

  Blocks are found in the trace: the function is cut where one activation is
  all that later operations need, as after a residual sum. The activations of
  all batches at two such places are held in memory, dense and pruned.

  Cost: beside that of `prune`, three forward passes, and `epochs` times a
  forward and a backward pass over the batches.

  Args:
    apply_fn: `apply_fn(params, batch)`, from any framework.
    params: its parameters.
    batches: batches of equal shapes; one step of Adam takes one batch. Many
      small ones fit better than few large ones: the cost is the same, and
      there are more steps.
    method: as in `prune`.
    sparsity: fraction removed; an N:M type implies it.
    sparsity_type: as in `prune`.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: exact path or glob -> the sparsity of these leaves,
      None to keep them dense.
    allocation: as in `prune`.
    epochs: passes over the batches per block; 0 gives the result of `prune`.
    learning_rate: of Adam, at the start.
    span: places to cut per block; 2 takes attention and MLP together.
    seed: of the order of the batches.
    refine: as in `prune`, before the training.
    damping: as in `prune`.
    block_size: as in `prune`.
    folder: store finished blocks here; the same call continues after them. A
      call with another function, data, method, version or setting of JAX is
      refused, and the error names the difference.
    progress: called with (layers done, number of layers, name).

  Returns:
    `(params, masks, report)`, as `prune` does. The errors in the report are
    those of the solver, before the training.

  Example:
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> params = {"w": rng.normal(size=(8, 4)).astype(np.float32)}
    >>> data = [rng.normal(size=(32, 8)).astype(np.float32)]
    >>> new, masks, report = prune_blocks(
    ...   lambda p, x: x @ p["w"], params, data, sparsity_type="2:4")
    >>> int(masks["w"].sum()), int((new["w"] != 0).sum()), report.sparsity
    (16, 16, 0.5)
  """
  if epochs < 0 or span < 1 or not 0 < learning_rate < np.inf:
    raise ValueError(
      f"epochs={epochs!r} must be at least 0, span={span!r} at least 1, "
      f"learning_rate={learning_rate!r} positive and finite"
    )
  kind = codec.parse_sparsity_type(sparsity_type)
  sparsity = getattr(kind, "sparsity", None) if sparsity is None else sparsity
  if sparsity is None:
    raise ValueError("sparsity is missing; give the fraction removed, as 0.5")
  start = time.perf_counter()
  model = calibration.Model(apply_fn, params, batches, filter_fn)
  rows = list(model.batches)
  model.batches = iter(rows)
  targets = pruning.targets_of(model, sparsity, allocation, custom_sparsity_map)
  parts = [p for p in model.parts if targets[p.leaf] is not None]
  if not parts:
    raise ValueError(
      f"custom_sparsity_map={custom_sparsity_map!r} keeps every weight dense"
    )
  settings = solve_layer.Settings(method, damping, block_size, refine)
  training = {
    "epochs": epochs, "learning_rate": learning_rate, "span": span,
    "seed": seed,
  }  # fmt: skip
  finished = _finished.Finished(
    folder,
    {} if folder is None else _facts(model, rows, targets, kind, settings)
    | training,
  )  # fmt: skip
  solve = functools.partial(_solve, targets, kind, settings)
  leaves, masks = list(model.leaves), [None] * len(model.leaves)
  train = _Trainer(epochs, learning_rate, seed)
  pruned, dense = _Rows(rows), _Rows(rows)
  layers = []
  blocks = _blocks.split(model.graph, parts, len(leaves), span)
  for at, block in enumerate(blocks):
    run = train.forward(block)
    dense.later(run, [model.leaves[i] for i in block.leaves])
    kept = finished.load(at, {i: leaves[i] for i in block.leaves})
    if kept is not None:
      for i in block.leaves:
        leaves[i], masks[i] = _like(leaves[i], kept[0][i]), kept[1][i]
      found = kept[2]
    else:
      found = solve(model, block, leaves, masks, pruned.now())
      goals = [row[0] for row in dense.now()]
      train.fit(block, leaves, masks, pruned.now(), goals)
      held = lambda x, b=block: {i: x[i] for i in b.leaves}
      finished.save(at, held(leaves), held(masks), found)
    layers += found
    pruned.later(run, [leaves[i] for i in block.leaves])
    if progress is not None:
      progress(len(layers), len(parts), layers[-1].name)
  seconds = time.perf_counter() - start
  report = PruneReport(tuple(layers), model.skipped, seconds)
  return model.tree(leaves), model.tree(masks, None), report


def _facts(model, rows, targets, kind, settings) -> dict[str, Any]:
  """Return what decides the result, as a folder keeps it."""
  return {
    "settings": settings.as_dict(),
    "targets": {model.name(i): s for i, s in targets.items()},
    "type": repr(kind),
    "function": fingerprint.text(repr(model.program.signature())),
    "weights": fingerprint.arrays(model.leaves),
    "data": fingerprint.arrays(rows),
    "jax": fingerprint.settings(),
    "versions": fingerprint.versions(),
  }


def _solve(
  targets: Mapping[int, float | None],
  kind: Any,
  settings: solve_layer.Settings,
  model: calibration.Model,
  block: _blocks.Block,
  leaves: list[Any],
  masks: list[Any],
  rows: list[Any],
) -> list[Any]:
  """Prune a block in place of its entries; return its layers' reports."""
  names = {i: model.name(i) for i in block.leaves}
  chosen = {part.leaf for part in block.parts}
  own = calibration.Model(
    functools.partial(_apply, block, names),
    {names[i]: leaves[i] for i in block.leaves},
    rows,
    lambda path, _: path[-1] in {names[i] for i in chosen},
  )
  index = {name: i for i, name in names.items()}
  outer = [index[own.name(j)] for j in range(len(own.leaves))]
  wanted = {j: targets[i] for j, i in enumerate(outer) if i in chosen}
  job = pruning.Job(own, wanted, kind, settings)
  job.run(lambda *_: None)
  for j, i in enumerate(outer):
    leaves[i], masks[i] = job.leaves[j], _both(masks[i], job.masks[j])
  return job.layers


def _like(old: Any, new: np.ndarray) -> Any:
  """Return an array as the kind of array that it replaces."""
  value = new.astype(old.dtype)
  placed = isinstance(old, jax.Array)
  return jax.device_put(value, old.sharding) if placed else value


def _both(old: Any, new: Any) -> Any:
  """Return the mask of a leaf; a stack gets one layer of it per block."""
  return new if old is None or new is None else np.minimum(old, new)


def _apply(
  block: _blocks.Block, names: Mapping[int, str], params: Any, live: Any
) -> Any:
  leaves = [params[names[i]] for i in block.leaves]
  return _program.run(block.program, [*leaves, *live])[0]


class _Rows:
  """The batches between two blocks, computed when they are asked for.

  Where all later blocks are in the folder already, nobody asks.
  """

  def __init__(self, rows: list[Any]):
    self._rows = rows
    self._waiting: list[tuple[Callable[[Any, Any], list[Any]], Any]] = []

  def later(self, run: Callable[[Any, Any], list[Any]], leaves: Any) -> None:
    """Note that the next block runs with these leaves."""
    self._waiting.append((run, leaves))

  def now(self) -> list[Any]:
    """Return the batches after all blocks that were noted."""
    while self._waiting:
      run, leaves = self._waiting.pop(0)
      self._rows = run(leaves, self._rows)
    return self._rows


def _shared(make: Callable[..., Any], block: _blocks.Block, *rest: Any) -> Any:
  """Return `make(block.program, *rest)`, the same one for equal programs."""
  return _compiled.get(
    (make.__name__, block.program.signature(), rest),
    lambda: make(block.program, *rest),
  )


@dataclasses.dataclass
class _Trainer:
  """Runs and trains blocks."""

  epochs: int
  learning_rate: float
  seed: int

  def forward(self, block: _blocks.Block) -> Callable[[Any, Any], list[Any]]:
    """Return `(leaves, batches) -> batches`, the block on every batch."""
    step = _shared(_forward, block)
    return lambda leaves, rows: [
      list(map(np.asarray, step(leaves, row))) for row in rows
    ]

  def fit(
    self,
    block: _blocks.Block,
    leaves: list[Any],
    masks: list[Any],
    inputs: list[Any],
    goals: list[Any],
  ) -> None:
    """Replace the block's entries of `leaves` by trained ones."""
    held = {part.leaf for part in block.parts}
    small = lambda x: np.ndim(x) < 2 and jnp.issubdtype(x.dtype, jnp.floating)
    places = tuple(
      at
      for at, i in enumerate(block.leaves)
      if i in held or (i in block.own and small(leaves[i]))
    )
    total = self.epochs * len(inputs)
    if not total:
      return
    every = [leaves[i] for i in block.leaves]
    # Copies in float32: a step gives its arguments away.
    trained = [jnp.array(every[at], jnp.float32, copy=True) for at in places]
    chosen = [masks[block.leaves[at]] for at in places]
    first, step = _shared(_steps, block, places)
    state = first(trained, chosen)
    rng = np.random.default_rng(self.seed)
    done = 0
    for _ in range(self.epochs):
      for row in rng.permutation(len(inputs)):
        rate = self.learning_rate * (1 + math.cos(math.pi * done / total)) / 2
        trained, state = step(
          trained, state, chosen, every, inputs[row], goals[row], rate
        )
        done += 1
    for at, value in zip(places, trained, strict=True):
      i = block.leaves[at]
      leaves[i] = _like(leaves[i], np.asarray(value))


def _forward(program: Program) -> Callable[..., Any]:
  return jax.jit(lambda leaves, live: _program.run(program, [*leaves, *live]))


def _steps(
  program: Program, places: tuple[int, ...]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Return the functions that start Adam and that take one step."""

  def tx(masks, rate):
    adam = optax.chain(optax.scale_by_adam(), optax.scale(-rate))
    return fixed_masks.hold_masks(adam, masks)

  def loss(trained, every, live, goal):
    leaves = list(every)
    for at, value in zip(places, trained, strict=True):
      leaves[at] = value.astype(every[at].dtype)
    y = _program.run(program, [*leaves, *live])[0]
    return relative_error(y, goal)

  def step(trained, state, masks, every, live, goal, rate):
    grads = jax.grad(loss)(trained, every, live, goal)
    updates, state = tx(masks, rate).update(grads, state, trained)
    return optax.apply_updates(trained, updates), state

  first = lambda trained, masks: tx(masks, 0.0).init(trained)
  return first, jax.jit(step, donate_argnums=(0, 1))


def relative_error(y: Any, goal: Any) -> jax.Array:
  """Return the mean of ‖y - goal‖² / ‖goal‖² over vectors of the last axis."""
  y, goal = (jnp.atleast_1d(x).astype(jnp.float32) for x in (y, goal))
  size = jnp.mean(jnp.square(goal), axis=-1, keepdims=True)
  tiny = jnp.finfo(jnp.float32).tiny
  size = jnp.maximum(size, jnp.maximum(_FLOOR * jnp.mean(size), tiny))
  return jnp.mean(jnp.square(y - goal) / size)
