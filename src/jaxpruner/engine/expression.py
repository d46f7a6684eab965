"""Score expressions: elementwise scores that are computed, not stored.

`|w|` costs less to compute again than to write to memory and read back. Inside
a traced update, scores that are short elementwise expressions of arrays at hand
are therefore passed on as expressions, and evaluated inside the passes that
count them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import Array, lax

from jaxpruner import program

# Primitives worth repeating in every pass: cheap, and they keep the shape.
_CHEAP = frozenset(
  "abs add and broadcast_in_dim convert_element_type copy div eq ge gt "
  "integer_pow iota le lt max min mul ne neg not or select_n "
  "shift_right_logical sign slice square squeeze sub xor".split()
)
_MAX_EQUATIONS = 12
_SMALL = 1024  # arrays up to this size are computed once, whatever they cost


class ScoreExpr(NamedTuple):
  """The scores of a leaf as an elementwise function of arrays.

  Attributes:
    jaxpr: the traced function, a `ClosedJaxpr` with one output.
    inputs: its arguments.
  """

  jaxpr: Any
  inputs: tuple[Array, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the scores."""
    return self.jaxpr.out_avals[0].shape

  @property
  def dtype(self) -> Any:
    """Dtype of the scores."""
    return self.jaxpr.out_avals[0].dtype

  @property
  def size(self) -> int:
    """Number of scores."""
    return math.prod(self.shape)

  @property
  def ndim(self) -> int:
    """Number of dimensions."""
    return len(self.shape)


Scores: TypeAlias = Array | ScoreExpr


def value(scores: Any) -> Array:
  """Return scores as an array."""
  if isinstance(scores, ScoreExpr):
    return evaluate_score(scores.jaxpr, scores.inputs)
  return jnp.asarray(scores)


def trace(fn: Callable[[], Any]) -> ScoreExpr:
  """Return `fn()` as an expression of the arrays that `fn` closes over."""
  closed = jax.make_jaxpr(fn)()
  return ScoreExpr(_without_constants(closed), tuple(closed.consts))


def _without_constants(closed: Any) -> Any:
  """Return a jaxpr whose constants have become its first inputs."""
  jaxpr = closed.jaxpr.replace(
    constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
  )
  return closed.replace(jaxpr=jaxpr, consts=[])


def apply(fn: Callable[..., Array], *scores: Any) -> Any:
  """Return `fn(*scores)` for an elementwise `fn`; an expression stays one.

  Args:
    fn: an elementwise function; arrays it needs are arguments, not closed over.
    *scores: arrays and expressions, at least one of them of the full shape.

  Returns:
    A `ScoreExpr` if any of the scores is one, else an array.
  """
  if not any(isinstance(s, ScoreExpr) for s in scores):
    return fn(*scores)
  expressions = [
    s if isinstance(s, ScoreExpr) else _constant(s) for s in scores
  ]
  lengths = [len(e.inputs) for e in expressions]
  starts = [sum(lengths[:i]) for i in range(len(lengths))]

  def composed(*flat):
    parts = zip(expressions, starts, lengths, strict=True)
    return fn(*(value(e._replace(inputs=flat[a : a + n])) for e, a, n in parts))

  inputs = tuple(x for e in expressions for x in e.inputs)
  closed = jax.make_jaxpr(composed)(*inputs)
  return ScoreExpr(_without_constants(closed), (*closed.consts, *inputs))


def _constant(x: Any) -> ScoreExpr:
  x = jnp.asarray(x)
  return ScoreExpr(jax.make_jaxpr(lambda x: x)(x), (x,))


