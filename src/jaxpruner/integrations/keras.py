"""Keras 3 on JAX: a pruner as the optimizer of `model.compile`.

Keras stores an optimizer's state in variables. Here the variables hold the
leaves of the Optax state, masks included, so that `fit`, `save` and
`load_model` preserve them.
"""

import types
from collections.abc import Mapping
from typing import Any

import jax
import keras
import optax

import jaxpruner


def _assign(variables: Any, values: Any) -> None:
  jax.tree.map(lambda variable, x: variable.assign(x), variables, values)


@keras.saving.register_keras_serializable(package="jaxpruner")
class SparseOptimizer(keras.optimizers.Optimizer):
  """An Optax optimizer wrapped by a pruner, for `model.compile`.

  Args:
    pruner: an updater, or the configuration of one.
    optimizer: the name of an Optax optimizer with a learning rate.
    learning_rate: a number, or a Keras schedule.
    **options: further arguments of the Optax optimizer.

  Example:
    >>> model = keras.Sequential(
    ...   [keras.Input((4,)), keras.layers.Dense(4, use_bias=False)])
    >>> optimizer = SparseOptimizer(
    ...   {"algorithm": "static_sparse", "sparsity": 0.75}, "sgd", 0.1)
    >>> optimizer.build(model.trainable_variables)
    >>> int((model.get_weights()[0] == 0).sum())
    12
  """

  def __init__(self, pruner, optimizer="adam", learning_rate=1e-3, **options):
    super().__init__(learning_rate)
    if isinstance(pruner, Mapping):
      pruner = jaxpruner.create_updater_from_config(pruner)
    self.pruner, self.optimizer, self.options = pruner, optimizer, options
    # Keras owns the learning rate: Optax asks for it at every step.
    rate = lambda _: keras.ops.convert_to_tensor(self.learning_rate)
    factory = getattr(optax, optimizer)
    self.tx = pruner.wrap_optax(factory(learning_rate=rate, **options))

  def build(self, variables: list[Any]) -> None:
    if self.built:
      return
    super().build(variables)
    weights: dict[str, Any] = {}
    for variable in variables:
      layer, _, name = variable.path.rpartition("/")
      weights.setdefault(layer, {})[name] = variable
    params = jax.tree.map(lambda v: v.value, weights)
    opt_state = self.tx.init(params)
    add = lambda x: self.add_variable(x.shape, dtype=x.dtype.name)
    slots = jax.tree.map(add, opt_state)
    # In a namespace, because Keras rebuilds the containers it is given.
    self.held = types.SimpleNamespace(variables=(weights, slots))
    # Algorithms that start sparse do so in the first forward pass.
    params = self.pruner.post_gradient_update(params, opt_state)
    _assign(self.held.variables, (params, opt_state))

  @property
  def trees(self) -> tuple[Any, Any]:
    """`(params, opt_state)` as the pruner sees them, masks included."""
    return jax.tree.map(lambda v: v.value, self.held.variables)

  def _backend_update_step(self, grads, trainable_variables, learning_rate):
    del learning_rate
    # Keras leaves out variables without a gradient; the tree is always whole.
    given = dict(zip(map(id, trainable_variables), grads, strict=True))
    params, opt_state = self.trees
    whole = lambda v, x: given.get(id(v), 0 * x)
    grads = jax.tree.map(whole, self.held.variables[0], params)
    updates, opt_state = self.tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    _assign(self.held.variables, (params, opt_state))

  def get_config(self) -> dict[str, Any]:
    return {
      "pruner": jaxpruner.config_from_updater(self.pruner),
      "optimizer": self.optimizer,
      "learning_rate": super().get_config()["learning_rate"],
      **self.options,
    }


class SparsityCallback(keras.callbacks.Callback):
  """Add the sparsity of the prunable weights to the logs of each epoch.

  The model must be compiled with a `SparseOptimizer`.

  Example:
    >>> model = keras.Sequential(
    ...   [keras.Input((4,)), keras.layers.Dense(4, use_bias=False)])
    >>> config = {"algorithm": "static_sparse", "sparsity": 0.75}
    >>> model.compile(SparseOptimizer(config, "sgd", 0.1), "mse")
    >>> x = jax.numpy.ones((2, 4))
    >>> history = model.fit(x, x, verbose=0, callbacks=[SparsityCallback()])
    >>> history.history["sparsity"]
    [0.75]
  """

  def on_epoch_end(self, epoch, logs):
    del epoch
    # fit keeps its variables in JAX until someone looks.
    self.model.jax_state_sync()
    metrics = jaxpruner.state_metrics(self.model.optimizer.trees[1])
    logs["sparsity"] = float(metrics.get("sparsity", 0))
