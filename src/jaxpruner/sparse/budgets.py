"""Prune coupled groups to a budget: weights, operations, bytes or time."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import _leaves
from jaxpruner.sparse import _branches, _choose, _groups
from jaxpruner.sparse._dims import Dim
from jaxpruner.sparse.shrinking import Shrunk, shrink

SCORES = ("magnitude", "taylor", "activations")


class Group(NamedTuple):
  """A dimension of the model that became smaller.

  Attributes:
    name: a weight that makes it, and the axis.
    before: its length in the given model.
    after: its length in the smaller model.

  Example:
    >>> Group("up[1]", 64, 48).after
    48
  """

  name: str
  before: int
  after: int


@dataclasses.dataclass(frozen=True)
class PrunedTo:
  """A model pruned to a budget, the result of `prune_to`.

  Attributes:
    params: the given parameters, with zeros in the place of what was removed.
    masks: 1 = kept, a tree like `params`.
    small: the smaller dense model, as `shrink` returns it.
    groups: the dimensions that became smaller.
    fixed: the number of dimensions that could not become smaller.
    kind: "params", "flops", "bytes", "latency" or "width".
    wanted: the fraction that was asked for.
    reached: the fraction that is left, counted (for latency, measured) on the
      smaller model.
    fan_in: a tree like `params`: the fraction that is left of the inputs that
      a weight's product adds up, 1 for other leaves. Divide by its square root
      to draw initial weights of the smaller model from those of the given one.
    blocks: the residual blocks that were taken out, by the path that their
      matrices share.

  Example:
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> params = {"up": rng.normal(size=(8, 32)), "down": np.ones((32, 4))}
    >>> mlp = lambda p, x: (x @ p["up"]) @ p["down"]
    >>> pruned = prune_to(mlp, params, np.ones((1, 8)), params=0.5)
    >>> pruned.groups, pruned.reached
    ([Group(name='up[1]', before=32, after=16)], 0.5)
  """

  params: Any
  masks: Any
  small: Shrunk
  groups: list[Group]
  fixed: int
  kind: str
  wanted: float
  reached: float
  fan_in: Any
  blocks: list[str] = dataclasses.field(default_factory=list)

  def __str__(self) -> str:
    lines = [f"{block}: taken out" for block in self.blocks]
    lines += [f"{g.name}: {g.before} -> {g.after}" for g in self.groups]
    lines.append(
      f"{self.kind}: {self.reached:.1%} left, {self.wanted:.1%} asked for; "
      f"{self.fixed} dimensions cannot become smaller"
    )
    return "\n".join(lines)


def prune_to(
  apply_fn: Callable[..., Any],
  weights: Any,
  /,
  *example_inputs: Any,
  params: float | None = None,
  flops: float | None = None,
  bytes: float | None = None,
  latency: float | None = None,
  width: float | None = None,
  depth: float | None = None,
  scores: str = "magnitude",
  grads: Any = None,
  filter_fn: Callable[[tuple[str, ...], Any], bool] | None = None,
  least: float = 0.1,
) -> PrunedTo:
  """Remove whole channels, neurons and heads until a budget is met.

  Which slices belong together is found from the traced program, as `shrink`
  finds it: a neuron with its bias, its norm and the next layer's row; a
  residual channel with all its partners; a head with its query, key, value and
  output, grouped heads and fused projections whole. Each such group has one
  score, the sum over its weights. The groups of lowest score are removed, from
  all layers, until the budget is met.

  Args:
    apply_fn: `apply_fn(weights, *inputs)`, the forward pass.
    weights: its parameters, any pytree; batch statistics belong here too.
    *example_inputs: inputs, or their shapes (real ones for activations).
    params: the fraction of the weights that may remain.
    flops: the fraction of the operations of all products.
    bytes: the fraction of the bytes of the parameters.
    latency: the fraction of the time of one call, measured here.
    width: the fraction of each dimension that remains, at least one slice.
      Exactly one of these five is given, or `depth` alone.
    depth: the fraction of the residual blocks (f in x + f(x)) that remain.
      The others are taken out first, and the budget is met by width. Their
      parameters stay in the tree, with a first axis of length 0.
    scores: "magnitude" (sum of squares), "taylor" (|sum of weight times
      gradient|; needs `grads`) or "activations" (norm of the activations times
      norm of the weights that they meet, on the example inputs).
    grads: gradients of the loss, a tree like `weights`, for "taylor".
    filter_fn: `(names, param) -> bool`; a group is removed only if it is true
      for all parameters that the group is part of.
    least: the fraction of every dimension that stays.

  Returns:
    The pruned parameters, their masks, and the smaller model in `small`.

  Raises:
    ValueError: if the budget cannot be met within 1 %.

  Example:
    >>> import jax.numpy as jnp, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> params = {"up": rng.normal(size=(8, 32)), "down": np.ones((32, 4))}
    >>> mlp = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    >>> pruned = prune_to(mlp, params, np.ones((1, 8)), params=0.5)
    >>> print(pruned)
    up[1]: 32 -> 16
    params: 50.0% left, 50.0% asked for; 2 dimensions cannot become smaller
    >>> pruned.small.params["up"].shape
    (8, 16)

    Whole blocks, here the only one of two that does little:

    >>> def two(p, x):
    ...   for name in ("first", "second"):
    ...     x = x + jnp.tanh(x @ p[name]["up"]) @ p[name]["down"]
    ...   return x
    >>> params = {name: {"up": scale * rng.normal(size=(8, 32)),
    ...                  "down": scale * rng.normal(size=(32, 8))}
    ...           for name, scale in (("first", 0.1), ("second", 1.0))}
    >>> print(prune_to(two, params, np.ones((1, 8)), depth=0.5))
    first: taken out
    depth: 50.0% left, 50.0% asked for; 1 dimensions cannot become smaller

  Papers: the groups follow DepGraph (Fang et al., 2023); scores by activations
    are those of FASP (2025) and Minitron (Muralidharan et al., 2024), by
    gradients those of Molchanov et al. (2019).
  """
  kind, fraction = _budget(
    depth, params=params, flops=flops, bytes=bytes, latency=latency,
    width=width,
  )  # fmt: skip
  if not 0 <= least < 1:
    raise ValueError(f"least={least} must be at least 0 and below 1")
  if scores not in SCORES:
    raise ValueError(f"scores={scores!r} must be one of {', '.join(SCORES)}")
  whole, treedef = _groups.trace(apply_fn, weights, example_inputs)
  score = _Scores(scores, weights, grads, example_inputs)
  traced, blocks, reached = whole, [], 1.0
  if depth is not None:
    blocks, reached = _blocks(whole, depth, score, filter_fn)
    traced = whole.without(blocks)
  make = _Maker(apply_fn, weights, example_inputs, whole, traced, treedef)
  keep: dict[Dim, np.ndarray] = {}
  if kind == "depth":
    dims, small = traced.removable(), make.small(keep)
  else:
    dims = _groups.chosen(traced, weights, filter_fn)
    ranked = score.of_dims(traced, dims)
    keep, small, reached = make.to(kind, fraction, ranked, least)
  every = dict.fromkeys(
    d
    for v in traced.values
    if v not in traced.lost
    for d in traced.dims.flat(v)
  )
  return PrunedTo(
    params=make.masked(keep),
    masks=make.masks(keep),
    small=small,
    groups=[
      Group(traced.name(d), d.size, int(k.sum()))
      for d, k in keep.items()
      if not k.all()
    ],
    fixed=len(every) - len(dims),
    kind=kind,
    wanted=fraction,
    reached=reached,
    fan_in=treedef.unflatten(traced.fan_in(keep).values()),
    blocks=[_branches.name(block, whole.names) for block in blocks],
  )


def _budget(depth: float | None, **given: float | None) -> tuple[str, float]:
  """Return the one budget that is given."""
  found = [(k, v) for k, v in given.items() if v is not None]
  if len(found) > 1 or (not found and depth is None):
    names = ", ".join(given)
    raise ValueError(f"give exactly one of {names}; {len(found)} are given")
  for kind, fraction in [*found, ("depth", depth)]:
    if fraction is not None and not 0 < fraction < 1:
      raise ValueError(
        f"{kind}={fraction} must be above 0 and below 1: the fraction that "
        "remains"
      )
  if found:
    return found[0]
  assert depth is not None
  return "depth", depth


@dataclasses.dataclass(frozen=True)
class _Scores:
  """What a slice or a block is worth."""

  kind: str
  params: Any
  grads: Any
  inputs: Sequence[Any]

  def of_dims(
    self, traced: _groups.Traced, dims: list[Dim]
  ) -> dict[Dim, np.ndarray]:
    """Return a score for each group, comparable between dims."""
    if self.kind == "activations":
      found = _groups.activation_scores(traced, dims, self._numbers())
    else:
      found = _groups.weight_scores(traced, dims, self._arrays(traced))
      found = {d: np.abs(s) for d, s in found.items()}
    for dim, score in found.items():
      self._check(traced.name(dim), score)
    return _groups.relative(found)

  def of_blocks(
    self, traced: _groups.Traced, blocks: Sequence[_branches.Branch]
  ) -> np.ndarray:
    """Return a score for each residual block."""
    if self.kind == "activations":
      arguments = [*traced.values.values(), *self._numbers()]
      found = _branches.shares(traced.program, blocks, arguments)
    else:
      found = _branches.worth(blocks, self._arrays(traced))
    for block, score in zip(blocks, found, strict=True):
      self._check(_branches.name(block, traced.names), np.array([score]))
    return np.abs(found)

  def _check(self, name: str, score: np.ndarray) -> None:
    if not np.isfinite(score).all():
      raise ValueError(
        f"{name}: {int((~np.isfinite(score)).sum())} scores are not finite; "
        "look for NaN in params, grads or inputs"
      )

  def _numbers(self) -> list[Any]:
    """Return the example inputs, which must not be shapes."""
    flat = jax.tree.leaves(self.inputs)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in flat):
      raise ValueError(
        'scores="activations" needs example inputs with numbers, not shapes'
      )
    return flat

  def _arrays(self, traced: _groups.Traced) -> dict[Any, np.ndarray]:
    """Return what each weight is worth."""
    values = traced.values
    if self.kind == "magnitude":
      return {v: np.square(x.astype(np.float64)) for v, x in values.items()}
    if self.grads is None:
      raise ValueError('scores="taylor" needs grads, a tree like the weights')
    leaves = _leaves.align(self.params, self.grads)
    return {
      v: x.astype(np.float64) * (0.0 if g is None else np.asarray(g))
      for (v, x), g in zip(values.items(), leaves, strict=True)
    }


def _blocks(
  traced: _groups.Traced, depth: float, score: _Scores, filter_fn: Any
) -> tuple[list[_branches.Branch], float]:
  """Return the residual blocks that go, and the fraction that stays."""
  found = _branches.find(traced.program, traced.values)
  if filter_fn is not None:
    named, _ = _leaves.flatten_with_names(score.params)
    taken = {
      v
      for v, (names, leaf) in zip(traced.values, named, strict=True)
      if filter_fn(names, leaf)
    }
    found = [b for b in found if b.params <= taken]
  if not found:
    raise ValueError(
      f"depth={depth}: there is no residual block, f in x + f(x) with "
      "parameters of its own (layers of a scan share theirs)"
      + (", that filter_fn takes" if filter_fn else "")
    )
  order = np.argsort(score.of_blocks(traced, found), kind="stable")
  stay = round(depth * len(found))
  gone = sorted(order[: len(found) - stay].tolist())
  return [found[i] for i in gone], stay / len(found)


def _cost(traced: _groups.Traced, kind: str) -> _groups.Cost:
  if kind == "flops":
    return _groups.flops_cost(traced)
  per_weight = {
    "params": lambda _: 1.0,
    "bytes": lambda d: np.dtype(d).itemsize,
  }
  return _groups.size_cost(traced, per_weight[kind])


@dataclasses.dataclass(frozen=True)
class _Maker:
  """Makes the smaller model of a choice."""

  apply_fn: Callable[..., Any]
  params: Any
  inputs: Sequence[Any]
  whole: _groups.Traced
  traced: _groups.Traced  # without the blocks that go
  treedef: Any

  def to(
    self,
    kind: str,
    fraction: float,
    scores: dict[Dim, np.ndarray],
    least: float,
  ) -> tuple[dict[Dim, np.ndarray], Shrunk, float]:
    """Return what stays, the smaller model, and the fraction reached."""
    if kind == "latency":
      return self._to_latency(scores, fraction, least)
    if kind == "width":
      sizes = {d: max(1, round(fraction * d.size)) for d in scores}
      keep = _groups.best(scores, sizes)
      reached = sum(sizes.values()) / sum(d.size for d in scores)
    else:
      keep, reached = self._to_cost(kind, scores, fraction, least)
    return keep, self.small(keep), reached

  def _to_cost(
    self,
    kind: str,
    scores: dict[Dim, np.ndarray],
    fraction: float,
    least: float,
  ) -> tuple[dict[Dim, np.ndarray], float]:
    cost = _cost(self.traced, kind)
    whole = _cost(self.whole, kind).total({})
    left = cost.total({}) / whole
    if left < fraction - 0.01:
      raise ValueError(
        f"{kind}={fraction}: without the residual blocks {left:.1%} is left; "
        "ask for more depth"
      )
    keep = _groups.plan(cost, scores, min(fraction / left, 1), least)
    sizes = {d: int(k.sum()) for d, k in keep.items()}
    reached = cost.total(sizes) / whole
    if abs(reached - fraction) > 0.01:
      raise ValueError(
        f"{kind}={fraction}: {reached:.1%} is as near as removing whole "
        f"groups comes with least={least}; ask for another fraction, lower "
        "`least`, or let filter_fn take more"
      )
    return keep, reached

  def masks(self, keep: Mapping[Dim, np.ndarray]) -> Any:
    return self.treedef.unflatten(
      [self.traced.mask(v, keep) for v in self.traced.values]
    )

  def masked(self, keep: Mapping[Dim, np.ndarray]) -> Any:
    return self.treedef.unflatten([
      jax.numpy.where(self.traced.mask(v, keep), x, 0).astype(x.dtype)
      for v, x in self.traced.values.items()
    ])  # fmt: skip

  def small(self, keep: Mapping[Dim, np.ndarray]) -> Shrunk:
    masked = self.masked(keep)
    blocks = len(self.traced.lost) > 0
    return shrink(self.apply_fn, masked, *self.inputs, blocks=blocks)

  def _to_latency(
    self, scores: dict[Dim, np.ndarray], fraction: float, least: float
  ) -> tuple[dict[Dim, np.ndarray], Shrunk, float]:
    """Find the fraction of operations that takes the wanted time."""
    cost = _groups.flops_cost(self.traced)
    zeros = jax.tree.map(_choose.concrete, tuple(self.inputs))
    dense = jax.jit(self.apply_fn)
    low, high = 0.0, 1.0
    best: tuple[float, Any, Any, float] | None = None
    for _ in range(6):
      middle = fraction if best is None else (low + high) / 2
      keep = _groups.plan(cost, scores, middle, least)
      small = self.small(keep)
      fast = jax.jit(small.fn)
      times = _choose.measure({
        "whole": lambda: dense(self.params, *zeros),
        "small": lambda fast=fast, small=small: fast(small.params, *zeros),
      })  # fmt: skip
      reached = times["small"] / times["whole"]
      found = (abs(reached - fraction), keep, small, reached)
      if best is None or found[0] < best[0]:
        best = found
      if best[0] <= 0.01:
        break
      low, high = (low, middle) if reached > fraction else (middle, high)
    assert best is not None
    return best[1], best[2], best[3]
