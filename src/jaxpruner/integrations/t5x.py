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
  """Return t5x's `OptaxWrapper` around a pruner's transformation.

  The wrapper applies updates itself and checkpoints the whole Optax state.
  """
  from t5x import optimizers

  pruner = jaxpruner.create_updater_from_config(pruner_config)
  return optimizers.OptaxWrapper(pruner.wrap_optax(tx))
