"""Lottery tickets: train, prune, rewind, and train again."""

import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner import sparse

PyTree: TypeAlias = Any
# (params, masks, first step, step to stop before, or None) -> params
Train: TypeAlias = Callable[[PyTree, PyTree, int, int | None], PyTree]

_REWINDS = ("initialization", "weights", "learning_rate")


class Ticket(NamedTuple):
  """A sparse network found by iterative pruning.

  Attributes:
    params: trained weights, zero under the masks.
    masks: what is kept.
    start: the weights from which this mask was trained.
    sparsities: the sparsity of every round's training, the dense one first.

  Example:
    >>> ticket = Ticket({"w": 0.5}, {"w": 1}, {"w": 0.1}, (0.0, 0.2))
    >>> ticket.sparsities[-1]
    0.2
  """

  params: PyTree
  masks: PyTree
  start: PyTree
  sparsities: tuple[float, ...]


def rounds(sparsity: float, fraction: float = 0.2) -> list[float]:
  """Return the sparsities of iterative pruning, the request exactly at last.

  Args:
    sparsity: fraction removed after the last round.
    fraction: part of the remaining weights removed per round.

  Returns:
    The sparsity after each round.

  Example:
    >>> [round(s, 3) for s in rounds(0.5)]
    [0.2, 0.36, 0.488, 0.5]
  """
  if not 0 < sparsity < 1 or not 0 < fraction < 1:
    raise ValueError(
      f"rounds: sparsity={sparsity!r} and fraction={fraction!r} must lie "
      "between 0 and 1, such as 0.9 and 0.2"
    )
  count = math.ceil(math.log(1 - sparsity) / math.log(1 - fraction) - 1e-9)
  steps = [1 - (1 - fraction) ** r for r in range(1, count)]
  return [*steps, sparsity]


def find_ticket(
  train: Train,
  params: PyTree,
  sparsity: float,
  *,
  fraction: float = 0.2,
  rewind: str = "weights",
  rewind_step: int = 0,
  make_pruner: Callable[[float], Any] | None = None,
  folder: str | os.PathLike | None = None,
) -> Ticket:
  """Find a ticket by iterative magnitude pruning (Frankle & Carbin, 2019).

  Trains to the end, removes the `fraction` of the remaining weights that is
  smallest, rewinds, and trains again, until the sparsity is reached: a sparse
  network at the price of about `log(1 - sparsity)/log(1 - fraction)` trainings.

  Args:
    train: `(params, masks, start, stop) -> params`: train from step `start`
      (its learning rate included) until step `stop`, or to the end if it is
      `None`, with weights under the masks at zero. Dense training has `None`
      for masks.
    params: the initial weights.
    sparsity: fraction removed at the end, exactly.
    fraction: part of the remaining weights removed per round.
    rewind: where each round starts: "weights", those of `rewind_step`
      (Frankle et al., 2020); "initialization"; or "learning_rate", where the
      trained weights stay and only the schedule goes back to `rewind_step`
      (Renda et al., 2020).
    rewind_step: the step to go back to.
    make_pruner: `sparsity -> updater` that ranks what is left; by default all
      leaves together, by |w|.
    folder: where finished rounds are kept, so that an interrupted search goes
      on after the last of them.

  Returns:
    The ticket: trained weights, their masks, and where they started.

  Example:
    >>> train = lambda params, masks, start, stop: params
    >>> params = {"w": jnp.arange(1.0, 9.0).reshape(2, 4)}
    >>> ticket = find_ticket(train, params, 0.5, fraction=0.3)
    >>> ticket.masks["w"].tolist()
    [[0, 0, 0, 0], [1, 1, 1, 1]]
  """
  if rewind not in _REWINDS:
    raise ValueError(
      f"find_ticket: rewind={rewind!r} must be one of {', '.join(_REWINDS)}"
    )
  wanted = rounds(sparsity, fraction)
  store = _Store(
    folder,
    params,
    {"sparsities": wanted, "rewind": rewind, "rewind_step": rewind_step},
  )
  if make_pruner is None:
    make_pruner = lambda s: jaxpruner.GlobalMagnitudePruning(sparsity=s)
  back = 0 if rewind == "initialization" else rewind_step
  early = store.keep(
    "start",
    lambda: (
      train(params, None, 0, back) if back and rewind == "weights" else params,
      None,
    ),
  )[0]
  first = 0 if rewind == "learning_rate" else back
  now, masks = store.keep(
    "round_0", lambda: (train(early, None, first, None), None)
  )
  start = early
  for number, target in enumerate(wanted, 1):
    masks = _prune(make_pruner(target), now, masks)
    start = _select(now if rewind == "learning_rate" else early, masks)
    now, masks = store.keep(
      f"round_{number}",
      lambda start=start, masks=masks: (
        _select(train(start, masks, back, None), masks),
        masks,
      ),
    )
  return Ticket(now, masks, start, (0.0, *wanted))


class _Store:
  """Finished parts of a search, as files; nothing without a folder."""

  def __init__(self, folder: Any, like: PyTree, plan: dict[str, Any]):
    self.folder = None if folder is None else pathlib.Path(folder)
    self.like, self.plan = like, plan

  def keep(self, name: str, make: Callable[[], tuple[PyTree, PyTree]]) -> Any:
    """Return what was kept under a name, or make it and keep it."""
    if self.folder is None:
      return make()
    path = self.folder / f"{name}.safetensors"
    if not path.exists():
      params, masks = make()
      self.folder.mkdir(parents=True, exist_ok=True)
      sparse.save(path, params, masks, metadata=self.plan)
      return params, masks
    if sparse.read_metadata(path) != self.plan:
      raise ValueError(
        f"folder={str(self.folder)!r} holds another search than the one asked "
        f"for ({self.plan}); choose an empty folder"
      )
    return jax.tree.map(jnp.asarray, sparse.load(path, like=self.like))


