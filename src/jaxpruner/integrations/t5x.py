"""t5x: a pruned Optax optimizer for its trainer; set it in gin.

```
from __gin__ import dynamic_registration
import optax
from jaxpruner.integrations import t5x
OPTIMIZER = @t5x.sparse_optimizer()
t5x.sparse_optimizer.tx = @optax.adamw()
t5x.sparse_optimizer.pruner_config = {"algorithm": "magnitude", "sparsity": 0.9,
                                      "total_steps": 100_000}
optax.adamw.learning_rate = 1e-3
```

t5x does not pass the trainer's `learning_rate_fn` to Optax: give the learning
rate, or t5x's `@utils.create_learning_rate_scheduler()`, to Optax.
"""

from typing import Any

import jax
import optax
from t5x import optimizers

import jaxpruner

_RULES = optimizers.OptaxStatePartitionRules


def sparse_optimizer(
  tx: optax.GradientTransformation, pruner_config: Any
) -> optimizers.OptaxWrapper:
  """Return t5x's `OptaxWrapper` of a transformation wrapped by a pruner.

  `OptaxWrapper` applies the updates and saves the whole Optax state in
  checkpoints. t5x asks, for every type of state, how it is partitioned: the
  rule for `SparseState` is registered here, and gives masks the axes of their
  parameter.

  t5x's own Adafactor is no Optax transformation, and t5x has no rule for the
  state of `optax.adafactor`; take `optax.adamw`, `optax.lion` or `optax.sgd`.

  Args:
    tx: the dense optimizer, of Optax.
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
  if isinstance(tx, optimizers.OptimizerDef):
    raise ValueError(
      f"tx={type(tx).__name__} is an optimizer of t5x, not of Optax; pass "
      "optax.adamw, optax.lion or optax.sgd (without `optimizers.`)"
    )
  _RULES._RULES[jaxpruner.SparseState] = _logical_axes
  pruner = jaxpruner.create_updater_from_config(pruner_config)
  return optimizers.OptaxWrapper(pruner.wrap_optax(tx))


def _logical_axes(state: jaxpruner.SparseState, params_axes: Any) -> Any:
  """Return the state with axes in place of arrays.

  What has the path and the rank of a parameter (masks, dense weights) is
  partitioned like it, everything else is replicated.
  """
  named, _ = jax.tree_util.tree_flatten_with_path(params_axes)
  axes = {_name(path): spec for path, spec in named}

  def place(path, leaf):
    for start in range(1, len(path)):
      spec = axes.get(_name(path[start:]))
      if spec is not None and len(spec) == leaf.ndim:
        return spec
    return None

  own = state._replace(inner_state=())
  own = jax.tree_util.tree_map_with_path(place, own)
  return own._replace(
    inner_state=_RULES.derive_optax_logical_axes(state.inner_state, params_axes)
  )


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")
