"""Pruning at initialization: masks from a loss, before the first step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner import (
  base_updater,
  mask_calculator,
  sparsity_distributions,
)
from jaxpruner.algorithms import global_pruners
from jaxpruner.updater import checks, ranking


def _category(
  paper: str, cost: str, temperature: float = 1.0
) -> base_updater.Category:
  return base_updater.Category(
    when="before",
    start="sparse-to-sparse",
    needs=frozenset({"loss"}),
    paper=paper,
    cost=f"a sparse step; at the start {cost}",
    temperature=temperature,
  )


@dataclasses.dataclass(eq=False)
class PruneAtInit(global_pruners.GlobalPruning):
  """Prune before training, all leaves together; the base of SNIP and GraSP.

  `pruner = pruner.bind(loss, batch)` supplies the loss that scores are computed
  from. `wrap_optax(tx).init(params)` selects the masks, which never change. A
  warning names each leaf that loses all weights, and `state_metrics` counts
  these leaves as `collapsed`. The other attributes are those of
  `GlobalPruning`.

  Attributes:
    is_sparse_gradients: whether gradients of pruned weights are set to zero
      before the optimizer sees them.
    loss: `(params, batch) -> scalar`.
    batch: examples for the loss.
    rounds: number of prunings until the target sparsity; each keeps the same
      share of the weights that are left.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner.algorithms.at_init import PruneAtInit
    >>> class LargestPruning(PruneAtInit):
    ...   def score(self, objective, weights):
    ...     return [jnp.abs(w) for w in weights]
    >>> pruner = LargestPruning(sparsity=0.5).bind(lambda p, batch: 0.0, None)
    >>> pruner.init_state(jnp.array([[3.0, -1, 2, -4]])).masks.tolist()
    [[1, 0, 0, 1]]
  """

  is_sparse_gradients: bool = True
  loss: Callable[[Any, Any], Any] | None = None
  batch: Any = None
  rounds: int = 1

  def __post_init__(self):
    super().__post_init__()
    checks.check_whole(self, "rounds", 1)

  def bind(self, loss, batch, apply=None, inputs=None):
    del apply, inputs
    return dataclasses.replace(self, loss=loss, batch=batch)

  def objective(self, params: Any) -> Any:
    """Return the scalar whose derivatives make the scores.

    Args:
      params: the parameters.

    Returns:
      The loss of the bound batch.
    """
    if self.loss is None:
      raise ValueError(
        f"{type(self).__name__} prunes by the loss of a batch and has none; "
        "call pruner = pruner.bind(loss, batch) before wrap_optax, with "
        "loss(params, batch) a scalar"
      )
    return self.loss(params, self.batch)

  def score(self, objective: Any, weights: list[Any]) -> list[Any]:
    """Return the scores of the prunable leaves; the highest are kept.

    Args:
      objective: `weights -> scalar`, a function of the prunable leaves.
      weights: the prunable leaves.

    Returns:
      An array of scores per leaf.
    """
    raise NotImplementedError

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state, grads
    view = self.view(params)
    objective = lambda weights: self.objective(view.put(params, weights))
    return view.put(params, self.score(objective, view.leaves))

  def get_initial_masks(self, params, target_sparsities):
    view = self.view(params, target_sparsities)

    def prune(k, masks):
      pruned = view.put(
        params, map(base_updater.apply_mask, view.leaves, masks)
      )
      scores = view.of(self.calculate_scores(pruned), "scores")
      # Weights removed in an earlier round stay removed.
      gone = lambda score, mask: jnp.where(mask, score, -jnp.inf)
      wanted = [self._share(s, k) for s in view.targets]
      return self._select(view, [*map(gone, scores, masks)], wanted).masks

    ones = super().get_initial_masks(params, target_sparsities)
    masks = view.of(ones, packed=False)
    if self.rounds == 1:
      return view.put(None, prune(0, masks))
    masks = jax.lax.fori_loop(0, self.rounds, prune, masks)
    ranking.warn_if_emptied(view, masks)
    return view.put(None, masks)

  def _share(self, target, k):
    if self.rounds == 1:
      return target
    done = (k + 1) / self.rounds
    now = 1 - jnp.power(jnp.float32(1 - target), done)
    now = jnp.where(k + 1 == self.rounds, jnp.float32(target), now)
    return mask_calculator.AtStep(now, target)


@dataclasses.dataclass(eq=False)
class SNIP(PruneAtInit):
  """Keep the largest |w · ∂L/∂w| at the start (Lee et al., 2019).

  The score is the gradient of the loss with respect to a gate `c` on each
  weight, `∂L(c·w)/∂c` at `c = 1`, from one batch before training. All leaves
  are ranked together. The attributes are those of `PruneAtInit`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.SNIP(sparsity=0.5).bind(
    ...   lambda params, batch: jnp.sum((batch @ params["w"]) ** 2),
    ...   jnp.array([[1.0, 0.0], [2.0, 0.0]]))
    >>> state = pruner.wrap_optax(optax.sgd(0.1)).init({"w": jnp.ones((2, 2))})
    >>> state.masks["w"].tolist()  # the second input is always zero
    [[1, 1], [0, 0]]
  """

  category: ClassVar[base_updater.Category] = _category(
    "Lee et al., 2019", "one gradient and one selection"
  )

  def score(self, objective, weights):
    grads = jax.grad(objective)(weights)
    return [jnp.abs(product) for product in map(_product, weights, grads)]


@dataclasses.dataclass(eq=False)
class GraSP(PruneAtInit):
  """Keep the weights that preserve the gradient flow (Wang et al., 2020).

  Removing a weight changes |∂L/∂w|² by `−w · (H ∂L/∂w)` to first order, where H
  is the Hessian. The weights with the highest value are removed.

  Bind a loss that divides the network's outputs by 200 (the category's
  `temperature`), as the authors' program does. Without it the gradient flow is
  dominated by examples that the network classifies wrongly with high
  confidence. The attributes are those of `PruneAtInit`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.GraSP(sparsity=0.5).bind(
    ...   lambda params, batch: jnp.sum((batch @ params["w"] / 200) ** 2),
    ...   jnp.array([[1.0, 0.0], [2.0, 0.0]]))
    >>> state = pruner.wrap_optax(optax.sgd(0.1)).init({"w": jnp.ones((2, 2))})
    >>> state.masks["w"].tolist()  # the second input is always zero
    [[1, 1], [0, 0]]
  """

  category: ClassVar[base_updater.Category] = _category(
    "Wang et al., 2020",
    "one Hessian-vector product and one selection",
    temperature=200.0,
  )

  def score(self, objective, weights):
    gradient = jax.grad(objective)
    _, flow = jax.jvp(gradient, (weights,), (gradient(weights),))
    return [*map(_product, weights, flow)]


@dataclasses.dataclass(eq=False)
class SynFlow(SNIP):
  """Keep the largest |w · ∂R/∂w|, R the flow through |w| (Tanaka et al., 2020).

  R is the sum of the outputs for an input of ones when every parameter is
  replaced by its absolute value, so no data is needed. With 100 rounds no layer
  is removed completely while other layers still have weights. Inputs that are
  not floats, for example tokens, are used unchanged. R has no meaning for
  layers that subtract a mean (layer norm).

  R grows by a factor per layer and exceeds float32 in networks of some forty
  layers. It is therefore computed in float64, as in the authors' program; a
  network that casts its weights to another type computes in that type. The
  other attributes are those of `PruneAtInit`.

  Attributes:
    rounds: number of prunings until the target sparsity.
    apply: `(params, inputs) -> outputs`.
    inputs: an array, or tree of arrays, of the network's input shape.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {"u": jnp.array([[3.0, 1], [3, 1]]), "v": jnp.ones((2, 2))}
    >>> pruner = jaxpruner.SynFlow(sparsity=0.5).bind(
    ...   None, None, apply=lambda p, x: x @ p["u"] @ p["v"],
    ...   inputs=jnp.ones((1, 2)))
    >>> masks = pruner.init_state(params).masks
    >>> masks["u"].tolist(), masks["v"].tolist()  # the first hidden neuron
    ([[1, 0], [1, 0]], [[1, 1], [0, 0]])
  """

  rounds: int = 100
  apply: Callable[[Any, Any], Any] | None = None
  inputs: Any = None

  category: ClassVar[base_updater.Category] = _category(
    "Tanaka et al., 2020", "100 gradients and selections, without data"
  )

  def bind(self, loss, batch, apply=None, inputs=None):
    del loss, batch
    return dataclasses.replace(self, apply=apply, inputs=inputs)

  def objective(self, params):
    if self.apply is None or self.inputs is None:
      raise ValueError(
        "SynFlow sums the outputs of the network and has none; call pruner = "
        "pruner.bind(loss, batch, apply=apply, inputs=x) before wrap_optax, "
        "with apply(params, x) the outputs"
      )
    floating = sparsity_distributions.is_floating
    # `float` is float64 inside `enable_x64`, else float32.
    positive = jax.tree.map(
      lambda p: jnp.abs(p).astype(float) if floating(p) else p, params
    )
    ones = jax.tree.map(
      lambda x: jnp.ones_like(x[:1], float) if floating(x) else x, self.inputs
    )
    outputs = jax.tree.leaves(self.apply(positive, ones))
    return functools.reduce(jnp.add, [jnp.sum(y, dtype=float) for y in outputs])

  def score(self, objective, weights):
    def shares(weights):
      weights = [w.astype(float) for w in weights]
      flow, grads = jax.value_and_grad(objective)(weights)
      # Shares of R rank as the products do, and fit into float32.
      share = lambda w, g: jnp.abs(w * g / jnp.maximum(flow, 1e-30))
      return [s.astype(jnp.float32) for s in map(share, weights, grads)]

    with jax.enable_x64(True):
      try:
        return shares(weights)
      except TypeError:  # such as a scan whose carry the network made float32
        pass
    return shares(weights)


def _product(weight, other):
  # In float32: half-precision products underflow or overflow.
  return weight.astype(jnp.float32) * other.astype(jnp.float32)
