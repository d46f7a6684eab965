"""Trees of BCOO leaves: exact counts, exact round trips, honest bytes."""

import subprocess
import sys

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse

SHAPES = [(4, 6), (2, 3, 4), (2, 2, 3, 2), (5,)]


@st.composite
def leaves(draw):
  shape = draw(st.sampled_from(SHAPES))
  value = draw(hnp.arrays(np.float32, shape))
  mask = draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 1)))
  return value, mask


@hypothesis.given(leaves())
@hypothesis.settings(max_examples=12)
def test_bcoo_keeps_mask_sum_entries_and_comes_back_bit_for_bit(leaf):
  value, mask = leaf
  params = {"a": jnp.asarray(value), "dense": jnp.ones(3)}
  packed = sparse.to_bcoo(params, {"a": mask, "dense": None})
  assert packed["a"].nse == mask.sum()
  assert isinstance(packed["dense"], jax.Array)
  back = jax.jit(sparse.from_bcoo)(packed)
  expected = np.where(mask, value, np.float32(0))
  np.testing.assert_array_equal(
    np.asarray(back["a"]).view(np.uint32), expected.view(np.uint32)
  )


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_bcoo_keeps_the_dtype_and_kept_zeros(dtype):
  value = jnp.zeros((4, 4), dtype)
  mask = np.eye(4, dtype=np.uint8)
  packed = sparse.to_bcoo([value], [mask])
  assert packed[0].nse == 4
  back = jax.jit(sparse.from_bcoo)(packed)
  assert back[0].dtype == value.dtype


def test_bcsr_and_packed_leaves_come_back_too():
  rng = np.random.default_rng(0)
  mask = (rng.random((6, 5)) < 0.4).astype(np.uint8)
  mask[2] = 0
  params = {"w": jnp.asarray(rng.standard_normal((6, 5)), "float32")}
  params["s"] = jnp.stack([params["w"]] * 2)
  masks = {"w": mask, "s": np.stack([mask] * 2)}
  want = jax.tree.map(lambda p, m: jnp.where(m, p, 0), params, masks)
  packed = sparse.to_bcsr(params, masks)
  assert packed["w"].indptr.shape == (7,)
  assert packed["w"].nse == packed["s"].nse // 2 == mask.sum()
  for tree in (
    packed,
    {n: sparse.pack(params[n], masks[n]) for n in params},
    {"w": sparse.Sell.fromdense(params["w"], mask), "s": want["s"]},
  ):
    back = sparse.from_bcoo(tree)
    assert all(np.array_equal(back[n], want[n]) for n in params)


def test_bytes_are_those_of_the_buffers():
  mask = np.zeros((64, 64), np.uint8)
  mask[:, 0] = 1
  tree = sparse.to_bcoo(
    {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}, {"w": mask, "b": None}
  )
  sizes = sparse.bytes_report(tree)
  assert sizes.dense == 4 * (64 * 64 + 64)
  assert sizes.sparse == 64 * (4 + 8) + 4 * 64
  assert sizes.leaves["['w']"] == (4 * 64 * 64, 64 * 12)
  assert sizes.saved == sizes.dense - sizes.sparse
  assert sizes.ratio == sizes.sparse / sizes.dense


def test_a_mask_of_another_shape_is_named():
  with pytest.raises(ValueError, match=r"masks\['w'\] has shape \(2,\)"):
    sparse.to_bcoo({"w": jnp.ones((2, 2))}, {"w": np.ones(2)})


def test_importing_the_package_imports_no_extra():
  code = (
    "import sys, jaxpruner.sparse as s; s.to_bcoo; "
    "bad = {'numba', 'safetensors', 'jax.experimental.sparse'} "
    "& set(sys.modules); sys.exit(repr(bad) if bad else 0)"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_refused_with_the_known_ones():
  with pytest.raises(AttributeError, match="to_bcoo"):
    sparse.to_coo  # noqa: B018
