"""Laws of distributions: exact totals, whatever the order of the leaves."""

import collections
import fractions
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxpruner
from jaxpruner import mask_calculator, sparsity_distributions

uniform, erk = sparsity_distributions.uniform, sparsity_distributions.erk

dims = st.integers(1, 40) | st.sampled_from([64, 1000, 4096])
shapes = st.lists(dims, min_size=2, max_size=3).map(tuple)
shapes = shapes.filter(lambda shape: math.prod(shape) < 2**32)
trees = st.lists(shapes, min_size=1, max_size=8)
sparsities = st.floats(0, 1, exclude_max=True) | st.sampled_from(
  [0.5, 0.75, 0.8, 0.9, 0.95, 0.99]
)
distributions = st.sampled_from([uniform, erk])


def leaf(shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def tree_of(shapes):
  return {f"layer_{i}": {"kernel": leaf(s)} for i, s in enumerate(shapes)}


def counts_of(tree, sparsities):
  """How many weights of each leaf an unstructured mask would keep."""
  return {
    name: mask_calculator.num_ones(
      math.prod(tree[name]["kernel"].shape), sparsities[name]["kernel"]
    )
    for name in tree
  }


def request(tree, sparsity):
  size = sum(math.prod(layer["kernel"].shape) for layer in tree.values())
  # A leaf never loses its last weight.
  return max(round(size * (1 - fractions.Fraction(sparsity))), len(tree))


@pytest.mark.quick
@hypothesis.given(trees, sparsities, distributions)
def test_realised_total_is_the_request_exactly(shapes, sparsity, distribution):
  tree = tree_of(shapes)
  counts = counts_of(tree, distribution(tree, sparsity))
  assert sum(counts.values()) == request(tree, sparsity)


@hypothesis.given(trees, sparsities)
def test_uniform_counts_are_the_largest_remainders(shapes, sparsity):
  tree = tree_of(shapes)
  sizes = [math.prod(s) for s in shapes]
  quotas = [n * (1 - fractions.Fraction(sparsity)) for n in sizes]
  wanted = reference.largest_remainder(
    quotas, sizes, request(tree, sparsity), list(tree)
  )
  assert list(counts_of(tree, uniform(tree, sparsity)).values()) == wanted


@hypothesis.given(trees, sparsities)
def test_uniform_leaves_differ_by_less_than_a_weight(shapes, sparsity):
  tree = tree_of(shapes)
  counts = counts_of(tree, uniform(tree, sparsity))
  for name, layer in tree.items():
    quota = math.prod(layer["kernel"].shape) * (
      1 - fractions.Fraction(sparsity)
    )
    # Where every leaf must keep one weight, the others pay for it.
    assert counts[name] <= math.ceil(quota) or counts[name] == 1
    assert counts[name] >= math.floor(quota) - len(tree)


@hypothesis.given(
  trees, sparsities, st.sampled_from([0, 0.25, 0.5, 1, 1.0, 2.0])
)
def test_erk_counts_are_the_largest_remainders_of_its_densities(
  shapes, sparsity, power
):
  tree = tree_of(shapes)
  sizes = [math.prod(s) for s in shapes]
  densities = reference.erk_densities(shapes, sparsity, power)
  wanted = reference.largest_remainder(
    [d * n for d, n in zip(densities, sizes, strict=True)],
    sizes,
    request(tree, sparsity),
    list(tree),
  )
  found = erk(tree, sparsity, erk_power_scale=power)
  assert list(counts_of(tree, found).values()) == wanted


@hypothesis.given(trees, sparsities)
def test_erk_without_power_keeps_what_uniform_keeps(shapes, sparsity):
  tree = tree_of(shapes)
  flat = erk(tree, sparsity, erk_power_scale=0)
  assert counts_of(tree, flat) == counts_of(tree, uniform(tree, sparsity))


@hypothesis.given(trees, sparsities)
def test_erk_gives_smaller_leaves_the_higher_density(shapes, sparsity):
  tree = tree_of(shapes)
  counts = counts_of(tree, erk(tree, sparsity))
  order = sorted(
    tree,
    key=lambda name: (
      -sum(tree[name]["kernel"].shape) / math.prod(tree[name]["kernel"].shape)
    ),
  )
  for dense, sparse in zip(order, order[1:], strict=False):
    n, m = (math.prod(tree[name]["kernel"].shape) for name in (dense, sparse))
    # Up to the rounding of either count.
    assert (counts[dense] + 1) / n >= (counts[sparse] - 1 - len(tree)) / m


@pytest.mark.quick
@hypothesis.given(st.data(), trees, sparsities, distributions)
def test_order_of_leaves_does_not_matter(data, shapes, sparsity, distribution):
  tree = tree_of(shapes)
  order = data.draw(st.permutations(list(tree)))
  shuffled = collections.OrderedDict((name, tree[name]) for name in order)
  found = distribution(tree, sparsity)
  assert dict(distribution(shuffled, sparsity)) == found


@hypothesis.given(trees, sparsities, distributions)
def test_sparsities_are_valid_floats_and_dense_leaves_are_none(
  shapes, sparsity, distribution
):
  tree = tree_of(shapes)
  tree["head"] = {"bias": leaf((7,)), "steps": leaf((3, 3), jnp.int32)}
  found = distribution(tree, sparsity)
  assert found["head"] == {"bias": None, "steps": None}
  for name in found:
    if name != "head":
      assert type(found[name]["kernel"]) is float
      assert 0 <= found[name]["kernel"] < 1


@hypothesis.given(
  trees.filter(lambda t: len(t) > 2), sparsities, sparsities, distributions
)
def test_custom_leaves_have_the_say_and_do_not_count(
  shapes, sparsity, own, distribution
):
  tree = tree_of(shapes)
  custom = {"layer_0/kernel": own, ("layer_1", "kernel"): None}
  found = distribution(tree, sparsity, custom_sparsity_map=custom)
  assert found["layer_0"]["kernel"] == own
  assert found["layer_1"]["kernel"] is None
  rest = {k: v for k, v in tree.items() if k not in ("layer_0", "layer_1")}
  assert {k: found[k] for k in rest} == distribution(rest, sparsity)


@hypothesis.given(trees, sparsities, sparsities)
def test_an_exact_path_wins_over_a_glob(shapes, glob, exact):
  tree = tree_of(shapes)
  custom = {"layer_*": glob, "layer_0/kernel": exact}
  found = uniform(tree, 0.5, custom_sparsity_map=custom)
  for name in tree:
    assert found[name]["kernel"] == (exact if name == "layer_0" else glob)


@hypothesis.given(st.data(), trees, sparsities, distributions)
def test_an_unknown_path_raises_and_names_the_nearest(
  data, shapes, sparsity, distribution
):
  tree = tree_of(shapes)
  name = data.draw(st.sampled_from(sorted(tree)))
  typo = f"{name}/kernle"
  with pytest.raises(ValueError, match=f"'{typo}' matches no leaf") as error:
    distribution(tree, sparsity, custom_sparsity_map={typo: 0.5})
  assert f"did you mean '{name}/kernel'?" in str(error.value)


@hypothesis.given(trees, sparsities, distributions)
def test_a_filter_that_matches_nothing_raises(shapes, sparsity, distribution):
  with pytest.raises(ValueError, match="filter_fn matches no leaf"):
    distribution(tree_of(shapes), sparsity, filter_fn=lambda _n, _p: False)


@hypothesis.given(
  st.one_of(
    st.floats(max_value=0, exclude_max=True),
    st.floats(min_value=1),
    st.just(math.nan),
    st.booleans(),
    st.text(max_size=4),
    st.none(),
  ),
  distributions,
)
def test_a_sparsity_outside_zero_to_one_raises(sparsity, distribution):
  with pytest.raises(ValueError, match="0 <= sparsity < 1"):
    distribution(tree_of([(3, 4)]), sparsity)


leaf_names = st.sampled_from(
  ["kernel", "w", "weight", "embedding", "bias", "b", "scale", "offset"]
)
modules = st.sampled_from(
  ["dense", "LayerNorm_0", "conv", "layer_norm", "head"]
)


@hypothesis.given(
  modules,
  leaf_names,
  st.lists(st.integers(1, 5), max_size=4),
  st.sampled_from(
    [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.bool_]
  ),
)
def test_default_filter_takes_float_matrices_but_biases_and_norms(
  module, name, shape, dtype
):
  norm = module in ("LayerNorm_0", "layer_norm")
  either = name in ("b", "scale", "offset")  # matrices may be called so too
  wanted = (
    len(shape) >= 2
    and jnp.issubdtype(dtype, jnp.floating)
    and name != "bias"
    and not (norm and (either or name in ("w", "weight")))
    and not (either and sum(size > 1 for size in shape) < 2)
  )
  taken = sparsity_distributions.default_filter(
    (module, name), leaf(tuple(shape), dtype)
  )
  assert taken == wanted


@hypothesis.given(st.integers(1, 2**31 - 1), sparsities)
def test_a_sparsity_keeps_the_count_it_was_made_for(size, sparsity):
  """A billion weights: no array, only the arithmetic."""
  tree = {"kernel": leaf((size, 1))}
  found = uniform(tree, sparsity)["kernel"]
  assert mask_calculator.num_ones(size, found) == reference.num_ones(
    size, sparsity
  )


def test_stacked_layers_are_taken_and_their_norm_scales_are_not():
  tree = {
    "layers": {
      "kernel": leaf((12, 8, 8)),
      "norm": {"scale": leaf((12, 8)), "weight": leaf((12, 8))},
    }
  }
  assert uniform(tree, 0.5) == {
    "layers": {"kernel": 0.5, "norm": {"scale": None, "weight": None}}
  }


def test_masks_of_a_tree_have_the_requested_total():
  shapes = [(5, 1), (5, 1), (7, 3)]
  tree = {
    name: {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=s))}
    for (name, _), s in zip(tree_of(shapes).items(), shapes, strict=True)
  }
  for name in ("magnitude", "global_magnitude"):
    pruner = jaxpruner.create_updater_from_config(
      {"algorithm": name, "sparsity": 0.5}
    )
    _, masks = pruner.instant_sparsify(tree)
    total = jaxpruner.summarize_sparsity(masks)["_nparams_nnz"]
    assert total == reference.num_ones(31, 0.5)
