"""jax.export: a pruned model leaves as StableHLO with its zeros."""

import jax
import numpy as np
from framework import SPARSITY, make_batch, make_pruner
from jax import export


def test_an_exported_program_gives_the_pruned_models_answers(tmp_path):
  x, _ = make_batch()
  rng = np.random.default_rng(1)
  params = {"w": jax.numpy.asarray(rng.normal(size=(8, 16)), "float32")}
  params, masks = make_pruner().instant_sparsify(params)
  model = lambda x: jax.nn.relu(x @ params["w"])
  path = tmp_path / "model.bin"
  path.write_bytes(export.export(jax.jit(model))(x).serialize())
  again = export.deserialize(bytearray(path.read_bytes()))
  np.testing.assert_array_equal(again.call(x), jax.jit(model)(x))
  assert (np.asarray(params["w"]) == 0).mean() == SPARSITY
