"""What a configuration or a user's method says is never taken for another."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import structures
from jaxpruner.updater.state import frozen

HALF = functools.partial(jaxpruner.sparsity_distributions.uniform, sparsity=0.5)
ALWAYS = jaxpruner.sparsity_schedules.PeriodicSchedule(1, 0)
PARAMS = {"dense": {"kernel": jnp.arange(1.0, 17).reshape(4, 4)}}


def made(kind=jaxpruner.MagnitudePruning, **options):
  fields = {"sparsity_distribution_fn": HALF, "scheduler": ALWAYS}
  return kind(**(fields | options))


def test_the_order_of_globs_is_part_of_a_configuration():
  # An earlier glob wins over a later one.
  globs = {
    "*/kernel": jaxpruner.NByM(2, 4),
    "dense*": jaxpruner.sparsity_types.Unstructured(),
  }
  turned = dict(reversed(globs.items()))
  assert frozen(globs) != frozen(turned)
  assert made(sparsity_type=globs) != made(sparsity_type=turned)
  kinds = [
    type(made(sparsity_type=types).view(PARAMS).kinds[0])
    for types in (globs, turned, globs)
  ]
  by_groups, plain = map(type, globs.values())
  assert kinds == [by_groups, plain, by_groups]
  one, other = (functools.partial(max, **k) for k in ({"a": 1, "b": 2},) * 2)
  assert frozen(one) == frozen(other)


def test_nan_is_refused_where_masks_are_made_by_an_override():
  pruner = made(
    structures.CoupledPruning,
    couplings=(structures.Coupling({"dense/kernel": -1}),),
  )
  broken = {"dense": {"kernel": PARAMS["dense"]["kernel"].at[0, 0].set(np.nan)}}
  with pytest.raises(ValueError, match="'dense/kernel' hold 1 NaN of 16"):
    pruner.instant_sparsify(broken)
  state = pruner.init_state(PARAMS)
  with pytest.raises(ValueError, match="'dense/kernel' hold 1 NaN of 16"):
    pruner.update_state(state, broken, None)


def test_a_global_ranking_needs_no_distribution():
  pruner = jaxpruner.GlobalMagnitudePruning(
    sparsity=0.5, sparsity_distribution_fn=None
  )
  _, masks = pruner.instant_sparsify(PARAMS)
  assert int(masks["dense"]["kernel"].sum()) == 8


@dataclasses.dataclass(eq=False)
class OwnScores(jaxpruner.SET):
  def calculate_scores(self, params, sparse_state=None, grads=None):
    return params


def test_scores_that_a_sparse_trainer_would_not_read_are_refused():
  with pytest.raises(TypeError, match="OwnScores.calculate_scores.*drop_score"):
    made(OwnScores)


@pytest.mark.parametrize("name", ["drop", "grow"])
def test_a_sparse_trainer_needs_criteria(name):
  with pytest.raises(ValueError, match=f"SET: {name}=None"):
    made(jaxpruner.SET, **{name: None})


def test_code_of_the_user_runs_outside_of_our_compiled_function():
  def numpy_topk(scores, sparsity):
    wanted = np.quantile(np.asarray(scores), float(sparsity))
    return jnp.asarray(np.asarray(scores) > wanted, jnp.uint8)

  _, masks = made(topk_fn=numpy_topk).instant_sparsify(PARAMS)
  assert int(masks["dense"]["kernel"].sum()) == 8

  @dataclasses.dataclass(frozen=True)
  class ByNumPy(jaxpruner.sparsity_types.Unstructured):
    def mask(self, scores, sparsity):
      return numpy_topk(scores, sparsity)

  _, masks = made(sparsity_type=ByNumPy()).instant_sparsify(PARAMS)
  assert int(masks["dense"]["kernel"].sum()) == 8


@dataclasses.dataclass(eq=False)
class Forgetful(jaxpruner.MagnitudePruning):
  def update_state(self, sparse_state, params, grads, **extra):
    sparse_state._replace(skipped=0)


def test_a_method_that_returns_nothing_is_named():
  tx = made(Forgetful).wrap_optax(optax.sgd(0.1))
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match="Forgetful.update_state.*None"):
    tx.update(PARAMS, state, PARAMS)


def test_a_state_of_another_optimizer_is_named():
  tx = made().wrap_optax(optax.sgd(0.1))
  chain = optax.chain(optax.clip(1.0), tx).init(PARAMS)
  with pytest.raises(ValueError, match="opt_state is tuple, not SparseState"):
    tx.update(PARAMS, chain, PARAMS)
