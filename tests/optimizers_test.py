"""Any Optax optimizer, inside the wrapper or around it."""

import dataclasses
import functools
import unittest.mock
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from small_model import (
  assert_confined,
  assert_identical,
  loss_fn,
  make_batch,
  make_params,
  make_updater,
  masks_by_name,
)

import jaxpruner
from jaxpruner import mask_calculator

ALGORITHMS = ("no_prune", "magnitude", "magnitude_ste", "rigl")
# RigL rests while it rewires; two steps apart it trains in between.
COMPILE_FAST = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}
SCHEDULE = dict(update_freq=2, update_start_step=2, update_end_step=6)


@dataclasses.dataclass(frozen=True)
class Case:
  """An optimizer, how it is wrapped, and what it needs to run."""

  inner: Callable[[], Any]
  wrap: Callable[[Any, Any], Any] = lambda updater, tx: updater.wrap_optax(tx)
  prepare: Callable[[Any], Any] = lambda params: params
  view: Callable[[Any], Any] = lambda params: params
  # Statistics that belong to no single weight: RigL must say so.
  shared: bool = False
  # Whether `update` takes arguments it does not know.
  extra: bool = True
  algorithms: tuple[str, ...] = ALGORITHMS
  steps: int = 8
  # The first step that changes any parameter.
  first: int = 1


def kernels_only(params):
  return jax.tree.map(lambda p: p.ndim == 2, params)


def kernel_labels(params):
  return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "rest", params)


adam = functools.partial(optax.adam, 0.05)
contrib = optax.contrib

