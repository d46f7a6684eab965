"""The updater: configuration, and the hooks that algorithms share.

`updater.transform` holds the training step, which calls the hooks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxpruner import (
  _leaves,
  _legacy,
  engine,
  mask_calculator,
  sparsity_schedules,
  sparsity_types,
)
from jaxpruner.updater import (
  at_once,
  checks,
  hidden,
  prunable,
  ranking,
  seeds,
  selecting,
  start,
  transform,
)
from jaxpruner.updater.masks import hold_at_zero, replace_masks
from jaxpruner.updater.prunable import UNSET, Prunable
from jaxpruner.updater.state import (
  Array,
  Category,
  Masks,
  PyTree,
  SparseState,
  Sparsities,
  apply_mask,
  find_state,
  frozen,
  masked_forward,
)

__all__ = [
  "UNSET",
  "BaseUpdater",
  "Category",
  "NoPruning",
  "SparseState",
  "apply_mask",
  "find_state",
  "frozen",
  "hold_at_zero",
  "masked_forward",
  "replace_masks",
]


@dataclasses.dataclass(eq=False)
class BaseUpdater:
  """Configure an algorithm; the base class of all of them.

  A new algorithm defines `calculate_scores`; the weights with the highest
  scores are kept.

  Attributes:
    scheduler: the steps at which masks are updated, and the sparsity at a step.
    skip_gradients: whether the optimizer rests on steps that update masks.
    is_sparse_gradients: whether gradients of pruned weights are set to zero
      before the optimizer sees them.
    sparsity_type: the structure of the masks: one type, a mapping from path or
      glob to type, or a function `(names, param) -> type`.
    sparsity_distribution_fn: `params -> tree of float or None`, the target
      sparsity of each leaf; None means dense.
    rng_seed: int or key; by default derived from the parameters at `init`.
    use_packed_masks: store masks at 1 bit per weight instead of 8.
    topk_fn: `(scores, sparsity) -> mask`, replaces the sparsity type; where
      none is given it reads as the type's own.
    track_exploration: keep the union of all masks so far, which takes another
      byte (or bit) per weight; it gives the share of weights ever trained (Liu
      et al., 2021).
    continue_sparse: start from a sparse model: weights that are zero at `init`
      are already pruned. Masks do not change while the schedule asks for more
      weights than are left.
    master_dtype: the dtype of a copy of the weights that the state keeps and
      the optimizer updates, such as "float32" for bfloat16 params; None keeps
      no copy beyond what the algorithm needs.
    stacked_axis: which leaves hold a stack of layers, each slice of which has
      its own target and mask: "auto" finds what `nn.scan`, `nn.vmap` and
      annotated axes say; an axis such as 0 for all leaves; a mapping from path
      or glob to axis; a function `(names, param) -> axis or None`; "none" for
      no leaf. `sparsity_table` shows what was found.

  Example:
    >>> import dataclasses, functools, jax, jax.numpy as jnp, jaxpruner
    >>> @dataclasses.dataclass(eq=False)
    ... class SmallestPruning(jaxpruner.BaseUpdater):
    ...   def calculate_scores(self, params, sparse_state=None, grads=None):
    ...     return jax.tree.map(lambda w: -jnp.abs(w), params)
    >>> pruner = SmallestPruning(
    ...   sparsity_distribution_fn=functools.partial(
    ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
    >>> pruner.instant_sparsify(jnp.array([[3.0, -1, 2, -4]]))[1].tolist()
    [[0, 1, 1, 0]]
  """

  scheduler: Any = sparsity_schedules.NoUpdateSchedule()
  skip_gradients: bool = False
  is_sparse_gradients: bool = False
  sparsity_type: Any = sparsity_types.Unstructured()
  sparsity_distribution_fn: Callable[..., Sparsities] | None = UNSET
  rng_seed: Any = None
  use_packed_masks: bool = False
  topk_fn: Callable[[Array, Any], Array] | None = _legacy.topk_fn()
  track_exploration: bool = False
  continue_sparse: bool = False
  master_dtype: Any = None
  stacked_axis: Any = "auto"

  category: ClassVar[Category] = Category()
  # "leaf": scores are ranked within their leaf; "global": over all leaves.
  ranking: ClassVar[str] = "leaf"
  # Whether removed weights are trained on, in the state; params show zeros.
  straight_through: ClassVar[bool] = False
  # Whether masks are selected after every step, from the new weights.
  reselects: ClassVar[bool] = False
  # Whether removed weights may return, with fresh optimizer moments.
  regrows: ClassVar[bool] = False
  # Whether the targets follow from the fields and the shapes of leaves alone.
  targets_by_shape: ClassVar[bool] = True
  # The fields of the state that `update_state` changes, beside the masks. A
  # class that overrides it without saying which may change all of them.
  changes: ClassVar[tuple[str, ...]] = ()

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    # A plain @dataclass on a user's subclass would replace equality and remove
    # the hash; methods that the class defines are not replaced.
    for name in ("__eq__", "__hash__"):
      if name not in cls.__dict__:
        setattr(cls, name, getattr(BaseUpdater, name))
    # A mixin that is no updater may define `update_state` too.
    for kind in cls.__mro__:
      if "changes" in kind.__dict__:
        break
      if "update_state" in kind.__dict__:
        cls.changes = SparseState._fields
        break

  def __post_init__(self):
    checks.check_fields(self)
    if self.ranking == "global":
      ranking.check_fields(self)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, BaseUpdater) or type(self) is not type(other):
      return NotImplemented
    return self._fields() == other._fields()

  def __hash__(self) -> int:
    return hash((type(self), self._fields()))

  def _fields(self) -> tuple[Any, ...]:
    fields = dataclasses.fields(self)
    return tuple(frozen(getattr(self, field.name)) for field in fields)

  @property
  def needs(self) -> frozenset[str]:
    """The inputs of the scores: the category's, and those of its parts."""
    return self.category.needs

  # --- hooks that an algorithm may override --------------------------------

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
    raise TypeError(
      f"{type(self).__name__} must define calculate_scores(self, params, "
      "sparse_state=None, grads=None), which says what weights matter"
    )

  def bind(
    self,
    loss: Callable[[PyTree, Any], Array],
    batch: PyTree,
    apply: Callable[[PyTree, Any], Array] | None = None,
    inputs: PyTree = None,
  ) -> "BaseUpdater":
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
    view = self.view(params, target_sparsities)
    if self.reselects and "gradients" not in self.needs:
      scores = view.of(selecting.calculate(self, params), "scores")
      start = SparseState(target_sparsities=target_sparsities, count=0)
      wanted = self.sparsities_at(view, start, 0)
      return view.put(None, self._select(view, scores, wanted).masks)
    ones = lambda p: jnp.ones_like(p, dtype=mask_calculator.MASK_DTYPE)
    return view.put(None, [_leaves.shard_like(ones(p), p) for p in view.leaves])

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
    view = self.view(params)
    if not view.names or self.category.when == "before":
      return sparse_state
    scores = selecting.scores_of(self, view, sparse_state, grads, extra)
    wanted = self.sparsities_at(view, sparse_state, sparse_state.count)
    stats = sparse_state.stats
    hint = stats.get("hint") if isinstance(stats, dict) else None
    found = self._select(view, scores, wanted, hint)
    if hint is not None and found.hint is not None:
      stats = {**stats, "hint": found.hint}
      sparse_state = sparse_state._replace(stats=stats)
    return self._replace_masks(view, sparse_state, found.masks, found.finite)

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
    if not self.is_sparse_gradients:
      return grads
    return self.apply_masks(grads, state.masks)

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

  def pre_forward_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the parameters for the forward pass: those you have.

    No algorithm needs this call: the parameters that a trainer holds are the
    masked ones. Of parameters that are not masked yet, before the first step,
    a straight-through algorithm returns the masked ones.

    Args:
      params: the parameters.
      opt_state: the optimizer's state, which holds a `SparseState`.

    Returns:
      A tree like `params`; gradients reach every weight.

    Example:
      >>> import functools, jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.SteMagnitudePruning(
      ...   sparsity_distribution_fn=functools.partial(
      ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.init_state(params)
      >>> pruner.pre_forward_update(params, state).tolist()
      [[3.0, 0.0, 0.0, -4.0]]
    """
    if not self.straight_through:
      return params
    masks = find_state(opt_state).masks
    if not jax.tree.leaves(masks):
      return params
    return self.view(params).map(masked_forward, params, masks)

  def dense_params(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the weights that are trained: the hidden ones where params agree.

    The state of a straight-through algorithm keeps the weights that `params`
    show as zero. A weight that `params` show otherwise than the state would
    was changed from outside, by another optimizer or an average: it is taken as
    `params` have it.

    Args:
      params: the parameters.
      opt_state: the optimizer's state, which holds a `SparseState`.

    Returns:
      A tree like `params`, of `master_dtype` if there is one.

    Example:
      >>> import functools, jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.SteMagnitudePruning(
      ...   sparsity_distribution_fn=functools.partial(
      ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.5))
      >>> params = jnp.array([[3.0, -1, 2, -4]])
      >>> state = pruner.init_state(params)
      >>> pruner.dense_params(jnp.array([[3.0, 0, 0, -5]]), state).tolist()
      [[3.0, -1.0, 2.0, -5.0]]
    """
    return hidden.dense(self, params, find_state(opt_state))

  @_legacy.renamed_argument("sparse_state", "opt_state")
  def post_gradient_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the parameters with pruned weights at zero; idempotent.

    `wrap_optax` keeps pruned weights at zero already. Call this function once
    after `init`, so that the first forward pass is sparse too (without it, an
    algorithm that starts sparse takes its first gradient at the dense weights),
    and on copies that the optimizer does not update: averages, target networks.

    Args:
      params: the parameters.
      opt_state: the optimizer's state, which holds a `SparseState`.

    Returns:
      The parameters, masked.

    Example:
      >>> import functools, jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.RigL(
      ...   sparsity_distribution_fn=functools.partial(
      ...     jaxpruner.sparsity_distributions.uniform, sparsity=0.75))
      >>> params = jnp.ones((4, 4))
      >>> state = pruner.init_state(params)
      >>> float(pruner.post_gradient_update(params, state).sum())
      4.0
    """
    state = find_state(opt_state)
    checks.check_made_by(self, params, state)
    return self.apply_masks(params, state.masks)

  # --- methods that an algorithm may call ----------------------------------

  def wrap_optax(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that prunes: `inner`, with masks.

    Make it the outermost transformation: a transformation chained after it can
    move pruned weights away from zero.

    Args:
      inner: the optimizer.

    Returns:
      A transformation whose state is a `SparseState`.

    Example:
      >>> import jax.numpy as jnp, jaxpruner, optax
      >>> pruner = jaxpruner.GlobalMagnitudePruning(
      ...   sparsity=0.5,
      ...   scheduler=jaxpruner.sparsity_schedules.OneShotSchedule())
      >>> tx = pruner.wrap_optax(optax.sgd(0.5))
      >>> params, grads = jnp.array([[3.0, -1, 2, -4]]), jnp.ones((1, 4))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> optax.apply_updates(params, updates).tolist()
      [[2.5, 0.0, 0.0, -4.5]]
    """
    return transform.wrap(self, inner)

  def init_state(self, params: PyTree) -> SparseState:
    """Return the state of step 0, without the state of an optimizer.

    Args:
      params: the parameters.

    Returns:
      A `SparseState` without an `inner_state`.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> pruner.init_state(jnp.ones((2, 2))).masks.tolist()
      [[1, 1], [1, 1]]
    """
    return start.first_state(self, params)

  def instant_sparsify(
    self, params: PyTree, grads: PyTree = None, **extra: Any
  ) -> tuple[PyTree, Masks]:
    """Prune to the target sparsity now, without training.

    Args:
      params: the parameters.
      grads: their gradients, if the scores need them.
      **extra: further arguments of `calculate_scores`.

    Returns:
      `(params, masks)`; removed weights are zero.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> params, masks = pruner.instant_sparsify(jnp.array([[3.0, -1, 2, -4]]))
      >>> params.tolist(), masks.tolist()
      ([[3.0, 0.0, 0.0, -4.0]], [[1, 0, 0, 1]])
    """
    return at_once.prune_at_once(self, params, grads, extra)

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
    if self.ranking == "global" and isinstance(sparsities, float):
      sparsities = _legacy.spread(self, scores, sparsities)
    view = self.view(scores, sparsities)
    return view.put(
      None,
      selecting.keep_highest(self, view, view.leaves, view.targets, None).masks,
    )

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
    if is_packed is None:
      is_packed = self.use_packed_masks
    checks.check_masks(params, masks, is_packed)
    return _leaves.map_masks(
      lambda _, param, mask: apply_mask(param, mask, is_packed), params, masks
    )

  def target_sparsities(self, params: PyTree) -> Sparsities:
    """Return the target sparsity of each leaf.

    Args:
      params: the parameters, or their shapes.

    Returns:
      A tree of floats, None for dense leaves.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> pruner.target_sparsities({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
      {'b': None, 'w': 0.5}
    """
    view = self.view(params)
    return view.put(None, view.targets)

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
    stored = view.of(state.target_sparsities, "target_sparsities")
    if not stored:
      return []
    stored = jnp.stack([jnp.asarray(s, jnp.float32) for s in stored])
    now = self.scheduler.get_sparsity_at_step(stored, step)
    return [
      mask_calculator.AtStep(now[i], s) if isinstance(s, float) else now[i]
      for i, s in enumerate(view.targets)
    ]

  def random_scores(
    self, params: PyTree, sparse_state: SparseState | None, salt: Any = 0
  ) -> PyTree:
    """Return uniform float32 scores that depend only on key, path and salt.

    Args:
      params: the parameters.
      sparse_state: the state, for its key. None, or the state of an algorithm
        whose category does not need "random", derives a key from `rng_seed` or
        from the parameters.
      salt: an integer, may be traced; each salt gives different scores.

    Returns:
      A tree like `params`; leaves that are not floats stay as they are.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.RandomPruning(rng_seed=0)
      >>> scores = pruner.random_scores(jnp.ones((2, 2)), None)
      >>> scores.shape, bool((scores >= 0).all() & (scores < 1).all())
      ((2, 2), True)
    """
    key = None if sparse_state is None else sparse_state.key
    if key is None or _leaves.is_absent(key):
      key = seeds.key_of(self, params)
    return seeds.random_scores(params, key, salt)

  def view(self, params: PyTree, targets: Sparsities = None) -> Prunable:
    """Return the prunable leaves of a tree; algorithms handle only these.

    Args:
      params: the parameters, or a tree like them.
      targets: the target sparsity of each leaf, None for dense leaves; by
        default the checked result of the distribution.

    Returns:
      A `Prunable`.

    Example:
      >>> import jax.numpy as jnp, jaxpruner
      >>> pruner = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
      >>> view = pruner.view({"w": jnp.ones((2, 2)), "b": jnp.ones(2)})
      >>> view.names, view.targets, view.put(None, ["mask"])
      ((('w',),), (0.5,), {'b': None, 'w': 'mask'})
    """
    return prunable.build(self, params, targets)

  # --- internal methods ----------------------------------------------------

  def _distribute(self, params: PyTree) -> Sparsities:
    """Return the target sparsity of each leaf, unchecked."""
    if self.ranking == "global":
      return ranking.distribute(self, params)
    if self.sparsity_distribution_fn is None:
      return None
    return self.sparsity_distribution_fn(params)

  def _select(self, view, scores, sparsities, hint=None) -> engine.Selection:
    """Return the selection of `create_masks`, with finiteness and hint."""
    if type(self).create_masks is BaseUpdater.create_masks:
      return selecting.keep_highest(self, view, scores, sparsities, hint)
    return selecting.by_create_masks(self, view, scores, sparsities, hint)

  def _replace_masks(self, view, state, masks, finite) -> SparseState:
    shrink = self.continue_sparse and not self.regrows
    return replace_masks(view, state, masks, finite, shrink)


@dataclasses.dataclass(eq=False)
class NoPruning(BaseUpdater):
  """Keep all weights; updates equal those of the wrapped optimizer bit for bit.

  Attributes:
    sparsity_distribution_fn: None, no leaf is pruned.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> jaxpruner.NoPruning().instant_sparsify({"w": jnp.ones(2)})[1]
    {'w': None}
  """

  sparsity_distribution_fn: Callable[..., Sparsities] | None = None

  category: ClassVar[Category] = Category(
    when="during", start="dense", cost="none"
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return params

  def instant_sparsify(self, params, grads=None, **extra):
    del grads, extra
    return params, jax.tree.map(lambda _: None, params)
