"""Scenic: runs where the user has it; it is on no registry."""

import framework
import jax
import optax
import pytest
from framework import SPARSITY, STEPS, assert_sparse

# PyPI's package of this name is another project.
framework.require("from its own repository, it is on no registry", "scenic")
pytest.importorskip("scenic.train_lib.optimizers", reason="another scenic")

import ml_collections

from jaxpruner.integrations import scenic


def test_scenics_optimizer_ends_exactly_sparse():
  params = {"dense": {"kernel": jax.random.normal(jax.random.key(0), (8, 16))}}
  tx = scenic.get_optimizer(
    ml_collections.ConfigDict({"optimizer": "momentum"}),
    lambda _step: 0.05,
    params,
    {"algorithm": "magnitude", "sparsity": SPARSITY, "total_steps": STEPS},
  )
  opt_state = tx.init(params)
  for _ in range(STEPS):
    updates, opt_state = tx.update(params, opt_state, params)
    params = optax.apply_updates(params, updates)
  assert_sparse(params, opt_state)


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("scenic")
