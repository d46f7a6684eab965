"""Sparse training at kept size: an updater's algorithm in another storage."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jaxpruner import _leaves, base_updater
from jaxpruner.algorithms import criteria
from jaxpruner.kept import capture, checking, folding, rewiring, tensors
from jaxpruner.kept import growth as growing
from jaxpruner.kept.layouts import Layout
from jaxpruner.program.owners import Owners, per_weight
from jaxpruner.updater import checks, moments
from jaxpruner.updater.seeds import params_key
from jaxpruner.updater.state import (
  SparseState,
  find_only,
  seed_data,
  unpack_mask,
)

PyTree = Any


class KeptState(NamedTuple):
  """Hold the state of a `KeptUpdater`: an Optax state, for checkpoints.

  Attributes:
    layouts: a `Layout` per kept leaf, None where dense.
    inner_state: state of the wrapped optimizer, at kept size.
    count: number of updates so far.
    key: PRNG key data.
    skipped: per kept leaf, how many mask updates were refused because of
      non-finite weights or scores.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> from jaxpruner import kept
    >>> pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
    >>> state = pruner.wrap_optax(optax.adam(0.1)).init(
    ...   {"w": kept.from_dense(jnp.eye(4))})
    >>> state.layouts["w"].count, state.inner_state[0].mu["w"].shape
    (4, (4,))
  """

  layouts: PyTree
  inner_state: Any = None
  count: Any = None
  key: Any = None
  skipped: Any = None


Growth = dict[str, list[tuple[Array, Array]]]


def find_kept_state(opt_state: PyTree) -> KeptState:
  """Return the one `KeptState` inside an optimizer state.

  Args:
    opt_state: the state of an Optax optimizer, or a `KeptState`.

  Returns:
    The `KeptState`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> from jaxpruner import kept
    >>> pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
    >>> tx = optax.chain(optax.clip(1.0), pruner.wrap_optax(optax.sgd(0.1)))
    >>> opt_state = tx.init({"w": kept.from_dense(jnp.eye(4))})
    >>> kept.find_kept_state(opt_state).layouts["w"].count
    4
  """
  return find_only(
    opt_state,
    KeptState,
    "states of kept storage",
    "state made by pruner.wrap_optax(tx).init(weights) of a KeptUpdater",
  )


@dataclasses.dataclass(frozen=True)
class KeptUpdater:
  """Train with weights, gradients and moments at the size of what is kept.

  It does what its updater does with masks, without the masks: `static_sparse`,
  `set` and `rigl` (or another `Rewiring` of their parts) drop and grow the same
  weights. What the trainer holds, `params`, is a tree of plain arrays: a kept
  leaf is the vector of its values. The positions are in the optimizer's state.

  `create_updater_from_config({..., "storage": "kept"})` returns it.

  Attributes:
    updater: the algorithm, its sparsities and its schedule.

  Example:
    >>> import jax, jax.numpy as jnp, jaxpruner, optax
    >>> from jaxpruner import kept
    >>> pruner = jaxpruner.create_updater_from_config({
    ...   "algorithm": "set", "sparsity": 0.9, "update_freq": 10,
    ...   "update_start_step": 1, "update_end_step": 100, "storage": "kept"})
    >>> init = lambda key, x: {"w": jax.random.normal(key, (32, 32))}
    >>> apply = kept.lift(lambda params, x: x @ params["w"])
    >>> weights = pruner.create(jax.random.key(0), init, jnp.ones((1, 32)))
    >>> tx = pruner.wrap_optax(optax.adam(1e-3))
    >>> opt_state = tx.init(weights)
    >>> params, _ = kept.split(weights)
    >>> def loss(params, opt_state, x):
    ...   return apply(pruner.pre_forward_update(params, opt_state), x).sum()
    >>> grads = jax.grad(loss)(params, opt_state, jnp.ones((1, 32)))
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> optax.apply_updates(params, updates)["w"].shape
    (102,)
  """

  updater: base_updater.BaseUpdater

  def __post_init__(self):
    checking.check_updater(self.updater)

  @property
  def grows_by_gradient(self) -> bool:
    """Whether mask updates need `growth` (RigL)."""
    return checking.rewires(self.updater) and isinstance(
      getattr(self.updater, "grow", None), criteria.Gradient
    )

  # --- make kept weights ---------------------------------------------------

  def create(
    self,
    key: Array,
    init_fn: Callable[..., PyTree],
    *inputs: Any,
    apply_fn: Callable[..., Any] | None = None,
    initializer: str | tensors.Initializer = "lecun_normal",
  ) -> PyTree:
    """Create a model's weights without ever making a dense kept weight.

    Leaves that stay dense come from `init_fn`; XLA leaves out what it would
    compute for the others. Positions are those of the algorithm's own initial
    masks for the same `rng_seed`.

    Args:
      key: a PRNG key.
      init_fn: `init_fn(key, *inputs)` returns the parameters, such as a Flax
        module's `init`.
      *inputs: example inputs.
      apply_fn: `apply_fn(params, *inputs)`; it tells which axes the products of
        weights with three or more axes contract.
      initializer: of kept leaves, as in `kept.create`.

    Returns:
      A tree with `KeptTensor` leaves.
    """
    shapes = jax.eval_shape(init_fn, key, *inputs)
    view = self.updater.view(shapes)
    checking.refuse_stacks(view)
    leaves, treedef = jax.tree.flatten(shapes)
    folds = folding.find(apply_fn, shapes, inputs)
    own = [i for i in range(len(leaves)) if i not in view.places]
    inputs = jax.tree.map(_concrete, inputs)

    def rest(key, *inputs):
      made = jax.tree.leaves(init_fn(key, *inputs))
      return [made[i] for i in own]

    out = dict(zip(own, jax.jit(rest)(key, *inputs), strict=True))
    for i, names, kind, target in zip(
      view.places, view.names, view.kinds, view.targets, strict=True
    ):
      name = _leaves.join(names)
      checking.check_kind(name, kind)
      out[i] = tensors.create(
        key,
        leaves[i].shape,
        target,
        initializer=initializer,
        dtype=leaves[i].dtype,
        split=folds[i].split,
        fan_in=folds[i].fan_in,
        name=name,
        positions_key=self._seed(key),
      )
    return treedef.unflatten([out[i] for i in range(len(leaves))])

  def from_dense(
    self,
    params: PyTree,
    masks: PyTree,
    *inputs: Any,
    apply_fn: Callable[..., Any] | None = None,
  ) -> PyTree:
    """Store dense parameters at kept size, under their masks.

    Args:
      params: dense parameters.
      masks: uint8, 1 = kept, None for dense leaves.
      *inputs: example inputs of `apply_fn`.
      apply_fn: as in `create`.

    Returns:
      A tree with `KeptTensor` leaves.
    """
    folds = folding.find(apply_fn, params, inputs)
    rows, treedef = _leaves.flatten_with_names(params)
    out = []
    for (names, leaf), mask, (split, _) in zip(
      rows, _leaves.align(params, masks), folds, strict=True
    ):
      if mask is not None:
        name = _leaves.join(names)
        leaf = tensors.from_dense(leaf, mask, split=split, name=name)
      out.append(leaf)
    return treedef.unflatten(out)

  def from_masked(
    self,
    params: PyTree,
    opt_state: PyTree,
    *inputs: Any,
    apply_fn: Callable[..., Any] | None = None,
  ) -> tuple[PyTree, KeptState]:
    """Switch a masked run to kept size; weights and moments are carried over.

    For the last phase of a gradual run, once its target is reached, and for
    fine-tuning under fixed masks.

    Args:
      params: dense parameters.
      opt_state: the `SparseState` of a pruner's `wrap_optax`.
      *inputs: example inputs of `apply_fn`.
      apply_fn: as in `create`.

    Returns:
      `(weights, opt_state)`: a tree with `KeptTensor` leaves, and the state to
      go on with; the optimizer must be the same.
    """
    if not isinstance(opt_state, SparseState):
      raise ValueError(
        f"from_masked: opt_state is {type(opt_state).__name__}, not the "
        "SparseState of wrap_optax; wrap_optax must be outermost"
      )
    masks = _unpacked(params, opt_state.masks)
    weights = self.from_dense(params, masks, *inputs, apply_fn=apply_fn)
    places = jax.tree.leaves(
      tensors.split(weights)[1], is_leaf=lambda x: x is None or _is_layout(x)
    )
    owners, leaves = Owners(params), jax.tree.leaves(params)

    def carry(path, leaf):
      owner = owners.find(path)
      if owner is None or places[owner] is None:
        return leaf
      layout = places[owner]
      if not per_weight(leaf, np.shape(leaves[owner])):
        if np.size(leaf) <= 1:
          return leaf
        raise ValueError(
          f"from_masked: the optimizer's {jax.tree_util.keystr(path)} of shape "
          f"{np.shape(leaf)} has no entry per weight, so it has no kept form; "
          "use an optimizer with moments per weight, such as adam or sgd"
        )
      flat = leaf.reshape(*leaf.shape[: leaf.ndim - len(layout.shape)], -1)
      return flat[..., layout.positions()]

    inner = jax.tree_util.tree_map_with_path(carry, opt_state.inner_state)
    state = self._start(weights)
    key = state.key if _leaves.is_absent(opt_state.key) else opt_state.key
    return weights, state._replace(
      inner_state=inner, count=opt_state.count, key=key
    )

  # --- train ---------------------------------------------------------------

  def wrap_optax(
    self, inner: optax.GradientTransformation
  ) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that keeps moments at kept size and rewires.

    Args:
      inner: the optimizer.

    Returns:
      A transformation. Its `init` takes the tree with `KeptTensor` leaves, its
      `update` gradients and parameters of kept size. Algorithms that grow by
      gradient need `update(…, growth=growth)` from `value_and_grad`.
    """
    checks.warn_if_never_updates(self.updater)
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> KeptState:
      values, _ = tensors.split(params)
      return self._start(params)._replace(inner_state=inner.init(values))

    def update(updates, state, params=None, *, growth=None, **extra):
      if params is None:
        raise ValueError(
          "KeptUpdater.wrap_optax(…).update needs params: call "
          "tx.update(grads, opt_state, params)"
        )
      if not isinstance(state, KeptState):
        raise ValueError(
          f"opt_state is {type(state).__name__}, not KeptState: it was made "
          "with another storage; convert it with from_masked"
        )
      _check_growth(self, state, growth)
      step = lambda old: inner.update(updates, old, params, **extra)
      count = optax.safe_increment(state.count)
      if not checking.rewires(self.updater):
        updates, inner_state = step(state.inner_state)
        return updates, state._replace(inner_state=inner_state, count=count)
      due = self.updater.scheduler.is_mask_update_iter(state.count)
      places, skipped, moved = jax.lax.cond(
        due,
        lambda: self._rewire(state, params, growth or {}),
        lambda: _unmoved(state, params),
      )
      stays = [None if m is None else ~m for m in _align(params, moved)]
      cleared = _clear(params, moved)
      keep = moments.keepers(
        state.inner_state, params, stays, inner.init(cleared), due
      )
      updates, inner_state = moments.update(step, state.inner_state, keep)
      updates = jax.tree.map(
        lambda u: jnp.where(due, jnp.zeros_like(u), u), updates
      )
      updates = _hold(params, updates, moved)
      return updates, KeptState(places, inner_state, count, state.key, skipped)

    return optax.GradientTransformationExtraArgs(init, update)

  def pre_forward_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the parameters for the forward pass, with `KeptTensor` leaves.

    Args:
      params: the parameters, kept leaves as vectors of values.
      opt_state: the optimizer's state.

    Returns:
      The tree that a lifted model takes.
    """
    return tensors.join(params, find_kept_state(opt_state).layouts)

  def post_gradient_update(self, params: PyTree, opt_state: PyTree) -> PyTree:
    """Return the parameters as they are: nothing else is stored.

    Args:
      params: the parameters.
      opt_state: not used.

    Returns:
      `params`.
    """
    del opt_state
    return params

  def value_and_grad(
    self, loss_fn: Callable[..., Any], has_aux: bool = False
  ) -> Callable[..., tuple[Any, PyTree, Growth]]:
    """Differentiate a loss and note what growth by gradient needs.

    The gradient of a weight that is not kept is the product of a layer's inputs
    and its output's cotangents; both are returned, and the product is computed
    a few rows at a time when masks are updated.

    Args:
      loss_fn: `loss_fn(params, opt_state, *args)`, a scalar; it calls a
        function made by `kept.lift`.
      has_aux: whether it returns `(loss, aux)`.

    Returns:
      A function of the same arguments that returns `(value, grads, growth)`.
    """

    def run(params, opt_state, *args, **kwargs):
      with capture.capturing(None) as seen:
        jax.eval_shape(lambda p: loss_fn(p, opt_state, *args, **kwargs), params)

      def noted(params, zeros):
        with capture.capturing(zeros) as now:
          out = loss_fn(params, opt_state, *args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        inputs = {
          name: [x for x, _ in uses] for name, uses in now.inputs.items()
        }
        return loss, (aux, inputs)

      differentiate = jax.value_and_grad(noted, (0, 1), has_aux=True)
      (loss, (aux, inputs)), (grads, dys) = differentiate(
        params, seen.make_zeros()
      )
      if inputs.keys() != seen.inputs.keys():
        raise ValueError(
          "value_and_grad: the loss was not traced anew, so the inputs of its "
          f"kept layers {sorted(seen.inputs)} were not seen; pass the loss "
          "without jit, and jit the whole step"
        )
      growth = {
        name: [
          _pair(x, side, dy)
          for x, (_, side), dy in zip(
            inputs[name], uses, dys[name], strict=True
          )
        ]
        for name, uses in seen.inputs.items()
      }
      return ((loss, aux) if has_aux else loss), grads, growth

    return run

  # --- internal ------------------------------------------------------------

  def _seed(self, key: Any) -> Array:
    seed = self.updater.rng_seed
    if seed is not None:
      return seed_data(seed)
    return jax.random.key_data(key) if tensors.is_key(key) else key

  def _start(self, weights: PyTree) -> KeptState:
    rows = jax.tree_util.tree_flatten_with_path(
      weights, is_leaf=tensors.is_kept
    )[0]
    held = [
      (_leaves.join(_leaves.path_names(path)), leaf)
      for path, leaf in rows
      if tensors.is_kept(leaf)
    ]
    if not held:
      raise ValueError(
        "tx.init: the tree has no KeptTensor leaf; pass the result of create, "
        "from_dense or from_masked"
      )
    named = jax.tree_util.tree_map_with_path(
      _named_layout, weights, is_leaf=tensors.is_kept
    )
    if self.updater.rng_seed is not None:
      key = seed_data(self.updater.rng_seed)
    else:
      key = params_key(tensors.split(weights)[0])
    return KeptState(
      layouts=named,
      count=jnp.zeros([], jnp.int32),
      key=key,
      skipped=jnp.zeros([len(held)], jnp.int32),
    )

  def _rewire(
    self, state: KeptState, params: PyTree, growth: Growth
  ) -> tuple[PyTree, Array, PyTree]:
    """Return new layouts, refusals, and the slots that moved."""
    leaves, treedef = jax.tree.flatten(params)
    places = _align(params, state.layouts)
    layouts, moved, refused = [], [], []
    for values, layout in zip(leaves, places, strict=True):
      if layout is None:
        layouts.append(None)
        moved.append(None)
        continue
      scores, finite = self._scores(state, layout, growth)
      finite &= rewiring.all_finite(values)
      totals = jnp.full((1,), layout.count, jnp.int32)
      left = self.updater.survivors(state, totals, None, None)[0]  # pyright: ignore
      left = jnp.where(finite, left, layout.count)
      new, moves, summed = rewiring.rewire(
        values, layout, scores, left, self._most(layout.count)
      )
      layouts.append(new)
      moved.append(moves)
      refused.append(~(finite & summed))
    skipped = state.skipped + jnp.stack(refused).astype(jnp.int32)
    return treedef.unflatten(layouts), skipped, treedef.unflatten(moved)

  def _scores(
    self, state: KeptState, layout: Layout, growth: Growth
  ) -> tuple[growing.Growth, Array]:
    """Return the growth scores, and whether their factors are finite."""
    if self.grows_by_gradient:
      scores = growing.gradient(growth[layout.name])
      return scores, scores.factors_finite()
    names = tuple(layout.name.split("/"))
    step = state.count + 1
    scores = growing.random(state.key, step, names, layout.matrix[1])
    return scores, jnp.bool_(True)

  def _most(self, count: int) -> int:
    """Return how many weights a mask update replaces at most."""
    if self.updater.drop_fraction_fn is not None:  # pyright: ignore
      return count
    fraction = self.updater.drop_fraction  # pyright: ignore
    return min(count, int(fraction * count) + 1)


def _is_layout(value: Any) -> bool:
  return isinstance(value, Layout)


def _align(params: PyTree, tree: PyTree) -> list[Any]:
  return jax.tree.structure(params).flatten_up_to(tree)


def _named_layout(path: Any, leaf: Any) -> Layout | None:
  """Return the layout under the path that the algorithm knows."""
  if not tensors.is_kept(leaf):
    return None
  name = _leaves.join(_leaves.path_names(path))
  return dataclasses.replace(leaf.layout, name=name)


def _pair(x: Array, columns: bool, dy: Array) -> tuple[Array, Array]:
  return (dy, x) if columns else (x, dy)


def _unmoved(state: KeptState, params: PyTree):
  none = [
    None if layout is None else jnp.zeros(layout.count, bool)
    for layout in _align(params, state.layouts)
  ]
  moved = jax.tree.structure(params).unflatten(none)
  return state.layouts, state.skipped, moved


def _map_moved(fn: Any, params: PyTree, *trees: PyTree) -> PyTree:
  leaves, treedef = jax.tree.flatten(params)
  columns = [_align(params, tree) for tree in trees]
  return treedef.unflatten([*map(fn, leaves, *columns)])


def _clear(params: PyTree, moved: PyTree) -> PyTree:
  return _map_moved(
    lambda p, m: p if m is None else jnp.where(m, jnp.zeros_like(p), p),
    params,
    moved,
  )


def _hold(params: PyTree, updates: PyTree, moved: PyTree) -> PyTree:
  """Bring moved slots to exactly zero: grown weights start there."""

  def hold(param, update, moved):
    if moved is None:
      return update
    dtype = jnp.promote_types(param.dtype, update.dtype)
    return jnp.where(moved, -param.astype(dtype), update.astype(dtype))

  return _map_moved(hold, params, updates, moved)


def _concrete(x: Any) -> Any:
  if isinstance(x, jax.ShapeDtypeStruct):
    return jnp.zeros(x.shape, x.dtype)
  return x


def _unpacked(params: PyTree, masks: PyTree) -> PyTree:
  def unpack(_, param, mask):
    if mask is None or mask.shape == param.shape:
      return mask
    return unpack_mask(mask, param)

  return _leaves.map_masks(unpack, params, masks)


def _check_growth(self: KeptUpdater, state: KeptState, growth: Any) -> None:
  if not self.grows_by_gradient:
    return
  for layout in jax.tree.leaves(state.layouts, is_leaf=_is_layout):
    if layout.name not in (growth or {}):
      raise ValueError(
        f"params leaf {layout.name!r}: {type(self.updater).__name__} grows by "
        "gradient, and nothing tells the gradients of weights that are not "
        "kept; call value, grads, growth = pruner.value_and_grad(loss_fn)"
        "(params, opt_state, …) and tx.update(grads, opt_state, params, "
        "growth=growth), with a loss that uses the weight through kept.lift"
      )
