"""The door of the engine: values in, values out, nothing mutated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import engine


@pytest.mark.parametrize("due", [True, False])
def test_run_if_runs_only_if_due(due):
  carry = {"mask": jnp.arange(4), "count": jnp.int32(3)}
  fn = lambda c: {"mask": c["mask"] * 2, "count": c["count"] + 1}
  expected = fn(carry) if due else carry
  eager = engine.run_if(due, fn, carry)
  jitted = jax.jit(lambda d, c: engine.run_if(d, fn, c))(jnp.array(due), carry)
  for got in (eager, jitted):
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_run_if_is_not_traced_when_concrete():
  calls = []
  assert engine.run_if(False, lambda c: calls.append(1) or c, 1) == 1
  assert engine.run_if(np.True_, lambda c: calls.append(1) or c + 1, 1) == 2
  assert len(calls) == 1


@pytest.mark.parametrize("traced", [False, True])
def test_among_leaves_the_others_out_of_ranking_and_of_finiteness(traced):
  scores = jnp.array([5.0, jnp.inf, 1.0, 3.0, jnp.nan, 2.0])
  among = jnp.array([1, 0, 1, 1, 0, 1], jnp.uint8)
  run = lambda s, a: engine.select([s], [3], among=[a])
  found = (jax.jit(run) if traced else run)(scores, among)
  assert found.masks[0].tolist() == [1, 0, 0, 1, 0, 1]
  assert found.finite.tolist() == [True]
  found = run(scores, among.at[4].set(1))
  assert found.finite.tolist() == [False]
