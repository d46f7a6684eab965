"""A conditional inside a step: taken if due, and not traced if known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.updater.conditional import run_if


@pytest.mark.parametrize("due", [True, False])
def test_run_if_runs_only_if_due(due):
  carry = {"mask": jnp.arange(4), "count": jnp.int32(3)}
  fn = lambda c: {"mask": c["mask"] * 2, "count": c["count"] + 1}
  expected = fn(carry) if due else carry
  eager = run_if(due, fn, carry)
  jitted = jax.jit(lambda d, c: run_if(d, fn, c))(jnp.array(due), carry)
  for got in (eager, jitted):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_run_if_is_not_traced_when_concrete():
  calls = []
  assert run_if(False, lambda c: calls.append(1) or c, 1) == 1
  assert run_if(np.True_, lambda c: calls.append(1) or c + 1, 1) == 2
  assert len(calls) == 1
