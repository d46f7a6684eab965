"""Scenic: one line around `optimizers.get_optimizer`.

Scenic's trainers make an Optax optimizer from `config.optimizer_configs` and
train with it unchanged; their loop has no hook after an update, and needs none.
"""

from typing import Any

import optax

import jaxpruner


def get_optimizer(
  optimizer_config: Any, learning_rate_fn: Any, params: Any, pruner_config: Any
) -> optax.GradientTransformation:
  """Return Scenic's optimizer, confined to the sparse set of a configuration.

  Args:
    optimizer_config: `config.optimizer_configs`.
    learning_rate_fn: as for Scenic's function of this name.
    params: the parameters, which Scenic's function reads for its masks.
    pruner_config: `config.pruner`, as `create_updater_from_config` takes it.
  """
  from scenic.train_lib import optimizers

  pruner = jaxpruner.create_updater_from_config(pruner_config)
  tx = optimizers.get_optimizer(optimizer_config, learning_rate_fn, params)
  return pruner.wrap_optax(tx)