def defer(fn: Callable[..., Any], *args: Any) -> Any:
  """Return `fn(*args)` with each short elementwise result as a `ScoreExpr`.

  Args:
    fn: a function of pytrees that returns a tree of scores.
    *args: its arguments; what is not needed by an expression is computed here.

  Returns:
    The tree that `fn` returns, of arrays and expressions.
  """
  closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
  jaxpr = closed.jaxpr
  known = dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
  known |= zip(jaxpr.constvars, closed.consts, strict=True)
  producers = {
    out: eqn
    for eqn in jaxpr.eqns
    for out in eqn.outvars
    if _is_cheap(eqn) or out.aval.size > _SMALL
  }
  slices = [_slice(producers, out) for out in jaxpr.outvars]
  needed = {
    x for x, eqns in zip(jaxpr.outvars, slices, strict=True) if not eqns
  }
  for eqns in filter(None, slices):
    needed |= _free_variables(eqns)
  once = [x for eqn in jaxpr.eqns for x in eqn.outvars if x in needed]
  if once:
    run = jax.extend.core.jaxpr_as_fun(
      closed.replace(jaxpr=jaxpr.replace(outvars=once))
    )
    known |= zip(once, run(*jax.tree.leaves(args)), strict=True)

  def result(out, eqns):
    if not eqns:
      return known[out] if _is_variable(out) else jnp.asarray(out.val)
    inputs = [x for x in known if x in _free_variables(eqns)]
    part = jaxpr.replace(constvars=[], invars=inputs, eqns=eqns, outvars=[out])
    return ScoreExpr(
      closed.replace(jaxpr=part, consts=[]), tuple(known[x] for x in inputs)
    )

  results = list(map(result, jaxpr.outvars, slices))
  return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _free_variables(eqns: list[Any]) -> set[Any]:
  read = {x for eqn in eqns for x in eqn.invars if _is_variable(x)}
  return read - {out for eqn in eqns for out in eqn.outvars}


def _slice(producers: dict[Any, Any], out: Any) -> list[Any] | None:
  """Return the equations of an output; None if they are many or not cheap."""
  eqns: dict[int, Any] = {}
  done: list[Any] = []

  def visit(atom):
    eqn = producers.get(atom) if _is_variable(atom) else None
    if eqn is None or id(eqn) in eqns or len(eqns) > _MAX_EQUATIONS:
      return
    eqns[id(eqn)] = eqn
    for operand in eqn.invars:
      visit(operand)
    done.append(eqn)  # after the equations it reads from

  visit(out)
  if len(eqns) > _MAX_EQUATIONS or not all(map(_is_cheap, done)):
    return None
  return done


def _is_variable(atom: Any) -> bool:
  return not isinstance(atom, jax.extend.core.Literal)


def _is_cheap(eqn: Any) -> bool:
  return program.consists_of(eqn, _CHEAP)


# --- operations on 16-bit floats ---------------------------------------------
#
# What XLA does: its CPU backend computes in float32 where a program says
# bfloat16 or float16, stores the result of each conversion back, and leaves
# out a rounding between two operations. What we do: operations that only move
# or clear bits are done on the bits, and a bfloat16 product is rounded in
# integers. What it saves: 2 bytes written per weight and pass, and masks that
# differ with how a program is fused. When it can go: when 16-bit floats are
# native there.


def evaluate_score(jaxpr: Any, inputs: Sequence[Array]) -> Array:
  """Return the scores of an expression."""
  return program.run(program.read(jaxpr, open_calls=True), inputs, _visit)[0]


def _visit(node: program.Node, inputs: list[Array]) -> list[Array]:
  """Run an operation of a score, or what replaces it."""
  dtype = jnp.dtype(node.outputs[0].dtype)
  if dtype in _BITWISE.get(node.name, ()):
    return [_RULES[node.name](*inputs)]
  return program.bind(node, inputs)


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
  return lax.bitcast_convert_type(
    (rounded >> 16).astype(jnp.uint16), jnp.bfloat16
  )


_HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_RULES: dict[str, Callable[..., Array]] = {
  "abs": _abs,
  "select_n": _select_bits,
  "mul": _multiply,
}
_BITWISE = {"abs": _HALVES, "select_n": _HALVES, "mul": _HALVES[:1]}
