"""Run a function now and then inside a compiled step."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def run_if(due: Any, fn: Callable[[Carry], Carry], carry: Carry) -> Carry:
  """Return `fn(carry)` where `due`, else `carry` itself.

  What XLA does: it copies every operand that a conditional returns unchanged
  (all masks, at every step), and it moves what a loop's body computes from
  constants of the loop out of the loop, where it runs at every step.
  What we do: a `while_loop` of 0 or 1 iterations, which aliases its carry, and
  inside it a conditional, out of which nothing is moved.
  What it saves: one read and one write of the carry per step at rest.
  When it can go: when a `cond` whose branch returns its operand is aliased.

  Args:
    due: whether to run; a Python bool, or a (traced) bool scalar. If it is
      concrete, nothing is compiled and `fn` is called or not.
    fn: a function of the carry, which returns arrays of the same structure,
      shapes and dtypes.
    carry: a pytree of arrays. Put in only what `fn` changes.

  Returns:
    The new carry.

  >>> run_if(True, lambda x: x + 1, jnp.int32(1)).item()
  2
  """
  if not isinstance(due, jax.core.Tracer):
    # An eager conditional would be compiled again at every call.
    return fn(carry) if due else carry

  def body(state: tuple[Any, Carry]) -> tuple[Any, Carry]:
    due, old = state
    return jnp.zeros_like(due), lax.cond(due, fn, lambda same: same, old)

  return lax.while_loop(lambda state: state[0], body, (due, carry))[1]
