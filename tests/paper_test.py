"""The paper's section 3 runs as printed, and so does code for its library.

Lee et al., "JaxPruner: A concise library for sparsity research", 2023. The
paper elides arguments by "..."; here they are filled in.
"""

import copy
import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner

HALF = functools.partial(jaxpruner.sparsity_distributions.uniform, sparsity=0.5)
RAMP = jaxpruner.sparsity_schedules.PolynomialSchedule(
  update_freq=1, update_start_step=0, update_end_step=2, power=3
)
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


def _existing_code():
  return optax.adam(0.1), {"kernel": X, "bias": jnp.ones(4)}


def _training_step(tx, opt_state, params):
  def loss(params):
    return jnp.sum((jnp.ones(8) @ params["kernel"] + params["bias"] - 1) ** 2)

  updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
  return optax.apply_updates(params, updates), opt_state


@pytest.mark.quick
@pytest.mark.parametrize("line_3", ["as_meant", "as_printed"])
def test_the_four_lines_of_optax_integration(line_3):
  tx, params = _existing_code()
  pruner = jaxpruner.MagnitudePruning(
    scheduler=RAMP, sparsity_distribution_fn=HALF
  )  # Line 1: Create pruner.
  tx = pruner.wrap_optax(tx)  # Line 2: Wrap optimizer.

  opt_state = tx.init(params)
  step = jax.jit(functools.partial(_training_step, tx))
  for _ in range(3):
    forward_params = params
    # Line 3: [Optional] modifies weights temporarily for the forward pass.
    if line_3 == "as_printed":
      forward_params = pruner.post_gradient_update(forward_params, opt_state)
    else:
      forward_params = pruner.pre_forward_update(forward_params, opt_state)
    new_params, new_opt_state = step(opt_state, forward_params)
    # Line 4: Apply masks to parameters.
    new_params = pruner.post_gradient_update(new_params, new_opt_state)
    params, opt_state = new_params, new_opt_state
  summary = jaxpruner.summarize_sparsity(params)
  assert summary["kernel"] == 0.5 and summary["bias"] == 0


def test_one_shot_pruning_of_an_array_and_of_a_collection():
  pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=HALF)
  X_pruned, mask = pruner.instant_sparsify(X)
  kept = np.zeros(32, bool)
  kept[np.argsort(-np.abs(np.asarray(X).ravel()), kind="stable")[:16]] = True
  np.testing.assert_array_equal(np.asarray(mask).ravel(), kept)
  np.testing.assert_array_equal(
    np.asarray(X_pruned).ravel(), np.where(kept, np.asarray(X).ravel(), 0)
  )
  params, masks = pruner.instant_sparsify({"a": {"kernel": X}, "b": X})
  np.testing.assert_array_equal(params["a"]["kernel"], X_pruned)
  assert masks["a"]["kernel"].dtype == jnp.uint8


def test_structured_sparsity_without_a_distribution():
  pruner = jaxpruner.MagnitudePruning(sparsity_type=jaxpruner.NbyM(2, 4))
  X_pruned, mask = pruner.instant_sparsify(X)
  # Two of every four, along the axis a kernel contracts over.
  np.testing.assert_array_equal(np.sum(mask.reshape(2, 4, 4), axis=1), 2)
  groups = np.abs(np.asarray(X)).reshape(2, 4, 4)
  ranks = np.argsort(np.argsort(-groups, axis=1), axis=1)
  np.testing.assert_array_equal(mask.reshape(2, 4, 4), ranks < 2)
  assert jaxpruner.summarize_sparsity(X_pruned)["_total_sparsity"] == 0.5


def test_custom_distributions_by_mapping_and_by_function():
  params = {"a": {"kernel": X}, "b": {"kernel": X}}
  mapped = functools.partial(
    jaxpruner.sparsity_distributions.erk,
    sparsity=0.8,
    custom_sparsity_map={("a", "kernel"): 0.25},
  )
  assert mapped(params)["a"]["kernel"] == 0.25

  def mine(params):
    del params
    return {"a": {"kernel": None}, "b": {"kernel": 0.75}}

  pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=mine)
  pruned, masks = pruner.instant_sparsify(params)
  assert masks["a"]["kernel"] is None
  assert jaxpruner.summarize_sparsity(pruned)["b/kernel"] == 0.75


class EveryOtherStep:
  """A user's own schedule needs no base class."""

  def is_mask_update_iter(self, step):
    return step % 2 == 1

  def get_sparsity_at_step(self, target_sparsities, step):
    del step
    return target_sparsities


