"""Run any model with kept weights in place of dense ones.

The user's function is traced with the dense shapes and evaluated again,
operation by operation; a product with a kept weight becomes a sparse product.
No dense weight is ever made: an operation without a sparse form is refused.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpruner import program
from jaxpruner.kept import capture, joining, views
from jaxpruner.kept.rules import RULES
from jaxpruner.kept.tensors import KeptTensor, is_kept
from jaxpruner.program import Node, jaxprs

_COPIES = frozenset(
  "copy device_put name optimization_barrier sharding_constraint".split()
)
# Derivative rules of their own would be lost if we entered these.
_RULED = frozenset("custom_jvp_call custom_vjp_call".split())


def _cure(path: str) -> str:
  return (
    f'keep this weight dense with custom_sparsity_map={{"{path}": None}} (or '
    "filter_fn), write the operation as a product, or pass "
    'on_unsupported="densify" to kept.lift'
  )


def _is_weight(value: Any) -> bool:
  return views.is_view(value) or joining.is_joined(value)


def lift(
  apply_fn: Callable[..., Any], *, on_unsupported: str = "refuse"
) -> Callable[..., Any]:
  """Return the function of kept parameters that a model computes.

  `apply_fn` is traced, not edited, so any framework's will do. Dense layers,
  attention projections, convolutions and embeddings (a gather, a product, or
  both) become sparse; weights may pass through `jit`, `remat` and `scan`, which
  may go through the layers of a stack. The result is differentiable with
  respect to inputs and values (`jax.grad`; not forward mode).

  Args:
    apply_fn: any function of parameters and inputs.
    on_unsupported: what to do with a kept weight that is used in another way:
      "refuse", or "densify", which decodes it with a warning.

  Returns:
    A function with the arguments of `apply_fn`, which accepts `KeptTensor`
    leaves anywhere in them.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import kept
    >>> model = lambda params, x: jnp.tanh(x @ params["w"]) + params["b"]
    >>> params = {"w": kept.from_dense(jnp.eye(2)), "b": jnp.ones(2)}
    >>> kept.lift(model)(params, jnp.zeros((1, 2))).tolist()
    [[1.0, 1.0]]
  """
  if on_unsupported not in ("refuse", "densify"):
    raise ValueError(
      f'on_unsupported={on_unsupported!r} must be "refuse" or "densify"'
    )

  @functools.wraps(apply_fn)
  def lifted(*args: Any, **kwargs: Any) -> Any:
    named, treedef = jax.tree_util.tree_flatten_with_path(
      (args, kwargs), is_leaf=is_kept
    )
    leaves = [leaf for _, leaf in named]
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    operands = [_named(*named[i]) for i in places]

    def flat(values):
      full = list(leaves)
      for i, value in zip(places, values, strict=True):
        full[i] = value
      args, kwargs = jax.tree.unflatten(treedef, full)
      return apply_fn(*args, **kwargs)

    shapes = [jax.ShapeDtypeStruct(np.shape(a), _dtype(a)) for a in operands]
    closed, out = jax.make_jaxpr(flat, return_shape=True)(shapes)
    seen = [views.whole(a) if is_kept(a) else a for a in operands]
    lifter = _Lifter(on_unsupported == "densify")
    results = [
      lifter.decoded(r, None, "it is returned") if _is_weight(r) else r
      for r in lifter.run(closed, seen)
    ]
    return jax.tree.unflatten(jax.tree.structure(out), results)

  return lifted


def _named(path: Any, leaf: Any) -> Any:
  """Give a kept weight without a name its path, for errors."""
  if not is_kept(leaf) or leaf.layout.name:
    return leaf
  name = jax.tree_util.keystr(path[2:], simple=True, separator="/")
  layout = dataclasses.replace(leaf.layout, name=name or "kernel")
  return KeptTensor(leaf.values, layout)


def _is_array(value: Any) -> bool:
  return hasattr(value, "shape") and hasattr(value, "dtype")


def _dtype(value: Any) -> Any:
  return value.dtype


@dataclasses.dataclass(frozen=True)
class _Lifter:
  """A visitor that multiplies by kept weights."""

  densify: bool

  def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return program.run(jaxpr, args, self.visit)

  def visit(self, node: Node, args: list[Any]) -> list[Any]:
    if not any(map(_is_weight, args)):
      return program.bind(node, args)
    if node.name in _COPIES:
      return args
    callee = jaxprs.callee(node.eqn)
    if callee is not None and node.name not in _RULED:
      return self._call(node, callee, args)
    if node.name == "scan":
      return _scan(self, node, *args)
    results = _sparse_form(node, args)
    if results is None:
      reason = "it has no sparse form"
      dense = [self.decoded(a, node, reason) for a in args]
      results = program.bind(node, dense)
    return results

  def decoded(self, value: Any, node: Node | None, reason: str) -> Any:
    """Return a dense value, or refuse."""
    if not _is_weight(value):
      return value
    path = value.tensor.layout.name
    if not self.densify:
      if node is None:
        raise ValueError(
          f"kept.lift: the parameter {path!r}: {reason}; {_cure(path)}"
        )
      raise program.unsupported("kept.lift", node, reason, _cure(path), path)
    warnings.warn(
      f"kept.lift: the parameter {path!r} is decoded to its dense size: "
      + (reason if node is None else str(node)),
      stacklevel=2,
    )
    return value.todense()

  def _call(self, node: Node, callee: Any, args: list[Any]) -> list[Any]:
    run = functools.partial(self.run, callee)
    if node.name != "remat2" or capture.active() is not None:
      return run(args)
    # Views are traced like arrays: what the body returns must be dense.
    inner = lambda args: [self.decoded(r, node, "") for r in run(args)]
    policy, cse = node.params["policy"], node.params["prevent_cse"]
    return jax.checkpoint(inner, policy=policy, prevent_cse=cse)(args)


def _sparse_form(node: Node, args: list[Any]) -> list[Any] | None:
  """Return the results of an operation with kept weights, if it has any."""
  if node.name == "concatenate":
    return joining.concatenate(node, *args)
  rule = RULES.get(node.name)
  if rule is None:
    return None
  if any(map(joining.is_joined, args)):
    return joining.apply(rule, node, *args)
  return rule(node, *args)


def _scan(lifter: _Lifter, node: Node, *args: Any) -> list[Any]:
  """Enter a scan; kept weights may be its constants, or stacks it slices."""
  scan = jaxprs.scan(node.eqn)
  first = scan.constants + scan.carried
  shared = args[: scan.constants]
  reason = "it is carried through a scan"
  start = [
    lifter.decoded(a, node, reason) for a in args[scan.constants : first]
  ]
  xs = [_sliced(lifter, node, a) for a in args[first:]]
  noting = capture.active()
  if noting is None:

    def body(carry, parts):
      out = _dense_results(lifter, node, scan, [*shared, *carry, *parts])
      return out[: len(carry)], out[len(carry) :]

    carry, ys = _run_scan(scan, body, start, xs)
    return [*carry, *ys]
  return _noting_scan(lifter, node, scan, shared, start, xs, noting)


def _sliced(lifter: _Lifter, node: Node, value: Any) -> Any:
  """Return what a scan slices: the layers of a stack, or an array."""
  if views.is_view(value) and value.stacked:
    if value.order[0] == value.tensor.layout.axis:
      return value.layer()
  reason = (
    "a scan slices it, but it is not a kept stack along that axis (set "
    "stacked_axis, or axis in kept.create)"
  )
  return lifter.decoded(value, node, reason)


def _run_scan(scan: jaxprs.Scan, body: Any, start: Any, xs: Any) -> Any:
  return jax.lax.scan(
    body,
    start,
    xs,
    length=scan.length,
    reverse=scan.reverse,
    unroll=scan.unroll,
  )


def _dense_results(
  lifter: _Lifter, node: Node, scan: jaxprs.Scan, args: list[Any]
) -> list[Any]:
  out = lifter.run(scan.body, args)
  return [lifter.decoded(o, node, "a scan returns it") for o in out]


def _noting_scan(
  lifter: _Lifter,
  node: Node,
  scan: jaxprs.Scan,
  shared: Sequence[Any],
  start: list[Any],
  xs: list[Any],
  noting: capture.Capture,
) -> list[Any]:
  """Run a scan that also returns the inputs of its products, step by step."""
  found: list[capture.Capture] = []
  stacks = {x.tensor.layout.name for x in xs if _is_weight(x)}

  def body(carry, parts):
    parts, zeros = parts
    with capture.capturing(zeros) as inner:
      out = _dense_results(lifter, node, scan, [*shared, *carry, *parts])
    found.append(inner)
    inputs = {n: [use.x for use in uses] for n, uses in inner.inputs.items()}
    return out[: len(carry)], (out[len(carry) :], inputs)

  # The first look tells the shapes of what is to be noted.
  slices = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs
  )
  jax.eval_shape(body, start, (slices, None))
  zeros: Any = {
    name: [
      noting.add(name, jax.ShapeDtypeStruct((scan.length, *s.shape), s.dtype))
      for s in shapes
    ]
    for name, shapes in found[0].shapes.items()
  }
  zeros = None if noting.zeros is None else zeros
  carry, (ys, inputs) = _run_scan(scan, body, start, (xs, zeros))
  for name, seen in inputs.items():
    uses = [
      use._replace(x=x).in_scan(name in stacks)
      for x, use in zip(seen, found[0].inputs[name], strict=True)
    ]
    noting.inputs.setdefault(name, []).extend(uses)
  return [*carry, *ys]
