"""Pruning and rounding in one pass: the paper's steps, and nothing twice."""

import jax.numpy as jnp
import layer_reference as reference
import numpy as np
import pytest
from layer_reference import error, layer

from jaxpruner.post_training import _pattern
from jaxpruner.post_training.solvers import sparsegpt, sparsegpt_int8
from jaxpruner.sparse import _int8
from jaxpruner.sparsity_types import NByM


def pattern_of(n, m):
  return _pattern.Pattern(NByM(n, m)) if m else _pattern.FREE


def pruned(w, gram, sparsity=0.5, pattern=None):
  pattern = pattern or pattern_of(0, 0)
  found = sparsegpt_int8.prune(
    jnp.asarray(w), jnp.asarray(gram), sparsity, pattern
  )
  return map(np.asarray, found)


def packed(w):
  """Return (inputs, outputs) weights as the layout int8 stores them."""
  return _int8.decode(*_int8.encode(np.asarray(w).T, "w")).T


@pytest.mark.parametrize("n, m", [(0, 0), (2, 4)])
def test_it_follows_the_paper(n, m):
  w, gram = layer(0, inputs=160, outputs=12)
  new, mask = pruned(w, gram, pattern=pattern_of(n, m))
  theirs, kept = reference.sparsegpt_int8(w, gram, 0.5, n, m)
  np.testing.assert_array_equal(mask != 0, kept)
  # A weight halfway between two codes goes either way, and what follows moves.
  assert (np.abs(new - theirs) > 1e-4 * np.abs(theirs).max()).mean() < 0.03
  assert error(w, new, gram) == pytest.approx(error(w, theirs, gram), rel=0.01)


@pytest.mark.parametrize("n, m", [(0, 0), (2, 4)])
def test_packing_rounds_nothing_again(n, m):
  w, gram = layer(1, inputs=200, outputs=24)
  new, mask = pruned(w, gram, pattern=pattern_of(n, m))
  np.testing.assert_array_equal(packed(new), new)
  assert not new[mask == 0].any()
  assert int(mask.sum()) == w.size // 2


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_one_pass_errs_less_than_rounding_afterwards(sparsity):
  w, gram = layer(2)
  new, _ = pruned(w, gram, sparsity)
  exact, _ = sparsegpt.prune(
    jnp.asarray(w), jnp.asarray(gram), sparsity, block_size=64
  )
  assert error(w, new, gram) < error(w, packed(exact), gram)


def test_inputs_that_never_fire_stay_out():
  w, gram = layer(3)
  gram[:, :70] = gram[:70] = 0
  new, _ = pruned(w, gram)
  assert not new[:70].any() and np.isfinite(new).all()


def test_groups_that_a_scale_would_cut_are_refused():
  w, gram = layer(0, inputs=192, outputs=8)
  with pytest.raises(ValueError, match="divides 64"):
    pruned(w, gram, pattern=pattern_of(1, 3))
  with pytest.raises(ValueError, match="not positive definite"):
    pruned(w, -gram)