def test_custom_schedules_are_passed_to_algorithms():
  pruner = jaxpruner.MagnitudePruning(
    scheduler=EveryOtherStep(), sparsity_distribution_fn=HALF
  )
  tx, params = _existing_code()
  tx = pruner.wrap_optax(tx)
  opt_state = tx.init(params)
  step = jax.jit(functools.partial(_training_step, tx))
  found = []
  for _ in range(2):
    params, opt_state = step(opt_state, params)
    found.append(jaxpruner.summarize_sparsity(params)["kernel"])
  assert found == [0, 0.5]


def test_a_new_algorithm_overrides_one_method():
  @dataclasses.dataclass
  class SignPruning(jaxpruner.BaseUpdater):
    """Keep the most positive weights."""

    def calculate_scores(self, params, sparse_state=None, grads=None):
      del sparse_state, grads
      return params

  pruner = SignPruning(sparsity_distribution_fn=HALF)
  _, mask = pruner.instant_sparsify(X)
  assert np.asarray(X)[mask == 1].min() > np.asarray(X)[mask == 0].max()


def _train_one_step(pruner, **extra):
  params = {"kernel": X, "bias": jnp.ones(4)}
  tx = pruner.wrap_optax(optax.sgd(0.1))
  state = tx.init(params)
  grads = jax.tree.map(jnp.ones_like, params)
  step = jax.jit(lambda g, s, p, e: tx.update(g, s, p, **e))
  return params, step(grads, state, params, extra)[1].masks["kernel"]


ONCE = jaxpruner.sparsity_schedules.OneShotSchedule(0)


