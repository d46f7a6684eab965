"""What every registered noun owes; registering one enrols it here.

The examples of docs/extending come from outside the package: each page is run,
and what it registers must keep the same contract as the library's own entries.
"""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner import api, post_training, sparse
from jaxpruner.compare import questions, tasks
from jaxpruner.post_training import _pattern, solve_layer
from jaxpruner.post_training.calibration import Statistics
from jaxpruner.post_training.solvers.table import SOLVERS
from jaxpruner.sparse.formats import FORMATS, Kept
from jaxpruner.sparsity_distributions.table import DISTRIBUTIONS
from jaxpruner.sparsity_schedules import SCHEDULES
from jaxpruner.sparsity_types import _spec

PAGES = pathlib.Path(__file__).parent.parent / "docs" / "extending"
TABLES = {
  "algorithm": api._REGISTRY,
  "sparsity_type": _spec.TYPES,
  "distribution": DISTRIBUTIONS,
  "schedule": SCHEDULES,
  "format": FORMATS,
  "solver": SOLVERS,
  "task": tasks.TASKS,
  "question": questions.QUESTIONS,
}
OUTSIDE = "(from outside)"
create = jaxpruner.create_updater_from_config
RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)


def every(noun):
  """Parametrise by all names of a table, and by what its page registers."""
  return pytest.mark.parametrize("name", [*TABLES[noun], OUTSIDE])


