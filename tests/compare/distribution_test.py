"""Distributions over layers: spectra, and verdicts against uniform."""

import compare_helpers as helpers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner.compare.cells import Cell
from jaxpruner.compare.questions import base, distribution


@given(st.integers(0, 99), st.integers(1, 6))
def test_a_projection_has_the_rank_of_its_image(seed, kept):
  rng = np.random.default_rng(seed)
  basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
  found = distribution.effective_rank(basis[:, :kept] @ basis[:, :kept].T)
  assert found == pytest.approx(kept / 6, abs=1e-6)
  assert distribution.effective_rank(np.zeros((3, 2))) == 0.0


def test_each_distribution_is_held_against_uniform():
  cells = {
    Cell("magnitude", 0.9, "", "erk"): ([92.0, 93.1, 94.0], 0.6),
    Cell("magnitude", 0.9, "", "uniform"): ([90.0, 91.0, 92.0], 0.5),
  }
  records = {
    c.id: helpers.record(c.id, v, algorithm=c.algorithm, sparsity=c.sparsity)
    for c, (v, _) in cells.items()
  }
  measures = {
    c.id: {"rank of a": [r, r, r], "density of a": [r, r, r]}
    for c, (_, r) in cells.items()
  }
  found = base.Findings(
    list(cells), records, {}, measures, "accuracy", "%", True
  )
  (sentence,) = distribution.verdict(found)
  assert "magnitude at 90 %, against uniform: erk +2.03" in sentence
  assert "(better), rank +0.100" in sentence
  (table,) = distribution.tables(found)
  assert table.lines == [["a", "0.60 / 0.60", "0.50 / 0.50"]]
  assert set(distribution.pictures(found)) == {"distribution"}
