"""Layer by layer, our solvers give what the papers' equations give."""

import jax
import jax.numpy as jnp
import layer_reference as reference
import numpy as np
import pytest
from layer_reference import error, layer

from jaxpruner import post_training
from jaxpruner.datasets import archives
from jaxpruner.post_training import _pattern, models, solve_layer
from jaxpruner.post_training.calibration import Statistics
from jaxpruner.post_training.solvers import alps, obc, sparsegpt, sparseswaps
from jaxpruner.sparsity_types import Block, NByM


def pattern_of(n, m):
  return _pattern.Pattern(NByM(n, m)) if m else _pattern.FREE


def close(ours, theirs):
  scale = np.abs(theirs).max()
  assert np.abs(np.asarray(ours) - theirs).max() <= 1e-4 * scale


@pytest.mark.parametrize(
  "outputs, seed",
  [(48, 0), (48, 1),
   pytest.param(sparsegpt._WIDE, 2, marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.parametrize("n, m", [(0, 0), (2, 4), (4, 8)])
def test_sparsegpt_follows_the_paper(outputs, seed, n, m):
  w, gram = layer(seed, outputs=outputs)
  pattern = pattern_of(n, m)
  new, mask = sparsegpt.prune(jnp.asarray(w), jnp.asarray(gram), 0.5, pattern)
  theirs, kept = reference.sparsegpt(w, gram, 0.5, n, m)
  np.testing.assert_array_equal(np.asarray(mask) != 0, kept)
  close(new, theirs)
  assert int(mask.sum()) == w.size // 2


@pytest.mark.parametrize("n, m", [(0, 0), (2, 4)])
def test_wide_weights_are_eliminated_as_narrow_ones(monkeypatch, n, m):
  w, gram = layer(15, inputs=16, outputs=3, tokens=50)
  factor = jnp.asarray(np.linalg.cholesky(np.linalg.inv(gram)).T)
  mask = jnp.asarray(np.arange(48).reshape(w.shape) % 2, jnp.uint8)
  given = pattern_of(n, m), jnp.asarray(w), factor, None if m else mask
  with jax.disable_jit():  # compiling the long loop takes seconds
    narrow = sparsegpt._eliminate(*given)
    monkeypatch.setattr(sparsegpt, "_WIDE", 0)
    wide = sparsegpt._eliminate(*given)
  np.testing.assert_array_equal(wide[1], narrow[1])
  for one, other in zip(wide, narrow, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_inputs_that_never_fire_are_removed_first():
  w, gram = layer(3)
  gram[:, :40] = gram[:40] = 0
  new, mask = sparsegpt.prune(jnp.asarray(w), jnp.asarray(gram), 0.5)
  theirs, kept = reference.sparsegpt(w, gram, 0.5)
  np.testing.assert_array_equal(np.asarray(mask) != 0, kept)
  close(new, theirs)
  assert not np.asarray(new)[:40].any()


@pytest.mark.parametrize("n, m", [(0, 0), (2, 4)])
def test_wanda_ranks_within_each_output(n, m):
  w, gram = layer(4)
  square = jnp.asarray(np.diag(gram))[None]
  seen = Statistics(1, jnp.zeros_like(square), square)
  pattern = pattern_of(n, m)
  new, mask = solve_layer.prune(
    w[None], seen, 0.5, pattern, solve_layer.Settings("wanda")
  )
  theirs, kept = reference.wanda(w, gram, 0.5, n, m)
  np.testing.assert_array_equal(np.asarray(mask[0]) != 0, kept)
  np.testing.assert_array_equal(new[0], theirs)


def test_ria_ranks_relative_importance():
  w, gram = layer(12)
  square = jnp.asarray(np.diag(gram))[None]
  seen = Statistics(1, jnp.zeros_like(square), square)
  new, mask = solve_layer.prune(
    w[None], seen, 0.5, settings=solve_layer.Settings("ria")
  )
  kept = reference.ria(w, gram, 0.5)
  np.testing.assert_array_equal(np.asarray(mask[0]) != 0, kept)
  np.testing.assert_array_equal(new[0], np.where(kept, w, 0))


@pytest.mark.parametrize("n, m", [(0, 0), (2, 4)])
def test_sparseswaps_makes_the_best_swaps(n, m):
  w, gram = layer(13, inputs=16, outputs=5, tokens=100)
  seen = Statistics(1, *2 * [jnp.diag(gram)[None]], jnp.asarray(gram)[None])
  new, mask = solve_layer.prune(
    w[None], seen, 0.5, pattern_of(n, m), solve_layer.Settings("sparseswaps")
  )
  _, start = reference.wanda(w, gram, 0.5, n, m)
  kept = reference.sparseswaps(w, gram, start, m)
  np.testing.assert_array_equal(np.asarray(mask[0]) != 0, kept)
  np.testing.assert_array_equal(new[0], np.where(kept, w, 0))
  np.testing.assert_array_equal(kept.sum(0), start.sum(0))
  assert (kept != start).any()


@pytest.mark.parametrize("n, m", [(0, 0), (2, 4)])
def test_dsnot_exchanges_by_the_mean(n, m):
  rng = np.random.default_rng(4)
  w = rng.normal(size=(24, 9)).astype(np.float32)
  mean = rng.normal(size=24).astype(np.float32)
  square = (mean**2 + rng.uniform(0.1, 2, 24)).astype(np.float32)
  seen = Statistics(1, mean[None], square[None])
  given = w[None], seen, 0.5, pattern_of(n, m)
  start = np.asarray(
    solve_layer.prune(*given, solve_layer.Settings("wanda"))[1][0]
  ).astype(bool)
  new, mask = solve_layer.prune(*given, solve_layer.Settings("dsnot"))
  kept = reference.dsnot(w, mean, square, start, m)
  assert (kept != start).any()
  np.testing.assert_array_equal(np.asarray(mask[0]) != 0, kept)
  np.testing.assert_array_equal(new[0], np.where(kept, w, 0))
  np.testing.assert_array_equal(mask[0].sum(0), start.sum(0))


def test_sparseswaps_never_raises_the_error_of_an_output(monkeypatch):
  monkeypatch.setattr(sparseswaps, "_ELEMENTS", 1)  # one output at a time
  w, gram = layer(14, inputs=64, outputs=12)
  seen = Statistics(1, *2 * [jnp.diag(gram)[None]], jnp.asarray(gram)[None])
  found = [
    np.asarray(solve_layer.prune(
      w[None], seen, 0.6, settings=solve_layer.Settings(name)
    )[0][0])
    for name in ("wanda", "sparseswaps")
  ]  # fmt: skip
  before, after = (
    np.array([error(w[:, o : o + 1], new[:, o : o + 1], gram)
              for o in range(12)])
    for new in found
  )  # fmt: skip
  assert (after <= before).all() and after.sum() < 0.9 * before.sum()


def test_obc_removes_what_brain_surgeon_would():
  w, gram = layer(5, inputs=24, outputs=6, tokens=100)
  new, mask = obc.prune(jnp.asarray(w), jnp.asarray(gram), 0.5)
  theirs, kept = reference.obc(w, gram, 0.5)
  np.testing.assert_array_equal(np.asarray(mask) != 0, kept)
  close(new, theirs)


def test_obc_fills_groups_of_m_with_n():
  w, gram = layer(6, inputs=24, outputs=6, tokens=100)
  pattern = pattern_of(2, 4)
  new, mask = obc.prune(jnp.asarray(w), jnp.asarray(gram), 0.5, pattern)
  assert (np.asarray(mask).reshape(6, 4, 6).sum(1) == 2).all()
  assert not np.asarray(new)[np.asarray(mask) == 0].any()


def test_refinement_reaches_the_optimum_of_a_mask():
  w, gram = layer(7, inputs=48, outputs=16)
  mask = np.random.default_rng(0).random(w.shape) < 0.5
  start = np.where(mask, w, 0)
  best = reference.best_on_support(w, mask, gram)
  new = alps.refine(*map(jnp.asarray, (start, mask, w, gram)), 0.01, 200)
  assert np.abs(np.asarray(new) - best).max() <= 1e-3 * np.abs(best).max()
  assert not np.asarray(new)[~mask].any()


def test_methods_that_know_more_err_less():
  w, gram = layer(8)
  square = jnp.asarray(np.diag(gram))[None]
  seen = Statistics(1, square, square, jnp.asarray(gram)[None])
  errors = {}
  for name in ("magnitude", "wanda", "sparsegpt", "alps"):
    new, mask = solve_layer.prune(
      w[None], seen, 0.5, settings=solve_layer.Settings(name)
    )
    errors[name] = error(w, new[0], gram)
    assert not np.asarray(new)[np.asarray(mask) == 0].any()
  order = sorted(errors, key=lambda name: errors[name])
  assert order == ["alps", "sparsegpt", "wanda", "magnitude"]


def test_blocks_are_kept_or_removed_whole():
  w, gram = layer(9)
  pattern = _pattern.Pattern(Block((4, 8)))
  new, mask = sparsegpt.prune(jnp.asarray(w), jnp.asarray(gram), 0.5, pattern)
  blocks = np.asarray(mask).reshape(48, 4, 6, 8).sum((1, 3))
  assert set(np.unique(blocks)) == {0, 32}
  assert (blocks > 0).sum() == 144
  kept = np.asarray(mask) != 0
  assert error(w, new, gram) < error(w, np.where(kept, w, 0), gram)


def test_moments_that_cannot_be_inverted_are_told():
  w, gram = layer(10, inputs=16, outputs=4)
  with pytest.raises(ValueError, match="positive definite"):
    sparsegpt.prune(jnp.asarray(w), -jnp.asarray(gram), 0.5)


@pytest.mark.slow
def test_real_layers_follow_the_papers_too():
  try:
    model = models.load("stories15M")
  except archives.DataError as error:
    pytest.skip(str(error))
  rng = np.random.default_rng(0)
  # Random tokens are no story, but what they become inside is the model's own.
  batches = [rng.integers(3, 30_000, (4, 128)) for _ in range(4)]
  names = ("layers/0/q", "layers/2/up", "layers/5/down")
  wanted = lambda path, _: "/".join(path) in names
  seen = post_training.calibrate(
    model.apply_fn, model.params, batches, filter_fn=wanted
  )
  assert set(seen) == set(names)
  for path in names:
    _, index, leaf = path.split("/")
    w = np.asarray(model.params["layers"][int(index)][leaf])
    (found,) = seen[path]
    gram = np.asarray(found.gram[0])
    for n, m in ((0, 0), (2, 4)):
      pattern = pattern_of(n, m)
      new, mask = sparsegpt.prune(
        jnp.asarray(w), jnp.asarray(gram), 0.5, pattern
      )
      theirs, kept = reference.sparsegpt(w, gram, 0.5, n, m)
      # Scores that are equal in float32 may swap; their outputs then differ.
      other = (np.asarray(mask) != 0) != kept
      assert other.mean() < 5e-4, f"{path} {n}:{m}: {other.sum()} differ"
      same = ~other.any(axis=0)
      close(np.asarray(new)[:, same], theirs[:, same])
      new, mask = solve_layer.prune(
        w[None], found, 0.5, pattern, solve_layer.Settings("wanda")
      )
      theirs, kept = reference.wanda(w, gram, 0.5, n, m)
      np.testing.assert_array_equal(np.asarray(mask[0]) != 0, kept)
      np.testing.assert_array_equal(new[0], theirs)
