"""Stop and resume equals never having stopped, bit for bit."""

import functools

import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small_model import (
  STEPS,
  adam_trainer,
  assert_close,
  assert_identical,
  every_mechanism,
  make_batch,
  make_params,
  reference_run,
)

HALFWAY = STEPS // 2


def through_orbax(tree, template, folder):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "checkpoint", tree)
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(folder / "checkpoint", template)


def through_msgpack(tree, template, folder):
  path = folder / "checkpoint.msgpack"
  path.write_bytes(flax.serialization.to_bytes(tree))
  return flax.serialization.from_bytes(template, path.read_bytes())


def describe(tree):
  """Return a template of shapes: what a new process knows before restoring."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )


@functools.cache
def packed_run(name):
  trainer = adam_trainer(name, packed=True)
  history = [trainer.start(make_params())]
  for _ in range(STEPS):
    history.append(trainer.jitted(*history[-1], make_batch()))
  return history


def resume(trainer, history, restored):
  """Finish the run from a restored state; return it, and check no retrace."""
  # The run may be older than a change of JAX's settings, which empties caches.
  trainer.jitted(*history[HALFWAY], make_batch())
  before = trainer.traces
  result = trainer.run(*restored, make_batch(), STEPS - HALFWAY)
  assert trainer.traces == before, "a restored state was traced anew"
  assert_identical(result, history[-1])


@every_mechanism
def test_orbax_resumes_bit_for_bit(name, tmp_path):
  history = reference_run(name)
  halfway = history[HALFWAY]
  restored = through_orbax(halfway, describe(halfway), tmp_path)
  assert_identical(restored, halfway)
  resume(adam_trainer(name), history, restored)


@every_mechanism
def test_msgpack_resumes_bit_for_bit(name, tmp_path):
  history, trainer = reference_run(name), adam_trainer(name)
  # Another seed's start is a template with none of the values.
  template = trainer.start(make_params(seed=5))
  restored = through_msgpack(history[HALFWAY], template, tmp_path)
  assert_identical(restored, history[HALFWAY])
  resume(trainer, history, restored)


@pytest.mark.parametrize("save", [through_orbax, through_msgpack])
@pytest.mark.parametrize("name", ["magnitude", "magnitude_ste", "set", "rigl"])
def test_packed_masks_resume_bit_for_bit(name, save, tmp_path):
  history, trainer = packed_run(name), adam_trainer(name, packed=True)
  halfway = history[HALFWAY]
  template = describe(halfway)
  if save is through_msgpack:
    template = trainer.start(make_params(seed=5))
  resume(trainer, history, save(halfway, template, tmp_path))


def replicated_on_eight():
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  return jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(
    mesh, jax.P("data")
  )


def with_sharding(tree, sharding):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
  )


@pytest.mark.parametrize("name", ["magnitude", "magnitude_ste", "set", "rigl"])
def test_resuming_on_more_or_fewer_devices_changes_nothing(name, tmp_path):
  history, trainer = reference_run(name), adam_trainer(name)
  whole, split = replicated_on_eight()
  alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  batch = jax.device_put(make_batch(), split)

  # One device to eight: the file is as good as the memory.
  start = history[2]
  (tmp_path / "up").mkdir()
  up = through_orbax(start, with_sharding(start, whole), tmp_path / "up")
  assert_identical(up, start)
  in_memory = trainer.run(*jax.device_put(start, whole), batch, 2)
  from_file = trainer.run(*up, batch, 2)
  assert_identical(from_file, in_memory)
  assert_close(from_file, history[4])

  # And back to one.
  (tmp_path / "down").mkdir()
  down = through_orbax(
    from_file, with_sharding(from_file, alone), tmp_path / "down"
  )
  assert_identical(down, from_file)
  result = trainer.run(*down, make_batch(), STEPS - 4)
  moved = jax.device_put(jax.tree.map(np.asarray, from_file), alone)
  assert_identical(result, trainer.run(*moved, make_batch(), STEPS - 4))
  assert_close(result, history[-1])


def test_a_state_restored_without_its_masks_is_refused():
  """Orbax restores None wherever the template says so, silently."""
  params, state = reference_run("magnitude")[HALFWAY]
  bare = state._replace(masks=jax.tree.map(lambda _: None, params))
  with pytest.raises(ValueError, match="'in/kernel'.*restore checkpoints"):
    adam_trainer("magnitude").tx.update(params, bare, params)
