"""Every format: exact round trips, honest bytes, pytree behaviour."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse

FORMATS = {
  "sell": {},
  "bitmask": {},
  "nm": {"n": 2, "m": 4},
  "block": {"block_shape": (4, 8)},
  "compact": {},
  "diagonals": {},
  "strided_nm": {"n": 1, "m": 2, "stride": 2},
  "panel": {},
}
# Below, at and above a tile (256), a panel (64), a block; odd ends.
SHAPES = [(8, 6), (264, 70), (4, 257)]


def structured(format, mask):
  """Make a random mask one that `format` can hold."""
  if format == "nm":
    groups = mask.reshape(-1, 4, mask.shape[1])
    return (groups & (np.cumsum(groups, axis=1) <= 2)).reshape(mask.shape)
  if format == "strided_nm":
    groups = mask.reshape(-1, 2, 2, mask.shape[1])
    return (groups & (np.cumsum(groups, axis=1) <= 1)).reshape(mask.shape)
  return mask


@st.composite
def matrices(draw, shape):
  dtype = draw(st.sampled_from(["float32", "bfloat16", "float16"]))
  seed = draw(st.integers(0, 2**32 - 1))
  density = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
  rng = np.random.default_rng(seed)
  mask = rng.random(shape) < density
  values = rng.standard_normal(shape)
  # Kept zeros, both of them, and what does not compare equal to itself.
  odd = draw(hnp.arrays(np.float32, 4))
  values.flat[: len(odd)] = odd
  values.flat[4:6] = [0.0, -0.0]
  with np.errstate(over="ignore"):
    return values.astype(jnp.dtype(dtype)), mask


def bits(array):
  array = np.asarray(array)
  return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=4)
def test_decoding_returns_every_kept_bit_and_zero_elsewhere(
  format, shape, data
):
  values, mask = data.draw(matrices(shape))
  mask = structured(format, mask)
  packed = sparse.pack(values, mask, format=format, **FORMATS[format])
  expected = np.where(mask, values, np.zeros((), values.dtype))
  decoded = jax.jit(lambda w: w.todense())(packed)
  np.testing.assert_array_equal(bits(decoded), bits(expected))


@pytest.mark.parametrize("format", FORMATS)
def test_gather_finds_what_todense_puts(format):
  rng = np.random.default_rng(0)
  mask = structured(format, rng.random((264, 70)) < 0.3)
  dense = np.where(mask, rng.standard_normal(mask.shape), 0).astype("f4")
  matrix = sparse.pack(dense, mask, format=format, **FORMATS[format]).matrix
  found = jax.jit(lambda matrix, dense: matrix.gather(dense))(matrix, dense)
  np.testing.assert_array_equal(found, matrix.values)


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_weight_is_a_leaf_of_a_tree(format):
  dense = np.zeros((8, 6), np.float32)
  dense[:4] = 1
  mask = structured(format, dense != 0)
  packed = sparse.pack(dense, mask, format=format, **FORMATS[format])
  assert packed.shape == (8, 6) and packed.ndim == 2 and packed.size == 48
  assert packed.dtype == np.float32
  again = jax.jit(lambda tree: tree)({"w": packed})["w"]
  assert jax.tree.structure(again) == jax.tree.structure(packed)
  decode = jax.jit(lambda w: w.todense())
  kept = np.where(mask, dense, 0)
  np.testing.assert_array_equal(decode(again), kept)
  assert packed.nbytes == sum(a.nbytes for a in jax.tree.leaves(packed))
  doubled = packed.with_values(2 * np.asarray(packed.values))
  np.testing.assert_array_equal(decode(doubled), 2 * kept)


def test_bytes_per_kept_weight():
  rng = np.random.default_rng(0)
  for sparsity, limit in [(0.8, 0.27), (0.9, 0.14), (0.95, 0.075)]:
    mask = rng.random((768, 3072)) >= sparsity
    dense = np.where(mask, 1, 0).astype(np.float32)
    packed = sparse.pack(dense, mask)
    assert packed.nbytes <= limit * dense.nbytes
  kept = int(mask.sum())
  bitmask = sparse.pack(dense, mask, format="bitmask")
  assert bitmask.nbytes == 4 * kept + mask.size // 8 + 4 * (3072 // 64)
  half = structured("nm", np.ones((64, 64), bool))
  nm = sparse.pack(np.ones((64, 64), np.float32), half, format="nm")
  assert nm.nbytes == 64 * 64 // 2 * 4 + 64 * 64 // 2 // 4


def test_any_rank_folds_and_comes_back():
  rng = np.random.default_rng(0)
  weight = rng.standard_normal((3, 4, 5)).astype(np.float32)
  for contract in [(0,), (1,), (2,), (0, 2), (2, 0), (-1,)]:
    packed = sparse.pack(weight, contract=contract)
    np.testing.assert_array_equal(packed.todense(), weight)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (dict(format="csr"), "format: 'csr' is unknown"),
    (dict(format="nm", m=3), "not divisible by m=3"),
    (dict(format="nm", n=1), "keeps 2 weights, more than n=1"),
    (dict(format="nm", n=5), "need 1 <= n <= m"),
    (dict(mask=np.ones((2, 2))), "mask has shape"),
  ],
)
def test_errors_name_the_value_and_the_cure(arguments, message):
  weight = np.zeros((8, 8), np.float32)
  weight[::2] = 1
  with pytest.raises(ValueError, match=message):
    sparse.pack(weight, **arguments)


def test_a_format_refuses_other_ranks():
  with pytest.raises(ValueError, match="use pack"):
    sparse.Sell.fromdense(np.zeros((2, 2, 2)))


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_refuses_options_it_does_not_have(format):
  message = f"format='{format}' has no option 'lane'"
  with pytest.raises(TypeError, match=message):
    sparse.pack(np.eye(8, dtype=np.float32), format=format, lane=3)


def test_a_refusal_lists_the_options_there_are():
  with pytest.raises(TypeError, match="its options are n, m"):
    sparse.pack(np.eye(8, dtype=np.float32), format="nm", k=3)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_take_returns_columns_bit_for_bit(format, shape):
  rng = np.random.default_rng(1)
  mask = structured(format, rng.random(shape) < 0.3)
  mask[:, [1, 2]] = False  # columns without weights
  dense = np.where(mask, rng.standard_normal(shape), 0).astype("f4")
  packed = sparse.pack(dense, mask, format=format, **FORMATS[format])
  columns = np.concatenate([np.arange(shape[1]), [1, 0, 0]])

  @jax.jit
  def look_up(w, i):
    grad = jax.grad(lambda v: (w.with_values(v).take(i) ** 2).sum())
    return w.take(i), w.with_values(grad(w.values)).todense()

  taken, got = look_up(packed, columns)
  np.testing.assert_array_equal(bits(taken), bits(dense[:, columns]))
  seen = np.bincount(columns, minlength=shape[1])
  np.testing.assert_allclose(got, 2 * dense * seen, rtol=1e-6)
