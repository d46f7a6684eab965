"""Laws of masks: shape, exact counts, ties, order, selection, packing."""

import functools
import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jaxpruner
from jaxpruner import mask_calculator

# Few shapes and types: what is drawn are values, so that programs are reused.
SHAPES = [(5, 7), (2, 4, 6)]
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8]
TYPES = [
  jaxpruner.Unstructured(),
  jaxpruner.Block((2, 3)),
  jaxpruner.Block((2, 3), use_avg_pooling=False),
  jaxpruner.Channel(-1),
  jaxpruner.Channel(0),
  jaxpruner.sparsity_types.Diagonals(),
]
GROUPS = [
  ((8, 5), jaxpruner.NByM(2, 4)),
  ((2, 8, 3), jaxpruner.NByM(1, 4, -2)),
  ((5, 6), jaxpruner.NByM(2, 3, axis=1)),
]

sparsities = st.floats(0, 1, exclude_max=True, width=32)
seeds = st.integers(0, 2**32 - 1)


@functools.cache
def jitted(kind):
  return jax.jit(kind.mask)


@st.composite
def score_arrays(draw, shape, dtype=np.float32):
  """Scores with many ties, wide ranges, or what Hypothesis finds nasty."""
  rng = np.random.default_rng(draw(seeds))
  style = draw(st.sampled_from(["ties", "normal", "wide", "nasty"]))
  if style == "nasty":
    x = draw(
      hnp.arrays(
        np.float32, shape, elements=st.floats(-1e4, 1e4, width=32), fill=None
      )
    )
  elif style == "ties":
    x = rng.integers(-3, 4, shape)
  elif style == "normal":
    x = rng.normal(size=shape)
  else:
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-44, 4, shape)
  return x.astype(dtype)


def check_unstructured(scores, sparsity):
  mask = np.asarray(jitted(jaxpruner.Unstructured())(scores, sparsity))
  assert mask.dtype == np.uint8 and mask.shape == scores.shape
  assert np.array_equal(mask, reference.unstructured(scores, sparsity))


@pytest.mark.quick
@hypothesis.given(st.data(), st.sampled_from(DTYPES), sparsities)
def test_unstructured_keeps_the_largest_ties_by_index(data, dtype, sparsity):
  scores = data.draw(score_arrays((5, 7), dtype))
  check_unstructured(scores, np.float32(sparsity))


@hypothesis.given(st.data(), sparsities)
def test_order_is_numpys_for_subnormals_zeros_and_infinities(data, sparsity):
  values = [0.0, -0.0, 1e-45, -1e-45, 3e-39, 1e-38, 2.0, -2.0]
  values += [math.inf, -math.inf, 3.4e38, -3.4e38]
  picks = data.draw(hnp.arrays(np.int8, (5, 7), elements=st.integers(0, 11)))
  scores = np.array(values, np.float32)[picks]
  check_unstructured(scores, np.float32(sparsity))


