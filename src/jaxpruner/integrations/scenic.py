"""Scenic: wrap the optimizers that its trainers make.

Scenic's trainers make an Optax optimizer from `config.optimizer_configs` with
`scenic.train_lib.optimizers.get_optimizer` and own the loop.
"""

import contextlib

from scenic.train_lib import optimizers

import jaxpruner
from jaxpruner.integrations import _patch


def pruned(
  pruner: jaxpruner.BaseUpdater,
) -> contextlib.AbstractContextManager[None]:
  """Return a context in which Scenic's optimizers are wrapped by a pruner.

  Call `classification_trainer.train(…)`, or another trainer, inside it. A
  trainer that makes several optimizers, one for each part of the network, gets
  each of them wrapped: every part has the pruner's sparsity, and
  `find_state(opt_state)` must be given the state of one part.

  Args:
    pruner: the updater.

  Returns:
    A context manager; after it, Scenic is as before.

  Example:
    >>> import ml_collections, numpy as np
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "static_sparse", "sparsity": 0.75})
    >>> config = ml_collections.ConfigDict(
    ...   {"optimizer": "sgd", "momentum": 0.9})
    >>> with pruned(pruner):
    ...   tx = optimizers.get_optimizer(config, lambda step: 0.1)
    >>> opt_state = tx.init({"kernel": np.ones((4, 4), np.float32)})
    >>> int(jaxpruner.find_state(opt_state).masks["kernel"].sum())
    4
  """
  return _patch.wrapped(optimizers, "get_optimizer", pruner)