def _top_half(scores):
  flat = np.asarray(scores).ravel()
  kept = np.zeros(flat.size, np.uint8)
  kept[np.argsort(-flat, kind="stable")[: flat.size // 2]] = 1
  return kept.reshape(np.shape(scores))


@dataclasses.dataclass(eq=False)
class ByActivation(jaxpruner.BaseUpdater):
  """Wanda's score: |w| times the norm of its input."""

  def calculate_scores(self, params, sparse_state=None, grads=None, **extra):
    del sparse_state, grads
    score = lambda w: jnp.abs(w) * extra["norms"][:, None]
    return jax.tree.map(lambda w: score(w) if w.ndim == 2 else w, params)


@dataclasses.dataclass(eq=False)
class ByHessian(jaxpruner.BaseUpdater):
  """Optimal brain damage: w² times the diagonal of the Hessian."""

  def calculate_scores(
    self, params, sparse_state=None, grads=None, hessian=None
  ):
    del sparse_state, grads
    return jax.tree.map(lambda w, h: w * w * h, params, hessian)


@dataclasses.dataclass(eq=False)
class ByLoss(jaxpruner.BaseUpdater):
  """Keep large weights while the loss is high, small ones when it is low."""

  def calculate_scores(self, params, sparse_state=None, grads=None, loss=None):
    del sparse_state, grads
    return jax.tree.map(lambda w: jnp.where(loss > 1, 1, -1) * abs(w), params)


@pytest.mark.quick
def test_extra_arguments_reach_the_scores_in_training_and_at_once():
  norms = jnp.arange(8.0)
  hessian = {"kernel": jnp.flip(jnp.abs(X)), "bias": jnp.ones(4)}
  magnitude = np.abs(np.asarray(X))
  cases = [
    (ByActivation, {"norms": norms}, magnitude * np.arange(8.0)[:, None]),
    (ByHessian, {"hessian": hessian}, magnitude**2 * hessian["kernel"]),
    (ByLoss, {"loss": jnp.float32(2)}, magnitude),
    (ByLoss, {"loss": jnp.float32(0)}, -magnitude),
  ]
  for cls, extra, scores in cases:
    pruner = cls(scheduler=ONCE, sparsity_distribution_fn=HALF)
    # An argument that neither the scores nor the optimizer take is left out.
    params, mask = _train_one_step(pruner, unknown=jnp.ones(1), **extra)
    np.testing.assert_array_equal(mask, _top_half(scores))
    _, masks = pruner.instant_sparsify(params, **extra)
    np.testing.assert_array_equal(masks["kernel"], _top_half(scores))


@pytest.mark.quick
def test_extra_arguments_leave_algorithms_without_them_alone():
  plain = jaxpruner.MagnitudePruning(
    scheduler=ONCE, sparsity_distribution_fn=HALF
  )
  _, mask = _train_one_step(plain, norms=jnp.ones(8))
  np.testing.assert_array_equal(mask, _top_half(np.abs(np.asarray(X))))


def test_an_override_of_update_state_in_the_old_way_still_trains():
  @dataclasses.dataclass
  class Counting(jaxpruner.MagnitudePruning):
    """Count mask updates, and forget the moments at each."""

    def init_extra(self, params, masks):
      return jnp.zeros([], jnp.int32)

    def update_state(self, sparse_state, params, grads):
      new = super().update_state(sparse_state, params, grads)
      zeros = jax.tree.map(jnp.zeros_like, new.inner_state)
      return new._replace(stats=new.stats + 1, inner_state=zeros)

    def create_masks(self, scores, sparsities):
      return super().create_masks(
        jax.tree.map(jnp.negative, scores), sparsities
      )

  pruner = Counting(scheduler=ONCE, sparsity_distribution_fn=HALF)
  tx = pruner.wrap_optax(optax.trace(0.9))
  params = {"kernel": X}
  state = tx.init(params)
  _, state = jax.jit(tx.update)(params, state, params)
  assert int(state.stats) == 1
  lowest = _top_half(-np.abs(np.asarray(X)))
  np.testing.assert_array_equal(state.masks["kernel"], lowest)


@pytest.mark.quick
def test_an_unset_distribution_stays_unset_when_copied():
  pruner = jaxpruner.MagnitudePruning(sparsity_type=jaxpruner.NByM(2, 4))
  for again in (
    copy.deepcopy(pruner),
    pickle.loads(pickle.dumps(pruner)),
    dataclasses.replace(pruner),
  ):
    assert again == pruner
    mask = again.instant_sparsify(X)[1]
    np.testing.assert_array_equal(mask, pruner.instant_sparsify(X)[1])
  ranked = jaxpruner.GlobalMagnitudePruning(sparsity=0.5)
  again = dataclasses.replace(copy.deepcopy(ranked), sparsity=0.25)
  assert again.sparsity == 0.25


def test_masks_are_uint8_or_bits():
  for packed, nbytes in ((False, 32), (True, 4)):
    pruner = jaxpruner.MagnitudePruning(
      scheduler=RAMP, sparsity_distribution_fn=HALF, use_packed_masks=packed
    )
    state = pruner.wrap_optax(optax.sgd(0.1)).init({"kernel": X})
    assert state.masks["kernel"].dtype == jnp.uint8
    assert state.masks["kernel"].nbytes == nbytes


def test_masked_parameters_become_bcoo_and_back():
  pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=HALF)
  params, masks = pruner.instant_sparsify({"kernel": X})
  bcoo = jaxpruner.sparse.to_bcoo(params, masks)
  np.testing.assert_array_equal(bcoo["kernel"].todense(), params["kernel"])


# --- source compatibility -----------------------------------------------------

ALGORITHMS = {
  "no_prune": jaxpruner.NoPruning,
  "magnitude": jaxpruner.MagnitudePruning,
  "random": jaxpruner.RandomPruning,
  "saliency": jaxpruner.SaliencyPruning,
  "magnitude_ste": jaxpruner.SteMagnitudePruning,
  "random_ste": jaxpruner.SteRandomPruning,
  "global_magnitude": jaxpruner.GlobalMagnitudePruning,
  "global_saliency": jaxpruner.GlobalSaliencyPruning,
  "static_sparse": jaxpruner.StaticRandomSparse,
  "set": jaxpruner.SET,
  "rigl": jaxpruner.RigL,
}


def test_registry_names_stand_for_the_papers_algorithms():
  assert set(ALGORITHMS) <= set(jaxpruner.all_algorithm_names())
  for name, cls in ALGORITHMS.items():
    assert jaxpruner.algorithm_class(name) is cls
    assert getattr(jaxpruner, cls.__name__) is cls
    if name != "no_prune":
      assert getattr(jaxpruner.algorithms, cls.__name__) is cls


SIGNATURES = {
  "BaseUpdater": "scheduler skip_gradients is_sparse_gradients sparsity_type "
  "sparsity_distribution_fn rng_seed use_packed_masks topk_fn",
  "BaseUpdater.calculate_scores": "self params sparse_state grads",
  "BaseUpdater.get_initial_masks": "self params target_sparsities",
  "BaseUpdater.create_masks": "self scores sparsities",
  "BaseUpdater.init_state": "self params",
  "BaseUpdater.update_state": "self sparse_state params grads",
  "BaseUpdater.apply_masks": "self params masks is_packed",
  "BaseUpdater.instant_sparsify": "self params grads",
  "BaseUpdater.pre_forward_update": "self params opt_state",
  "BaseUpdater.post_gradient_update": "self params opt_state",
  "BaseUpdater.wrap_optax": "self inner",
  "SparseState": "masks inner_state target_sparsities count",
  "apply_mask": "param mask is_packed",
  "create_updater_from_config": "sparsity_config",
  "register_algorithm": "name algorithm",
  "summarize_sparsity": "param_tree only_total_sparsity",
  "summarize_intersection": "mask_tree1 mask_tree2 only_total_intersection",
  "mask_calculator.topk_mask_calculator": "scores sparsity",
  "mask_calculator.get_topk_fn": "sparsity_type",
  "sparsity_distributions.uniform": "params sparsity filter_fn "
  "custom_sparsity_map",
  "sparsity_distributions.erk": "params sparsity filter_fn custom_sparsity_map",
  "sparsity_schedules.NoUpdateSchedule": "",
  "sparsity_schedules.OneShotSchedule": "target_step",
  "sparsity_schedules.PeriodicSchedule": "update_freq update_start_step "
  "update_end_step",
  "sparsity_schedules.PolynomialSchedule": "update_freq update_start_step "
  "update_end_step power",
  "sparsity_types.Unstructured": "",
  "sparsity_types.NByM": "n m",
  "sparsity_types.Block": "block_shape use_avg_pooling",
  "sparsity_types.Channel": "axis",
}
for _cls in ("NoUpdate", "OneShot", "Periodic", "Polynomial"):
  _name = f"sparsity_schedules.{_cls}Schedule."
  SIGNATURES[_name + "is_mask_update_iter"] = "self step"
  SIGNATURES[_name + "get_sparsity_at_step"] = "self target_sparsities step"


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_arguments_are_the_predecessors(name):
  found = functools.reduce(getattr, name.split("."), jaxpruner)
  names = list(inspect.signature(found).parameters)
  wanted = SIGNATURES[name].split()
  assert names[: len(wanted)] == wanted
  extra = list(inspect.signature(found).parameters.values())[len(wanted) :]
  assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in extra)