CASES = {
  "adabelief": Case(lambda: optax.adabelief(0.05)),
  "adadelta": Case(lambda: optax.adadelta(0.5)),
  "adafactor": Case(
    lambda: optax.adafactor(0.05, min_dim_size_to_factor=4), shared=True
  ),
  "adafactor_unfactored": Case(lambda: optax.adafactor(0.05, factored=False)),
  "adagrad": Case(lambda: optax.adagrad(0.1)),
  "adam": Case(adam),
  "adamax": Case(lambda: optax.adamax(0.05)),
  "adamw": Case(lambda: optax.adamw(0.05, weight_decay=0.1)),
  "adan": Case(lambda: optax.adan(0.05)),
  "ademamix": Case(lambda: contrib.ademamix(0.05)),
  "amsgrad": Case(lambda: optax.amsgrad(0.05)),
  "fromage": Case(lambda: optax.fromage(0.05)),
  "lamb": Case(lambda: optax.lamb(0.05)),
  "lars": Case(lambda: optax.lars(0.05, momentum=0.9)),
  "lbfgs": Case(lambda: optax.lbfgs(0.05, memory_size=2, linesearch=None)),
  "lion": Case(lambda: optax.lion(0.02)),
  "muon": Case(lambda: contrib.muon(0.05)),
  "nadam": Case(lambda: optax.nadam(0.05)),
  "nesterov": Case(lambda: optax.sgd(0.05, momentum=0.9, nesterov=True)),
  "noisy_sgd": Case(lambda: optax.noisy_sgd(0.05, key=jax.random.key(0))),
  "novograd": Case(lambda: optax.novograd(0.05)),
  "optimistic_gradient_descent": Case(
    lambda: optax.optimistic_gradient_descent(0.05)
  ),
  "polyak_sgd": Case(lambda: optax.polyak_sgd(0.1)),
  "prodigy": Case(lambda: contrib.prodigy(0.5)),
  "radam": Case(lambda: optax.radam(0.05)),
  "rmsprop": Case(lambda: optax.rmsprop(0.02, momentum=0.9)),
  "rprop": Case(lambda: optax.rprop(0.02)),
  "sgd": Case(lambda: optax.sgd(0.1)),
  "sgd_momentum": Case(lambda: optax.sgd(0.05, momentum=0.9)),
  "sgd_bf16_momentum": Case(
    lambda: optax.sgd(0.05, momentum=0.9, accumulator_dtype=jnp.bfloat16)
  ),
  "sign_sgd": Case(lambda: optax.sign_sgd(0.02)),
  "sm3": Case(lambda: optax.sm3(0.05), shared=True),
  "sophia": Case(lambda: contrib.sophia(0.05, update_interval=2)),
  "yogi": Case(lambda: optax.yogi(0.05)),
  # Wrappers inside the pruner's.
  "inner_add_noise": Case(
    lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), adam())
  ),
  "inner_apply_every": Case(lambda: optax.chain(adam(), optax.apply_every(2))),
  "inner_apply_if_finite": Case(lambda: optax.apply_if_finite(adam(), 3)),
  "inner_chain": Case(
    lambda: optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adaptive_grad_clip(0.5),
      optax.scale_by_adam(),
      optax.add_decayed_weights(0.1),
      optax.scale_by_schedule(optax.cosine_decay_schedule(-0.05, 8)),
    )
  ),
  "inner_conditionally_mask": Case(
    lambda: optax.conditionally_mask(
      adam(), lambda step, **_: step % 2 == 0, forward_extra_args=True
    )
  ),
  "inner_ema": Case(lambda: optax.chain(adam(), optax.ema(0.9))),
  "inner_flatten": Case(lambda: optax.flatten(adam()), shared=True),
  "inner_inject_hyperparams": Case(
    lambda: optax.inject_hyperparams(optax.adam)(
      optax.linear_schedule(0.1, 0.01, 8)
    )
  ),
  "inner_lookahead": Case(
    lambda: optax.lookahead(adam(), sync_period=3, slow_step_size=0.5),
    prepare=optax.LookaheadParams.init_synced,
    view=lambda params: params.fast,
    # It takes gradients of the fast parameters only: none for the slow.
    algorithms=("no_prune", "magnitude", "magnitude_ste"),
    extra=False,
  ),
  "inner_masked": Case(lambda: optax.masked(adam(), kernels_only)),
  "inner_multi_steps": Case(
    lambda: optax.MultiSteps(
      adam(), 2, should_skip_update_fn=optax.skip_not_finite
    )
  ),
  "inner_named_chain": Case(
    lambda: optax.named_chain(("clip", optax.clip(1.0)), ("adam", adam()))
  ),
  "inner_partition": Case(
    lambda: optax.partition(
      {"matrix": adam(), "rest": optax.sgd(0.1, momentum=0.9)}, kernel_labels
    )
  ),
  "inner_reduce_on_plateau": Case(
    lambda: optax.chain(adam(), contrib.reduce_on_plateau(patience=1))
  ),
  "inner_sam": Case(
    lambda: contrib.sam(
      optax.sgd(0.05), optax.chain(contrib.normalize(), optax.sgd(0.05))
    ),
    extra=False,
  ),
  "inner_schedule_free": Case(
    lambda: contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9)
  ),
  "inner_zero_nans": Case(lambda: optax.chain(optax.zero_nans(), adam())),
  # Wrappers around the pruner's.
  "outer_apply_if_finite": Case(
    adam, lambda u, tx: optax.apply_if_finite(u.wrap_optax(tx), 3)
  ),
  "outer_chain_after_clipping": Case(
    adam, lambda u, tx: optax.chain(optax.clip(1.0), u.wrap_optax(tx))
  ),
  "outer_inject_hyperparams": Case(
    adam,
    lambda u, _tx: optax.inject_hyperparams(
      lambda rate: u.wrap_optax(optax.adam(rate))
    )(rate=0.05),
  ),
  "outer_masked": Case(
    adam, lambda u, tx: optax.masked(u.wrap_optax(tx), kernels_only)
  ),
  "outer_multi_steps": Case(
    adam, lambda u, tx: optax.MultiSteps(u.wrap_optax(tx), 2), steps=16, first=2
  ),
  "outer_multi_transform": Case(
    adam,
    lambda u, tx: optax.multi_transform(
      {"matrix": u.wrap_optax(tx), "rest": optax.sgd(0.1)}, kernel_labels
    ),
  ),
}

