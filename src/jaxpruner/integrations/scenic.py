"""Scenic: one line around `optimizers.get_optimizer`.

Scenic's trainers make an Optax optimizer from `config.optimizer_configs`. Their
loop has no hook after an update, and a wrapped optimizer needs none.
"""

from typing import Any

import optax

import jaxpruner


def get_optimizer(
  optimizer_config: Any, learning_rate_fn: Any, params: Any, pruner_config: Any
) -> optax.GradientTransformation:
  """Return Scenic's optimizer, wrapped by the pruner of a configuration.

  Args:
    optimizer_config: `config.optimizer_configs`.
    learning_rate_fn: step -> learning rate, as for Scenic's function of this
      name.
    params: the parameters; Scenic's function reads them for weight decay.
    pruner_config: `config.pruner`, a configuration for
      `create_updater_from_config`.

  Returns:
    The wrapped transformation.

  Example:
    >>> import ml_collections, numpy as np
    >>> params = {"kernel": np.ones((4, 4), np.float32)}
    >>> tx = get_optimizer(
    ...   ml_collections.ConfigDict({"optimizer": "momentum"}),
    ...   lambda step: 0.1, params,
    ...   {"algorithm": "static_sparse", "sparsity": 0.75})
    >>> masks = jaxpruner.find_state(tx.init(params)).masks
    >>> int(masks["kernel"].sum())
    4
  """
  from scenic.train_lib import optimizers

  pruner = jaxpruner.create_updater_from_config(pruner_config)
  tx = optimizers.get_optimizer(optimizer_config, learning_rate_fn, params)
  return pruner.wrap_optax(tx)
