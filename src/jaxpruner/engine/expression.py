# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Score expressions: elementwise scores that are computed, not stored.

`|w|` costs less to compute again than to write to memory and read back. Inside
a traced update, scores that are short elementwise expressions of arrays at hand
are therefore passed on as expressions, and evaluated inside the passes that
count them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxpruner import program

# Primitives worth repeating in every pass: cheap, and each element of a result
# reads one element of each input, at a fixed place.
_CHEAP = frozenset(
  "abs add and broadcast_in_dim convert_element_type copy div eq ge gt "
  "integer_pow iota le lt max min mul ne neg not or select_n "
  "shift_right_logical sign slice square squeeze sub xor".split()
)
_MOST = 12  # operations of an expression; a call counts as one
_SMALL = 256  # arrays up to this size are computed once, whatever they cost


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoreExpr:
  """The scores of a leaf as an elementwise function of arrays; a pytree.

  Attributes:
    jaxpr: the traced function, a `ClosedJaxpr` with one output.
    inputs: its arguments.
  """

  jaxpr: Any = dataclasses.field(metadata={"static": True})
  inputs: tuple[Array, ...]

  @property
  def aval(self) -> Any:
    """Shape, dtype and sharding of the scores, as `jax.typeof` gives them."""
    return self.jaxpr.out_avals[0]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the scores."""
    return self.aval.shape

  @property
  def dtype(self) -> Any:
    """Dtype of the scores."""
    return self.aval.dtype

  @property
  def size(self) -> int:
    """Number of scores."""
    return math.prod(self.shape)

  @property
  def ndim(self) -> int:
    """Number of dimensions."""
    return len(self.shape)


Scores: TypeAlias = Array | ScoreExpr


def trace(fn: Callable[[], Any]) -> ScoreExpr:
  """Return `fn()` as an expression of the arrays that `fn` closes over."""
  closed: Any = jax.make_jaxpr(fn)()
  # The constants become inputs.
  jaxpr = closed.jaxpr.replace(constvars=[], invars=closed.jaxpr.constvars)
  return ScoreExpr(closed.replace(jaxpr=jaxpr, consts=[]), tuple(closed.consts))


def value(scores: Any) -> Array:
  """Return scores as an array."""
  if not isinstance(scores, ScoreExpr):
    return jnp.asarray(scores)
  operations = program.read(scores.jaxpr, open_calls=True)
  return program.run(operations, scores.inputs, _visit)[0]


def apply(fn: Callable[..., Array], *scores: Any) -> Any:
  """Return `fn(*scores)` for an elementwise `fn`; an expression stays one.

  Args:
    fn: an elementwise function.
    *scores: arrays and expressions, at least one of them of the full shape.

  Returns:
    A `ScoreExpr` if any of the scores is one, else an array.
  """
  if not any(isinstance(s, ScoreExpr) for s in scores):
    return fn(*scores)
  return trace(lambda: fn(*map(value, scores)))


class _Later(NamedTuple):
  """A cheap operation that is not computed yet."""

  node: program.Node
  inputs: list[Any]
  cost: int


def defer(fn: Callable[..., Any], *args: Any) -> Any:
  """Return `fn(*args)` with each short elementwise result as a `ScoreExpr`.

  Args:
    fn: a function of pytrees that returns a tree of scores.
    *args: its arguments; what is not cheap is computed here.

  Returns:
    The tree that `fn` returns, of arrays and expressions.
  """

  def now(x: Any) -> Any:
    if not isinstance(x, _Later):
      return x
    return program.bind(x.node, [now(y) for y in x.inputs])[0]

  def visit(node: program.Node, inputs: list[Any]) -> list[Any]:
    cost = 1 + sum(x.cost for x in inputs if isinstance(x, _Later))
    is_large = math.prod(node.outputs[0].shape) > _SMALL
    is_single = len(node.outputs) == 1
    if is_large and is_single and cost <= _MOST:
      if program.consists_of(node, _CHEAP):
        return [_Later(node, inputs, cost)]
    return program.bind(node, [now(x) for x in inputs])

  traced = program.trace(fn, *args, open_calls=False, unroll=0)
  found = program.run(traced, jax.tree.leaves(args), visit)
  results = [
    trace(functools.partial(now, x)) if isinstance(x, _Later) else value(x)
    for x in found
  ]
  return jax.tree.unflatten(traced.out_tree, results)


# --- operations on 16-bit floats ---------------------------------------------
#
# What XLA does: its CPU backend computes in float32 where a program says
# bfloat16 or float16, stores the result of each conversion back, and leaves
# out a rounding between two operations. What we do: operations that only move
# or clear bits are done on the bits, and a bfloat16 product is rounded in
# integers. What it saves: 2 bytes written per weight and pass, and masks that
# differ with how a program is fused. When it can go: when 16-bit floats are
# native there.


def _visit(node: program.Node, inputs: list[Array]) -> list[Array]:
  """Run an operation of a score, or what replaces it."""
  rule, dtypes = _RULES.get(node.name, (None, ()))
  if rule is None or jnp.dtype(node.outputs[0].dtype) not in dtypes:
    return program.bind(node, inputs)
  return [rule(*inputs)]


def _bits(x: Any) -> Array:
  return lax.bitcast_convert_type(jnp.asarray(x), jnp.uint16)


def _abs(x: Array) -> Array:
  return lax.bitcast_convert_type(_bits(x) & jnp.uint16(0x7FFF), x.dtype)


def _select_bits(which: Array, *cases: Any) -> Array:
  chosen = lax.select_n(which, *map(_bits, cases))
  return lax.bitcast_convert_type(chosen, jnp.asarray(cases[0]).dtype)


def _multiply(x: Array, y: Array) -> Array:
  product = x.astype(jnp.float32) * y.astype(jnp.float32)
  bits = lax.bitcast_convert_type(product, jnp.uint32)
  even = bits + (0x7FFF + ((bits >> 16) & 1))
  rounded = jnp.where(jnp.isnan(product), 0x7FC00000, even)
  upper = (rounded >> 16).astype(jnp.uint16)
  return lax.bitcast_convert_type(upper, jnp.bfloat16)


_HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_RULES: dict[str, tuple[Callable[..., Array], tuple[Any, ...]]] = {
  "abs": (_abs, _HALVES),
  "select_n": (_select_bits, _HALVES),
  "mul": (_multiply, _HALVES[:1]),
}
