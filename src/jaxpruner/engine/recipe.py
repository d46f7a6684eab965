"""Scores by recipe: an elementwise expression, evaluated where it is needed.

XLA's CPU backend computes in float32 where a program says bfloat16 or
float16, and stores the result of each conversion back. A pass over such
scores would write them first. So operations that only move or clear bits are
done on the bits, and a bfloat16 product is rounded by hand, to the same value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxpruner.program import evaluate as _jaxprs


class Recipe(NamedTuple):
  """`score(*inputs)`, cast to `dtype`, gives the scores of a leaf."""

  score: Callable[..., Array]
  inputs: tuple[Array, ...]
  shape: tuple[int, ...]
  dtype: Any

  @property
  def size(self) -> int:
    return int(np.prod(self.shape, dtype=np.int64))

  def scores(self) -> Array:
    return self.score(*self.inputs).astype(self.dtype)


def _identity(x: Array) -> Array:
  return x


def _is_staging() -> bool:
  return isinstance(jnp.zeros(()), jax.core.Tracer)


def recipe(scores: Array | Callable[[], Array]) -> Recipe:
  """Return the recipe of an array, or of a function of no arguments.

  What the function closes over becomes the inputs.
  """
  if callable(scores) and not _is_staging():
    # Outside jit there is nothing to fuse with, and arrays, unlike functions,
    # are found again in the cache of compiled programs.
    value = scores()
    scores = scores if isinstance(value, jax.core.Tracer) else value
  if callable(scores):
    closed = jax.make_jaxpr(scores)()
    (aval,) = closed.out_avals
    shape, dtype, inputs = aval.shape, aval.dtype, tuple(closed.consts)
    score = lambda *inputs: _jaxprs.evaluate(closed.jaxpr, inputs, (), _run)[0]
  else:
    scores = jnp.asarray(scores)
    shape, dtype, inputs = scores.shape, scores.dtype, (scores,)
    score = _identity
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise ValueError(f"scores of dtype {dtype} have no order: use jnp.abs")
  if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
    dtype = jnp.dtype(jnp.bfloat16)
  made = Recipe(score, inputs, shape, jnp.dtype(dtype))
  if made.size >= 1 << 32:
    raise ValueError(
      f"scores of shape {shape} have 2**32 elements or more; split them"
    )
  return made


def _run(eqn, inputs) -> list[Array]:
  """Run an operation of a score, or what replaces it."""
  name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
  if name in ("jit", "pjit"):
    inner = eqn.params["jaxpr"]
    return _jaxprs.evaluate(inner.jaxpr, inner.consts, inputs, _run)
  if jnp.dtype(dtype) in _BITWISE.get(name, ()):
    return [_RULES[name](*inputs)]
  return _jaxprs.bind(eqn, inputs)


def _bits(x) -> Array:
  return lax.bitcast_convert_type(jnp.asarray(x), jnp.uint16)


def _abs(x):
  return lax.bitcast_convert_type(_bits(x) & jnp.uint16(0x7FFF), x.dtype)


def _select(which, *cases):
  chosen = lax.select_n(which, *map(_bits, cases))
  return lax.bitcast_convert_type(chosen, jnp.asarray(cases[0]).dtype)


def _multiply(x, y):
  product = x.astype(jnp.float32) * y.astype(jnp.float32)
  bits = lax.bitcast_convert_type(product, jnp.uint32)
  even = bits + (0x7FFF + ((bits >> 16) & 1))
  rounded = jnp.where(jnp.isnan(product), 0x7FC00000, even)
  return lax.bitcast_convert_type(
    (rounded >> 16).astype(jnp.uint16), jnp.bfloat16
  )


_HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_RULES = {"abs": _abs, "select_n": _select, "mul": _multiply}
_BITWISE = {"abs": _HALVES, "select_n": _HALVES, "mul": _HALVES[:1]}
