"""Weights below 32 bits: codes, products, files and the text they write."""

import hub_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner import cli, post_training, sparse
from jaxpruner.post_training import generation, models
from jaxpruner.sparse import _int8

SHAPES = [(1, 1), (64, 64), (70, 130), (200, 65)]


def slow(dense, kept):
  """Round a (K, N) matrix weight by weight, in Python's own numbers."""
  found = np.zeros(dense.shape, np.float32)
  for n in range(dense.shape[1]):
    for k in range(0, dense.shape[0], 64):
      column = np.where(kept, dense, 0)[k : k + 64, n]
      scale = float(np.float32(max(abs(column)) / np.float32(127)).astype(
        jnp.bfloat16
      ))  # fmt: skip
      for i, w in enumerate(column):
        found[k + i, n] = round(float(w) / scale) * scale if scale else 0.0
  return found


def drawn(seed, shape, density):
  rng = np.random.default_rng(seed)
  dense = (rng.normal(size=shape) * 10 ** rng.normal()).astype(np.float32)
  return dense, rng.random(shape) < density


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_format_is_the_slow_rounding(shape, density):
  dense, kept = drawn(0, shape, density)
  matrix = sparse.Int8.fromdense(dense, kept)
  expected = slow(dense, kept)
  columns = np.array([0, shape[1] - 1, shape[1] // 2])
  look = jax.jit(lambda w: (w.todense(), w.positions(), w.take(columns)))
  decoded, found, taken = look(matrix)
  np.testing.assert_array_equal(decoded, expected)
  row, col, real = map(np.asarray, found)
  assert int(kept.sum()) == int(real.sum())
  assert kept[row[real], col[real]].all()
  np.testing.assert_array_equal(taken, expected[:, columns].T)


@pytest.mark.parametrize("batch", [1, 3, 4, 6, 65])
def test_product_is_that_of_the_decoded(batch):
  for shape in SHAPES:
    for density in (0.4, 1.0):
      dense, kept = drawn(1, shape, density)
      matrix = sparse.Int8.fromdense(dense, kept)
      x = np.random.default_rng(2).normal(size=(batch, shape[0])).astype("f4")
      wide = _int8.decode(*_int8.encode(np.where(kept, dense, 0).T, "w")).T
      expected = x.astype(np.float64) @ wide.astype(np.float64)
      size = np.abs(x).astype(np.float64) @ np.abs(wide) + 1e-30
      error = np.abs(jax.jit(lambda x, w: x @ w)(x, matrix) - expected) / size
      assert error.max() < 1e-6


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_bfloat16_values_expand_in_registers(batch):
  for shape in SHAPES:
    dense, kept = drawn(1, shape, 0.4)
    dense = dense.astype(jnp.bfloat16)
    matrix = sparse.Bitmask.fromdense(dense, kept)
    assert matrix.values.dtype == jnp.bfloat16
    x = np.random.default_rng(2).normal(size=(batch, shape[0])).astype("f4")
    wide = np.where(kept, dense, 0).astype(np.float64)
    size = np.abs(x) @ np.abs(wide) + 1e-30
    error = np.abs(jax.jit(lambda x, w: x @ w)(x, matrix) - x @ wide) / size
    assert error.max() < 1e-6


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(4, 16), (64, 32), (72, 1104)])
def test_two_of_four_are_picked_by_their_bits(shape, dtype):
  dense, _ = drawn(1, shape, 0.4)
  order = np.argsort(np.abs(dense).reshape(-1, 4, shape[1]), axis=1)
  kept = (np.argsort(order, axis=1) >= 2).reshape(shape)
  dense = dense.astype(dtype)
  matrix = sparse.NM.fromdense(dense, kept)
  assert sparse.NM.fits(sparse.Kept(kept, 1)) == {"n": 2, "m": 4}
  wide = np.where(kept, dense, 0).astype(np.float64)
  for batch in (1, 3):
    x = np.random.default_rng(2).normal(size=(batch, shape[0])).astype("f4")
    size = np.abs(x) @ np.abs(wide) + 1e-30
    error = np.abs(jax.jit(lambda x, w: x @ w)(x, matrix) - x @ wide) / size
    assert error.max() < 1e-6


def test_only_two_of_four_in_whole_vectors_are_candidates():
  fits = lambda mask, batch=1: sparse.NM.fits(sparse.Kept(mask, batch))
  mask = np.tile(np.array([1, 1, 0, 0], bool)[:, None], (2, 16))
  assert fits(mask) == {"n": 2, "m": 4}
  assert fits(mask, 64) is None
  assert fits(mask[:6]) is None and fits(mask[:, :8]) is None
  mask[2, 3] = True
  assert fits(mask) is None


