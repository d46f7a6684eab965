"""The cost of a sparse model: weights kept, bytes stored, FLOPs.

FLOPs are counted on the traced function: its matrix products and convolutions,
two per multiply-add. A product with a masked parameter costs in proportion to
the weights its mask keeps, so the count is linear in the densities and is
stored per parameter: one trace gives the cost of any mask.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import _leaves, program
from jaxpruner.program import Node, jaxprs
from jaxpruner.program.primitives import (
  CASTS,
  CONTROL,
  COPIES,
  KNOWN,
  RESHAPES,
)

PyTree = Any

# Primitives whose result holds the same weights, reordered or scaled.
_SAME_WEIGHTS = (
  RESHAPES | CASTS | COPIES | {"div", "mul", "neg", "rev", "select_n"}
)


class Flops(NamedTuple):
  """FLOPs of one call of the dense function, per parameter.

  Attributes:
    leaves: path of a parameter -> FLOPs of its products.
    other: FLOPs of products without a parameter.
    unknown: primitives that `jaxpruner.program` does not know, for example
      kernels of other libraries; nothing is counted for them.

  Example:
    >>> flops = Flops({"up": 100.0, "down": 50.0}, other=10.0)
    >>> flops.total(), flops.total({"up": 0.25})
    (160.0, 85.0)
  """

  leaves: dict[str, float]
  other: float
  unknown: tuple[str, ...] = ()

  def total(self, densities: Mapping[str, float] | None = None) -> float:
    """Return the FLOPs with each named parameter at its density.

    Args:
      densities: path -> fraction of weights kept; absent paths are dense.

    Returns:
      The FLOPs of one call.
    """
    densities = densities or {}
    return self.other + sum(
      flops * densities.get(path, 1.0) for path, flops in self.leaves.items()
    )


def path_name(path: tuple[Any, ...]) -> str:
  """Return a key path as `a/b/kernel`, without wrappers like NNX's `value`.

  Args:
    path: a key path of `jax.tree_util.tree_flatten_with_path`.

  Returns:
    The names of its keys, joined by "/".

  Example:
    >>> from jax.tree_util import DictKey, GetAttrKey
    >>> path_name((DictKey("a"), DictKey("kernel"), GetAttrKey("value")))
    'a/kernel'
  """
  return _leaves.join(_leaves.path_names(path))


def count_flops(fn: Callable[..., Any], params: PyTree, *args: Any) -> Flops:
  """Count the FLOPs of `fn(params, *args)`, per parameter of two or more dims.

  Matrix products and convolutions are counted; elementwise operations, which
  sparsity does not change, are not. The body of a `scan` is counted once per
  iteration, and a `cond` as its most expensive branch.

  Args:
    fn: the forward pass; anything JAX can trace.
    params: parameters, or `jax.ShapeDtypeStruct`s of them.
    *args: the other arguments, arrays or shapes.

  Returns:
    `Flops`; its `total(densities)` gives the FLOPs of a sparse model.

  Example:
    >>> import jax, jaxpruner.report as report
    >>> w = jax.ShapeDtypeStruct((8, 4), "float32")
    >>> x = jax.ShapeDtypeStruct((2, 8), "float32")
    >>> report.count_flops(lambda p, x: x @ p["w"], {"w": w}, x).total()
    128.0
  """
  traced = program.trace(fn, params, *args, unroll=0)
  named, _ = jax.tree_util.tree_flatten_with_path(params)
  owners: list[str | None] = [
    path_name(path) if np.ndim(leaf) >= 2 else None for path, leaf in named
  ]
  owners += [None] * (len(traced.inputs) - len(owners))
  count = _Count()
  count.run(traced, owners)
  return Flops(dict(count.leaves), count.other, tuple(sorted(count.unknown)))


def leaf_densities(masks: PyTree) -> dict[str, float]:
  """Return the fraction of ones of every mask.

  Args:
    masks: masks, 1 = kept; `None` leaves are left out.

  Returns:
    Path of the leaf -> fraction of weights kept.

  Example:
    >>> leaf_densities({"w": np.array([[1, 0], [0, 0]]), "bias": None})
    {'w': 0.25}
  """
  named, _ = jax.tree_util.tree_flatten_with_path(masks)
  return {path_name(path): float(np.mean(leaf)) for path, leaf in named}


def stored_bytes(params: PyTree, masks: PyTree = None) -> int:
  """Return the bytes of the parameters with masks stored as bits.

  A masked leaf takes one bit per weight plus its kept values, or its dense size
  if that is smaller; other leaves take their dense size.

  Args:
    params: parameters.
    masks: their masks, 1 = kept; `None` leaves are dense.

  Returns:
    The total number of bytes.

  Example:
    >>> params = {"w": np.ones((4, 4), np.float32), "bias": np.ones(4, "f4")}
    >>> masks = {"w": np.eye(4), "bias": None}
    >>> stored_bytes(params), stored_bytes(params, masks)
    (80, 34)
  """
  named, _ = jax.tree_util.tree_flatten_with_path(params)
  kept = {
    path_name(path): int(np.count_nonzero(leaf))
    for path, leaf in jax.tree_util.tree_flatten_with_path(masks)[0]
  }
  total = 0
  for path, leaf in named:
    array = np.asarray(leaf)
    dense = array.size * array.itemsize
    name = path_name(path)
    if name in kept:
      packed = math.ceil(array.size / 8) + kept[name] * array.itemsize
      dense = min(dense, packed)
    total += dense
  return total


def count_weights(params: PyTree, masks: PyTree = None) -> int:
  """Count the parameters that remain: kept weights and unmasked leaves.

  Args:
    params: parameters.
    masks: their masks, 1 = kept; `None` leaves are dense.

  Returns:
    The number of parameters that are not removed.

  Example:
    >>> params = {"w": np.ones((4, 4)), "bias": np.ones(4)}
    >>> count_weights(params), count_weights(params, {"w": np.eye(4)})
    (20, 8)
  """
  masked = jax.tree_util.tree_leaves(masks)
  total = sum(int(np.prod(np.shape(x))) for x in jax.tree.leaves(params))
  return total - sum(int(m.size - np.count_nonzero(m)) for m in masked)


def needs_dense_gradient(updater: Any, step: Any) -> Any:
  """Return whether a step needs the gradients of removed weights too.

  Algorithms that grow weights by gradient need them at mask updates (RigL,
  GraNet), in the steps that lead to one (`SignalRigL`), or at every step if
  they keep a running mean of them (SNFS).
  Algorithms that read gradients of kept weights only (MEST) never do.

  Args:
    updater: the pruning algorithm.
    step: the number of the step, may be traced.

  Returns:
    A bool, or a boolean array if the step is traced.

  Example:
    >>> import jaxpruner
    >>> every_ten = jaxpruner.sparsity_schedules.PeriodicSchedule(10)
    >>> rigl = jaxpruner.RigL(scheduler=every_ten)
    >>> [bool(needs_dense_gradient(rigl, step)) for step in (9, 10, 11)]
    [False, True, False]
    >>> needs_dense_gradient(jaxpruner.MEST(scheduler=every_ten), 10)
    False
  """
  if "momentum" in updater.needs:
    return True
  grow = getattr(updater, "grow", None)
  needs = updater.needs if grow is None else getattr(grow, "needs", ())
  if not updater.regrows or "gradients" not in needs:
    return False
  due = updater.scheduler.is_mask_update_iter
  near = [due(step + k) for k in range(getattr(grow, "window", 1))]
  return functools.reduce(operator.or_, near)


@dataclasses.dataclass
class _Count:
  """A visitor that counts FLOPs; a value is the path of its parameter or None.

  Attributes:
    times: how often the visited program runs.
  """

  times: float = 1.0
  leaves: dict[str, float] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(float)
  )
  other: float = 0.0
  unknown: set[str] = dataclasses.field(default_factory=set)

  @property
  def total(self) -> float:
    return self.other + sum(self.leaves.values())

  def run(self, traced: Any, owners: Sequence[str | None]) -> list[Any]:
    return program.run(traced, owners, self.visit, constant=lambda _: None)

  def enter(self, body: Any, owners: Sequence[str | None], times: float = 1):
    """Return the count of a body that runs `times` per run of this program."""
    inner = _Count(self.times * times)
    inner.run(program.read(body, open_calls=True), owners)
    return inner

  def add(self, inner: "_Count") -> None:
    self.other += inner.other
    self.unknown |= inner.unknown
    for leaf, flops in inner.leaves.items():
      self.leaves[leaf] += flops

  def visit(self, node: Node, owners: list[str | None]) -> list[str | None]:
    """Count an operation; return the parameter that each result holds."""
    if node.name in _FLOPS:
      self._product(node, owners)
    elif bodies := jaxprs.bodies(node.eqn):
      self.add(self._control(node, bodies, owners))
    elif node.name in _SAME_WEIGHTS:
      return _followed(node, owners)
    elif node.name not in KNOWN:
      self.unknown.add(node.name)
    return [None] * len(node.outputs)

  def _product(self, node: Node, owners: list[str | None]) -> None:
    flops = self.times * _FLOPS[node.name](node)
    weight = next((o for o in owners if o is not None), None)
    if weight is None:
      self.other += flops
    else:
      self.leaves[weight] += flops

  def _control(
    self, node: Node, bodies: list[Any], owners: list[str | None]
  ) -> "_Count":
    """Return the count of an operation that contains other programs."""
    if node.name == "scan":
      return self.enter(bodies[0], owners, node.params["length"])
    if node.name == "cond":
      branches = [self.enter(body, owners[1:]) for body in bodies]
      return max(branches, key=lambda count: count.total)
    if node.name == "shard_map":
      return self.enter(bodies[0], owners, node.params["mesh"].size)
    for body in bodies:
      inputs = jaxprs.opened(body)[0].invars
      if self.enter(body, [None] * len(inputs)).total:
        loop = node.name in CONTROL
        raise program.unsupported(
          "count_flops",
          node,
          "it has matrix products inside and no known number of iterations",
          "use scan, or fori_loop with static bounds"
          if loop
          else "count a version of the function without it",
          next((owner for owner in owners if owner is not None), ""),
        )
    if node.name not in KNOWN:
      self.unknown.add(node.name)
    return _Count()


def _followed(node: Node, owners: list[str | None]) -> list[str | None]:
  """Return the one parameter that the results hold, reordered or scaled."""
  if len(node.outputs) == len(node.inputs) > 1:  # a barrier for several arrays
    return owners
  sources = {
    (owner, math.prod(v.shape))
    for owner, v in zip(owners, node.inputs, strict=True)
    if owner is not None
  }
  owner, size = sources.pop() if len(sources) == 1 else (None, None)
  same = all(math.prod(v.shape) == size for v in node.outputs)
  return [owner if same else None] * len(node.outputs)


def _dot_flops(node: Node) -> float:
  (contract, _), _ = node.params["dimension_numbers"]
  depth = math.prod(node.inputs[0].shape[axis] for axis in contract)
  return 2.0 * depth * math.prod(node.outputs[0].shape)


def _conv_flops(node: Node) -> float:
  kernel = node.inputs[1].shape
  numbers = node.params["dimension_numbers"]
  per_output = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
  zeros = math.prod(node.params["lhs_dilation"])
  return 2.0 * per_output * math.prod(node.outputs[0].shape) / zeros


_FLOPS = {"conv_general_dilated": _conv_flops, "dot_general": _dot_flops}
