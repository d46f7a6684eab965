"""Estimates over seeds, against the formulas written out and SciPy."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats

from jaxpruner.compare import statistics

values = st.lists(
  st.floats(-1e3, 1e3, allow_nan=False), min_size=2, max_size=12
)


@pytest.mark.quick
@hypothesis.given(st.floats(0.05, 0.999), st.integers(1, 60))
def test_t_quantile_is_scipys(confidence, dof):
  expected = scipy.stats.t.ppf((1 + confidence) / 2, dof)
  assert statistics.t_quantile(confidence, dof) == pytest.approx(expected)


@hypothesis.given(values)
def test_estimate_is_the_textbook_formula(numbers):
  found = statistics.estimate(numbers)
  n = len(numbers)
  mean = math.fsum(numbers) / n
  std = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (n - 1))
  half = scipy.stats.t.ppf(0.975, n - 1) * std / math.sqrt(n)
  assert found.mean == pytest.approx(mean, abs=1e-9)
  assert found.std == pytest.approx(std, abs=1e-9)
  assert found.low == pytest.approx(mean - half, abs=1e-6)
  assert found.high == pytest.approx(mean + half, abs=1e-6)


@hypothesis.given(values, st.floats(-1e3, 1e3))
def test_paired_difference_cancels_what_seeds_share(numbers, shift):
  shifted = [x + shift for x in numbers]
  found = statistics.paired_difference(shifted, numbers)
  assert found.mean == pytest.approx(shift, abs=1e-6)
  assert found.std == pytest.approx(0, abs=1e-6)


def test_intervals_cover_the_truth_as_often_as_they_say():
  rng = np.random.default_rng(0)
  hits = 0
  for _ in range(2000):
    found = statistics.estimate(rng.normal(3.0, 2.0, 3))
    hits += found.low <= 3.0 <= found.high
  assert 0.93 < hits / 2000 < 0.97


def test_one_seed_has_no_interval():
  found = statistics.estimate([1.5])
  assert found.mean == 1.5
  assert math.isnan(found.std) and math.isnan(found.low)


def test_unpaired_seeds_are_refused():
  with pytest.raises(ValueError, match="same seeds"):
    statistics.paired_difference([1.0, 2.0], [1.0])
