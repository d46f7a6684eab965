"""t5x: runs where the user has it; it is on no registry."""

import framework
import jax
import optax
from framework import SPARSITY, STEPS, assert_sparse

framework.require("from its own repository, it is on no registry", "t5x")

from jaxpruner.integrations import t5x


def test_t5xs_optimizer_ends_exactly_sparse():
  params = {"dense": {"kernel": jax.random.normal(jax.random.key(0), (8, 16))}}
  definition = t5x.sparse_optimizer(
    optax.sgd(0.05),
    {"algorithm": "magnitude", "sparsity": SPARSITY, "total_steps": STEPS},
  )
  state = definition.init_state(params)
  for _ in range(STEPS):
    params, state = definition.apply_gradient(
      definition.hyper_params, params, state, params
    )
  assert_sparse(params, state.param_states)


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("t5x")
