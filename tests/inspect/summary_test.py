"""Laws of summaries: exact integers, whatever the size."""

import fractions

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxpruner
from jaxpruner.inspect import summary

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
dtypes = st.sampled_from(
  [np.float32, np.float16, np.int32, np.bool_, ml_dtypes.bfloat16]
)


@st.composite
def arrays(draw):
  x = draw(hnp.arrays(np.int8, draw(shapes), elements=st.integers(-1, 1)))
  return x.astype(draw(dtypes))


trees = st.recursive(
  arrays() | st.none(),
  lambda inner: (
    st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    | st.lists(inner, max_size=3)
  ),
  max_leaves=6,
)


@pytest.mark.quick
@hypothesis.given(trees)
def test_sparsity_is_counted_exactly(tree):
  leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
  size = sum(x.size for x in leaves)
  nonzero = sum(int((x != 0).sum()) for x in leaves)
  found = jaxpruner.summarize_sparsity(tree)
  assert found["_nparams"] == size
  assert found["_nparams_nnz"] == nonzero
  assert found["_total_sparsity"] == ((size - nonzero) / size if size else 0)
  assert len(found) == len(leaves) + 3
  total = jaxpruner.summarize_sparsity(tree, only_total_sparsity=True)
  assert total == {k: v for k, v in found.items() if k.startswith("_")}


masks = hnp.arrays(np.uint8, (3, 7), elements=st.integers(0, 1))


@hypothesis.given(masks, masks)
def test_intersection_is_the_shared_part_of_the_first(one, two):
  found = jaxpruner.summarize_intersection(
    {"a": {"kernel": one}, "b": None}, {"a": {"kernel": two}, "b": None}
  )
  ones = int(one.sum())
  shared = int((one & two).sum())
  wanted = shared / ones if ones else 0.0
  assert found == {"a/kernel": wanted, "_total_intersection": wanted}
  packed = jaxpruner.summarize_intersection(
    {"a": {"kernel": np.packbits(one)}}, {"a": {"kernel": np.packbits(two)}}
  )
  assert packed == found


@hypothesis.given(masks)
def test_packed_masks_are_summarised_alike(mask):
  params = {"kernel": np.ones(mask.shape, np.float32)}
  assert jaxpruner.summarize_sparsity(
    {"kernel": np.packbits(mask)}, params=params
  ) == jaxpruner.summarize_sparsity({"kernel": mask})


@hypothesis.given(
  st.lists(st.integers(1, 60_000), min_size=2, max_size=2).map(tuple),
  st.floats(0, 1, exclude_max=True),
)
def test_a_plan_from_shapes_has_exact_totals(shape, sparsity):
  params = {
    "dense": {
      "kernel": jax.ShapeDtypeStruct(shape, jnp.float32),
      "bias": jax.ShapeDtypeStruct(shape[-1:], jnp.float32),
    }
  }
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": "magnitude", "sparsity": sparsity}
  )
  size = shape[0] * shape[1]
  kept = jaxpruner.mask_calculator.num_ones(size, sparsity)
  table = jaxpruner.sparsity_table(params, updater=pruner)
  prunable, everything = table.splitlines()[-2:]
  assert prunable.endswith(f"{kept:,} of {size:,}")
  assert everything.endswith(f"{kept + shape[1]:,} of {size + shape[1]:,}")


def test_a_plan_for_2_4_billion_parameters_allocates_nothing():
  layer = {
    "attention": {"kernel": (24, 2560, 4 * 2560)},
    "mlp": {"up": {"kernel": (24, 2560, 10240)}},
    "norm": {"scale": (24, 2560)},
  }
  shapes = {"layers": layer, "embedding": (452_375, 2560)}
  params = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.bfloat16),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )
  total = 2 * 24 * 2560 * 10240 + 24 * 2560 + 452_375 * 2560
  assert total > 2_400_000_000
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": "rigl", "sparsity": 0.9, "dist_type": "erk"}
  )
  table = jaxpruner.sparsity_table(params, updater=pruner)
  prunable = total - 24 * 2560
  kept = round(prunable * (1 - fractions.Fraction(0.9)))
  assert f"{kept:,} of {prunable:,}" in table.splitlines()[-2]
  assert f"of {total:,}" in table.splitlines()[-1]


@pytest.mark.slow
def test_a_broadcast_leaf_of_2_4_billion_is_counted_without_a_copy():
  row = np.zeros(24_000, np.uint8)
  row[::10] = 1
  mask = np.broadcast_to(row, (100_000, 24_000))
  found = jaxpruner.summarize_sparsity({"kernel": mask})
  assert found["_nparams"] == 2_400_000_000
  assert found["_nparams_nnz"] == 240_000_000
  assert found["kernel"] == 0.9


def test_shapes_and_tracers_are_refused_with_the_cure():
  with pytest.raises(ValueError, match="sparsity_table takes shapes"):
    jaxpruner.summarize_sparsity(
      {"kernel": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
    )


def trained(packed):
  pruner = jaxpruner.create_updater_from_config(
    {
      "algorithm": "static_sparse",
      "sparsity": 0.75,
      "use_packed_masks": packed,
      "rng_seed": 0,
    }
  )
  params = {"kernel": jnp.ones((32, 24)), "bias": jnp.ones(24)}
  return params, pruner.init_state(params).masks


@pytest.mark.quick
def test_packed_masks_without_params_are_refused_with_the_cure():
  params, masks = trained(packed=True)
  with pytest.raises(ValueError, match=r"'kernel'.*params=params"):
    jaxpruner.summarize_sparsity(masks)
  found = jaxpruner.summarize_sparsity(masks, params=params)
  assert found == jaxpruner.summarize_sparsity(trained(packed=False)[1])
  assert found["_total_sparsity"] == 0.75


@pytest.mark.quick
def test_a_summary_inside_jit_equals_the_one_outside():
  params, masks = trained(packed=False)
  tree = {"masks": masks, "weights": params, "steps": jnp.zeros((2, 3), int)}
  inside = jax.jit(jaxpruner.summarize_sparsity)(tree)
  outside = jaxpruner.summarize_sparsity(tree)
  assert inside.keys() == outside.keys()
  for name, value in outside.items():
    np.testing.assert_allclose(inside[name], value, rtol=1e-6)
  assert int(inside["_nparams_nnz"]) == outside["_nparams_nnz"]
  total = jax.jit(
    lambda t: jaxpruner.summarize_sparsity(t, only_total_sparsity=True)
  )(tree)
  assert set(total) == {"_total_sparsity", "_nparams", "_nparams_nnz"}


def test_packed_masks_inside_jit_are_right_or_nan():
  params, masks = trained(packed=True)
  found = jax.jit(jaxpruner.summarize_sparsity)(masks)
  assert np.isnan(found["kernel"]) and np.isnan(found["_total_sparsity"])
  known = jax.jit(lambda m, p: jaxpruner.summarize_sparsity(m, params=p))
  assert float(known(masks, params)["_total_sparsity"]) == 0.75


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_under_a_mask_is_counted_without_numpys_complaints(dtype):
  weights = jnp.array([jnp.nan, 0.0, 1.0], dtype)
  mask = np.array([0, 0, 1], np.uint8)
  with pytest.warns(UserWarning, match="remove 1 weights") as seen:
    summary.warn_if_contradicted({"w": weights}, {"w": mask}, "save")
  assert len(seen) == 1
