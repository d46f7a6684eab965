"""Sparse training at kept size: an updater's algorithm in another storage."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax
from jax import Array

from jaxpruner import base_updater
from jaxpruner.kept import (
  checking,
  creation,
  differentiation,
  making,
  stepping,
  tensors,
)
from jaxpruner.kept.differentiation import Growth
from jaxpruner.kept.states import KeptState, find_kept_state

PyTree = Any


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
    return checking.grows_by_gradient(self.updater)

  # --- make kept weights ---------------------------------------------------

  def create(
    self,
    key: Array,
    init_fn: Callable[..., PyTree],
    *inputs: Any,
    apply_fn: Callable[..., Any] | None = None,
    initializer: str | creation.Initializer = "lecun_normal",
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
    return making.create(
      self.updater, key, init_fn, inputs, apply_fn, initializer
    )

  def from_dense(
    self,
    params: PyTree,
    masks: PyTree = None,
    *inputs: Any,
    apply_fn: Callable[..., Any] | None = None,
  ) -> PyTree:
    """Store dense parameters at kept size, under their masks.

    Args:
      params: dense parameters.
      masks: uint8, 1 = kept, None for dense leaves. If the whole argument is
        None, the masks with which the algorithm starts.
      *inputs: example inputs of `apply_fn`.
      apply_fn: as in `create`.

    Returns:
      A tree with `KeptTensor` leaves.
    """
    return making.from_dense(self.updater, params, masks, inputs, apply_fn)

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
    return making.from_masked(self.updater, params, opt_state, inputs, apply_fn)

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
    return stepping.wrap(self.updater, inner)

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
    return differentiation.value_and_grad(loss_fn, has_aux)
