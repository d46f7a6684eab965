"""What a sparse model costs: weights kept, bytes stored, FLOPs.

FLOPs come from the model itself: the function is traced and its matrix
products and convolutions are counted (two per multiply-add). A product with
a masked parameter costs in proportion to the weights its mask keeps, so the
count is linear in the densities and is kept per parameter: trace once, then
price any mask.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any

# Primitives through which a weight stays the same weights, relaid or scaled.
_RELAY = frozenset(
  "reshape transpose convert_element_type squeeze expand_dims "
  "broadcast_in_dim copy copy_p rev select_n mul div neg "
  "sharding_constraint optimization_barrier reduce_precision".split()
)


class Flops(NamedTuple):
  """FLOPs of one call, dense: per parameter path, and all the rest."""

  leaves: dict[str, float]
  other: float

  def total(self, densities: Mapping[str, float] | None = None) -> float:
    """Return the FLOPs with each named parameter at its density.

    Args:
      densities: path -> fraction of weights kept; absent paths are dense.
    """
    densities = densities or {}
    return self.other + sum(
      flops * densities.get(path, 1.0) for path, flops in self.leaves.items()
    )


def path_name(path: tuple[Any, ...]) -> str:
  """Return a key path as `a/b/kernel`."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def count_flops(fn: Callable[..., Any], params: PyTree, *args: Any) -> Flops:
  """Count the FLOPs of `fn(params, *args)`, per parameter of two or more dims.

  Matrix products and convolutions count; elementwise work, which sparsity
  does not change, does not. `scan` bodies count once per iteration; `cond`
  takes its costliest branch.

  Args:
    fn: the forward pass; anything JAX can trace.
    params: parameters, or `jax.ShapeDtypeStruct`s of them.
    *args: the other arguments, arrays or shapes.

  Returns:
    `Flops`; `.total(densities)` prices a sparse model.

  Example:
    >>> import jax, jaxpruner.report as report
    >>> w = jax.ShapeDtypeStruct((8, 4), "float32")
    >>> x = jax.ShapeDtypeStruct((2, 8), "float32")
    >>> report.count_flops(lambda p, x: x @ p["w"], {"w": w}, x).total()
    128.0
  """
  closed = jax.make_jaxpr(fn)(params, *args)
  named, _ = jax.tree_util.tree_flatten_with_path(params)
  owners: list[str | None] = [
    path_name(path) if np.ndim(leaf) >= 2 else None for path, leaf in named
  ]
  owners += [None] * (len(closed.jaxpr.invars) - len(owners))
  leaves: dict[str, float] = {}
  other = _walk(closed.jaxpr, owners, 1.0, leaves)[0]
  return Flops(leaves, other)


def leaf_densities(masks: PyTree) -> dict[str, float]:
  """Return path -> fraction of ones, for every leaf that has a mask."""
  named, _ = jax.tree_util.tree_flatten_with_path(masks)
  return {path_name(path): float(np.mean(leaf)) for path, leaf in named}


def stored_bytes(params: PyTree, masks: PyTree = None) -> int:
  """Return the bytes of the parameters with zeros stored as bits.

  A masked leaf costs one bit per weight plus its kept values, or its dense
  size when that is smaller; other leaves cost their dense size.
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
  """Return how many parameters remain: kept ones, plus the unmasked leaves."""
  masked = jax.tree_util.tree_leaves(masks)
  total = sum(int(np.prod(np.shape(x))) for x in jax.tree.leaves(params))
  return total - sum(int(m.size - np.count_nonzero(m)) for m in masked)


def _walk(jaxpr, owners, times, leaves) -> tuple[float, list[str | None]]:
  """Add the FLOPs of `jaxpr` to `leaves`; return (rest, owners of outputs)."""
  owner = dict(zip(jaxpr.invars, owners, strict=True))
  other = 0.0

  def of(var) -> str | None:
    # Literals are unhashable in some versions and never a parameter.
    return None if hasattr(var, "val") else owner.get(var)

  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    incoming = [of(var) for var in eqn.invars]
    outgoing: list[str | None] = [None] * len(eqn.outvars)
    flops = _own_flops(eqn)
    inner = _inner_jaxprs(eqn)
    if flops:
      weight = next((o for o in incoming if o is not None), None)
      if weight is None:
        other += times * flops
      else:
        leaves[weight] = leaves.get(weight, 0.0) + times * flops
    elif inner:
      rest, outgoing = _walk_inner(eqn, inner, incoming, times, leaves)
      other += rest
    elif name in _RELAY:
      sources = {
        (o, v.aval.size)
        for o, v in zip(incoming, eqn.invars, strict=True)
        if o is not None
      }
      if len(sources) == 1:
        source, size = sources.pop()
        if all(v.aval.size == size for v in eqn.outvars):
          outgoing = [source] * len(eqn.outvars)
    owner.update(zip(eqn.outvars, outgoing, strict=True))
  return other, [of(var) for var in jaxpr.outvars]


def _walk_inner(eqn, inner, incoming, times, leaves):
  """Count a call-like primitive through the jaxprs it carries."""
  name = eqn.primitive.name
  outs: list[str | None] = [None] * len(eqn.outvars)
  if name == "cond":
    counts = []
    for branch in inner:
      mine: dict[str, float] = {}
      rest, _ = _walk(branch, incoming[1:], times, mine)
      counts.append((rest + sum(mine.values()), rest, mine))
    _, rest, mine = max(counts, key=lambda c: c[0])
    for leaf, flops in mine.items():
      leaves[leaf] = leaves.get(leaf, 0.0) + flops
    return rest, outs
  if name == "while":
    mine = {}
    unknown = [None] * len(inner[-1].invars)
    rest, _ = _walk(inner[-1], unknown, times, mine)
    if rest or mine:
      raise ValueError(
        "count_flops: a while_loop with matrix products has no fixed cost; "
        "use scan, or fori_loop with static bounds"
      )
    return 0.0, outs
  if name == "scan":
    rest, _ = _walk(inner[0], incoming, times * eqn.params["length"], leaves)
    return rest, outs
  body = inner[0]
  # custom_vjp_call and friends may pass constants first: align at the end.
  given = incoming[len(incoming) - len(body.invars) :]
  rest, found = _walk(body, given, times, leaves)
  return rest, found if len(found) == len(outs) else outs


def _inner_jaxprs(eqn) -> list[Any]:
  found = []
  for key, value in eqn.params.items():
    if key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_thunk"):
      continue
    for item in value if isinstance(value, tuple | list) else (value,):
      item = getattr(item, "jaxpr", item)
      if hasattr(item, "eqns"):
        found.append(item)
  return found


def _own_flops(eqn) -> float:
  name = eqn.primitive.name
  if name == "dot_general":
    (contract, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    depth = math.prod(shape[axis] for axis in contract)
    return 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)
  if name == "conv_general_dilated":
    numbers = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    per_output = math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    zeros = math.prod(eqn.params["lhs_dilation"])
    return 2.0 * per_output * math.prod(eqn.outvars[0].aval.shape) / zeros
  return 0.0
