"""Scores as expressions, computed in the passes that use them.

`|w|` costs less to compute again than to write to memory and read back. Inside
a traced update, scores that are elementwise expressions of the parameters are
therefore handed on as functions.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxpruner.engine.selection import all_finite
from jaxpruner.program import evaluate as _jaxprs

# Cheap operations that keep the shape: worth repeating in every pass.
_CHEAP = frozenset(
  "abs add and broadcast_in_dim convert_element_type copy div eq ge gt "
  "integer_pow iota le lt max min mul ne neg not or select_n "
  "shift_right_logical sign slice square squeeze sub xor".split()
)
_LONGEST = 12
_SMALL = 1024  # values that are computed once, however dear


class Lazy:
  """Scores of a leaf that exist only while they are used.

  Attributes:
    finite: whether all are; known once a selection has looked at them.
    trail: where their threshold was last, if that tells where it will be; see
      `_trails`. A selection goes on with it.
  """

  finite: jax.Array | None = None
  trail: jax.Array | None = None

  def __init__(self, fn: Callable[[], jax.Array], shape: tuple[int, ...]):
    self.fn, self.shape = fn, shape
    self.size, self.ndim = math.prod(shape), len(shape)

  def __call__(self) -> jax.Array:
    return self.fn()


def value(scores: Any) -> jax.Array:
  """Return scores as an array."""
  return scores() if isinstance(scores, Lazy) else jnp.asarray(scores)


def finite(scores: Any) -> jax.Array:
  """Return whether all scores are finite; takes a pass only if unknown."""
  if isinstance(scores, Lazy) and scores.finite is not None:
    return scores.finite
  return all_finite(value(scores))


def lift(fn: Callable[..., jax.Array], *scores: Any) -> Any:
  """Apply an elementwise function; lazily if the scores are lazy."""
  if any(isinstance(s, Lazy) for s in scores):
    return Lazy(lambda: fn(*map(value, scores)), scores[0].shape)
  return fn(*scores)


def defer(fn: Callable[..., Any], *args: Any) -> Any:
  """Return `fn(*args)` with its elementwise results as `Lazy`."""
  closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
  jaxpr = closed.jaxpr
  known = dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
  known |= zip(jaxpr.constvars, closed.consts, strict=True)
  # Small values are computed once, however dear.
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
    needed |= {x for eqn in eqns for x in eqn.invars if _is_variable(x)}
    needed -= {out for eqn in eqns for out in eqn.outvars}
  once = [x for eqn in jaxpr.eqns for x in eqn.outvars if x in needed]
  if once:
    run = jax.extend.core.jaxpr_as_fun(
      closed.replace(jaxpr=jaxpr.replace(outvars=once))
    )
    known |= zip(once, run(*jax.tree.leaves(args)), strict=True)

  def result(out, eqns):
    if not eqns:
      return known[out] if _is_variable(out) else jnp.asarray(out.val)
    part = jaxpr.replace(
      constvars=[], invars=list(known), eqns=eqns, outvars=[out]
    )
    run = jax.extend.core.jaxpr_as_fun(closed.replace(jaxpr=part, consts=[]))
    return Lazy(lambda: run(*known.values())[0], out.aval.shape)

  results = list(map(result, jaxpr.outvars, slices))
  return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _slice(producers: dict[Any, Any], out: Any) -> list[Any] | None:
  """Return the equations an output needs; None if they are many or dear."""
  eqns: dict[int, Any] = {}
  done: list[Any] = []

  def visit(atom):
    eqn = producers.get(atom) if _is_variable(atom) else None
    if eqn is None or id(eqn) in eqns or len(eqns) > _LONGEST:
      return
    eqns[id(eqn)] = eqn
    for operand in eqn.invars:
      visit(operand)
    done.append(eqn)  # after what it needs

  visit(out)
  return None if len(eqns) > _LONGEST or not all(map(_is_cheap, done)) else done


def _is_variable(atom: Any) -> bool:
  return not isinstance(atom, jax.extend.core.Literal)


def _is_cheap(eqn: Any) -> bool:
  return _jaxprs.consists_of(eqn, _CHEAP)