every_case = pytest.mark.parametrize(
  "case",
  [
    pytest.param(name, marks=pytest.mark.quick if name == "adam" else ())
    for name in CASES
  ],
)


def by_sorting(scores, ones, *, together=False):
  # The engine has tests of its own, and takes ten times longer to compile.
  del together
  masks = []
  for score, count in zip(scores, ones, strict=True):
    score = score() if callable(score) else score
    order = jnp.argsort(score.reshape(-1), descending=True, stable=True)
    mask = jnp.zeros(score.size, jnp.uint8)
    mask = mask.at[order].set(
      (jnp.arange(score.size) < count).astype(jnp.uint8)
    )
    masks.append(mask.reshape(score.shape))
  return masks


def take_step(tx, case, updater, params, state):
  batch = make_batch()

  def loss(params, *unused):
    del unused
    seen = updater.pre_forward_update(params, state) if updater else params
    return loss_fn(case.view(seen), batch)

  value, grads = jax.value_and_grad(loss)(params)
  if case.prepare is not CASES["adam"].prepare:
    grads = case.view(grads)
  extra = dict(value=value, grad=grads, value_fn=loss, obj_fn=loss)
  updates, state = tx.update(
    grads, state, params, **(extra if case.extra else {})
  )
  return optax.apply_updates(params, updates), state


@dataclasses.dataclass
class Runs:
  """Histories of `(params, state)` by algorithm; "bare" is the optimizer's."""

  updaters: dict[str, Any]
  histories: dict[str, list[Any]]
  warned: list[str]


@functools.cache
def run(name: str) -> Runs:
  """Train all algorithms in one program: compiling is what costs."""
  case = CASES[name]
  updaters = {a: make_updater(a, **SCHEDULE) for a in case.algorithms}
  inner = case.inner()
  transforms = {a: case.wrap(u, inner) for a, u in updaters.items()}
  transforms["bare"] = case.wrap(Unwrapped(), inner)
  updaters["bare"] = None
  at, warned = {}, []
  with unittest.mock.patch.object(mask_calculator, "topk_masks", by_sorting):
    for algorithm, tx in transforms.items():
      params = case.prepare(make_params())
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        at[algorithm] = params, tx.init(params)
      warned += [f"{algorithm}: {w.message}" for w in caught]

    @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
    def step(at):
      return {
        a: take_step(tx, case, updaters[a], *at[a])
        for a, tx in transforms.items()
      }

    histories = {a: [at[a]] for a in at}
    for _ in range(case.steps):
      at = step(at)
      for a in at:
        histories[a].append(at[a])
  return Runs(updaters, histories, warned)


class Unwrapped:
  """Stands where an updater would, and adds nothing."""

  def wrap_optax(self, tx):
    return tx


@every_case
def test_pruned_weights_are_zero_after_apply_updates(case):
  runs = run(case)
  for algorithm in CASES[case].algorithms:
    # Before the first step, sparse trainers' parameters are still dense.
    for params, state in runs.histories[algorithm][CASES[case].first :]:
      assert_confined(runs.updaters[algorithm], params, state)
      assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))


@every_case
def test_kept_count_is_exact(case):
  runs = run(case)
  for algorithm in CASES[case].algorithms[1:]:
    final = runs.histories[algorithm][-1]
    masks = masks_by_name(runs.updaters[algorithm], *final)
    assert len(masks) in (2, 4)  # Lookahead's parameters come in pairs.
    for name, mask in masks.items():
      assert mask.sum(dtype=np.int64) == mask.size // 4, name
    if not case.startswith(("inner_lookahead", "inner_sam")):
      start = runs.histories[algorithm][0]
      moved = jax.tree.map(lambda a, b: (a != b).any(), start[0], final[0])
      assert all(jax.tree.leaves(moved)), "the optimizer trains nothing"