def entry(noun, name):
  """Return a name and its entry; run the page for one from outside."""
  table = TABLES[noun]
  if name == OUTSIDE:
    before = set(table)
    text = (PAGES / f"{noun}.md").read_text()
    space = {"__name__": f"page_{noun}"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
      exec(compile(block, noun, "exec"), space)
      if set(table) - before:
        break
    (name,) = set(table) - before
  return name, table.find(name)


def through_json(updater):
  text = json.dumps(jaxpruner.config_from_updater(updater), allow_nan=False)
  assert create(json.loads(text)) == updater


@pytest.mark.quick
@pytest.mark.parametrize("noun", TABLES)
def test_a_taken_name_is_refused_with_both_modules_named(noun):
  table = TABLES[noun]
  name = next(iter(table))
  ours = table._owner(table[name])

  def impostor():
    """Of the same qualified name, in another module."""

  impostor.__qualname__, impostor.__module__ = ours.__qualname__, "elsewhere"
  new = post_training.Solver(impostor) if noun == "solver" else impostor
  with pytest.raises(ValueError, match="choose another for elsewhere") as error:
    table.register(name, new)
  assert f"{ours.__module__}.{ours.__qualname__}" in str(error.value)


@pytest.mark.quick
def test_an_algorithm_of_the_same_class_name_does_not_replace_ours():
  @dataclasses.dataclass(eq=False)
  class RigL(jaxpruner.RigL):
    """A user's."""

  RigL.__qualname__ = "RigL"
  with pytest.raises(ValueError, match="sparse_trainers.RigL"):
    jaxpruner.register_algorithm("rigl", RigL)
  assert jaxpruner.algorithm_class("rigl") is jaxpruner.RigL


def test_an_algorithm_from_outside_prunes_exactly():
  name, cls = entry("algorithm", OUTSIDE)
  pruner = create({"algorithm": name, "sparsity": 0.75})
  _, masks = pruner.instant_sparsify({"w": jnp.asarray(W)})
  assert int(masks["w"].sum()) == 64 and cls.category.cost
  through_json(pruner)


def make_type(cls):
  required = [
    f
    for f in dataclasses.fields(cls)
    if f.default is dataclasses.MISSING
    and f.default_factory is dataclasses.MISSING
  ]
  return cls(*(2, 4, 8)[: len(required)])


@every("sparsity_type")
def test_a_sparsity_type_masks_and_is_written(name):
  name, cls = entry("sparsity_type", name)
  kind = make_type(cls)
  assert jaxpruner.parse_sparsity_type(kind.spec()) == kind
  sparsity = getattr(kind, "sparsity", 0.5)
  mask = jax.jit(lambda s: kind.mask(s, sparsity))(jnp.abs(W))
  assert mask.dtype == jnp.uint8 and mask.shape == W.shape
  assert 0 < int(mask.sum()) == kind.kept(W.shape, sparsity) < W.size
  pruner = create(
    {"algorithm": "magnitude", "sparsity": sparsity, "sparsity_type": kind}
  )
  through_json(pruner)


@every("sparsity_type")
def test_a_sparsity_type_of_units_is_rewired(name):
  name, cls = entry("sparsity_type", name)
  if cls.mask is not jaxpruner.sparsity_types.SparsityType.mask:
    pytest.skip("decides on its masks alone")
  kind = make_type(cls)
  sparsity = getattr(kind, "sparsity", 0.5)
  rigl = create(
    {
      "algorithm": "rigl",
      "sparsity": sparsity,
      "sparsity_type": kind,
      "update_start_step": 1,
      "update_freq": 1,
    }
  )
  tx = rigl.wrap_optax(optax.sgd(0.1))
  params = {"w": jnp.asarray(W)}
  state = tx.init(params)
  ones = int(state.masks["w"].sum())
  params = rigl.post_gradient_update(params, state)
  for _ in range(3):
    grads = {"w": jnp.asarray(RNG.normal(size=W.shape), jnp.float32)}
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  assert int(state.masks["w"].sum()) == ones


@every("distribution")
def test_a_distribution_gives_each_leaf_a_sparsity(name):
  name, _ = entry("distribution", name)
  pruner = create(
    {"algorithm": "magnitude", "dist_type": name, "sparsity": 0.5}
  )
  params = {"in": W, "out": W[:4], "bias": W[0]}
  found = pruner.sparsity_distribution_fn(params)
  assert set(found) == set(params) and found["bias"] is None
  assert all(0 <= s < 1 for s in found.values() if s is not None)
  through_json(pruner)


@every("schedule")
def test_a_schedule_takes_traced_steps_and_is_written(name):
  name, cls = entry("schedule", name)
  pruner = create(
    {
      "algorithm": "magnitude",
      "sparsity": 0.5,
      "schedule": name,
      "total_steps": 40,
    }
  )
  schedule = pruner.scheduler
  assert type(schedule) is cls
  through_json(pruner)
  due = jax.jit(lambda step: jnp.asarray(schedule.is_mask_update_iter(step)))
  level = jax.jit(
    lambda step: jnp.asarray(schedule.get_sparsity_at_step(0.5, step))
  )
  for step in (0, 10, 30, 39):
    assert bool(due(step)) == bool(schedule.is_mask_update_iter(step))
    assert float(level(step)) == schedule.get_sparsity_at_step(0.5, step)
    assert 0 <= float(level(step)) <= 0.5
  assert float(level(40)) == 0.5


# The default stride is that of a TPU's registers: 128 rows, more than W has.
FORMAT_OPTIONS = {"strided_nm": {"n": 4, "m": 4, "stride": 4}}


@every("format")
def test_a_format_packs_multiplies_and_is_differentiated(name):
  name, cls = entry("format", name)
  mask = np.asarray(jaxpruner.NByM(2, 4).mask(jnp.abs(W), 0.5))
  options = FORMAT_OPTIONS.get(name, {})
  packed = sparse.pack(W, mask, format=name, **options)
  x = jnp.asarray(RNG.normal(size=(3, 16)), jnp.float32)
  dense = jnp.where(mask, W, 0)
  if not jnp.issubdtype(packed.values.dtype, jnp.floating):
    # Rounded codes: near the weights, and nothing to differentiate by.
    near = packed.todense()
    np.testing.assert_allclose(near, dense, atol=np.abs(W).max() / 250)
    assert not np.asarray(near)[mask == 0].any()
    np.testing.assert_allclose(x @ packed, x @ near, rtol=1e-4, atol=1e-5)
    assert cls.fits(Kept(mask != 0, 1)) is None  # never chosen unasked
    return
  np.testing.assert_array_equal(packed.todense(), dense)
  np.testing.assert_allclose(x @ packed, x @ dense, rtol=1e-4, atol=1e-5)
  grad = jax.grad(lambda v: jnp.sum((x @ packed.with_values(v)) ** 2))(
    packed.values
  )
  wanted = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(dense)
  wanted = packed.matrix.gather(wanted)
  kept = packed.matrix.positions()[2]
  if kept is not None:
    grad = jnp.where(kept, grad, 0)
  np.testing.assert_allclose(grad, wanted, rtol=1e-3, atol=1e-3)
  options = cls.fits(Kept(mask != 0, 1))
  assert options is None or cls.fromdense(W, mask, **options).shape == W.shape
  assert isinstance(cls.runs_here(), bool)


@every("solver")
@pytest.mark.parametrize("spec", ["unstructured", "2:4"])
def test_a_solver_prunes_exactly_what_is_asked(name, spec):
  name, solver = entry("solver", name)
  x = RNG.normal(size=(64, 16))
  seen = Statistics(
    64,
    jnp.asarray(x.mean(0)[None], jnp.float32),
    jnp.asarray((x**2).mean(0)[None], jnp.float32),
    jnp.asarray((x.T @ x / 64)[None], jnp.float32),
  )
  kind = jaxpruner.parse_sparsity_type(spec)
  solve = functools.partial(
    solve_layer.prune, W[None], seen, 0.5, _pattern.Pattern(kind)
  )
  new, mask = solve(settings=solve_layer.Settings(name))
  assert int(mask.sum()) == W.size // 2
  assert np.isfinite(new).all() and not np.asarray(new)[mask == 0].any()
  given, _ = solve(settings=solve_layer.Settings(solver))
  np.testing.assert_array_equal(given, new)


@every("task")
def test_a_task_is_a_frozen_dataclass_with_a_metric(name):
  name, cls = entry("task", name)
  task = tasks.make_task(name, {"steps": 3})
  assert task.steps == 3 and cls.__doc__ and task.metric and task.name
  with pytest.raises(dataclasses.FrozenInstanceError):
    task.steps = 4
  params = jax.eval_shape(task.init, jax.random.key(0))
  assert jax.tree.leaves(params)
