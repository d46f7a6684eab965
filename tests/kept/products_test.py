"""Products with kept weights equal dense products, with both gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner import kept
from jaxpruner.kept import (
  bitmaps,
  block_products,
  choosing,
  growth,
  layouts,
  places,
  products,
  rewiring,
)
from jaxpruner.updater import draw


@pytest.fixture(params=["kernel", "decoded"])
def kernel(request, monkeypatch):
  if request.param == "decoded":
    monkeypatch.setattr(products, "load", lambda: None)
  elif products.load() is None:
    pytest.skip("needs numba")


@pytest.mark.parametrize("batch", [1, 17, 40, 150])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(33, 70), (5, 70_000)])
def test_product_and_gradients_equal_dense_ones(
  kernel, batch, transposed, shape
):
  if shape[1] > 100 and batch != 17:
    pytest.skip("wide indices are tested once")
  w = kept.create(jax.random.key(0), shape, 0.8)
  dense = np.asarray(w.todense(), np.float64)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(batch, shape[transposed])).astype(np.float32)
  g = rng.normal(size=(batch, shape[not transposed])).astype(np.float32)
  product = lambda x, v: products.product(x, v, w.layout, transposed)

  @jax.jit
  def run(x, v, g):
    y, back = jax.vjp(product, x, v)
    return y, *back(g)

  y, dx, dv = run(x, w.values, g)
  m = dense.T if transposed else dense
  outer = g.T @ x if transposed else x.T @ g
  close = lambda a, b: np.testing.assert_allclose(
    a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max()
  )
  close(y, x @ m)
  close(dx, g @ m.T)
  close(dv, w.layout.gather(jnp.asarray(outer)))


@pytest.mark.skipif(products.load() is None, reason="needs numba")
def test_panels_are_transposed_rows_and_zeros_beyond_the_batch():
  """By whole tiles, at the edge of rows, and with several threads."""
  rng = np.random.default_rng(0)
  for batch, size, width in (5, 7, 16), (130, 70, 64), (512, 400, 128):
    x = rng.normal(size=(batch, size)).astype(np.float32)
    panels = -(-batch // width)
    wanted = np.zeros((panels * width, size), np.float32)
    wanted[:batch] = x
    wanted = wanted.reshape(panels, width, size).transpose(0, 2, 1)
    np.testing.assert_array_equal(products._panels(x, width), wanted)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("room", [700, 2**22])
def test_blocks_are_multiplied_some_at_a_time(transposed, room, monkeypatch):
  """No side is a multiple of the block's; the last blocks come alone."""
  monkeypatch.setattr(block_products, "ROOM", room)
  w = kept.create(jax.random.key(0), (33, 70), 0.5, block=(8, 16))
  dense = np.asarray(w.todense(), np.float64)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(7, w.shape[transposed])).astype(np.float32)
  g = rng.normal(size=(7, w.shape[not transposed])).astype(np.float32)
  product = lambda x, v: products.product(x, v, w.layout, transposed)
  rows = np.array([0, 32, 7, 7])

  @jax.jit
  def run(x, v, g):
    y, back = jax.vjp(product, x, v)
    return y, *back(g), block_products.look_up(v, w.layout, rows)

  y, dx, dv, found = run(x, w.values, g)
  m = dense.T if transposed else dense
  outer = g.T @ x if transposed else x.T @ g
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  close(y, x @ m)
  close(dx, g @ m.T)
  close(dv, w.layout.gather(jnp.asarray(outer)))
  np.testing.assert_array_equal(found, dense.astype(np.float32)[rows])


def test_half_precision_accumulates_in_float32(kernel):
  w = kept.from_dense(jnp.ones((512, 2), jnp.bfloat16))
  y = jnp.ones((1, 512), jnp.bfloat16) @ w
  assert y.dtype == jnp.bfloat16
  assert y.tolist() == [[512.0, 512.0]]


