"""The updater: configuration, and what a trainer calls.

`updater.hooks` holds what an algorithm may define, `updater.transform` the
training step, which calls it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import optax

from jaxpruner import (
  _leaves,
  _legacy,
  engine,
  sparsity_schedules,
  sparsity_types,
)
from jaxpruner.updater import (
  at_once,
  checks,
  hidden,
  hooks,
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
class BaseUpdater(hooks.Hooks):
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

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    # A plain @dataclass on a user's subclass would replace equality and remove
    # the hash; methods that the class defines are not replaced.
    for name in ("__eq__", "__hash__"):
      if name not in cls.__dict__:
        setattr(cls, name, getattr(BaseUpdater, name))

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
    return hidden.masked_view(self, params, find_state(opt_state))

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

  def _distribute(self, params: PyTree) -> Sparsities:
    """Return the target sparsity of each leaf, unchecked."""
    if self.ranking == "global":
      return ranking.distribute(self, params)
    if self.sparsity_distribution_fn is None:
      return None
    return self.sparsity_distribution_fn(params)

  def _select(self, view, scores, sparsities, hint=None) -> engine.Selection:
    """Return the selection of `create_masks`, with finiteness and hint."""
    if type(self).create_masks is hooks.Hooks.create_masks:
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
