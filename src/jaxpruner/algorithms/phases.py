"""Phases: one pruner after another, with one step count."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import optax

from jaxpruner import _leaves, base_updater
from jaxpruner.updater import hidden
from jaxpruner.updater.masks import count_changes
from jaxpruner.updater.start import make_init


def chain(*phases: tuple[int, base_updater.BaseUpdater]) -> "Chain":
  """Return an updater that applies each of these updaters in turn.

  All schedules use the step count of the whole training: a phase that begins at
  step 500 has a schedule from 500 to 900, for example. Each phase starts with
  the masks of the phase before it. After a dense phase (`NoPruning`), an
  algorithm that starts sparse selects its own masks. After a sparse phase it
  continues from the existing masks, and gradual pruning changes no mask until
  its schedule asks for fewer weights than are left.

  Args:
    *phases: `(first step, updater)`, the first at step 0.

  Returns:
    The updater.

  Example:
    >>> import jaxpruner
    >>> make = jaxpruner.create_updater_from_config
    >>> gradual = make({"algorithm": "magnitude", "sparsity": 0.9,
    ...   "update_freq": 10, "update_start_step": 100, "update_end_step": 500})
    >>> rigl = make({"algorithm": "rigl", "sparsity": 0.9,
    ...   "update_freq": 50, "update_start_step": 550, "update_end_step": 900})
    >>> pruner = jaxpruner.chain((0, gradual), (501, rigl))
    >>> [type(phase).__name__ for _, phase in pruner.phases]
    ['MagnitudePruning', 'RigL']
  """
  packed = any(p.use_packed_masks for _, p in phases)
  tracked = any(p.track_exploration for _, p in phases)
  masters = [p.master_dtype for _, p in phases if p.master_dtype is not None]
  first = phases[0][1] if phases else None
  return Chain(
    phases=phases,
    use_packed_masks=packed,
    track_exploration=tracked,
    master_dtype=masters[0] if masters else None,
    continue_sparse=first is not None and first.continue_sparse,
    rng_seed=getattr(first, "rng_seed", None),
    stacked_axis=next(
      (p.stacked_axis for _, p in phases if not _is_dense(p)), "auto"
    ),
  )


@dataclasses.dataclass(eq=False)
class Chain(base_updater.BaseUpdater):
  """Apply one updater after another; `chain` constructs it.

  Attributes:
    phases: `(first step, updater)` pairs, the first at step 0.

  Example:
    >>> import jaxpruner
    >>> pruner = jaxpruner.Chain(
    ...   phases=((0, jaxpruner.NoPruning()), (500, jaxpruner.RigL())))
    >>> sorted(pruner.needs)
    ['gradients', 'random']
  """

  phases: tuple[tuple[int, Any], ...] = ()

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True, cost="that of the phase in force"
  )
  targets_by_shape: ClassVar[bool] = False

  def __post_init__(self):
    super().__post_init__()
    starts = [start for start, _ in self.phases]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)):
      raise ValueError(
        f"chain: phases begin at steps {starts}; the first must begin at 0 and "
        "each later than the one before"
      )
    for start, phase in self.phases:
      if not isinstance(phase, base_updater.BaseUpdater) or isinstance(
        phase, Chain
      ):
        raise ValueError(
          f"chain: the phase at step {start} is {phase!r}; it must be a "
          "pruner, such as jaxpruner.RigL(…), and not itself a chain"
        )
    before, phases = None, []
    for start, phase in self.phases:
      waits = before is not None and not _is_dense(before)
      waits = waits and not phase.category.dynamic
      phase = dataclasses.replace(
        phase,
        use_packed_masks=self.use_packed_masks,
        stacked_axis=self.stacked_axis,
        master_dtype=self.master_dtype,
        continue_sparse=waits or phase.continue_sparse,
      )
      phases.append((start, phase))
      before = phase
    self.phases = tuple(phases)

  @property
  def needs(self):
    return frozenset().union(*(phase.needs for _, phase in self.phases))

  @property
  def straight_through(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a phase trains removed weights on, in the state."""
    return any(phase.straight_through for _, phase in self.phases)

  def bind(self, loss, batch, apply=None, inputs=None):
    bound = [(s, p.bind(loss, batch, apply, inputs)) for s, p in self.phases]
    return dataclasses.replace(self, phases=tuple(bound))

  def _distribute(self, params):
    """Return the last phase's targets; all phases must prune its leaves."""
    names = [_leaves.join(n) for n, _ in _leaves.flatten_with_names(params)[0]]
    found, last = None, jax.tree.map(lambda _: None, params)
    for start, phase in self.phases:
      if _is_dense(phase):
        continue
      last = phase.target_sparsities(params)
      pruned = [s is not None for s in _leaves.align(params, last)]
      for name, now, before in zip(names, pruned, found or pruned, strict=True):
        if now != before:
          raise ValueError(
            f"chain: the phase at step {start} "
            f"{'prunes' if now else 'leaves out'} {name!r}, unlike the phases "
            "before it; give all phases the same filter_fn"
          )
      found = pruned
    return last

  def get_initial_masks(self, params, target_sparsities):
    first = self.phases[0][1]
    if _is_dense(first):
      return super().get_initial_masks(params, target_sparsities)
    return first.get_initial_masks(params, first.target_sparsities(params))

  def init_extra(self, params, masks):
    made = [phase.init_extra(params, masks) for _, phase in self.phases]
    return tuple(map(_leaves.without_none, made))

  def wrap_optax(self, inner):
    parts = [phase.wrap_optax(inner) for _, phase in self.phases]
    wide = [jnp.float32] if hidden.hides(self) else []

    def update_fn(updates, state, params=None, **extra):
      if params is None:
        raise ValueError(
          "chain(…).wrap_optax(…).update needs params: call "
          "tx.update(grads, opt_state, params)"
        )

      def run(i, updates, state, params):
        entered = self._enter(i, self._state_of(i, state, params), params)
        new_updates, new = parts[i].update(updates, entered, params, **extra)
        stats = (*state.stats[:i], new.stats, *state.stats[i + 1 :])
        # Branches must have equal dtypes, and a phase may widen an update.
        widen = lambda u, p: u.astype(jnp.result_type(u.dtype, p.dtype, *wide))
        new_updates = jax.tree.map(widen, new_updates, params)
        return new_updates, new._replace(
          stats=stats, target_sparsities=state.target_sparsities
        )

      return self._in_force(run, state.count, updates, state, params)

    return optax.GradientTransformationExtraArgs(
      make_init(self, inner), update_fn
    )

  def _in_force(self, run, step, *args):
    """Return `run(i, *args)` of the phase that contains a step."""
    starts = jnp.array([start for start, _ in self.phases])
    if not isinstance(step, jax.core.Tracer):
      return run(int(jnp.sum(starts <= step)) - 1, *args)
    branches = [
      lambda *args, i=i: run(i, *args) for i in range(len(self.phases))
    ]
    return jax.lax.switch(jnp.sum(starts <= step) - 1, branches, *args)

  def _state_of(self, i, state, params):
    """Return the state as phase `i` alone would have it."""
    phase, targets = self.phases[i][1], _leaves.ABSENT
    if not _is_dense(phase):
      view = phase.view(params)
      wanted = [jnp.asarray(s, jnp.float32) for s in view.targets]
      targets = view.store(wanted)
    return state._replace(stats=state.stats[i], target_sparsities=targets)

  def _enter(self, i, state, params):
    """Return the state with which a phase begins, at its first step."""
    start, phase = self.phases[i]
    if i == 0:
      return state

    def enter(state):
      view, new = self.view(params), state
      before = self.phases[i - 1][1]
      if hidden.hides(phase) and not hidden.hides(before):
        # The phase before trained what params show.
        new = new._replace(hidden=hidden.copies(self, view))
      masks = view.put(None, view.of(state.masks))
      if _is_dense(before) and phase.category.start == "sparse-to-sparse":
        masks = phase.get_initial_masks(params, phase.target_sparsities(params))
        new = new._replace(masks=view.store(view.of(masks, packed=False)))
      stats = _leaves.without_none(phase.init_extra(params, masks))
      new = new._replace(stats=stats)
      return count_changes(view, state, new, self.regrows)

    first = state.count == start
    if not isinstance(first, jax.core.Tracer):
      return enter(state) if first else state
    # The optimizer's state does not change: it stays outside the conditional.
    kept = state._replace(inner_state=_leaves.ABSENT)
    entered = jax.lax.cond(first, enter, lambda s: s, kept)
    return entered._replace(inner_state=state.inner_state)

  def dense_params(self, params, opt_state):
    state = base_updater.find_state(opt_state)

    def run(i, params, state):
      own = self._enter(i, self._state_of(i, state, params), params)
      return self.phases[i][1].dense_params(params, own)

    kept = state._replace(inner_state=_leaves.ABSENT)
    return self._in_force(run, state.count, params, kept)

  def instant_sparsify(self, params, grads=None, **extra):
    return self.phases[-1][1].instant_sparsify(params, grads, **extra)


def _is_dense(phase: base_updater.BaseUpdater) -> bool:
  return phase.category.start == "dense"
