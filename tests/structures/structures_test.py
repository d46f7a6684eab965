"""Structures: what they promise, against enumeration and plain loops."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import sparsity_types, structures

seeds = st.integers(0, 2**32 - 1)


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def all_blocks(n):
  """Every 4 x 4 block with n ones per row and column, by brute force."""
  every = (np.arange(2**16)[:, None] >> np.arange(16) & 1).reshape(-1, 4, 4)
  return every[(every.sum(1) == n).all(1) & (every.sum(2) == n).all(1)]


@pytest.mark.parametrize(("n", "count"), [(1, 24), (2, 90), (3, 24), (4, 1)])
def test_transposable_masks_on_4x4_are_the_best_there_are(n, count):
  every = all_blocks(n)
  assert len(every) == count
  masks, sums = sparsity_types.transposable.patterns(4)
  ours = {m.astype(int).tobytes() for m in masks[sums == n]}
  assert ours == {m.astype(int).tobytes() for m in every}
  scores = np.abs(draw(n, 200, 4, 4))
  mask = structures.TransposableNByM(n, 4).mask(scores, 1 - n / 4)
  assert (mask.sum(-1) == n).all() and (mask.sum(-2) == n).all()
  best = np.einsum("bij,pij->bp", scores, every).max(1)
  np.testing.assert_allclose((scores * mask).sum((1, 2)), best, 1e-5)
  if n == 2:  # every optimum is found: each pattern scores highest once
    mask = structures.TransposableNByM(2, 4).mask(every.astype(np.float32), 0.5)
    np.testing.assert_array_equal(mask, every)


@pytest.mark.parametrize(("n", "m"), [(2, 8), (4, 8), (8, 16)])
def test_transposable_masks_beyond_4_hold_both_ways_and_keep_nearly_all(n, m):
  scipy_optimize = pytest.importorskip("scipy.optimize")
  scores = np.abs(draw(m + n, 2 * m, 2 * m))
  mask = np.asarray(structures.TransposableNByM(n, m).mask(scores, 1 - n / m))
  blocks = lambda x: x.reshape(2, m, 2, m).swapaxes(1, 2).reshape(-1, m, m)
  assert (blocks(mask).sum(-1) == n).all()
  assert (blocks(mask).sum(-2) == n).all()
  # The polytope of n-regular blocks has whole corners: a linear program.
  rows = np.kron(np.eye(m), np.ones(m))
  columns = np.kron(np.ones(m), np.eye(m))
  for block, chosen in zip(blocks(scores), blocks(mask), strict=True):
    best = scipy_optimize.linprog(
      -block.ravel(),
      A_eq=np.concatenate([rows, columns]),
      b_eq=np.full(2 * m, n),
      bounds=(0, 1),
    )
    assert (block * chosen).sum() > 0.97 * -best.fun


def test_transposable_masks_train_and_are_spelled():
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": "magnitude", "sparsity_type": "transposable_2,4",
     "update_freq": 1, "update_start_step": 0, "update_end_step": 2}
  )  # fmt: skip
  assert pruner.sparsity_type == structures.TransposableNByM(2, 4)
  config = jaxpruner.config_from_updater(pruner)
  assert jaxpruner.create_updater_from_config(config) == pruner
  tx = pruner.wrap_optax(optax.sgd(0.1))
  params = {"kernel": jnp.asarray(draw(0, 8, 12))}
  state = tx.init(params)
  for _ in range(3):
    updates, state = tx.update(params, state, params)
  mask = np.asarray(state.masks["kernel"])
  assert (mask.reshape(2, 4, 12).sum(1) == 2).all()
  assert (mask.reshape(8, 3, 4).sum(2) == 2).all()
  with pytest.raises(ValueError, match="axis -1 has length 6"):
    pruner.wrap_optax(optax.sgd(0.1)).init({"kernel": jnp.ones((8, 6))})


@hypothesis.given(
  seeds,
  st.sampled_from([(2, 4), (1, 4), (4, 8), (1, 2), (4, 4)]),
  st.integers(1, 6),
  st.sampled_from(["normal", "ties", "sorted", "heavy"]),
)
def test_permuting_channels_never_keeps_less(seed, nm, groups, style):
  n, m = nm
  w = draw(seed, groups * m, 5)
  if style == "ties":
    w = np.round(w)
  elif style == "sorted":
    w = np.sort(w, axis=0)
  elif style == "heavy":
    w = w**5
  order = structures.permutation(w, n, m)
  assert sorted(order) == list(range(len(w)))
  alone = structures.kept_magnitude(w, n, m)
  assert structures.kept_magnitude(w, n, m, order=order) >= alone


def test_permuting_helps_where_large_channels_sit_together():
  w = np.sort(np.abs(draw(3, 32, 16)), axis=0)
  order = structures.permutation(w, 2, 4)
  alone = structures.kept_magnitude(w, 2, 4)
  assert structures.kept_magnitude(w, 2, 4, order=order) > 1.1 * alone
  mask = np.asarray(jaxpruner.NByM(2, 4).mask(w[order], 0.5))
  kept = np.sum(w[order] * mask, dtype=np.float64)
  np.testing.assert_allclose(
    kept, structures.kept_magnitude(w, 2, 4, order=order), 1e-5
  )


def mlp(params, x):
  hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
  return hidden @ params["down"]["kernel"]


def mlp_params():
  return {
    "up": {"kernel": jnp.asarray(draw(1, 4, 8)), "bias": draw(2, 8)},
    "down": {"kernel": jnp.asarray(draw(3, 8, 4))},
  }


def test_permuting_a_coupling_changes_no_output():
  params, x = mlp_params(), draw(4, 3, 4)
  coupling = structures.Coupling(
    {"up/kernel": -1, "up/bias": 0, "down/kernel": -2}
  )
  order = structures.permutation(params["down"]["kernel"], 2, 4)
  moved = structures.permute(params, order, coupling)
  np.testing.assert_allclose(mlp(moved, x), mlp(params, x), 1e-5, 1e-6)
  with pytest.raises(ValueError, match="did you mean 'up/kernel'"):
    structures.permute(params, order, structures.Coupling({"up/kernle": -1}))


def test_search_gives_where_energy_is_small():
  params = {
    "flat": {"kernel": np.ones((16, 4), np.float32)},
    "peaked": {"kernel": np.tile(2.0 ** -np.arange(8), (4, 2)).T},
  }
  params["peaked"]["kernel"] = params["peaked"]["kernel"].astype(np.float32)
  types = structures.search_n_by_m(params, 0.5, m=8)
  assert set(types) == {"flat/kernel", "peaked/kernel"}
  assert types["peaked/kernel"].n < types["flat/kernel"].n
  removed = np.mean([kind.sparsity for kind in types.values()])
  assert 0.5 <= removed < 0.5 + 1 / 8
  _, masks = jaxpruner.MagnitudePruning(sparsity_type=types).instant_sparsify(
    jax.tree.map(jnp.asarray, params)
  )
  assert jaxpruner.summarize_sparsity(masks)["_total_sparsity"] == removed


@pytest.mark.parametrize("width", [1, 2])
def test_coupled_neurons_go_together_and_can_be_removed(width):
  params = mlp_params()
  pruner = structures.CoupledPruning(
    couplings=(
      structures.Coupling({"up/kernel": -1, "down/kernel": -2}, width),
    ),
    sparsity_distribution_fn=functools.partial(
      jaxpruner.sparsity_distributions.uniform, sparsity=0.5
    ),
  )
  pruned, masks = pruner.instant_sparsify(params)
  up, down = masks["up"]["kernel"], masks["down"]["kernel"]
  units = np.asarray(up[0])
  assert (up == units).all() and (down == units[:, None]).all()
  mean = np.abs(params["up"]["kernel"]).mean(0)
  mean = mean + np.abs(params["down"]["kernel"]).mean(1)
  blocks = mean.reshape(-1, width).mean(1)
  best = np.argsort(-blocks)[: len(blocks) // 2]
  assert set(np.flatnonzero(units) // width) == set(best)
  small = jaxpruner.sparse.shrink(mlp, pruned, draw(4, 3, 4), masks=masks)
  assert small.params["up"]["kernel"].shape == (4, 4)


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (6, 2)])
def test_diagonals_are_ranked_by_their_mean(shape):
  scores = np.abs(draw(1, *shape))
  long = max(shape)
  number = lambda k, n: (n - k if shape[0] <= shape[1] else k - n) % long
  sums = np.zeros(long)
  for k, n in np.ndindex(shape):
    sums[number(k, n)] += scores[k, n]
  best = set(np.argsort(-sums)[: round(long / 2)])
  mask = np.asarray(sparsity_types.Diagonals().mask(scores, 0.5))
  for k, n in np.ndindex(shape):
    assert mask[k, n] == (number(k, n) in best)
  with pytest.raises(ValueError, match="no diagonals"):
    sparsity_types.Diagonals().mask(scores[0], 0.5)


@pytest.mark.parametrize("strided", [False, True])
def test_diagonal_blocks_follow_their_pattern(strided):
  kind = structures.BlockDiagonal(3, strided)
  mask = np.asarray(kind.mask(draw(0, 6, 9), kind.sparsity))
  for i, j in np.ndindex(6, 9):
    same = i % 3 == j % 3 if strided else i // 2 == j // 3
    assert mask[i, j] == same
  pruner = jaxpruner.MagnitudePruning(sparsity_type=kind)
  _, masks = pruner.instant_sparsify({"kernel": jnp.asarray(draw(0, 6, 9))})
  np.testing.assert_array_equal(masks["kernel"], mask)
  config = jaxpruner.config_from_updater(pruner)
  assert jaxpruner.create_updater_from_config(config) == pruner
  with pytest.raises(ValueError, match="cannot be cut into 3"):
    kind.mask(draw(0, 6, 8), 0.5)


def test_a_diagonal_and_a_strided_layer_reach_everything():
  one = np.asarray(structures.BlockDiagonal(3).mask(draw(0, 9, 9), 0.5))
  two = structures.BlockDiagonal(3, strided=True).mask(draw(0, 9, 9), 0.5)
  assert ((one @ np.asarray(two)) > 0).all()


@hypothesis.given(seeds, st.sampled_from([0.5, 0.75]))
def test_regrouping_makes_blocks_and_keeps_no_less(seed, sparsity):
  w = draw(seed, 8, 12)
  mask = np.asarray(jaxpruner.Unstructured().mask(np.abs(w), sparsity))
  blocks, order = structures.regroup(w, mask, (4, 2))
  assert sorted(order) == list(range(8))
  cut = blocks[order].reshape(2, 4, 6, 2)
  assert (cut == cut[:, :1, :, :1]).all()
  assert blocks.sum() == mask.sum()
  plain = jaxpruner.Block((4, 2)).mask(np.abs(w) * mask, sparsity)
  held = lambda m: (np.abs(w) * mask * m).sum()
  assert held(blocks) >= held(np.asarray(plain)) - 1e-5


def test_regrouping_finds_rows_that_were_shuffled():
  rng = np.random.default_rng(0)
  truth = np.kron(np.eye(3), np.ones((4, 4)))
  shuffled = truth[rng.permutation(12)]
  blocks, _ = structures.regroup(shuffled, shuffled.astype(np.uint8))
  np.testing.assert_array_equal(blocks, shuffled)


def test_refilling_keeps_the_channels_the_mask_speaks_for():
  w = np.abs(draw(0, 6, 8)) + 0.1
  mask = np.zeros((6, 8), np.uint8)
  mask[:, [1, 4]] = 1
  mask[0, 0] = mask[1, 1] = 1
  mask[2, 4] = 0
  full = structures.refill(w, mask)
  expected = np.zeros((6, 8), np.uint8)
  expected[:, [1, 4]] = 1
  np.testing.assert_array_equal(full, expected)
