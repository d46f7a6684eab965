"""t5x: a pruned Optax optimizer for its trainer; set it in gin.

```
from jaxpruner.integrations import t5x
OPTIMIZER = @t5x.sparse_optimizer()
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