@jax.jit
def look(mask, count):
  words = bitmaps.pack(mask)
  return (
    bitmaps.unpack(words, mask.size),
    bitmaps.positions(words, mask.size),
    bitmaps.ranks(words, jnp.arange(mask.size)),
    bitmaps.positions(bitmaps.lowest(words, count), mask.size),
  )


@given(st.integers(0, 2**31), st.floats(0, 1), st.integers(0, 160))
def test_bitmaps_count_and_find_as_numpy_does(seed, density, count):
  mask = np.random.default_rng(seed).random(150) < density
  bits, found, ranks, low = map(np.asarray, look(mask, count))
  where = np.flatnonzero(mask)
  np.testing.assert_array_equal(bits, mask)
  np.testing.assert_array_equal(found[: len(where)], where)
  assert (found[len(where) :] == -1).all()
  np.testing.assert_array_equal(ranks, np.cumsum(mask) - mask)
  taken = min(count, len(where))
  np.testing.assert_array_equal(low[:taken], where[:taken])
  assert (low[taken:] == -1).all()


SHAPE, COUNT = (13, 37), 70
arrange = jax.jit(lambda p, s: layouts.arrange(p, s, SHAPE, 1))


@given(st.integers(0, 2**31))
def test_lists_are_sorted_whatever_the_order_of_slots(seed):
  rng = np.random.default_rng(seed)
  rows, columns = SHAPE
  positions = rng.permutation(rows * columns)[:COUNT].astype(np.int32)
  slots = rng.permutation(COUNT).astype(np.int32)
  plain = layouts.from_sorted(np.sort(positions), SHAPE, 1, "")
  own = np.arange(COUNT, dtype=np.int32)
  jax.tree.map(
    np.testing.assert_array_equal, plain, arrange(np.sort(positions), own)
  )
  layout = arrange(positions, slots)
  order = np.argsort(positions)
  np.testing.assert_array_equal(layout.positions(), positions[order])
  np.testing.assert_array_equal(layout.by_row.slots, slots[order])
  row, column = positions // columns, positions % columns
  order = np.lexsort((row, column))
  np.testing.assert_array_equal(layout.by_column.slots, slots[order])
  np.testing.assert_array_equal(layout.by_column.indices, row[order])
  starts = np.searchsorted(np.sort(column), np.arange(columns + 1))
  np.testing.assert_array_equal(layout.by_column.starts, starts)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("count", [37, 500])
def test_growth_takes_exactly_the_highest_and_the_lower_of_equals(
  small, count, monkeypatch
):
  monkeypatch.setattr(choosing, "SMALL", 10**6 if small else 256)
  monkeypatch.setattr(choosing, "TILE", 1024)
  rng = np.random.default_rng(1)
  scores = rng.integers(0, 40, (50, 31)).astype(np.float32)  # many are equal
  excluded = rng.random(scores.shape) < 0.3
  find = jax.jit(
    lambda scores, excluded: choosing.highest(
      lambda rows: scores[rows],
      *scores.shape,
      count,
      count,
      bitmaps.pack(excluded),
    )
  )
  words, finite = find(scores, excluded)
  assert bool(finite)
  free = np.where(excluded, -1, scores).ravel()
  wanted = np.sort(np.argsort(-free, kind="stable")[:count])
  np.testing.assert_array_equal(bitmaps.positions(words, count), wanted)


@functools.cache
def update(fn, shape):
  most = layout_of(shape).count
  if fn is rewiring._in_kernel:  # more leaves than threads
    return jax.jit(lambda *leaf: fn(leaf, leaf, leaf, leaf, leaf))
  return jax.jit(functools.partial(fn, most=most))