@every_case
def test_no_prune_equals_the_bare_optimizer_bit_for_bit(case):
  runs = run(case)
  for (params, state), (bare_params, bare_state) in zip(
    runs.histories["no_prune"], runs.histories["bare"], strict=True
  ):
    assert_identical(params, bare_params)
    if CASES[case].wrap is CASES["adam"].wrap:
      assert_identical(state.inner_state, bare_state)


@pytest.mark.parametrize(
  "case", [c for c in CASES if "rigl" in CASES[c].algorithms]
)
def test_moments_of_pruned_and_of_grown_weights_are_fresh(case):
  runs, inner = run(case), CASES[case].inner()
  updater, history = runs.updaters["rigl"], runs.histories["rigl"]
  before = masks_by_name(updater, *history[0])
  checked = 0
  for params, state in history[CASES[case].first :]:
    masks = masks_by_name(updater, params, state)
    # No two parameters share a shape: a state leaf's shape names its owner.
    fresh = {
      mask.shape: (mask == 0) | (before[name] < mask)
      for name, mask in masks.items()
    }
    before = masks
    inner_state = jaxpruner.find_state(state).inner_state
    start = inner.init(params)
    if jax.tree.structure(start) != jax.tree.structure(inner_state):
      # Partitioned: the inner optimizer, Adam, sees some parameters only.
      start = jax.tree.map(jnp.zeros_like, inner_state)
    for leaf, new in zip(
      jax.tree.leaves(inner_state), jax.tree.leaves(start), strict=True
    ):
      shape = np.shape(leaf)
      for rows in (shape, shape[1:]):  # a memory has an axis in front
        if len(rows) == 2 and rows in fresh:
          where = np.broadcast_to(fresh[rows], shape)
          checked += int(where.sum())
          np.testing.assert_array_equal(
            np.asarray(leaf)[where], np.asarray(new)[where]
          )
  stateless = ("sgd", "noisy_sgd", "polyak_sgd", "fromage", "sign_sgd")
  assert checked or CASES[case].shared or case in (*stateless, "inner_sam")


def test_rigl_regrows_weights_it_dropped():
  """Else fresh moments of grown weights would be no news."""

  def returned(case) -> int:
    runs = run(case)
    states = [
      masks_by_name(runs.updaters["rigl"], *at) for at in runs.histories["rigl"]
    ]
    masks = np.stack(
      [np.concatenate([m.ravel() for m in s.values()]) for s in states]
    ).astype(int)
    changes = np.diff(masks, axis=0)
    return int(((changes == -1).any(0) & (changes == 1).any(0)).sum())

  # Few weights move in so few steps, and in some cases none returns.
  assert sum(map(returned, ("adam", "sgd", "rmsprop", "adagrad", "lion"))) > 0


@every_case
def test_shared_statistics_are_announced_and_nothing_else(case):
  told = [w for w in run(case).warned if "belong to no single weight" in w]
  assert run(case).warned == told
  assert len(told) == int(CASES[case].shared)
  assert all(w.startswith("rigl") for w in told)


def test_at_least_forty_optimizers_and_wrappers():
  assert len(CASES) >= 40


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extra_args_reach_the_inner_optimizer(algorithm):
  def update(updates, state, params=None, *, rate, **extra):
    del params, extra
    return jax.tree.map(lambda u: -rate * u, updates), state

  inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
  updater = make_updater(algorithm, **SCHEDULE)
  tx, params = updater.wrap_optax(inner), make_params()
  with unittest.mock.patch.object(mask_calculator, "topk_masks", by_sorting):
    state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(grads, state, params, rate=3.0, unused=1)
  assert (np.asarray(updates["temperature"]) == -3).all()


def test_rigl_refuses_gradients_that_do_not_match_the_parameters():
  params = optax.LookaheadParams.init_synced(make_params())
  tx = make_updater("rigl", **SCHEDULE).wrap_optax(
    CASES["inner_lookahead"].inner()
  )
  with unittest.mock.patch.object(mask_calculator, "topk_masks", by_sorting):
    state = tx.init(params)
    with pytest.raises(ValueError, match="grads.*'fast/in/bias'.*of params"):
      tx.update(params.fast, state, params)
