"""Keras 3 on JAX: a pruner as the optimizer of `model.compile`.

Keras keeps an optimizer's state in variables. Here they hold the leaves of the
Optax state, masks included, so that `fit`, `save` and `load_model` carry them.
"""

from collections.abc import Mapping
from typing import Any

import jax
import keras
import optax

import jaxpruner


@keras.saving.register_keras_serializable(package="jaxpruner")
class SparseOptimizer(keras.optimizers.Optimizer):
  """An Optax optimizer, confined to a sparse set, for `model.compile`.

  Args:
    pruner: an updater, or the configuration of one.
    optimizer: the name of an Optax optimizer with a learning rate.
    learning_rate: a number, or a Keras schedule.
    options: further arguments of the Optax optimizer.
  """

  def __init__(
    self, pruner, optimizer="adam", learning_rate=1e-3, name="sparse", **options
  ):
    super().__init__(learning_rate=learning_rate, name=name)
    if isinstance(pruner, Mapping):
      pruner = jaxpruner.create_updater_from_config(pruner)
    if not pruner.holds_zeros and pruner.category.start != "dense":
      raise ValueError(
        f"pruner={type(pruner).__name__} masks the forward pass, which belongs "
        "to the Keras model; choose an algorithm that masks the weights"
      )
    self.pruner, self.optimizer, self.options = pruner, optimizer, options
    factory = optax.inject_hyperparams(getattr(optax, optimizer))
    # Keras owns the learning rate and sets it at every step.
    self.tx = pruner.wrap_optax(factory(learning_rate=0.0, **options))
    self.leaves: list[Any] = []

  def build(self, variables: list[Any]) -> None:
    if self.built:
      return
    super().build(variables)
    params = self._tree(variables, [v.value for v in variables])
    state = self.tx.init(params)
    leaves, self.treedef = jax.tree.flatten(state)
    for i, leaf in enumerate(leaves):
      variable = self.add_variable(
        leaf.shape, "zeros", str(leaf.dtype), name=f"state_{i}"
      )
      variable.assign(leaf)
      self.leaves.append(variable)
    if self.pruner.category.start == "sparse-to-sparse":
      self._assign(variables, self.pruner.post_gradient_update(params, state))

  @property
  def state(self) -> Any:
    """The Optax state: `jaxpruner.find_state(optimizer.state).masks`."""
    return self.treedef.unflatten([v.value for v in self.leaves])

  def _backend_apply_gradients(self, grads, trainable_variables):
    # Variables without a gradient are given none: the tree is always whole.
    given = dict(zip(map(id, trainable_variables), grads, strict=True))
    variables = self._trainable_variables
    values = [v.value for v in variables]
    params = self._tree(variables, values)
    updates = self._tree(
      variables,
      [given.get(id(v), 0 * x) for v, x in zip(variables, values, strict=True)],
    )
    state: Any = self.state
    inner = state.inner_state
    rate = jax.numpy.asarray(self.learning_rate, "float32")
    inner = inner._replace(
      hyperparams={**inner.hyperparams, "learning_rate": rate}
    )
    updates, state = self.tx.update(
      updates, state._replace(inner_state=inner), params
    )
    self._assign(variables, optax.apply_updates(params, updates))
    for variable, leaf in zip(self.leaves, jax.tree.leaves(state), strict=True):
      variable.assign(leaf)

  def _tree(self, variables, values) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for variable, value in zip(variables, values, strict=True):
      *folders, name = variable.path.split("/")
      node = tree
      for folder in folders:
        node = node.setdefault(folder, {})
      node[name] = value
    return tree

  def _assign(self, variables, params) -> None:
    for variable in variables:
      value = params
      for name in variable.path.split("/"):
        value = value[name]
      variable.assign(value)

  def get_config(self) -> dict[str, Any]:
    return {
      "pruner": jaxpruner.config_from_updater(self.pruner),
      "optimizer": self.optimizer,
      "learning_rate": super().get_config()["learning_rate"],
      "name": self.name,
      **self.options,
    }


class SparsityCallback(keras.callbacks.Callback):
  """Add the sparsity of the prunable weights to the logs of each epoch."""

  def on_epoch_end(self, epoch, logs=None):
    del epoch
    # fit keeps its variables in JAX until someone looks.
    self.model.jax_state_sync()
    masks = jaxpruner.find_state(self.model.optimizer.state).masks
    summary = jaxpruner.summarize_sparsity(masks, only_total_sparsity=True)
    if logs is not None:
      logs["sparsity"] = summary["_total_sparsity"]
