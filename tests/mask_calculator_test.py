"""Laws of the mask engine, against stable sorts and exact fractions."""

import fractions
import functools
import itertools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxpruner import mask_calculator as mc

# Few shapes, so that few programs are compiled: ranked by comparison, solved
# in the sample, counted in whole rows, and in rows with a short last one.
SHAPES = [(), (7, 5), (61, 53), (96, 128), (20011,)]
DTYPES = [
  jnp.float32,
  jnp.bfloat16,
  jnp.float16,
  jnp.int32,
  jnp.int8,
  jnp.uint32,
  jnp.bool_,
]


def reference_order(scores: np.ndarray) -> np.ndarray:
  """Flat indices, best first, by a stable sort; NaN last."""
  flat = np.asarray(scores).reshape(-1)
  is_float = jnp.issubdtype(flat.dtype, jnp.floating)
  flat = flat.astype(np.float64 if is_float else np.int64)
  missing = np.isnan(flat)
  return np.lexsort(
    (np.arange(flat.size), -np.where(missing, 0, flat), missing)
  )


def reference_mask(scores, ones: int) -> np.ndarray:
  mask = np.zeros(np.size(scores), np.uint8)
  mask[reference_order(scores)[:ones]] = 1
  return mask.reshape(np.shape(scores))


@functools.cache
def compiled(together=False):
  masks = lambda scores, ones: mc.topk_masks(scores, ones, together=together)
  return jax.jit(masks)


def draw_scores(seed: int, kind: str, shape, dtype) -> np.ndarray:
  rng = np.random.default_rng(seed)
  if not jnp.issubdtype(dtype, jnp.floating):
    spread = {"normal": 2**31, "few": 3, "constant": 1}.get(kind, 100)
    return rng.integers(-spread, spread, shape).astype(dtype)
  x = rng.standard_normal(shape)
  if kind == "few":
    x = np.round(2 * x) * rng.choice([-1.0, 1.0], shape)  # both zeros
  elif kind == "constant":
    x = np.full(shape, rng.standard_normal())
  elif kind == "tiny":
    x = np.ldexp(x, -140 if dtype != jnp.float16 else -20)  # subnormal
  elif kind == "odd":
    values = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0]
    x = np.where(rng.random(shape) < 0.6, rng.choice(values, shape), x)
  elif kind == "heavy":
    x = np.exp(20 * x) * rng.choice([-1.0, 1.0], shape)
  with np.errstate(over="ignore"):
    return np.asarray(x).astype(dtype)