@functools.cache
def layout_of(shape):
  size = shape[0] * shape[1]
  chosen = np.random.default_rng(2).choice(size, size // 7 + 1, replace=False)
  return layouts.from_sorted(np.sort(chosen).astype(np.int32), shape, 1, "w")


@pytest.mark.skipif(rewiring.load() is None, reason="needs numba")
@pytest.mark.parametrize("kind", ["random", "gradient", "zero", "overflow"])
@pytest.mark.parametrize("shape", [(3, 5), (50, 131), (3, 70_000)])
def test_a_mask_update_in_machine_code_is_the_one_with_bitmaps(shape, kind):
  """Integer factors give exact scores, with ties; so do integer values."""
  rng = np.random.default_rng(3)
  layout = layout_of(shape)
  values = jnp.asarray(rng.integers(-9, 9, layout.count), jnp.float32)
  if kind == "random":
    scores = growth.random(jnp.array([1, 2], jnp.uint32), 3, "w", shape, 1)
  else:
    left, right = (
      rng.integers(-2, 3, (7, n)).astype(np.float32) for n in shape
    )
    left *= kind != "zero"
    if kind == "overflow":
      left[0, 0] = right[0, 0] = 1e30
    scores = growth.gradient([(jnp.asarray(left), jnp.asarray(right))])
  for left in {0, int(0.7 * layout.count), layout.count}:
    fast, slow = (
      update(fn, shape)(values, layout, scores, jnp.int32(left))
      for fn in (rewiring._in_kernel, rewiring._with_bitmaps)
    )
    for found in fast:
      if left < layout.count:
        assert bool(found[2]) == bool(slow[2]) == (kind != "overflow")
      jax.tree.map(np.testing.assert_array_equal, found[:2], slow[:2])
      if kind == "overflow":
        jax.tree.map(np.testing.assert_array_equal, found[0], layout)


@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3])
def test_random_scores_are_those_of_masked_training(axis):
  """Of a stack, layer by layer, wherever its layers are."""
  data = jax.random.key_data(jax.random.key(3))
  shape = (4, 5, 6, 7)
  whole = draw.draw(data, 5, [jnp.zeros(shape)], (("a", "kernel"),))[0]
  scores = growth.random(data, 5, "a/kernel", shape, 2, axis)
  rows = jnp.arange(2, 12)
  if axis is None:
    np.testing.assert_array_equal(
      scores.rows(rows), whole.reshape(20, -1)[2:12]
    )
    return
  inner = np.moveaxis(np.asarray(whole), axis, 0)
  matrix = inner.reshape(shape[axis], *places.fold(inner.shape[1:], 2))
  found = jax.vmap(lambda scores: scores.rows(rows))(scores)
  np.testing.assert_array_equal(found, matrix[:, 2:12])


def test_creation_and_training_never_make_the_dense_array():
  """Creation counts on bitmaps; a step holds nothing but activations."""
  make = lambda key: kept.create(key, (2**15, 2**14), 0.99)
  dense = 4 * 2**29
  key = jax.random.key(0)
  memory = jax.jit(make).lower(key).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 0.45 * dense

  def step(w, x):
    loss = lambda v: jnp.sum(products.product(x, v, w.layout) ** 2)
    return jax.grad(loss)(w.values)

  w, x = (
    jax.eval_shape(make, key),
    jax.ShapeDtypeStruct((8, 2**15), jnp.float32),
  )
  memory = jax.jit(step).lower(w, x).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 0.01 * dense


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.999])
def test_creation_keeps_the_exact_count(sparsity):
  w = kept.create(jax.random.key(1), (100, 99), sparsity)
  assert w.values.size == round(9900 * (1 - sparsity))
  assert int(w.layout.mask().sum()) == w.values.size


def test_bad_weights_are_refused():
  with pytest.raises(ValueError, match="'a/b'.*int32.*filter_fn"):
    kept.from_dense(np.ones((2, 2), np.int32), name="a/b")
  with pytest.raises(ValueError, match=r"shape \(3,\) has no kept form"):
    kept.create(jax.random.key(0), (3,), 0.5)
  with pytest.raises(ValueError, match="keeps no weight"):
    kept.from_dense(np.zeros((2, 2), np.float32))
  with pytest.raises(ValueError, match="initializer='he'.*he_normal"):
    kept.create(jax.random.key(0), (3, 3), 0.5, initializer="he")
  with pytest.raises(ValueError, match="2\\*\\*31"):
    kept.create(jax.random.key(0), (2**16, 2**16), 0.99)