def test_gradient_passes_through_the_activations():
  dense, kept = drawn(3, (70, 65), 0.5)
  matrix = sparse.Int8.fromdense(dense, kept)
  x = np.ones((2, 70), np.float32)
  got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(x @ matrix))))(x)
  full = np.asarray(jax.jit(lambda w: w.todense())(matrix))
  want = np.cos(x @ full) @ full.T
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@given(seed=st.integers(0, 1000), width=st.integers(1, 150))
def test_codes_are_near_and_rounding_twice_changes_nothing(seed, width):
  dense, kept = drawn(seed, (3, width), 0.7)
  dense = np.where(kept, dense, 0)
  codes, scales = _int8.encode(dense, "w")
  near = _int8.decode(codes, scales)
  wide = np.repeat(scales.astype(np.float32), 64, axis=-1)[:, :width]
  assert (np.abs(near - dense) <= 0.5001 * wide).all()
  assert (near[dense == 0] == 0).all()
  again, same = _int8.encode(near, "w")
  np.testing.assert_array_equal(again, codes)
  np.testing.assert_array_equal(same, scales)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_file_keeps_masks_vectors_and_codes(tmp_path, dtype):
  dense, kept = drawn(5, (40, 130), 0.5)
  kept[0, 0], dense[0, 0] = True, 0.0  # a kept zero
  whole = dense
  dense = np.where(kept, dense, 0)
  tree = {"w": dense.astype(dtype), "full": whole[:8], "b": whole[0]}
  masks = {"w": kept.astype(np.uint8), "full": None, "b": None}
  path = tmp_path / "model.safetensors"
  sparse.save(path, tree, masks, layout="int8")
  params, found = sparse.load(path)
  np.testing.assert_array_equal(found["w"], masks["w"])
  assert found["full"] is None
  np.testing.assert_array_equal(params["b"], tree["b"])
  wide = np.where(kept, tree["w"].astype(np.float32), 0)
  expected = _int8.decode(*_int8.encode(wide, "w")).astype(dtype)
  np.testing.assert_array_equal(params["w"], expected)
  assert params["w"].dtype == dtype
  with sparse.open_checkpoint(path) as file:
    assert file.layout == "int8"
    assert file.tensors["w"].stored_bytes < 0.72 * tree["w"].size
    assert file.tensors["full"].stored_bytes < 1.1 * tree["full"].size
  if dtype == np.float32:  # what was rounded stays as it is
    sparse.save(tmp_path / "again", params, found, layout="int8")
    same, _ = sparse.load(tmp_path / "again")
    np.testing.assert_array_equal(same["w"], params["w"])


def test_weights_that_are_not_finite_are_refused(tmp_path):
  dense = np.array([[1.0, np.inf]], np.float32)
  with pytest.raises(ValueError, match="w holds weights that are not finite"):
    sparse.save(tmp_path / "f", {"w": dense}, layout="int8")
  assert not list(tmp_path.iterdir())
  with pytest.raises(ValueError, match="not finite"):
    sparse.Int8.fromdense(dense)


def test_int8_folder_writes_the_text_of_its_decoded_weights(
  tmp_path, monkeypatch
):
  # The step as machine code rounds its inputs too; `step_test` holds it.
  monkeypatch.setattr(generation._step, "kernel", lambda *_: None)
  folder, small = tmp_path / "model", tmp_path / "small"
  hub_models.write_folder(folder, "smollm2")
  pruned = ["prune", folder, "--sparsity", "0.5", "--layout", "int8", "-o"]
  assert cli.main([str(a) for a in [*pruned, small]]) == 0
  model = models.load_folder(small)
  found = generation.rounded(model, "int8")
  packed = [k for k, v in found.items() if isinstance(v, sparse.SparseTensor)]
  assert packed
  for name in packed:  # the groups of file and kernel are the same
    np.testing.assert_array_equal(found[name].todense(), model.params[name])
  texts = [
    [t.id for t in post_training.Writer(model, 16, **options).write([1, 5], 5)]
    for options in ({}, {"values": "int8"}, {"values": "bfloat16"})
  ]
  assert texts[0] == texts[1]
  exact = {k: v.astype(jnp.bfloat16) for k, v in model.params.items()}
  exact = {k: v.astype(jnp.float32) for k, v in exact.items()}
  same = post_training.Writer(model._replace(params=exact), 16)
  assert texts[2] == [t.id for t in same.write([1, 5], 5)]
  with pytest.raises(ValueError, match="values='int8' must be None"):
    post_training.Writer(model, 16, values="int8", accelerate=True)