KINDS = ["normal", "few", "constant", "tiny", "odd", "heavy"]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_masks_equal_a_stable_sort(dtype):
  shapes = SHAPES if dtype == jnp.float32 else [(7, 5), (96, 128)]
  for shape, kind in itertools.product(shapes, KINDS):
    scores = draw_scores(0, kind, shape, dtype)
    size = scores.size
    for ones in {1, size // 10, size // 2, size - 1, size} - {0}:
      got = compiled()([scores], [np.int32(ones)])[0]
      assert got.dtype == np.uint8 and got.shape == shape
      np.testing.assert_array_equal(
        got, reference_mask(scores, ones), f"{shape} {kind} {ones}"
      )


@hypothesis.given(
  st.integers(0, 2**32),
  st.sampled_from(KINDS),
  st.sampled_from([(7, 5), (96, 128)]),
  st.sampled_from([jnp.float32, jnp.bfloat16]),
  st.floats(0, 1),
)
def test_masks_of_random_counts_equal_a_stable_sort(
  seed, kind, shape, dtype, share
):
  scores = draw_scores(seed, kind, shape, dtype)
  ones = round(share * scores.size)
  got = compiled()([scores], [np.int32(ones)])[0]
  np.testing.assert_array_equal(got, reference_mask(scores, ones))


@hypothesis.given(
  hnp.arrays(np.float32, (7, 5), elements=st.floats(width=32, allow_nan=True)),
  st.integers(0, 35),
)
def test_masks_of_any_float32_equal_a_stable_sort(scores, ones):
  got = compiled()([scores], [np.int32(ones)])[0]
  np.testing.assert_array_equal(got, reference_mask(scores, ones))


TREE = [((96, 128), jnp.float32), ((5,), jnp.bfloat16), ((0, 3), jnp.float32)]
TREE += [((61, 53), jnp.bfloat16), ((50, 40), jnp.float32)]


@hypothesis.settings(max_examples=30)
@hypothesis.given(
  st.integers(0, 2**32),
  st.sampled_from(["normal", "few", "constant", "heavy"]),
  st.floats(0, 1),
)
def test_leaves_ranked_together_equal_their_concatenation(seed, kind, share):
  scores = [draw_scores(seed + i, kind, *leaf) for i, leaf in enumerate(TREE)]
  flat = np.concatenate([s.astype(np.float32).ravel() for s in scores])
  ones = round(share * flat.size)
  got = compiled(True)(scores, np.int32(ones))
  want = reference_mask(flat, ones)
  got = np.concatenate([np.asarray(m).ravel() for m in got])
  np.testing.assert_array_equal(got, want)


@hypothesis.settings(max_examples=30)
@hypothesis.given(st.integers(0, 2**32), st.sampled_from(KINDS))
def test_leaves_of_several_dtypes_are_ranked_one_by_one(seed, kind):
  scores = [draw_scores(seed + i, kind, *leaf) for i, leaf in enumerate(TREE)]
  ones = [np.int32(s.size // 3) for s in scores]
  for score, one, got in zip(
    scores, ones, compiled()(scores, ones), strict=True
  ):
    np.testing.assert_array_equal(got, reference_mask(score, one))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_64_bit_scores_keep_their_order(dtype):
  rng = np.random.default_rng(0)
  scores = rng.integers(0, 2**63, (60, 50)).astype(np.uint64)
  scores = scores.view(np.float64) if dtype == np.float64 else scores
  scores = np.nan_to_num(scores).astype(dtype)
  with jax.enable_x64(True):
    got = np.asarray(mc.topk_masks([jnp.asarray(scores)], [700])[0])
  order = np.argsort(scores.ravel(), kind="stable")[::-1]  # no ties here
  assert set(np.flatnonzero(got)) == set(order[:700])


def test_tiny_floats_are_ranked_too():
  scores = np.arange(-8, 8).astype(jnp.float8_e4m3fn)
  np.testing.assert_array_equal(
    mc.topk_masks([jnp.asarray(scores)], [5])[0], reference_mask(scores, 5)
  )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("eager", [False, True])
def test_functions_give_the_masks_of_their_scores(dtype, eager):
  w = draw_scores(0, "normal", (96, 128), dtype)
  g = draw_scores(1, "few", (96, 128), dtype)
  mask = draw_scores(2, "few", (96, 128), jnp.bool_)
  minus_inf = jnp.asarray(-jnp.inf, dtype)

  def lazy(w, g, mask):
    return mc.topk_masks(
      [
        lambda: jnp.abs(w),
        lambda: jnp.abs(w * g),
        lambda: jnp.where(mask, jnp.abs(w), minus_inf),
        lambda: jax.nn.relu(w.astype(jnp.float32)),
      ],
      [1000, 2000, 3000, 4000],
    )

  run = lazy if eager else jax.jit(lazy)
  wanted = [
    np.abs(w),
    np.abs(np.asarray(jnp.asarray(w) * jnp.asarray(g))),
    np.where(mask, np.abs(w), np.asarray(minus_inf)),
    np.maximum(w.astype(np.float32), 0),
  ]
  got = run(*map(jnp.asarray, (w, g, mask)))
  for i, (scores, one) in enumerate(zip(wanted, got, strict=True)):
    np.testing.assert_array_equal(
      one, reference_mask(scores, 1000 * (i + 1)), f"function {i}"
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scores_given_as_functions_are_never_stored(dtype):
  shape = jax.ShapeDtypeStruct((512, 2048), dtype)
  mask = jax.ShapeDtypeStruct((512, 2048), jnp.uint8)

  def masks(w, g, m):
    minus_inf = jnp.asarray(-jnp.inf, w.dtype)
    lazy = [
      lambda: jnp.abs(w),
      lambda: jnp.abs(w * g),
      lambda: jnp.where(m, jnp.abs(w), minus_inf),
    ]
    return mc.topk_masks(lazy, [100_000] * 3)

  memory = jax.jit(masks).lower(shape, shape, mask).compile()
  stored = memory.memory_analysis().temp_size_in_bytes
  assert stored <= 0.1 * 3 * 512 * 2048


def test_static_and_traced_counts_agree():
  scores = jnp.asarray(draw_scores(3, "few", (61, 53), jnp.float32))
  static = mc.topk_masks([scores], [777])[0]
  traced = jax.jit(lambda s, k: mc.topk_masks([s], [k])[0])(scores, 777)
  np.testing.assert_array_equal(static, traced)


@pytest.mark.parametrize("shape", [(7, 5), (96, 128)])
def test_vmap_equals_one_by_one(shape):
  scores = np.stack(
    [draw_scores(i, k, shape, jnp.float32) for i, k in enumerate(KINDS)]
  )
  ones = np.arange(1, 7, dtype=np.int32) * 5
  masks = jax.vmap(lambda s, k: mc.topk_masks([s], [k])[0])
  for run in (masks, jax.jit(masks)):
    got = run(jnp.asarray(scores), jnp.asarray(ones))
    for mask, score, one in zip(got, scores, ones, strict=True):
      np.testing.assert_array_equal(mask, reference_mask(score, one))
  shared = jax.jit(jax.vmap(lambda s: mc.topk_masks([s], [7])[0]))
  np.testing.assert_array_equal(shared(scores)[2], reference_mask(scores[2], 7))


def test_scan_equals_one_by_one():
  scores = np.stack(
    [draw_scores(i, "few", (96, 128), jnp.float32) for i in range(3)]
  )
  step = lambda _, s: (None, mc.topk_mask_calculator(s, 0.9))
  got = jax.jit(lambda s: jax.lax.scan(step, None, s)[1])(scores)
  for mask, score in zip(got, scores, strict=True):
    np.testing.assert_array_equal(mask, reference_mask(score, 1229))


def test_gradients_pass_a_mask_by():
  loss = lambda x: jnp.sum(jnp.where(mc.topk_mask_calculator(x, 0.6), x, 0))
  x = jnp.array([1.0, 5.0, 2.0, 3.0, 4.0])
  np.testing.assert_array_equal(jax.grad(loss)(x), [0, 1, 0, 0, 1])


def test_no_leaves_and_empty_leaves_give_empty_masks():
  assert mc.topk_masks([], []) == []
  assert mc.topk_masks([], 0, together=True) == []
  (mask,) = mc.topk_masks([jnp.zeros((0, 3))], [0])
  assert mask.shape == (0, 3) and mask.dtype == jnp.uint8


def test_wrong_requests_name_the_cure():
  with pytest.raises(ValueError, match="2 counts for 1 leaves"):
    mc.topk_masks([jnp.ones(3)], [1, 2])
  with pytest.raises(ValueError, match=r"use jnp\.abs"):
    mc.topk_masks([jnp.ones(3, jnp.complex64)], [1])
  for sparsity in (1.0, -0.1, float("nan"), 90):
    with pytest.raises(ValueError, match="fraction removed"):
      mc.num_ones(10, sparsity)
  with pytest.raises(ValueError, match="below 2"):
    mc.num_ones(1 << 32, 0.5)


# Counts ---------------------------------------------------------------------

SIZES = [0, 1, 2, 7, 10, 1000, 2**24 + 1, 2**31 - 1, 2**31 + 6, 2**32 - 1]


def exact_ones(size: int, sparsity: float) -> int:
  kept = size * (1 - fractions.Fraction(sparsity))
  return min(size, max(1, round(kept)))


traced_ones = jax.jit(lambda s: [mc.num_ones(size, s) for size in SIZES])


@pytest.mark.quick
@hypothesis.given(
  st.one_of(
    st.floats(0, 1, exclude_max=True, width=32),
    # Halves to round, for each size a different set of them.
    st.integers(0, 2**24 - 1).map(lambda i: i / 2**24),
    st.integers(0, 199).map(lambda i: i / 200),
  )
)
def test_counts_are_exact_static_and_traced(sparsity):
  value = np.float32(sparsity)
  hypothesis.assume(value < 1)
  traced = traced_ones(value)
  for size, ones in zip(SIZES, traced, strict=True):
    assert mc.num_ones(size, sparsity) == exact_ones(size, sparsity)
    assert mc.num_ones(size, value) == exact_ones(size, float(value))
    assert int(ones) == exact_ones(size, float(value)), size


def test_counts_round_half_to_even():
  assert [mc.num_ones(n, 0.5) for n in (1, 3, 5, 7, 9)] == [1, 2, 2, 4, 4]
  half = jnp.float32(0.5)
  assert [int(mc.num_ones(n, half)) for n in (1, 3, 5, 7, 9)] == [1, 2, 2, 4, 4]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_counts_of_short_floats_are_those_of_their_value(dtype):
  value = jnp.asarray(0.9, dtype)
  assert mc.num_ones(10**9, value) == exact_ones(10**9, float(value))


def test_a_scheduled_count_falls_to_exactly_the_target():
  size, target = 123_456_789, 0.9
  ramp = jnp.linspace(0, np.float32(target), 50)
  count = jax.jit(lambda v: mc.num_ones(size, mc.AtStep(v, target)))
  counts = [int(count(v)) for v in ramp]
  assert counts == sorted(counts, reverse=True)
  assert counts[-1] == exact_ones(size, target)
  assert min(counts) == exact_ones(size, target)


# Structured and packed masks ------------------------------------------------


@hypothesis.settings(max_examples=30)
@hypothesis.given(
  st.integers(0, 2**32),
  st.sampled_from(KINDS),
  st.sampled_from([(2, 4, 0), (1, 2, -1), (3, 3, 0), (1, 6, 1), (1, 1, 0)]),
)
def test_n_by_m_keeps_the_n_largest_of_each_group(seed, kind, pattern):
  n, m, axis = pattern
  scores = draw_scores(seed, kind, (12, 18), jnp.float32)
  got = np.asarray(mc.n_by_m_mask(scores, n, m, axis))
  lanes = np.moveaxis(scores, axis, -1).reshape(-1, m)
  masks = np.moveaxis(got, axis, -1).reshape(-1, m)
  for lane, mask in zip(lanes, masks, strict=True):
    np.testing.assert_array_equal(mask, reference_mask(lane, n))


def test_a_rank_is_the_place_in_a_stable_sort():
  # Many equal scores: sorts that are not stable differ from about 16 on.
  scores = np.random.default_rng(0).integers(0, 3, (4, 500))
  wanted = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
  np.testing.assert_array_equal(mc.rank(jnp.asarray(scores)), wanted)


def test_n_by_m_acts_on_the_contraction_axis_by_default():
  scores = jnp.arange(32.0).reshape(8, 4)
  assert mc.n_by_m_mask(scores, 1, 8).tolist() == [[0] * 4] * 7 + [[1] * 4]


def test_n_by_m_refuses_what_does_not_divide():
  with pytest.raises(ValueError, match="not divisible by m=4; pad it"):
    mc.n_by_m_mask(jnp.ones((6, 4)), 2, 4)
  with pytest.raises(ValueError, match="0 < n <= m"):
    mc.n_by_m_mask(jnp.ones((8, 4)), 5, 4)


@pytest.mark.parametrize("shape", [(), (1,), (8,), (3, 7), (0,), (5, 8, 3)])
def test_packing_is_numpys_and_comes_back(shape):
  mask = np.random.default_rng(0).integers(0, 2, shape).astype(np.uint8)
  packed = mc.pack_mask(jnp.asarray(mask))
  np.testing.assert_array_equal(packed, np.packbits(mask))
  back = mc.unpack_mask(packed, shape)
  assert back.dtype == jnp.uint8
  np.testing.assert_array_equal(back, mask)


def test_unpacking_inside_a_select_stores_nothing():
  shape = (512, 1024)

  def keep(packed, x):
    return jnp.where(mc.unpack_mask(packed, shape), x, 0)

  program = jax.jit(keep).lower(
    jax.ShapeDtypeStruct((512 * 128,), jnp.uint8),
    jax.ShapeDtypeStruct(shape, jnp.float32),
  )
  analysis = program.compile().memory_analysis()
  assert analysis.temp_size_in_bytes < 1000


def test_topk_fn_is_the_mask_of_a_sparsity_type():
  class Type:
    def mask(self, scores, sparsity):
      return scores, sparsity

  assert mc.get_topk_fn(Type())(1, 2) == (1, 2)
