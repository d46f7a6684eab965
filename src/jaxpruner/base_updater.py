"""The updater: an Optax wrapper that confines parameters to a sparse set."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import optax

from jaxpruner import (
  _checks,
  _leaves,
  _moments,
  mask_calculator,
  sparsity_distributions,
  sparsity_schedules,
  sparsity_types,
)
from jaxpruner._state import (
  Array,
  Category,
  Masks,
  PyTree,
  SparseState,
  Sparsities,
  apply_mask,
  count_ones,
  draw,
  find_state,
  frozen,
  new_tally,
  params_key,
  refuse_nan,
  seed_data,
  unpack_mask,
  update_tally,
)
from jaxpruner.engine import lazy as _lazy

UNSET = functools.partial(sparsity_distributions.uniform, sparsity=0.0)


@dataclasses.dataclass(eq=False)
class BaseUpdater:
  """Base of all algorithms; a new one defines `calculate_scores`.

  Attributes:
    scheduler: when masks are updated, and how far the sparsity has come.
    skip_gradients: whether the optimizer rests on steps that update masks.
    is_sparse_gradients: whether pruned weights' gradients are zeroed before
      the optimizer sees them.
    sparsity_type: the structure of masks: one type, a mapping from path or glob
      to type, or a function `(names, param) -> type`.
    sparsity_distribution_fn: `params -> tree of float or None`.
    rng_seed: int or key; by default derived from the parameters at `init`.
    use_packed_masks: store 1 bit per weight instead of 8.
    topk_fn: `(scores, sparsity) -> mask`, instead of a sparsity type.
    track_exploration: also keep the union of all masks so far, another byte (or
      bit) per weight: the share of weights ever trained (Liu et al., 2021).
    continue_sparse: start from a sparse model: weights that are zero at `init`
      are pruned already. Masks then only change once the schedule asks for
      fewer weights than are left.
  """

  scheduler: Any = sparsity_schedules.NoUpdateSchedule()
  skip_gradients: bool = False
  is_sparse_gradients: bool = False
  sparsity_type: Any = sparsity_types.Unstructured()
  sparsity_distribution_fn: Callable[..., Sparsities] | None = UNSET
  rng_seed: Any = None
  use_packed_masks: bool = False
  topk_fn: Callable[[Array, Any], Array] | None = None
  track_exploration: bool = False
  continue_sparse: bool = False

  category: ClassVar[Category] = Category()
  # Whether weights under the mask are kept at zero in the parameters.
  holds_zeros: ClassVar[bool] = True
  # Whether removed weights may return, and must then find fresh moments.
  regrows: ClassVar[bool] = False
  # How often configuration updates the masks, if the method says so itself.
  update_every: ClassVar[int | None] = None
  # The schedule a configuration gets that names none; None: by `regrows`.
  default_schedule: ClassVar[str | None] = None
  # Evaluations of the gradient in a training step, which is what a step costs.
  gradients_per_step: ClassVar[int] = 1
  # What the network's outputs should be divided by in the loss to bind.
  temperature: ClassVar[float] = 1.0

  def __init_subclass__(cls, **kwargs):
    super().__init_subclass__(**kwargs)
    # A plain @dataclass on a user's subclass would replace equality and remove
    # the hash; names already in the class are left alone.
    for name in ("__eq__", "__hash__"):
      if name not in cls.__dict__:
        setattr(cls, name, getattr(BaseUpdater, name))

  def __post_init__(self):
    _checks.check_fields(self)

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
    """What it takes to compute masks; parts may add to the category's."""
    return self.category.needs

  # --- what an algorithm may override -------------------------------------

  @classmethod
  def trainings(cls, sparsity: float) -> int:
    """Return how many trainings of the usual length the method takes."""
    del sparsity
    return 1

  def bind(
    self,
    loss: Callable[[PyTree, Any], Array],
    batch: PyTree,
    apply: Callable[[PyTree, Any], Array] | None = None,
    inputs: PyTree = None,
  ) -> "BaseUpdater":
    """Return the updater with what pruning at initialization looks at.

    Args:
      loss: `(params, batch) -> scalar`.
      batch: examples for the loss.
      apply: `(params, inputs) -> outputs`, for what needs no labels.
      inputs: what `apply` takes; only its shape may matter.
    """
    del loss, batch, apply, inputs
    return self

  def calculate_scores(
    self,
    params: PyTree,
    sparse_state: SparseState | None = None,
    grads: PyTree = None,
  ) -> PyTree:
    """Return a tree of scores like `params`; the highest are kept."""
    raise TypeError(
      f"{type(self).__name__} must define calculate_scores(self, params, "
      "sparse_state=None, grads=None), which says what weights matter"
    )

  def distribute(self, params: PyTree) -> Sparsities:
    """Return the sparsity each leaf is heading for."""
    if self.sparsity_distribution_fn is None:
      return None
    return self.sparsity_distribution_fn(params)

  def get_initial_masks(
    self, params: PyTree, target_sparsities: Sparsities
  ) -> Masks:
    """Return the masks training starts with: all ones, unless overridden."""
    return _leaves.map_masks(
      lambda _, p, s: (
        None
        if s is None
        else _leaves.shard_like(
          jnp.ones_like(p, dtype=mask_calculator.MASK_DTYPE), p
        )
      ),
      params,
      target_sparsities,
      name="target_sparsities",
    )

  def init_stats(self, params: PyTree, masks: Masks) -> Any:
    """Return what the algorithm remembers from step to step: nothing."""
    del params, masks
    return None

  def observe(
    self, state: SparseState, params: PyTree, grads: PyTree
  ) -> SparseState:
    """Return the state after a look at this step's gradients; a hook."""
    del params, grads
    return state

  def update_state(
    self, sparse_state: SparseState, params: PyTree, grads: PyTree
  ) -> SparseState:
    """Return the state with the masks this step calls for."""
    scores = self._scores(sparse_state, params, grads)
    if not getattr(type(self).create_masks, "takes_lazy", False):
      scores = jax.tree.map(_lazy.value, scores)
    sparsities = self.sparsities_at(sparse_state, params, sparse_state.count)
    masks = self.create_masks(scores, sparsities)
    return self.replace_masks(sparse_state, params, masks, scores)

  def prepare_gradients(
    self, grads: PyTree, state: SparseState, params: PyTree
  ) -> PyTree:
    """Return the gradients the optimizer sees."""
    del params
    if not self.is_sparse_gradients:
      return grads
    return self.apply_masks(grads, state.masks)

  def confine(
    self, updates: PyTree, state: SparseState, params: PyTree
  ) -> PyTree:
    """Return updates that leave pruned weights at exactly +0.0.

    The update of a pruned weight is minus the weight, in a dtype wide enough
    that their sum is exact.
    """
    if not self.holds_zeros:
      return updates

    def confine_leaf(_, param, update, mask):
      if mask is None:
        return update
      dtype = jnp.promote_types(param.dtype, update.dtype)
      kept = self._unpack(mask, param)
      return jnp.where(kept, update.astype(dtype), -param.astype(dtype))

    updates = jax.tree.structure(params).unflatten(
      _leaves.align(params, updates, "updates")
    )
    return _leaves.map_masks(confine_leaf, params, updates, state.masks)

  def after_update(
    self,
    state: SparseState,
    params: PyTree,
    updates: PyTree,
    grads: PyTree = None,
  ) -> SparseState:
    """Return the state after an update; a hook for per-step masks."""
    del params, updates, grads
    return state

  def trained_masks(self, state: SparseState) -> Masks:
    """Return the masks of the weights that are trained; None means all."""
    return state.masks if self.holds_zeros else None

  def pre_forward_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the parameters the forward pass should see."""
    del opt_state
    return params

  def post_gradient_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the parameters with pruned weights at zero; idempotent.

    `wrap_optax` already keeps them there. Call this once after `init`, so that
    the first forward pass is sparse too, and on parameters the wrapper does not
    see: averages, target networks.
    """
    if not self.holds_zeros:
      return params
    return self.apply_masks(params, find_state(opt_state).masks)

  # --- the machinery ------------------------------------------------------

  def wrap_optax(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    """Return `inner`, confined to the sparse set.

    Make it the outermost transformation: whatever is chained after it can move
    pruned weights away from zero.
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
      raise ValueError(
        f"wrap_optax: inner={inner!r} must be an Optax transformation, such "
        "as optax.adam(1e-3)"
      )
    _checks.say_if_idle(self)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: PyTree) -> SparseState:
      state = self.init_state(params)
      inner_state = inner.init(params)
      _checks.say_if_moments_stay(self, inner_state, params, state.masks)
      return state._replace(inner_state=inner_state)

    def update_fn(updates, state, params=None, **extra):
      if params is None:
        raise ValueError(
          f"{type(self).__name__}.wrap_optax(…).update needs params: call "
          "tx.update(grads, opt_state, params)"
        )
      _checks.check_masks(
        params, state.masks, self.use_packed_masks, state.target_sparsities
      )
      if self.is_sparse_gradients or "gradients" in self.needs:
        _leaves.align(params, updates, "grads")  # raises where they differ
      state = self.observe(state, params, updates)
      due = self.scheduler.is_mask_update_iter(state.count)
      state = self._update_if(due, state, params, updates)
      grads = self.prepare_gradients(updates, state, params)
      step = lambda old: inner.update(grads, old, params, **extra)
      held = self.skip_gradients and due
      if held is False and not self.regrows:
        new_updates, inner_state = step(state.inner_state)
      else:
        keep = self._keepers(inner, state, params, held)
        new_updates, inner_state = _moments.update(
          step, state.inner_state, keep
        )
      if held is not False:
        new_updates = jax.tree.map(
          lambda u: jnp.where(held, jnp.zeros_like(u), u), new_updates
        )
      new_updates = self.confine(new_updates, state, params)
      state = state._replace(
        inner_state=inner_state,
        count=optax.safe_increment(state.count),
      )
      after = self.after_update(state, params, new_updates, updates)
      return new_updates, self._tallied(state, after, params)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)

  def init_state(self, params: PyTree) -> SparseState:
    """Return the state of step 0, without an optimizer's."""
    targets = self.targets(params)
    _checks.say_if_zero(self, targets)
    key = None
    if "random" in self.needs:
      key = self._key(params)
    state = SparseState(
      masks=None,
      target_sparsities=_leaves.map_masks(
        lambda _, p, s: None if s is None else jnp.asarray(s, jnp.float32),
        params,
        targets,
      ),
      count=jnp.zeros([], jnp.int32),
      key=key,
    )
    if self.continue_sparse:
      masks = self._masks_of_zeros(params, targets)
    else:
      masks = self.get_initial_masks(params, targets)
    stats, masks = self.init_stats(params, masks), self._pack(masks)
    leaves, held = self._held(params, masks)
    if not held:  # checkpoints refuse empty arrays
      return state._replace(masks=masks, stats=stats)
    return state._replace(
      masks=masks,
      stats=stats,
      skipped=jnp.zeros([len(held)], jnp.int32),
      explored=jax.tree.map(jnp.copy, masks)
      if self.track_exploration
      else None,
      tally=new_tally(leaves, held, self.track_exploration),
    )

  def instant_sparsify(
    self, params: PyTree, grads: PyTree = None
  ) -> tuple[PyTree, Masks]:
    """Prune now, to the target sparsity; return `(params, masks)`."""
    if self.sparsity_distribution_fn is None:
      raise ValueError(
        "instant_sparsify: sparsity_distribution_fn=None says nothing about "
        "how much to remove; pass functools.partial("
        "jaxpruner.sparsity_distributions.uniform, sparsity=0.8)"
      )
    if "gradients" in self.needs and grads is None:
      raise ValueError(
        f"instant_sparsify: {type(self).__name__} scores weights by their "
        "gradients; pass grads="
      )
    targets = self.targets(params)
    scores = self.calculate_scores(params, grads=grads)
    _checks.check_scores(self, params, targets, scores)
    masks = self.create_masks(scores, targets)
    return self.apply_masks(params, masks, is_packed=False), self._pack(masks)

  def create_masks(self, scores: PyTree, sparsities: Sparsities) -> Masks:
    """Return masks that keep the highest scores at the given sparsities."""
    leaves, treedef = _leaves.flatten_with_names(scores)
    wanted = _leaves.align(scores, sparsities, "sparsities")
    picked = [i for i, s in enumerate(wanted) if s is not None]
    refuse_nan([leaves[i] for i in picked])
    kinds = self._types([leaves[i] for i in picked], among=leaves)
    masks = sparsity_types.create_masks(
      kinds, [leaves[i][1] for i in picked], [wanted[i] for i in picked]
    )
    result: list[Any] = [None] * len(leaves)
    for i, mask in zip(picked, masks, strict=True):
      result[i] = mask
    return treedef.unflatten(result)

  # An override that is not marked so gets its scores as arrays.
  create_masks.takes_lazy = True  # pyright: ignore[reportFunctionMemberAccess]

  def apply_masks(
    self, params: PyTree, masks: Masks, is_packed: bool | None = None
  ) -> PyTree:
    """Return the parameters with pruned weights at exactly +0.0."""
    if is_packed is None:
      is_packed = self.use_packed_masks

    _checks.check_masks(params, masks, is_packed)
    return _leaves.map_masks(
      lambda _, param, mask: apply_mask(param, mask, is_packed), params, masks
    )

  def targets(self, params: PyTree) -> Sparsities:
    """Return what `distribute` says, checked leaf by leaf."""
    leaves, treedef = _leaves.flatten_with_names(params)
    wanted = _leaves.align(
      params, self.distribute(params), "sparsity_distribution_fn"
    )
    picked = [i for i, s in enumerate(wanted) if s is not None]
    kinds = self._types([leaves[i] for i in picked], among=leaves)
    for i, kind in zip(picked, kinds, strict=True):
      name = f"params leaf {_leaves.join(leaves[i][0])!r}"
      if not isinstance(wanted[i], jax.Array):
        wanted[i] = sparsity_distributions.check_sparsity(wanted[i], name)
      if hasattr(kind, "sparsity") and not isinstance(wanted[i], jax.Array):
        if self.sparsity_distribution_fn is UNSET:
          wanted[i] = kind.sparsity  # the structure says it all
        elif abs(wanted[i] - kind.sparsity) > 1e-6:
          raise ValueError(
            f"{name}: sparsity={wanted[i]} contradicts {kind}, which "
            f"removes exactly {kind.sparsity:g}; ask for that, or change it"
          )
      if hasattr(kind, "check"):
        kind.check(leaves[i][1].shape, wanted[i], name)
    return treedef.unflatten(wanted)

  def sparsities_at(
    self, sparse_state: SparseState, params: PyTree, step: Any
  ) -> Sparsities:
    """Return the sparsities in force at a step, as `create_masks` takes them.

    A float32 cannot hold the sparsity of a large leaf, so each comes with the
    exact target it is heading for.
    """
    leaves, treedef = _leaves.flatten_with_names(params)
    stored = _leaves.align(params, sparse_state.target_sparsities, "targets")
    exact = _leaves.align(params, self.targets(params), "targets")
    picked = [i for i, s in enumerate(stored) if s is not None]
    if not picked:
      return treedef.unflatten([None] * len(leaves))
    values = self.scheduler.get_sparsity_at_step(
      jnp.stack([jnp.asarray(stored[i], jnp.float32) for i in picked]), step
    )
    result: list[Any] = [None] * len(leaves)
    for row, i in enumerate(picked):
      target = exact[i]
      result[i] = (
        mask_calculator.AtStep(values[row], target)
        if isinstance(target, float)
        else values[row]
      )
    return treedef.unflatten(result)

  def replace_masks(
    self, state: SparseState, params: PyTree, masks: Masks, *scores: PyTree
  ) -> SparseState:
    """Return the state with new masks, but where a score is not finite."""
    leaves, treedef = _leaves.flatten_with_names(params)
    new = _leaves.align(params, masks)
    old = _leaves.align(params, state.masks)
    columns = [_leaves.align(params, tree, "scores") for tree in scores]
    skipped = []
    for i, mask in enumerate(new):
      if mask is None or old[i] is None:
        new[i] = old[i]
        continue
      judged = [_lazy.finite(column[i]) for column in columns]
      finite = functools.reduce(jnp.logical_and, judged, jnp.array(True))
      packed = self._pack(mask)
      kept = finite
      if self.continue_sparse and not self.regrows:
        kept &= count_ones(packed) <= count_ones(old[i])
      new[i] = jnp.where(kept, packed, old[i])
      skipped.append(1 - finite.astype(jnp.int32))
    return state._replace(
      masks=treedef.unflatten(new),
      skipped=state.skipped + jnp.stack(skipped)
      if skipped and state.skipped is not None
      else state.skipped,
    )

  def random_scores(
    self, params: PyTree, sparse_state: SparseState | None, salt: Any = 0
  ) -> PyTree:
    """Return uniform float32 scores that depend on key, path and salt only."""
    stored = None if sparse_state is None else sparse_state.key
    leaves, treedef = _leaves.flatten_with_names(params)
    drawn = [
      i
      for i, (_, leaf) in enumerate(leaves)
      if sparsity_distributions.is_floating(leaf)
    ]
    result = [leaf for _, leaf in leaves]
    scores = draw(
      self._key(params) if stored is None else stored,
      salt,
      [result[i] for i in drawn],
      tuple(leaves[i][0] for i in drawn),
    )
    for i, score in zip(drawn, scores, strict=True):
      result[i] = score
    return treedef.unflatten(result)

  def _scores(
    self, state: SparseState, params: PyTree, grads: PyTree
  ) -> PyTree:
    """Return what `calculate_scores` says, lazily where that is cheap."""
    return _lazy.defer(
      lambda p, s, g: self.calculate_scores(p, sparse_state=s, grads=g),
      params,
      state,
      grads,
    )

  def _masks_of_zeros(self, params: PyTree, targets: Sparsities) -> Masks:
    return _leaves.map_masks(
      lambda _, p, s: (
        None if s is None else (p != 0).astype(mask_calculator.MASK_DTYPE)
      ),
      params,
      targets,
    )

  def _keepers(self, inner, state, params, held) -> list[Any]:
    """Return how each leaf of the optimizer's state is stored.

    If weights regrow, that of pruned ones is made fresh every step, in the pass
    that writes it anyway: a conditional reset on growth would copy the whole
    state instead.
    """
    kept: list[Any] = [
      None if mask is None else self._unpack(mask, param)
      for param, mask in zip(
        jax.tree.leaves(params),
        _leaves.align(params, state.masks),
        strict=True,
      )
    ]
    fresh = None
    if self.regrows:
      # Some moments start at the parameter: that of a pruned one is zero.
      fresh = inner.init(self.apply_masks(params, state.masks))
    return _moments.keepers(state.inner_state, params, kept, fresh, held)

  def _held(self, params: PyTree, masks: Masks) -> tuple[list[Any], list[Any]]:
    """Return the prunable leaves and their masks."""
    pairs = zip(
      jax.tree.leaves(params), _leaves.align(params, masks), strict=True
    )
    held = [pair for pair in pairs if pair[1] is not None]
    return [leaf for leaf, _ in held], [mask for _, mask in held]

  def _tallied(
    self, old: SparseState, new: SparseState, params: PyTree
  ) -> SparseState:
    """Return the new state with its masks counted, if they changed."""
    before = self._held(params, old.masks)[1]
    after = self._held(params, new.masks)[1]
    if old.tally is None or all(
      a is b for a, b in zip(before, after, strict=True)
    ):
      return new
    if new.explored is not None:
      seen = jax.tree.map(jnp.bitwise_or, new.explored, new.masks)
      new = new._replace(explored=seen)
    seen = jax.tree.leaves(new.explored)
    return new._replace(
      tally=update_tally(old.tally, before, after, seen, self.regrows)
    )

  def _updated(self, state, params, grads) -> SparseState:
    new = self.update_state(state, params, grads)
    _checks.check_structure(self, state, new)
    return self._tallied(state, new, params)

  def _key(self, params: PyTree) -> Array:
    if self.rng_seed is None:
      return params_key(params)
    return seed_data(self.rng_seed)

  def _types(self, leaves, among=None) -> list[Any]:
    """Return the sparsity type of each `(names, leaf)`."""
    if self.topk_fn is not None:
      return [_TopKFn(self.topk_fn)] * len(leaves)
    kind = self.sparsity_type
    if isinstance(kind, Mapping):
      # A pattern must match some leaf, pruned or not.
      every = [names for names, _ in (leaves if among is None else among)]
      keys = _leaves.match_patterns(kind, every, "sparsity_type")
      table = dict(zip(every, keys, strict=True))
      default = sparsity_types.Unstructured()
      return [
        default if table[names] is None else kind[table[names]]
        for names, _ in leaves
      ]
    if callable(getattr(kind, "mask", None)):
      return [kind] * len(leaves)
    kinds = [kind(names, leaf) for names, leaf in leaves]
    for (names, _), chosen in zip(leaves, kinds, strict=True):
      if isinstance(chosen, type) or not hasattr(chosen, "mask"):
        raise ValueError(
          f"sparsity_type gives {chosen!r} for {_leaves.join(names)!r}; it "
          "must return a sparsity type, such as Unstructured()"
        )
    return kinds

  def _pack(self, masks: Masks) -> Masks:
    if not self.use_packed_masks:
      return masks
    return jax.tree.map(
      lambda mask: _leaves.with_auto_axes(mask_calculator.pack_mask, mask),
      masks,
    )

  def _unpack(self, mask: Array, param: Array) -> Array:
    return unpack_mask(mask, param) if self.use_packed_masks else mask

  def _update_if(self, due, state, params, grads) -> SparseState:
    """Update the state when due; the conditional carries only what changes."""
    if not isinstance(due, jax.core.Tracer):
      # An eager conditional would be compiled anew at every step.
      if not due:
        return state
      return self._updated(state, params, grads)
    leaves, treedef = jax.tree.flatten(state)
    closed = jax.make_jaxpr(self._updated)(state, params, grads)
    jaxpr = closed.jaxpr
    changed = [
      i for i, out in enumerate(jaxpr.outvars) if out is not jaxpr.invars[i]
    ]
    if not changed:
      return state
    arguments = jax.tree.leaves((state, params, grads))

    def updated(old):
      for i, value in zip(changed, old, strict=True):
        arguments[i] = value
      outs = jax.extend.core.jaxpr_as_fun(closed)(*arguments)
      return [outs[i] for i in changed]

    # A loop of one turn or none: a conditional would copy masks that stay. In
    # it a conditional, out of which nothing is moved to where it always runs.
    _, new = jax.lax.while_loop(
      lambda turn: turn[0],
      lambda turn: (
        jnp.zeros_like(turn[0]),
        jax.lax.cond(turn[0], updated, lambda old: old, turn[1]),
      ),
      (due, [leaves[i] for i in changed]),
    )
    for i, value in zip(changed, new, strict=True):
      leaves[i] = value
    return treedef.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class _TopKFn:
  """A user's function in the place of a sparsity type."""

  fn: Callable[[Array, Any], Array]

  def mask(self, scores: Array, sparsity: Any) -> Array:
    return self.fn(scores, sparsity)


@dataclasses.dataclass(eq=False)
class NoPruning(BaseUpdater):
  """Keep everything: bit for bit the wrapped optimizer."""

  sparsity_distribution_fn: Callable[..., Sparsities] | None = None

  category: ClassVar[Category] = Category(
    when="during", start="dense", cost="none"
  )
  holds_zeros: ClassVar[bool] = False

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    return params

  def update_state(self, sparse_state, params, grads):
    del params, grads
    return sparse_state

  def instant_sparsify(self, params, grads=None):
    del grads
    return params, jax.tree.map(lambda _: None, params)
