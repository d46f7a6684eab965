"""Laws of schedules: when masks are updated, and how far the ramp has come."""

import fractions

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxpruner import sparsity_schedules as schedules

WINDOW = 48  # one length of step vectors, so that programs are reused

targets = st.floats(0, 1, exclude_max=True, width=32)
starts = st.integers(0, 10**6)
powers = st.sampled_from([1, 2, 3, 5, 0.5, 1.5])


@st.composite
def ramps(draw):
  start = draw(starts)
  end = start + draw(st.integers(0, 60) | st.integers(0, 10**6))
  freq = draw(st.integers(1, 70))
  return schedules.PolynomialSchedule(freq, start, end, draw(powers))


@st.composite
def windows(draw, ramp):
  """Steps around the start, the end, or anywhere between."""
  at = draw(
    st.sampled_from([ramp.update_start_step, ramp.update_end_step])
    | st.integers(ramp.update_start_step, ramp.update_end_step)
  )
  first = max(0, at - draw(st.integers(0, WINDOW - 1)))
  return np.arange(first, first + WINDOW, dtype=np.int32)


def sparsities(schedule, target, steps):
  return np.asarray(
    schedule.get_sparsity_at_step(np.float32(target), jnp.asarray(steps))
  )


@pytest.mark.quick
@hypothesis.given(st.data(), ramps())
def test_updates_happen_at_start_every_freq_and_at_the_end(data, ramp):
  steps = data.draw(windows(ramp))
  due = np.asarray(ramp.is_mask_update_iter(jnp.asarray(steps)))
  wanted = reference.update_steps(
    ramp.update_freq,
    ramp.update_start_step,
    ramp.update_end_step,
    int(steps[-1]) + 1,
  )
  assert {int(s) for s in steps[due]} == wanted & set(steps.tolist())


@hypothesis.given(starts, st.integers(1, 70), st.integers(0, 10**6))
def test_an_endless_schedule_never_stops(start, freq, k):
  schedule = schedules.PeriodicSchedule(freq, start)
  assert bool(schedule.is_mask_update_iter(start + k * freq))
  assert not start or not bool(schedule.is_mask_update_iter(start - 1))


@pytest.mark.quick
@hypothesis.given(st.data(), ramps(), targets)
def test_sparsity_is_zero_until_start_and_the_target_from_end(
  data, ramp, target
):
  steps = data.draw(windows(ramp))
  found = sparsities(ramp, target, steps)
  after = steps >= ramp.update_end_step
  before = (steps <= ramp.update_start_step) & ~after
  assert (found[before] == 0).all()
  assert (found[after] == np.float32(target)).all()


@hypothesis.given(st.data(), ramps(), targets)
def test_sparsity_never_falls_nor_exceeds_its_target(data, ramp, target):
  found = sparsities(ramp, target, data.draw(windows(ramp)))
  assert (np.diff(found) >= 0).all()
  assert found.min() >= 0 and found.max() <= np.float32(target)


@hypothesis.given(st.data(), ramps(), targets)
def test_a_higher_target_is_ahead_at_every_step(data, ramp, target):
  steps = data.draw(windows(ramp))
  lower = np.float32(target) * np.float32(0.75)
  assert (
    sparsities(ramp, lower, steps) <= sparsities(ramp, target, steps)
  ).all()


@hypothesis.given(st.data(), ramps(), targets)
def test_ramp_is_zhu_and_guptas_to_float32_rounding(data, ramp, target):
  steps = data.draw(windows(ramp))
  found = sparsities(ramp, target, steps)
  for step, value in zip(steps.tolist(), found.tolist(), strict=True):
    exact = reference.zhu_gupta(
      np.float32(target),
      step,
      ramp.update_start_step,
      ramp.update_end_step,
      ramp.power,
    )
    error = abs(fractions.Fraction(value) - exact)
    assert error <= 8 * 2.0**-24, (step, value, float(exact))


@hypothesis.given(st.data(), ramps(), targets)
def test_ramp_has_the_same_bits_inside_and_outside_jit(data, ramp, target):
  # Start and end become constants of the program: a few of them only.
  ramp = schedules.PolynomialSchedule(
    7, 10, data.draw(st.sampled_from([10, 37, 100_010])), ramp.power
  )
  steps = data.draw(windows(ramp))
  inside = _jitted(ramp)(np.float32(target), steps)
  assert np.array_equal(np.asarray(inside), sparsities(ramp, target, steps))
  single = ramp.get_sparsity_at_step(np.float32(target), int(steps[5]))
  assert np.asarray(inside)[5] == np.asarray(single)


_cache = {}


def _jitted(schedule):
  if schedule not in _cache:
    _cache[schedule] = jax.jit(schedule.get_sparsity_at_step)
  return _cache[schedule]


@hypothesis.given(starts, st.integers(-20, 20), targets)
def test_one_shot_is_dense_before_and_at_target_from_its_step(
  at, offset, target
):
  schedule = schedules.OneShotSchedule(at)
  step = at + offset
  assert bool(schedule.is_mask_update_iter(step)) == (offset == 0)
  wanted = np.float32(target) if offset >= 0 else 0
  assert float(schedule.get_sparsity_at_step(target, step)) == wanted


@hypothesis.given(starts)
def test_no_update_schedule_never_updates(step):
  assert schedules.NoUpdateSchedule().is_mask_update_iter(step) is False


nonsense = st.one_of(
  st.integers(max_value=-1),
  st.floats(),
  st.booleans(),
  st.text(max_size=3),
  st.none(),
)


@hypothesis.given(
  st.sampled_from(
    ["update_freq", "update_start_step", "update_end_step", "power"]
  ),
  nonsense,
)
def test_nonsense_raises_at_construction_and_is_named(argument, value):
  good = dict(update_freq=5, update_start_step=0, update_end_step=20, power=3)
  if (
    argument == "power"
    and isinstance(value, float)
    and 0 < value < float("inf")
  ):
    return
  with pytest.raises(ValueError, match=argument):
    schedules.PolynomialSchedule(**{**good, argument: value})


@hypothesis.given(st.integers(1, 1000), st.integers(0, 1000))
def test_an_end_before_the_start_raises(gap, end):
  for kind in (schedules.PeriodicSchedule, schedules.PolynomialSchedule):
    with pytest.raises(ValueError, match="update_start_step"):
      kind(1, end + gap, end)
  with pytest.raises(ValueError, match="update_freq=0"):
    schedules.PeriodicSchedule(0, end, end + gap)