@hypothesis.given(st.integers(1, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_count_is_exact_for_any_size(size, sparsity):
  assert mask_calculator.num_ones(size, sparsity) == reference.num_ones(
    size, sparsity
  )


# Around 2**24, where float32 stops counting, and 2**31, where int32 does.
SIZES = [
  1,
  2,
  7,
  1000,
  2**24 - 1,
  2**24 + 1,
  123_456_789,
  2**31 + 11,
  2**32 - 1,
]


@functools.cache
def traced_count(size):
  return jax.jit(functools.partial(mask_calculator.num_ones, size))


@hypothesis.given(st.sampled_from(SIZES), sparsities)
def test_a_traced_count_is_exact_beyond_2_to_24(size, sparsity):
  sparsity = np.float32(sparsity)
  assert int(traced_count(size)(sparsity)) == reference.num_ones(size, sparsity)


@functools.cache
def scheduled_count(size, target):
  return jax.jit(
    lambda value: mask_calculator.num_ones(
      size, mask_calculator.AtStep(value, target)
    )
  )


@hypothesis.given(
  st.sampled_from([10, 2**24 + 1, 123_456_789, 2**31 + 11]),
  st.sampled_from([0.1, 0.8, 1 - 1 / 3, 1 - 7 / 123_456_789]),
  st.floats(0, 1, width=32),
)
def test_a_scheduled_count_ends_at_the_target_and_never_below(
  size, target, progress
):
  count = scheduled_count(size, target)
  exact = reference.num_ones(size, target)
  assert int(count(np.float32(target))) == exact
  value = np.float32(target) * np.float32(progress)
  wanted = max(exact, reference.num_ones(size, value))
  if value < np.float32(target):
    assert int(count(value)) == wanted


@pytest.mark.quick
@hypothesis.given(
  st.data(), st.sampled_from(TYPES), st.sampled_from(SHAPES), sparsities
)
def test_equal_scores_keep_the_first_units(data, kind, shape, sparsity):
  value = data.draw(st.floats(-1e3, 1e3, width=32))
  scores = np.full(shape, value, np.float32)
  mask = np.asarray(jitted(kind)(scores, np.float32(sparsity)))
  units = (np.asarray(kind.pool(jnp.asarray(mask))) > 0).ravel()
  kept = reference.num_ones(units.size, np.float32(sparsity))
  # Edge blocks average fewer numbers: equal up to rounding only.
  if not (isinstance(kind, jaxpruner.Block) and kind.use_avg_pooling):
    assert units.tolist() == [i < kept for i in range(units.size)]
  assert units.sum() == kept


@hypothesis.given(
  st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
  st.integers(1, 5),
  st.integers(1, 5),
  st.integers(0, 3),
)
def test_masks_have_the_shape_of_their_parameter(shape, height, width, axis):
  kinds = [
    jaxpruner.Unstructured(),
    jaxpruner.Block((height, width)),
    jaxpruner.Block((height, width), use_avg_pooling=False),
    jaxpruner.Channel(axis % len(shape)),
  ]
  scores = jax.ShapeDtypeStruct(shape, jnp.float32)
  for kind in kinds:
    units = jax.eval_shape(kind.pool, scores)
    assert math.prod(units.shape) == kind.units(shape)
    mask = jax.eval_shape(lambda u, k=kind: k.expand(u, shape), units)
    assert mask.shape == shape


@hypothesis.given(
  st.data(), st.sampled_from(TYPES), st.sampled_from(SHAPES), sparsities
)
def test_units_are_kept_or_removed_as_a_whole(data, kind, shape, sparsity):
  scores = data.draw(score_arrays(shape))
  mask = np.asarray(jitted(kind)(scores, np.float32(sparsity)))
  units = np.asarray(kind.pool(jnp.asarray(mask, jnp.float32)))
  if not isinstance(kind, jaxpruner.Block) or kind.use_avg_pooling:
    assert set(np.unique(units)) <= {0.0, 1.0}
  assert np.array_equal(
    np.asarray(kind.expand(jnp.asarray(units > 0), shape)), mask
  )
  assert (units > 0).sum() == reference.num_ones(
    units.size, np.float32(sparsity)
  )


@hypothesis.given(
  st.data(),
  st.sampled_from(TYPES),
  st.sampled_from(SHAPES),
  sparsities,
  sparsities,
)
def test_a_higher_sparsity_keeps_a_subset(data, kind, shape, one, two):
  scores = data.draw(score_arrays(shape))
  low, high = sorted([np.float32(one), np.float32(two)])
  more = np.asarray(jitted(kind)(scores, low))
  fewer = np.asarray(jitted(kind)(scores, high))
  assert (fewer <= more).all()


@pytest.mark.quick
@hypothesis.given(st.data(), st.sampled_from(GROUPS))
def test_n_by_m_keeps_n_of_every_m_along_its_axis(data, case):
  shape, kind = case
  scores = data.draw(score_arrays(shape))
  mask = np.asarray(jitted_groups(kind)(scores))
  axis = -2 if kind.axis is None else kind.axis
  groups = np.moveaxis(mask, axis, -1).reshape(-1, kind.m)
  assert (groups.sum(axis=1) == kind.n).all()
  assert np.array_equal(mask, reference.n_by_m(scores, kind.n, kind.m, axis))


@functools.cache
def jitted_groups(kind):
  return jax.jit(lambda scores: kind.mask(scores, kind.sparsity))


@hypothesis.given(st.data(), st.sampled_from(GROUPS), sparsities)
def test_n_by_m_never_keeps_fewer_than_n_while_it_ramps(data, case, sparsity):
  shape, kind = case
  sparsity = np.float32(sparsity)
  scores = data.draw(score_arrays(shape))
  mask = np.asarray(jitted(kind)(scores, sparsity))
  kept = max(kind.n, reference.num_ones(kind.m, sparsity))
  axis = -2 if kind.axis is None else kind.axis
  assert np.array_equal(mask, reference.n_by_m(scores, kept, kind.m, axis))


@hypothesis.given(
  st.integers(1, 6), st.integers(1, 6), st.floats(0, 1, exclude_max=True)
)
def test_a_sparsity_that_contradicts_n_by_m_raises(n, extra, sparsity):
  kind = jaxpruner.NByM(n, n + extra)
  hypothesis.assume(abs(sparsity - kind.sparsity) > 1e-5)
  pruner = jaxpruner.MagnitudePruning(
    sparsity_type=kind,
    sparsity_distribution_fn=lambda _params: {"kernel": sparsity},
  )
  params = {"kernel": np.ones((n + extra, 2), np.float32)}
  with pytest.raises(
    ValueError, match=f"'kernel'.*contradicts {n}:{n + extra}"
  ):
    pruner.target_sparsities(params)


@hypothesis.given(st.integers(2, 9), st.integers(1, 40))
def test_an_axis_that_m_does_not_divide_raises_with_the_path(m, length):
  hypothesis.assume(length % m)
  pruner = jaxpruner.MagnitudePruning(sparsity_type=jaxpruner.NByM(1, m))
  params = {"dense": {"kernel": np.ones((length, 2), np.float32)}}
  with pytest.raises(ValueError, match=f"'dense/kernel'.*length {length}"):
    pruner.target_sparsities(params)


@hypothesis.given(
  st.floats(max_value=0, exclude_max=True) | st.floats(min_value=1)
)
def test_a_sparsity_outside_zero_to_one_raises(sparsity):
  for kind in TYPES:
    with pytest.raises(ValueError, match="sparsity"):
      kind.mask(np.ones((4, 6), np.float32), sparsity)


PARAM_DTYPES = [np.float32, jnp.bfloat16, jnp.float16, np.int32]


@functools.cache
def jitted_apply(packed):
  return jax.jit(lambda p, m: jaxpruner.apply_mask(p, m, is_packed=packed))


@pytest.mark.quick
@hypothesis.given(
  hnp.arrays(np.uint32, (5, 7)),
  hnp.arrays(np.uint8, (5, 7), elements=st.integers(0, 1)),
  st.sampled_from(PARAM_DTYPES),
)
def test_a_mask_selects_bits_and_removed_weights_are_plus_zero(
  bits, mask, dtype
):
  """Any bit pattern: NaN, infinities, subnormals, minus zero."""
  word = f"uint{8 * np.dtype(dtype).itemsize}"
  bits = bits.astype(word)
  if np.dtype(dtype).itemsize == 2:
    # CPUs compute half precision in float32, which loses the payload of NaN.
    with np.errstate(invalid="ignore"):
      is_nan = np.isnan(bits.view(dtype))
    bits[is_nan] = np.array(np.nan, dtype).view(word)
  param = bits.view(dtype)
  found = np.asarray(jitted_apply(False)(param, mask))
  assert found.dtype == param.dtype
  assert np.array_equal(found.view(word), np.where(mask, bits, 0))


@hypothesis.given(
  hnp.arrays(np.float32, (5, 7), elements=st.floats(width=32)),
  hnp.arrays(np.uint8, (5, 7), elements=st.integers(0, 1)),
)
def test_a_packed_mask_selects_the_same(param, mask):
  packed = jitted_pack(mask)
  assert np.array_equal(np.asarray(packed), np.packbits(mask))
  assert np.array_equal(
    np.asarray(jitted_apply(True)(param, packed)).view(np.uint32),
    np.asarray(jitted_apply(False)(param, mask)).view(np.uint32),
  )


jitted_pack = jax.jit(mask_calculator.pack_mask)


@hypothesis.given(
  st.data(), st.tuples(*[st.sampled_from([0.25, 0.5, 0.75])] * 3)
)
def test_each_leaf_may_have_a_type_of_its_own(data, wanted):
  kinds = {
    "a/*": jaxpruner.NByM(2, 4),
    "b/kernel": jaxpruner.Block((2, 3)),
    "c/*": jaxpruner.Channel(0),
  }
  shapes = {"a": (8, 5), "b": (5, 7), "c": (5, 7), "d": (5, 7)}
  params = {
    n: {"kernel": data.draw(score_arrays(s))} for n, s in shapes.items()
  }
  targets = [0.5, *wanted]
  masks = mixed_masks(params, [np.float32(t) for t in targets])
  own = [*kinds.values(), jaxpruner.Unstructured()]
  for name, kind, target in zip(shapes, own, targets, strict=True):
    scores = np.abs(params[name]["kernel"])
    alone = jitted(kind)(scores, np.float32(target))
    assert np.array_equal(masks[name]["kernel"], alone), name


@jax.jit
def mixed_masks(params, targets):
  pruner = jaxpruner.MagnitudePruning(
    sparsity_type={
      "a/*": jaxpruner.NByM(2, 4),
      "b/kernel": jaxpruner.Block((2, 3)),
      "c/*": jaxpruner.Channel(0),
    }
  )
  sparsities = {
    name: {"kernel": t} for name, t in zip(params, targets, strict=True)
  }
  return pruner.create_masks(pruner.calculate_scores(params), sparsities)


@pytest.mark.parametrize(
  "kind", [jaxpruner.Block((3, 3)), jaxpruner.Channel(-1)]
)
def test_pooling_has_the_same_bits_inside_and_outside_jit(kind):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(64, 50)), jnp.float32)
  inside = np.asarray(jax.jit(kind.pool)(x))
  assert np.array_equal(inside, np.asarray(kind.pool(x)))
