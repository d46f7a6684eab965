"""Measure a training step at kept size against a dense one."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.kept import _fresh, capture, lifting, products, states, tensors
from jaxpruner.kept import report as reports
from jaxpruner.kept.places import fold
from jaxpruner.kept.report import TrainingBytes

PyTree = Any


@dataclasses.dataclass(frozen=True)
class LayerTime:
  """The time of a layer's products in a step, forward and backward.

  Attributes:
    name: the path of the leaf.
    rows: how many rows it multiplies in a step, all uses together.
    kept: seconds with kept weights.
    dense: seconds with a dense weight.

  Example:
    >>> LayerTime("w", 64, 0.001, 0.003).ratio
    3.0
  """

  name: str
  rows: int
  kept: float
  dense: float

  @property
  def ratio(self) -> float:
    """How many times faster kept weights are."""
    return self.dense / self.kept


@dataclasses.dataclass(frozen=True)
class TrainingReport:
  """What a training step costs, measured; `print` shows it as tables.

  Attributes:
    bytes: weights, gradients, moments and indices, counted.
    layers: one `LayerTime` per kept leaf.
    kept: seconds of a step (forward, backward, optimizer).
    dense: seconds of the dense step.
    peak: bytes, peak of a step in a fresh process; None if not measured.
    dense_peak: the same for the dense step.

  Example:
    >>> report = TrainingReport(TrainingBytes(()), (), 0.1, 0.4, None, None)
    >>> report.ratio
    4.0
  """

  bytes: TrainingBytes
  layers: tuple[LayerTime, ...]
  kept: float
  dense: float
  peak: int | None
  dense_peak: int | None

  @property
  def ratio(self) -> float:
    """How many times faster a step at kept size is."""
    return self.dense / self.kept

  def __str__(self) -> str:
    rows = [("leaf", "rows", "kept, ms", "dense, ms", "faster")]
    rows += [
      (l.name, str(l.rows), _ms(l.kept), _ms(l.dense), f"{l.ratio:.2f}x")
      for l in self.layers
    ]
    rows.append(
      ("step", "", _ms(self.kept), _ms(self.dense), f"{self.ratio:.2f}x")
    )
    parts = [str(self.bytes), "", reports.aligned(rows)]
    if self.peak is not None and self.dense_peak is not None:
      parts.append(
        f"peak of a step in a fresh process: {self.peak / 1e6:.0f} MB, dense "
        f"{self.dense_peak / 1e6:.0f} MB, {self.peak / self.dense_peak:.3f}x"
      )
    return "\n".join(parts)


def _ms(seconds: float) -> str:
  return f"{1e3 * seconds:.3f}"


def training_report(
  pruner: Any,
  loss_fn: Callable[..., Any],
  weights: PyTree,
  optimizer: optax.GradientTransformation,
  *batch: Any,
  repeats: int = 7,
  peak: bool = True,
) -> TrainingReport:
  """Measure time, bytes and peak memory of a step, kept and dense.

  Both steps compute the loss, its gradients and the optimizer's update; masks
  are not updated. Times are medians of runs in turns. The dense step needs the
  memory of the dense model.

  Args:
    pruner: the `KeptUpdater`.
    loss_fn: `loss_fn(params, *batch)`, a scalar, as for dense parameters.
    weights: a tree with `KeptTensor` leaves.
    optimizer: the optimizer, not wrapped.
    *batch: arrays.
    repeats: how many steps of each kind to time.
    peak: whether to run both steps in a process of their own for their peak
      memory.

  Returns:
    A `TrainingReport`.

  Example:
    >>> import jax, jax.numpy as jnp, jaxpruner, optax
    >>> from jaxpruner import kept
    >>> pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
    >>> weights = {"w": kept.create(jax.random.key(0), (256, 256), 0.9)}
    >>> report = kept.training_report(
    ...   pruner, lambda p, x: jnp.sum((x @ p["w"]) ** 2), weights,
    ...   optax.adam(1e-3), jnp.ones((8, 256)), repeats=1, peak=False)
    >>> report.layers[0].rows, report.bytes.ratio < 0.2
    (8, True)
  """
  lifted = lifting.lift(loss_fn)
  tx = pruner.wrap_optax(optimizer)
  opt_state = tx.init(weights)
  values, places = tensors.split(weights)

  def kept_step(state, batch):
    params, opt_state = state
    own = states.find_kept_state(opt_state)
    loss = lambda p: lifted(tensors.join(p, own.layouts), *batch)
    grads = jax.grad(loss)(params)
    # The optimizer alone: a step without a mask update.
    updates, inner = optimizer.update(grads, own.inner_state, params)
    params = optax.apply_updates(params, updates)
    return params, own._replace(inner_state=inner)

  def dense_step(state, batch):
    params, inner = state
    grads = jax.grad(lambda p: loss_fn(p, *batch))(params)
    updates, inner = optimizer.update(grads, inner, params)
    return optax.apply_updates(params, updates), inner

  kept_state = (values, opt_state)
  sizes = reports.training_bytes(values, opt_state)
  uses = _uses(lifted, values, places, batch)
  decode = jax.jit(lambda *tree: tensors.todense(tensors.join(*tree))[0])
  dense = decode(values, places)
  dense_state = (dense, optimizer.init(dense))
  peaks: list[int | None] = [None, None]
  if peak:
    peaks = [
      _fresh.peak_of(kept_step, kept_state, batch),
      _fresh.peak_of(dense_step, dense_state, batch),
    ]
  times = _in_turns(
    repeats,
    (jax.jit(kept_step), kept_state, batch),
    (jax.jit(dense_step), dense_state, batch),
  )
  del dense_state
  layers = tuple(
    _layer_time(leaf, uses[leaf.layout.name], repeats)
    for leaf in jax.tree.leaves(
      tensors.join(values, opt_state.layouts), is_leaf=tensors.is_kept
    )
    if tensors.is_kept(leaf) and leaf.layout.name in uses
  )
  kept_time, dense_time = times
  return TrainingReport(sizes, layers, kept_time, dense_time, *peaks)


def _uses(lifted: Any, values: Any, places: Any, batch: Any) -> dict[str, int]:
  """Return name -> how many rows a step multiplies by this leaf."""
  named = jax.tree_util.tree_map_with_path(
    states.named_layout, tensors.join(values, places), is_leaf=tensors.is_kept
  )
  with capture.capturing(None) as seen:
    jax.eval_shape(lambda v: lifted(tensors.join(v, named), *batch), values)
  rows = lambda use: int(np.prod(use.x.shape[: use.x.ndim - 1]))
  return {
    name: sum(rows(use) for use in uses)
    for name, uses in seen.inputs.items()
    if all(jnp.issubdtype(use.x.dtype, jnp.floating) for use in uses)
  }


def _layer_time(leaf: Any, rows: int, repeats: int) -> LayerTime:
  """Time the three products of one leaf (of each layer of a stack, in turn)."""
  layout = leaf.layout
  share = rows // (layout.layers or 1)
  inside, outside = fold(layout.inner, layout.split)
  x, g = jnp.ones((share, inside)), jnp.ones((share, outside))

  def kept(leaf, _):
    def one(layout, values):
      product = lambda x, v: products.product(x, v, layout)
      y, back = jax.vjp(product, x, values)
      return back(g), y

    return leaf.layout.in_turn(one, leaf.values)

  def dense(w, _):
    y, back = jax.vjp(jnp.matmul, x, w)
    return back(g), y

  one = jnp.ones((inside, outside), leaf.values.dtype)
  times = _in_turns(
    repeats, (jax.jit(kept), leaf, ()), (jax.jit(dense), one, ())
  )
  return LayerTime(layout.name, rows, times[0], times[1] * (layout.layers or 1))


def _in_turns(repeats: int, *runs: Any) -> list[float]:
  """Return the median seconds of each `(function, state, batch)`."""
  for run, state, batch in runs:
    jax.block_until_ready(run(state, batch))
  seen: list[list[float]] = [[] for _ in runs]
  for _ in range(repeats):
    for (run, state, batch), own in zip(runs, seen, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(run(state, batch))
      own.append(time.perf_counter() - start)
  return [float(np.median(own)) for own in seen]
