"""t5x: a pruned Optax optimizer for its trainer; set it in gin.

```
from __gin__ import dynamic_registration
import optax
from jaxpruner.integrations import t5x
OPTIMIZER = @t5x.sparse_optimizer()
t5x.sparse_optimizer.tx = @optax.adam()
t5x.sparse_optimizer.pruner_config = {"algorithm": "magnitude", "sparsity": 0.9,
                                      "total_steps": 100_000}
```
"""

from typing import Any

import optax

import jaxpruner


def sparse_optimizer(
  tx: optax.GradientTransformation, pruner_config: Any
) -> Any:
  """Return t5x's `OptaxWrapper` of a transformation wrapped by a pruner.

  `OptaxWrapper` applies the updates and saves the whole Optax state in
  checkpoints.

  Args:
    tx: the dense optimizer.
    pruner_config: a configuration for `create_updater_from_config`.

  Returns:
    The optimizer definition for t5x's trainer.

  Example:
    >>> import numpy as np
    >>> definition = sparse_optimizer(
    ...   optax.sgd(0.1), {"algorithm": "static_sparse", "sparsity": 0.75})
    >>> state = definition.init_state({"kernel": np.ones((4, 4), np.float32)})
    >>> masks = jaxpruner.find_state(state.param_states).masks
    >>> int(masks["kernel"].sum())
    4
  """
  from t5x import optimizers

  pruner = jaxpruner.create_updater_from_config(pruner_config)
  return optimizers.OptaxWrapper(pruner.wrap_optax(tx))
