"""The hooks of an algorithm: what it may define, and what is done if not."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

from jaxpruner import _legacy
from jaxpruner.updater import selecting, start
from jaxpruner.updater.masks import hold_at_zero, masked, sparse_gradients
from jaxpruner.updater.prunable import Prunable
from jaxpruner.updater.state import (
  Array,
  Category,
  Masks,
  PyTree,
  SparseState,
  Sparsities,
)


class Hooks:
  """What an algorithm may define; `BaseUpdater` adds fields and what one calls.

  Class variables say what kind of algorithm it is. Only `calculate_scores` has
  no default. `updater/README.md` tells when each hook is called.

  Attributes:
    category: what the algorithm is and needs, for tables and comparisons.
    ranking: "leaf", scores are ranked within their leaf; "global", over all
      leaves.
    straight_through: whether removed weights are trained on, in the state;
      params show zeros.
    reselects: whether masks are selected after every step, from the new
      weights.
    regrows: whether removed weights may return, with fresh optimizer moments.
    targets_by_shape: whether the targets follow from the fields and the shapes
      of leaves alone.
    changes: the fields of the state that `update_state` changes, beside the
      masks. A class that overrides it without saying which may change all.

  Example:
    >>> import jaxpruner
    >>> jaxpruner.RigL.regrows, jaxpruner.MagnitudePruning.regrows
    (True, False)
  """

  category: ClassVar[Category] = Category()
  ranking: ClassVar[str] = "leaf"
  straight_through: ClassVar[bool] = False
  reselects: ClassVar[bool] = False
  regrows: ClassVar[bool] = False
  targets_by_shape: ClassVar[bool] = True
  changes: ClassVar[tuple[str, ...]] = ()

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    # A mixin that is no updater may define `update_state` too.
    for kind in cls.__mro__:
      if "changes" in kind.__dict__:
        break
      if "update_state" in kind.__dict__:
        cls.changes = SparseState._fields
        break

  @property
  def needs(self) -> frozenset[str]:
    """The inputs of the scores: the category's, and those of its parts."""
    return self.category.needs

  def calculate_scores(
    self,
    params: PyTree,
    sparse_state: SparseState | None = None,
    grads: PyTree = None,
  ) -> PyTree:
    """Return a score for every weight; the highest are kept.

    An override may take further keyword arguments, by name or as `**extra`.
    They come from `tx.update(grads, state, params, **extra)` and
    `instant_sparsify(params, grads, **extra)`.

    Args:
      params: the parameters.
      sparse_state: the state; None outside training.
      grads: the gradients of this step; None if there are none.

    Returns:
      A tree of real numbers, shaped as the parameters.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.MagnitudePruning()
      >>> pruner.calculate_scores({"w": jnp.array([3.0, -1.0])})["w"].tolist()
      [3.0, 1.0]
    """
    del params, sparse_state, grads
    raise TypeError(
      f"{type(self).__name__} must define calculate_scores(self, params, "
      "sparse_state=None, grads=None), which says what weights matter"
    )

  @_legacy.renamed_argument("target_sparsity", "sparsities")
  def create_masks(self, scores: PyTree, sparsities: Sparsities) -> Masks:
    """Return masks that keep the highest scores.

    Args:
      scores: a score for every weight.
      sparsities: the fraction removed of each leaf, None for dense leaves; a
        global pruner also takes one fraction for all leaves.

    Returns:
      uint8 masks, 1 = kept, None for dense leaves.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.MagnitudePruning()
      >>> scores = {"w": jnp.array([0.1, 0.4, 0.3, 0.2]), "b": jnp.ones(2)}
      >>> masks = pruner.create_masks(scores, {"w": 0.5, "b": None})
      >>> masks["w"].tolist(), masks["b"]
      ([0, 1, 1, 0], None)
    """
    return selecting.create_masks(self, scores, sparsities)

  def sparsities_at(
    self, view: Prunable, state: SparseState, step: Any
  ) -> list[Any]:
    """Return the sparsity of each prunable leaf at a step.

    A float32 cannot represent every sparsity of a large leaf, so each value
    comes with its exact target.

    Args:
      view: the prunable leaves.
      state: the state, for its `target_sparsities`.
      step: the step, may be traced.

    Returns:
      An `AtStep`, or a float32 scalar, per prunable leaf.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(
      ...   sparsity=0.5,
      ...   scheduler=jaxpruner.sparsity_schedules.PolynomialSchedule(
      ...     1, 0, 4, power=1))
      >>> params = jnp.ones((2, 2))
      >>> view, state = pruner.view(params), pruner.init_state(params)
      >>> float(pruner.sparsities_at(view, state, 2)[0].value)
      0.25
    """
    return selecting.sparsities_at(self, view, state, step)

  def update_state(
    self,
    sparse_state: SparseState,
    params: PyTree,
    grads: PyTree,
    **extra: Any,
  ) -> SparseState:
    """Return the state with new masks; called when the schedule says so.

    Args:
      sparse_state: the state; `count` is the step.
      params: the parameters.
      grads: their gradients.
      **extra: keyword arguments of `tx.update`.

    Returns:
      A state of the same structure.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.init_state(params)
      >>> pruner.update_state(state, params, None).masks.tolist()
      [[1, 0, 0, 1]]
    """
    return selecting.new_masks(self, sparse_state, params, grads, extra)

  def bind(
    self,
    loss: Callable[[PyTree, Any], Array],
    batch: PyTree,
    apply: Callable[[PyTree, Any], Array] | None = None,
    inputs: PyTree = None,
  ) -> Self:
    """Return the updater with the loss and data for pruning at initialization.

    Args:
      loss: `(params, batch) -> scalar`.
      batch: examples for the loss.
      apply: `(params, inputs) -> outputs`, for algorithms that need no labels.
      inputs: the inputs of `apply`; some algorithms read only their shape.

    Returns:
      A new updater if its category needs a "loss", else the updater itself.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> loss = lambda params, batch: jnp.sum(batch @ params)
      >>> pruner = jaxpruner.SNIP(sparsity=0.5).bind(loss, jnp.eye(2))
      >>> pruner.loss is loss
      True
    """
    del loss, batch, apply, inputs
    return self

  def get_initial_masks(
    self, params: PyTree, target_sparsities: Sparsities
  ) -> Masks:
    """Return the masks with which training starts.

    Args:
      params: the parameters.
      target_sparsities: a float per prunable leaf, None for dense leaves.

    Returns:
      uint8 masks, None for dense leaves. By default all ones; for
      straight-through algorithms the masks of step 0.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> targets = pruner.target_sparsities(params)
      >>> pruner.get_initial_masks(params, targets)["w"].tolist()
      [[1, 1], [1, 1]]
    """
    return start.first_masks(self, params, target_sparsities)

  def init_extra(self, params: PyTree, masks: Masks) -> Any:
    """Return the first `state.stats`: arrays carried from step to step.

    Args:
      params: the parameters.
      masks: the first masks, not packed.

    Returns:
      A dict of arrays or trees of arrays, or None.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.SteMagnitudePruning()
      >>> list(pruner.init_extra(jnp.ones((2, 2)), None))
      ['hint']
    """
    del params, masks
    return None

  def on_gradients(
    self, state: SparseState, params: PyTree, grads: PyTree
  ) -> SparseState:
    """Return the state after reading the gradients; called at every step.

    Args:
      state: the state before the step.
      params: the parameters.
      grads: their gradients.

    Returns:
      The state; an override may change its `stats`.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.init_state(params)
      >>> pruner.on_gradients(state, params, params) is state
      True
    """
    del params, grads
    return state

  def forward(self, params: PyTree, state: SparseState) -> PyTree:
    """Return what the forward pass uses of the dense weights.

    Args:
      params: the dense weights.
      state: the state, with the masks in force.

    Returns:
      A tree like `params`; by default removed weights are +0.0.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.update_state(pruner.init_state(params), params, None)
      >>> pruner.forward(params, state).tolist()
      [[3.0, 0.0, 0.0, -4.0]]
    """
    return self.apply_masks(params, state.masks)

  def invert_forward(self, params: PyTree, state: SparseState) -> PyTree:
    """Return dense weights for parameters that were changed from outside.

    Args:
      params: the parameters.
      state: the state before the step.

    Returns:
      A tree like `params`, which `forward` takes back to them.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.update_state(pruner.init_state(params), params, None)
      >>> pruner.invert_forward(params, state).tolist()
      [[3.0, -1.0, 2.0, -4.0]]
    """
    del state
    return params

  def backward(
    self, grads: PyTree, state: SparseState, params: PyTree
  ) -> PyTree:
    """Return the gradients of the dense weights.

    Args:
      grads: the gradients at `forward(params, state)`.
      state: the state before the step.
      params: the dense weights.

    Returns:
      A tree like `grads`; by default the same, the straight-through estimator.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.update_state(pruner.init_state(params), params, None)
      >>> pruner.backward(jnp.ones((1, 4)), state, params).tolist()
      [[1.0, 1.0, 1.0, 1.0]]
    """
    del state, params
    return grads

  def prepare_gradients(
    self, grads: PyTree, state: SparseState, params: PyTree
  ) -> PyTree:
    """Return the gradients that the optimizer gets.

    Args:
      grads: the gradients of the step.
      state: the state, with the masks in force.
      params: the parameters.

    Returns:
      A tree like the gradients; zero for pruned weights if
        `is_sparse_gradients`.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(
      ...   sparsity=0.5, is_sparse_gradients=True)
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.update_state(pruner.init_state(params), params, None)
      >>> pruner.prepare_gradients(jnp.ones((1, 4)), state, params).tolist()
      [[1.0, 0.0, 0.0, 1.0]]
    """
    del params
    return sparse_gradients(self, grads, state)

  def hold_zeros(
    self, updates: PyTree, state: SparseState, params: PyTree
  ) -> PyTree:
    """Return updates that keep pruned weights at exactly +0.0.

    Args:
      updates: the updates of the optimizer.
      state: the state, with the masks in force.
      params: the parameters.

    Returns:
      The updates. The update of a pruned weight is minus the weight, in a dtype
      in which the sum is exact.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.update_state(pruner.init_state(params), params, None)
      >>> pruner.hold_zeros(jnp.full((1, 4), 0.5), state, params).tolist()
      [[0.5, 1.0, -2.0, 0.5]]
    """
    if self.straight_through:
      return updates
    return hold_at_zero(self, updates, state, params)

  def apply_masks(
    self, params: PyTree, masks: Masks, is_packed: bool | None = None
  ) -> PyTree:
    """Return the parameters with pruned weights at exactly +0.0.

    Args:
      params: the parameters, or a tree like them.
      masks: their masks, None for dense leaves.
      is_packed: whether the masks are packed bits; by default
        `use_packed_masks`.

    Returns:
      A tree like `params`.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> masks = {"w": jnp.array([1, 0], jnp.uint8), "b": None}
      >>> params = {"w": jnp.array([3.0, -1.0]), "b": jnp.ones(1)}
      >>> jaxpruner.MagnitudePruning().apply_masks(params, masks)["w"].tolist()
      [3.0, 0.0]
    """
    return masked(self, params, masks, is_packed)
