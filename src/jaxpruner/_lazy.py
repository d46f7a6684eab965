"""Scores as expressions, computed in the passes that use them.

`|w|` costs less to compute again than to write to memory and read back. Inside
a traced update, scores that are elementwise expressions of the parameters are
therefore handed on as functions.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

# Cheap operations that keep the shape: worth repeating in every pass.
_CHEAP = frozenset(
  "abs add and convert_element_type copy div eq ge gt integer_pow le lt max "
  "min mul ne neg not or select_n sign square sub".split()
)
_LONGEST = 12


class Lazy:
  """Scores of a leaf that exist only while they are used."""

  def __init__(self, fn: Callable[[], jax.Array]):
    aval = jax.eval_shape(fn)
    self.fn, self.shape, self.dtype = fn, aval.shape, aval.dtype
    self.size, self.ndim = aval.size, len(aval.shape)

  def __call__(self) -> jax.Array:
    return self.fn()


def value(scores: Any) -> jax.Array:
  """Return scores as an array."""
  return scores() if isinstance(scores, Lazy) else jnp.asarray(scores)


def lift(fn: Callable[..., jax.Array], *scores: Any) -> Any:
  """Apply an elementwise function; lazily if the scores are lazy."""
  if any(isinstance(s, Lazy) for s in scores):
    return Lazy(lambda: fn(*map(value, scores)))
  return fn(*scores)


def defer(fn: Callable[..., Any], *args: Any) -> Any:
  """Return `fn(*args)` with its elementwise results as `Lazy`."""
  closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
  jaxpr, inputs = closed.jaxpr, jax.tree.leaves(args)
  producers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
  slices = [_slice(producers, out) for out in jaxpr.outvars]
  cheap = [
    eqns is not None and all(_is_cheap(eqn) for eqn in eqns) for eqns in slices
  ]
  results: list[Any] = [None] * len(cheap)
  rest = [i for i, c in enumerate(cheap) if not c]
  if rest:
    everything = jax.extend.core.jaxpr_as_fun(closed)(*inputs)
    for i in rest:
      results[i] = everything[i]
  for i, eqns in enumerate(slices):
    if cheap[i]:
      part = closed.replace(
        jaxpr=jaxpr.replace(eqns=eqns, outvars=[jaxpr.outvars[i]])
      )
      run = jax.extend.core.jaxpr_as_fun(part)
      results[i] = Lazy(lambda run=run: run(*inputs)[0])
  return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _slice(producers: dict[Any, Any], out: Any) -> list[Any] | None:
  """Return the equations an output needs, or None if they are many."""
  eqns: dict[int, Any] = {}
  done: list[Any] = []

  def visit(atom):
    if isinstance(atom, jax.extend.core.Literal):
      return
    eqn = producers.get(atom)
    if eqn is None or id(eqn) in eqns or len(eqns) > _LONGEST:
      return
    eqns[id(eqn)] = eqn
    for operand in eqn.invars:
      visit(operand)
    done.append(eqn)  # after what it needs

  visit(out)
  return None if len(eqns) > _LONGEST else done


def _is_cheap(eqn: Any) -> bool:
  name = eqn.primitive.name
  if name in ("jit", "pjit"):
    return all(_is_cheap(inner) for inner in eqn.params["jaxpr"].jaxpr.eqns)
  return name in _CHEAP
