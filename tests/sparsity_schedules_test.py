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
from jaxpruner._tools import registry

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
  schedule = schedules.NoUpdateSchedule()
  assert schedule.is_mask_update_iter(step) is False
  assert schedule.get_sparsity_at_step({"w": 0.5}, step) == {"w": 0.5}


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
  for kind in schedules.SCHEDULES.values():
    if issubclass(kind, schedules.PeriodicSchedule):
      with pytest.raises(ValueError, match="update_freq=0"):
        kind(0, end, end + gap)


@pytest.mark.parametrize("step", [-1, 0.5, "3", None, True])
def test_one_shot_asks_for_a_step(step):
  with pytest.raises(ValueError, match="target_step"):
    schedules.OneShotSchedule(step)


def test_a_schedule_is_registered_by_its_name():
  class Mine(schedules.BaseSchedule):
    pass

  with registry.restored():
    assert schedules.register_schedule("mine")(Mine) is Mine
    assert schedules.SCHEDULES["mine"] is Mine
    for wrong in (Mine(), int, "mine"):
      with pytest.raises(ValueError, match="subclass of"):
        schedules.register_schedule("wrong")(wrong)
    assert "wrong" not in schedules.SCHEDULES


@pytest.mark.parametrize("jitted", [False, True])
def test_alternating_is_dense_before_then_by_turns_then_sparse(jitted):
  schedule = schedules.AlternatingSchedule(3, 2, 13)
  at = lambda step: schedule.get_sparsity_at_step(0.5, step)
  at = jax.jit(at) if jitted else at
  # Phases of 3 steps from step 2 on, sparse first; sparse from 13 on.
  expected = [0] * 2 + [1] * 3 + [0] * 3 + [1] * 3 + [0] * 2 + [1] * 5
  assert [float(at(i)) * 2 for i in range(len(expected))] == expected


def test_geometric_removes_a_fifth_of_the_rest_and_ends_at_its_target():
  schedule = schedules.GeometricSchedule(10, 5, 45)
  assert schedule.fraction == 0.2
  found = [
    float(schedule.get_sparsity_at_step(0.9, step))
    for step in (0, 4, 5, 14, 15, 25, 44, 45, 99)
  ]
  target = float(np.float32(0.9))
  rounds = [0, 0, 1, 1, 2, 3, 4]
  expected = [1 - 0.8**n for n in rounds] + [target, target]
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert found[-2:] == [target, target]
  # Never beyond the target, though a round would go further.
  assert float(schedule.get_sparsity_at_step(0.1, 5)) == np.float32(0.1)


@pytest.mark.parametrize("name", ["Alternating", "Geometric"])
def test_schedules_with_an_end_ask_for_it(name):
  build = getattr(schedules, f"{name}Schedule")
  with pytest.raises(ValueError, match="update_end_step=None"):
    build(10, 5)
  build(10, 5, 5)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2, 1, "0.2", None, True])
def test_a_geometric_fraction_lies_between_zero_and_one(fraction):
  with pytest.raises(ValueError, match="fraction="):
    schedules.GeometricSchedule(10, 5, 45, fraction)


@pytest.mark.parametrize(
  "schedule",
  [
    schedules.NoUpdateSchedule(),
    schedules.OneShotSchedule(3),
    schedules.PeriodicSchedule(3, 2),
    schedules.PeriodicSchedule(3, 2, 9),
    schedules.PolynomialSchedule(3, 2, 9, 2.0),
    schedules.AlternatingSchedule(3, 2, 9),
    schedules.GeometricSchedule(3, 2, 9, 0.5),
  ],
  ids=lambda s: type(s).__name__,
)
def test_a_schedule_is_made_again_from_its_configuration(schedule):
  config = schedule.to_config()
  assert None not in config.values()
  assert set(config) <= set(type(schedule).config_keys())
  assert type(schedule).from_config(config | {"other": 1}) == schedule
  assert set(type(schedule).needs) <= set(config)


def test_defaults_of_schedules_are_documented_ones():
  assert schedules.OneShotSchedule().target_step == 0
  periodic = schedules.PeriodicSchedule()
  assert (periodic.update_freq, periodic.update_start_step) == (100, 0)
  assert periodic.update_end_step is None
