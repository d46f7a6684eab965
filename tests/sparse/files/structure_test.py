"""Structures are named exactly, and nothing is named that is not there."""

import doctest

import hypothesis
import hypothesis.strategies as hst
import numpy as np
import pytest

from jaxpruner.sparse import _table, structure


def n_of_m(rng, n, m, shape, axis):
  moved = [s for i, s in enumerate(shape) if i != axis] + [shape[axis]]
  ranks = rng.random((*moved[:-1], moved[-1] // m, m)).argsort(-1)
  return np.moveaxis((ranks < n).reshape(moved), -1, axis)


@hypothesis.given(
  hst.sampled_from([(1, 2), (2, 4), (1, 4), (3, 8), (5, 16)]),
  hst.integers(0, 1), hst.integers(0, 99),
)  # fmt: skip
def test_n_of_m_is_found_along_its_axis(pattern, axis, seed):
  n, m = pattern
  mask = n_of_m(np.random.default_rng(seed), n, m, (64, 64), axis)
  assert f"exactly {n}:{m} along axis {axis}" in structure.describe(mask)


def test_a_kept_weight_of_zero_makes_it_at_most():
  mask = n_of_m(np.random.default_rng(0), 2, 4, (32, 32), 0)
  mask[np.nonzero(mask)[0][0], np.nonzero(mask)[1][0]] = False
  assert structure.describe(mask) == "at most 2:4 along axis 0"


@hypothesis.given(hst.integers(1, 8), hst.integers(1, 8), hst.integers(0, 99))
def test_blocks_are_found_with_ragged_edges(height, width, seed):
  rng = np.random.default_rng(seed)
  units = rng.random((9, 9)) < 0.4
  mask = np.kron(units, np.ones((height, width)))[: 9 * height - 1, :]
  if height == width == 1:
    assert "blocks" not in structure.describe(mask)
  else:
    assert f"blocks of {height}x{width}" in structure.describe(mask)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_removed_slices_are_counted(axis):
  mask = np.ones((6, 7, 8), bool)
  np.moveaxis(mask, axis, 0)[[1, 4]] = False
  text = f"only 2 of {6 + axis} slices along axis {axis} removed"
  assert structure.describe(mask) == text
  mask[0, 0, 0] = False
  assert structure.describe(mask).startswith(text.removeprefix("only "))


@hypothesis.given(hst.floats(0.2, 0.8), hst.integers(0, 99))
def test_random_masks_have_no_structure(sparsity, seed):
  mask = np.random.default_rng(seed).random((64, 96)) >= sparsity
  assert structure.describe(mask) == "unstructured"


def test_the_extremes():
  assert structure.describe(np.ones((3, 3))) == "dense"
  assert structure.describe(np.zeros((3, 3))) == "all zero"
  assert structure.describe(np.ones(())) == "dense"
  assert structure.describe(np.array([1, 0, 1])).startswith("only 1 of 3")


@pytest.mark.parametrize("module", [structure, _table])
def test_examples_run(module):
  assert doctest.testmod(module).failed == 0