def test_summaries_have_the_predecessors_keys():
  params = {"a": {"b": {"kernel": jnp.array([0.0, 1.0, 0.0, 0.0])}}}
  assert jaxpruner.summarize_sparsity(params) == {
    "a/b/kernel": 0.75,
    "_total_sparsity": 0.75,
    "_nparams": 4,
    "_nparams_nnz": 1,
  }
  assert list(jaxpruner.summarize_sparsity(params, True)) == [
    "_total_sparsity",
    "_nparams",
    "_nparams_nnz",
  ]
  one, two = (
    {"w": jnp.array(m, jnp.uint8)} for m in ([1, 1, 0, 0], [1, 0, 1, 0])
  )
  assert jaxpruner.summarize_intersection(one, two) == {
    "w": 0.5,
    "_total_intersection": 0.5,
  }


def test_the_base_class_is_an_ordinary_dataclass():
  assert dataclasses.is_dataclass(jaxpruner.BaseUpdater)
  pruner = jaxpruner.MagnitudePruning()
  pruner.scheduler = RAMP
  assert pruner == jaxpruner.MagnitudePruning(scheduler=RAMP)


def test_get_topk_fn_is_the_types_own_selection():
  fn = jaxpruner.mask_calculator.get_topk_fn(jaxpruner.NByM(1, 2))
  assert fn(jnp.array([[1.0], [2.0]]), 0.5).tolist() == [[0], [1]]
  pruner = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=HALF,
    topk_fn=jaxpruner.mask_calculator.topk_mask_calculator,
  )
  plain = jaxpruner.MagnitudePruning(sparsity_distribution_fn=HALF)
  np.testing.assert_array_equal(
    pruner.instant_sparsify(X)[1], plain.instant_sparsify(X)[1]
  )


def test_an_unknown_argument_of_instant_sparsify_is_refused_by_name():
  pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=HALF)
  with pytest.raises(TypeError, match="takes no norm;"):
    pruner.instant_sparsify(X, norm=1.0)


def test_update_state_of_a_plain_mixin_keeps_what_it_writes():
  class Counting:
    """No updater: only the classes it is mixed into are."""

    def update_state(self, sparse_state, params, grads, **extra):
      state = super().update_state(sparse_state, params, grads, **extra)
      return state._replace(stats={"seen": state.stats["seen"] + 1})

    def init_extra(self, params, masks):
      return {"seen": jnp.zeros([], jnp.int32)}

  class Mixed(Counting, jaxpruner.MagnitudePruning):
    pass

  class Child(Mixed):
    pass

  for kind in (Mixed, Child):
    tx = kind(
      sparsity_distribution_fn=functools.partial(
        jaxpruner.sparsity_distributions.uniform, sparsity=0.5
      ),
      scheduler=jaxpruner.sparsity_schedules.PeriodicSchedule(1, 0, 3),
    ).wrap_optax(optax.sgd(0.1))
    params = {"w": jnp.arange(16.0).reshape(4, 4)}
    state = tx.init(params)
    for _ in range(2):
      _, state = tx.update(params, state, params)
    assert int(state.stats["seen"]) == 2
