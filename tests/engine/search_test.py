"""Laws of a pass: brackets shrink, probes lie inside, the search ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpruner import engine
from jaxpruner.engine import order, search, warm_start

KEYS = st.integers(-(2**31) + 1, 2**31 - 1)


def state_of(low, high, reach, beyond, keep, evenly=False):
  """The state of one segment of int32 keys."""
  guess = jnp.zeros(search.PROBES, jnp.int32)
  state = search.start(
    jnp.uint32(keep), jnp.uint32(reach or 1), guess, jnp.dtype("int32")
  )
  return state._replace(
    low=jnp.int32(low),
    high=jnp.int32(high),
    reach=jnp.uint32(reach),
    beyond=jnp.uint32(beyond),
    evenly=jnp.array(evenly),
  )


@pytest.mark.quick
def test_the_bounds_move_to_the_probes_nearest_to_the_threshold():
  # The example of the README: 7 3 9 3 1 3 8 2, keep 4.
  scores = np.array([7, 3, 9, 3, 1, 3, 8, 2])
  probes = np.array([2, 4, 6, 8, 8, 8])
  state = state_of(0, 9, 8, 0, 4)
  state = state._replace(probes=jnp.asarray(probes, jnp.int32))
  counts = (scores[:, None] >= probes).sum(0)
  new = search._narrow(state, jnp.asarray(counts, jnp.uint32))
  found = [int(x) for x in (new.low, new.high, new.reach, new.beyond)]
  assert found == [2, 3, 7, 3]


@pytest.mark.quick
def test_a_search_ends_even_if_counts_are_wrong():
  row = state_of(0, 9, 8, 0, 4).pack()
  wrong = lambda _: jnp.zeros(search.PROBES, jnp.uint32)
  state = search.unpack(jax.jit(lambda r: search.search(r, wrong))(row))
  assert int(state.passes) == search.LIMIT


@given(KEYS, KEYS, st.integers(0, 2**20), st.data())
def test_probes_lie_inside_the_bracket(one, other, inside, data):
  low, high = min(one, other), max(one, other)
  beyond = data.draw(st.integers(0, 100))
  keep = beyond + data.draw(st.integers(1, inside + 1))
  evenly = data.draw(st.booleans())
  state = state_of(low, high, beyond + inside + 1, beyond, keep, evenly)
  probes = np.asarray(search._next_probes(state), np.int64)
  assert probes.min() > low
  assert probes.max() <= max(high, low + 1)


@pytest.mark.quick
@pytest.mark.parametrize("width", [1, 5, search.PROBES])
def test_a_narrow_bracket_is_counted_value_by_value(width):
  probes = search._next_probes(state_of(10, 10 + width, 99, 3, 50))
  assert set(probes.tolist()) >= set(range(11, 11 + width))


@pytest.mark.quick
def test_interpolated_probes_surround_the_expected_threshold():
  # 1000 scores spread evenly over 100,000 keys: 700 are to be exceeded.
  probes = np.asarray(search._next_probes(state_of(0, 100_000, 1000, 0, 300)))
  middle = search.PROBES // 2
  assert probes[middle - 1] < 70_000 < probes[middle]
  deviation = 100 * np.sqrt(1000 * 0.7 * 0.3)
  np.testing.assert_allclose(probes[-1] - 70_000, 4 * deviation, rtol=0.1)
  # Where it is certain, half a score's worth of keys is one deviation.
  probes = np.asarray(search._next_probes(state_of(0, 100_000, 1000, 0, 1000)))
  np.testing.assert_allclose(probes[-1], 4 * 50, atol=1)


@pytest.mark.quick
def test_a_hint_follows_the_thresholds_and_its_error_decays():
  level = order.sort_key(jnp.array([1.5, 2.0, -8.0]))
  # Met by chance; missed by 0.25; the first threshold of a leaf.
  hint = jnp.array([[1.0, 0.5, 8.0], [1.0, 0.75, 0.5], [0.0, 0.0, jnp.inf]])
  found = warm_start.follow(hint, level, jnp.dtype("float32"))
  wanted = [[1.5, 0.5, 2.0], [2.0, 1.0, 0.25], [-8.0, 0.0, 0.25]]
  np.testing.assert_array_equal(found, wanted)


@pytest.mark.quick
def test_a_certain_hint_is_looked_at_key_by_key():
  hint = jnp.array([[1.0, 0.5, 0.0]])  # threshold, last move, error
  probes = warm_start.guess(hint, jnp.dtype("float32"))
  key = int(order.sort_key(jnp.float32(1.5)))
  assert (np.asarray(probes)[0] - key).tolist() == [-2, -1, 1, 2]


@pytest.mark.parametrize("wrong", [np.nan, 0.0, -1e15, 1e15])
@pytest.mark.parametrize("scores", ["normal", "ties"])
def test_a_search_ends_whatever_interpolation_says(monkeypatch, wrong, scores):
  # After `PATIENCE` passes every pass leaves a sixth of the bracket.
  away = np.full(search.PROBES, wrong, np.float32)
  monkeypatch.setattr(search, "_AWAY", away)
  monkeypatch.setattr(search, "PATIENCE", 4)
  passes = []
  advance = search.advance

  def noted(state, counts):
    jax.debug.callback(lambda: passes.append(1))
    return advance(state, counts)

  monkeypatch.setattr(search, "advance", noted)
  values = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
  if scores == "ties":
    values[values < 1] = 0
  chosen = jax.jit(lambda x: engine.select([x], [1000]).masks[0])
  mask = chosen(jnp.asarray(values))
  jax.effects_barrier()
  wanted = np.zeros(values.size, np.uint8)
  wanted[np.argsort(-values, kind="stable")[:1000]] = 1
  np.testing.assert_array_equal(mask, wanted)
  # 32 bits of keys, then 12 bits of indices, 2.6 bits a pass.
  assert len(passes) <= 2 * search.PATIENCE + 13 + 5


@pytest.mark.quick
def test_a_state_survives_packing():
  state = state_of(-7, 2**31 - 1, 9, 3, 5)
  again = search.unpack(state.pack())
  for name, one, other in zip(state._fields, state, again, strict=True):
    np.testing.assert_array_equal(one, other, err_msg=name)
    assert one.dtype == other.dtype, name


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_first_probes_lie_between_the_bounds(dtype):
  keys = np.iinfo(order.key_dtype(dtype))
  probes = order.landmarks(jnp.dtype(dtype))
  assert probes.shape == (search.PROBES,)
  if jnp.issubdtype(dtype, jnp.floating):
    most = -float(jnp.finfo(dtype).max)
    common = jnp.array([0, 2**-10, 2**-5, 1, most, jnp.inf], dtype)
    assert probes.tolist() == order.sort_key(common).tolist()
  assert keys.min < probes.min()
  assert probes.max() <= keys.max
