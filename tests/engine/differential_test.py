"""Every kind of mask against its slow definition, through the public door."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import reference
import training

import jaxpruner

SHAPES = {"a": (8, 5), "b": (4, 7), "c": (2, 4, 6)}
SPARSITY = 0.6


def block_mask(shape, average):
  return lambda scores: reference.block(scores, SPARSITY, shape, average)


def channel_mask(axis):
  return lambda scores: reference.channel(scores, SPARSITY, axis)


# Spelling -> the definition of the mask of one leaf.
KINDS = {
  "unstructured": lambda scores: reference.unstructured(scores, SPARSITY),
  "2:4": lambda scores: reference.n_by_m(scores, 2, 4, -2),
  "nm_1,4": lambda scores: reference.n_by_m(scores, 1, 4, -2),
  "block_2,3": block_mask((2, 3), True),
  "maxblock_2,3": block_mask((2, 3), False),
  "3x3": block_mask((3, 3), True),
  "channel_-1": channel_mask(-1),
  "channel_0": channel_mask(0),
}


@st.composite
def trees(draw):
  rng = np.random.default_rng(draw(training.seeds))
  style = draw(st.sampled_from(["normal", "ties", "wide"]))

  def values(shape):
    x = rng.normal(size=shape)
    if style == "ties":
      x = np.round(x * 2) / 2
    elif style == "wide":
      x = x * 10.0 ** rng.integers(-6, 7, shape)
    return x.astype(np.float32)

  return tuple(
    {name: {"kernel": values(shape)} for name, shape in SHAPES.items()}
    for _ in range(2)
  )


@functools.cache
def instant(algorithm, kind):
  config = {"algorithm": algorithm, "rng_seed": 3}
  if kind is not None:
    config["sparsity_type"] = kind
  if kind not in ("2:4", "nm_1,4"):
    # The same sparsity for each leaf, not the same total.
    config["sparsity"] = SPARSITY
    if not algorithm.startswith("global"):
      config["custom_sparsity_map"] = {"*": SPARSITY}
  pruner = jaxpruner.create_updater_from_config(config)

  def run(params, grads):
    scores = pruner.calculate_scores(params, grads=grads)
    return scores, *pruner.instant_sparsify(params, grads)

  return jax.jit(run)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(trees())
def test_a_mask_of_every_kind_is_its_definition(kind, tree):
  params, grads = tree
  scores, pruned, masks = instant("magnitude", kind)(params, grads)
  for name in SHAPES:
    weights = params[name]["kernel"]
    wanted = KINDS[kind](np.abs(weights))
    assert np.array_equal(scores[name]["kernel"], np.abs(weights))
    assert np.array_equal(masks[name]["kernel"], wanted), name
    assert np.array_equal(pruned[name]["kernel"], np.where(wanted, weights, 0))


@pytest.mark.parametrize(
  "algorithm", ["saliency", "random", "magnitude_ste", "random_ste"]
)
@hypothesis.given(trees())
def test_every_local_algorithm_keeps_its_best_scores(algorithm, tree):
  params, grads = tree
  scores, pruned, masks = instant(algorithm, None)(params, grads)
  for name in SHAPES:
    weights = params[name]["kernel"]
    found = np.asarray(scores[name]["kernel"])
    if algorithm == "saliency":
      assert np.array_equal(found, np.abs(weights * grads[name]["kernel"]))
    elif algorithm == "magnitude_ste":
      assert np.array_equal(found, np.abs(weights))
    wanted = reference.unstructured(found, SPARSITY)
    assert np.array_equal(masks[name]["kernel"], wanted), name
    assert np.array_equal(pruned[name]["kernel"], np.where(wanted, weights, 0))


@pytest.mark.parametrize("algorithm", ["global_magnitude", "global_saliency"])
@hypothesis.given(trees())
def test_global_algorithms_rank_all_leaves_together(algorithm, tree):
  params, grads = tree
  scores, _, masks = instant(algorithm, None)(params, grads)
  wanted = reference.together(
    [scores[name]["kernel"] for name in SHAPES], SPARSITY
  )
  for name, mask in zip(SHAPES, wanted, strict=True):
    assert np.array_equal(masks[name]["kernel"], mask), name


REWIRED = ["unstructured", "nm_2,4", "block_2,3", "channel_-1"]


@functools.cache
def rewire(kind):
  """One mask update of RigL from a drawn mask, at a drop fraction of 0.4."""
  config = {
    "algorithm": "rigl",
    "sparsity": 0.5,
    "sparsity_type": kind,
    "drop_fraction": 0.4,
    "update_freq": 1,
    "update_start_step": 0,
    "schedule": "periodic",
  }
  pruner = jaxpruner.create_updater_from_config(config)

  def run(params, grads):
    state = pruner.init_state(params)
    state = state._replace(count=state.count + 1)
    params = pruner.post_gradient_update(params, state)
    return state.masks, params, pruner.update_state(state, params, grads).masks

  return jax.jit(run)


@pytest.mark.parametrize("kind", REWIRED)
@hypothesis.given(trees())
def test_rigl_drops_and_grows_units_of_every_kind(kind, tree):
  before, params, after = jax.tree.map(np.asarray, rewire(kind)(*tree))
  for name, shape in SHAPES.items():
    old, new = before[name]["kernel"], after[name]["kernel"]
    drop = np.abs(params[name]["kernel"])
    grow = np.abs(tree[1][name]["kernel"])
    if kind == "nm_2,4":
      dropped = int(np.floor(np.float32(0.4) * np.float32(old.sum())))
      wanted = reference.drop_and_grow_n_by_m(old, drop, grow, dropped, 4, -2)
    else:
      pool, spread = POOLS[kind]
      units = np.asarray(pool(old.astype(np.float32)) > 0, np.uint8)
      dropped = int(np.floor(np.float32(0.4) * np.float32(units.sum())))
      wanted = spread(
        reference.drop_and_grow(units, pool(drop), pool(grow), dropped), shape
      )
    assert np.array_equal(new, wanted), name


# How weights are pooled to units, and units spread to weights.
POOLS = {
  "unstructured": (lambda x: x, lambda units, _shape: units),
  "block_2,3": (
    lambda x: reference.block_scores(x, (2, 3), True),
    lambda units, shape: reference.spread_blocks(units, shape, (2, 3)),
  ),
  "channel_-1": (
    lambda x: reference.channel_scores(x, -1),
    lambda units, shape: np.broadcast_to(units, shape),
  ),
}
