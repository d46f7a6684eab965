# pyright: strict
"""Evaluate a program with a callback per operation."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from jaxpruner.program import jaxprs
from jaxpruner.program.tracing import Node, Program, Var, read

Visit: TypeAlias = Callable[[Node, list[Any]], Sequence[Any]]


def bind(node: Any, values: Sequence[Any], **changed: Any) -> list[Any]:
  """Return the results of an operation, in the context it was traced in.

  Args:
    node: a `Node`, or an equation of a jaxpr.
    values: its operands.
    **changed: parameters of the primitive to replace, such as sizes.

  Returns:
    A list of results, also for operations with one result.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner.program import trace
    >>> node = trace(lambda x: -x, jnp.ones(2)).nodes[0]
    >>> bind(node, [jnp.array([3.0, 4.0])])[0].tolist()
    [-3.0, -4.0]
  """
  eqn = node.eqn if isinstance(node, Node) else node
  first, params = jaxprs.bind_params(eqn.primitive, {**eqn.params, **changed})
  with eqn.ctx.manager:
    outputs: Any = eqn.primitive.bind(*first, *values, **params)
  return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _value(var: Var) -> Any:
  return var.value


def run(
  program: Any,
  args: Sequence[Any],
  visit: Visit = bind,
  constant: Callable[[Var], Any] = _value,
) -> list[Any]:
  """Evaluate a program, operation by operation, and return its results.

  Values may be of any type that the visitor understands: arrays, sparse
  weights, the name of the parameter that a value comes from. Calls and loops
  that the program holds are single operations (`trace` opens calls and unrolls
  short scans, `read` does not); a visitor enters them with
  `run(read(body), values, visit)`.

  Args:
    program: a `Program`, or a jaxpr; the calls and scans of a jaxpr stay single
      operations.
    args: one value for each of its inputs.
    visit: returns the results of an operation; by default those of `bind`.
    constant: returns the value of a constant; by default its `value`.

  Returns:
    One value for each output.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner.program import trace
    >>> program = trace(lambda x: jnp.sin(x) + 1.0, jnp.ones(1))
    >>> shift = lambda node, values: bind(
    ...   node, [values[0], 5.0] if node.name == "add" else values)
    >>> run(program, [jnp.zeros(1)], shift)[0].tolist()
    [5.0]
  """
  traced = program if isinstance(program, Program) else read(program)
  known: dict[Var, Any] = dict(zip(traced.inputs, args, strict=True))

  def lookup(var: Var) -> Any:
    return known[var] if var in known else constant(var)

  for node in traced.nodes:
    outputs = visit(node, [lookup(v) for v in node.inputs])
    known.update(zip(node.outputs, outputs, strict=True))
  return [lookup(v) for v in traced.outputs]


def consists_of(node: Any, names: Collection[str]) -> bool:
  """Return whether an operation consists of the given primitives only.

  Args:
    node: a `Node`, or an equation of a jaxpr.
    names: names of primitives.

  Returns:
    True if its primitive is in `names`, or if it is a call in which all are.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from jaxpruner.program import trace
    >>> call = trace(jax.jit(jnp.sin), jnp.ones(2), open_calls=False).nodes[0]
    >>> call.name, consists_of(call, {"sin"}), consists_of(call, {"cos"})
    ('jit', True, False)
  """
  eqn = node.eqn if isinstance(node, Node) else node
  callee = jaxprs.callee(eqn)
  if callee is not None:
    inner = jaxprs.opened(callee)[0].eqns
    return all(consists_of(part, names) for part in inner)
  return eqn.primitive.name in names