def _prune(pruner: Any, params: PyTree, masks: PyTree) -> PyTree:
  scores = pruner.calculate_scores(params)
  if masks is not None:  # what is gone stays behind everything that is not
    gone = lambda s, m: s if m is None else jnp.where(m, s, -1)
    scores = _map(gone, scores, masks)
  return pruner.create_masks(scores, pruner.target_sparsities(params))


def _map(fn: Callable[..., Any], tree: PyTree, masks: PyTree) -> PyTree:
  leaves, treedef = jax.tree.flatten(tree)
  entries = treedef.flatten_up_to(masks)
  return treedef.unflatten(map(fn, leaves, entries))


def _select(params: PyTree, masks: PyTree) -> PyTree:
  return _map(jaxpruner.apply_mask, params, masks)


def mask_distance(one: PyTree, other: PyTree) -> float:
  """Return the share of weights on which two masks differ.

  Args:
    one: masks; `None` leaves are left out.
    other: masks of the same parameters.

  Returns:
    The Hamming distance divided by the number of weights.

  Example:
    >>> mask_distance({"w": np.array([1, 0])}, {"w": np.array([1, 1])})
    0.5
  """
  pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
  size = sum(np.size(a) for a, _ in pairs)
  differ = sum(
    int(np.count_nonzero(np.asarray(a) != np.asarray(b))) for a, b in pairs
  )
  return differ / max(size, 1)


class EarlyBird:
  """Notice when the masks have settled (You et al., 2020).

  Draw a mask at the end of each epoch and show it; once the largest distance
  among the last `window` masks falls below `tolerance`, dense training has
  done its part and the ticket can be drawn.

  Args:
    window: how many masks are compared.
    tolerance: the largest distance of masks that have settled.

  Example:
    >>> bird = EarlyBird(window=2, tolerance=0.3)
    >>> [bird.settled({"w": np.array(m)}) for m in ([1, 0], [0, 1], [0, 1])]
    [False, False, True]
  """

  def __init__(self, window: int = 5, tolerance: float = 0.1):
    if window < 2 or not 0 < tolerance < 1:
      raise ValueError(
        f"EarlyBird: window={window!r} must be at least 2 and "
        f"tolerance={tolerance!r} lie between 0 and 1"
      )
    self.window, self.tolerance = window, tolerance
    self.seen: list[PyTree] = []

  def settled(self, masks: PyTree) -> bool:
    """Take the masks of an epoch; tell whether they have settled."""
    self.seen = [*self.seen, masks][-self.window :]
    *before, last = self.seen
    return len(self.seen) == self.window and all(
      mask_distance(mask, last) < self.tolerance for mask in before
    )


def average(
  snapshots: Sequence[PyTree], weights: Sequence[float] | None = None
) -> PyTree:
  """Return the mean of networks that share one mask (Yin et al., 2022).

  Zeros of all are zeros of the mean; running statistics such as those of batch
  norm must be gathered again.

  Args:
    snapshots: trees of parameters of one structure.
    weights: how much each counts; equally by default.

  Returns:
    The weighted mean, leaf by leaf, computed in float32.

  Example:
    >>> average([{"w": jnp.array([0.0, 2.0])}, {"w": jnp.array([0.0, 4.0])}])
    {'w': Array([0., 3.], dtype=float32)}
  """
  if not snapshots:
    raise ValueError("average: snapshots is empty; pass at least one")
  shares = weights or [1.0] * len(snapshots)
  if len(shares) != len(snapshots) or sum(shares) <= 0:
    raise ValueError(
      f"average: weights={weights!r} must be {len(snapshots)} numbers with a "
      "positive sum"
    )
  total = sum(shares)

  def mean(*leaves):
    wide = [jnp.asarray(x, jnp.float32) for x in leaves]
    mixed = sum(s / total * x for s, x in zip(shares, wide, strict=True))
    return jnp.asarray(mixed, jnp.result_type(leaves[0]))

  return jax.tree.map(mean, *snapshots)


def superpose(
  tickets: Sequence[tuple[PyTree, PyTree]],
  weights: Sequence[float] | None = None,
) -> tuple[PyTree, PyTree]:
  """Mix sparse networks with different masks into one (Yin et al., 2022).

  Sup-tickets: the mean of `(params, masks)` pairs, pruned back by |w| to as
  many weights per leaf as the first has.

  Args:
    tickets: pairs of parameters and masks.
    weights: how much each counts; equally by default.

  Returns:
    The mixed parameters, zero where removed, and their masks.

  Example:
    >>> one = {"w": jnp.array([4.0, 0.0])}, {"w": jnp.array([1, 0])}
    >>> two = {"w": jnp.array([0.0, 2.0])}, {"w": jnp.array([0, 1])}
    >>> params, masks = superpose([one, two])
    >>> params["w"].tolist(), masks["w"].tolist()
    ([2.0, 0.0], [1, 0])
  """
  mixed = average([params for params, _ in tickets], weights)
  first = tickets[0][1]

  def prune(param, mask):
    if mask is None:
      return None
    ones = int(np.count_nonzero(np.asarray(mask)))
    scores = [jnp.abs(param)]
    return jaxpruner.mask_calculator.topk_masks(scores, [ones])[0]

  masks = _map(prune, mixed, first)
  return _select(mixed, masks), masks
