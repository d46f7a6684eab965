"""nanodo: wrap inside MultiSteps, whose `gradient_step` its trainer reads."""

import functools

import framework
import jax
import numpy as np
import pytest
from framework import STEPS, assert_same, assert_sparse, make_pruner

framework.require("nanodo --source nanodo=DIR", "nanodo")

import flax.linen as nn
import orbax.checkpoint as ocp
from jax.experimental import mesh_utils
from nanodo import model, optimizer, train
from nanodo.configs import default

import jaxpruner

MICRO = 2


@functools.cache
def make_config():
  c = default.get_config()
  c.model.update({"L": 8, "D": 16, "F": 32, "N": 1, "H": 2})
  c.opt.update(
    {
      "num_train_steps": STEPS,
      "warmup_steps": 2,
      "peak_learning_rate": 0.01,
      "init_learning_rate": 0.001,
      "final_learning_rate": 0.001,
      "grad_accumulation_steps": MICRO,
    }
  )
  return c


def make(algorithm, fsdp, monkeypatch):
  """Return nanodo's trainer, with its optimizer wrapped inside MultiSteps."""
  base = optimizer._get_base_optimizer
  pruner = make_pruner(algorithm)
  monkeypatch.setattr(
    optimizer,
    "_get_base_optimizer",
    lambda c: pruner.wrap_optax(base(c)),  # added
  )
  c = make_config()
  shape = model.DoConfig(**c.model.to_dict(), V=16)
  shape.fsdp_enabled = fsdp
  devices = mesh_utils.create_device_mesh((jax.device_count(),))
  mesh = jax.sharding.Mesh(devices, ("data",))
  rng = jax.random.PRNGKey(0)
  shardings, state = train._init_train_state(
    c, model.TransformerDo(shape), rng, mesh=mesh
  )
  monkeypatch.undo()
  return train.Trainer(c, state, mesh, shardings)


def run(trainer, steps):
  rng = np.random.default_rng(0)
  words = rng.integers(1, 16, size=(8, 8)).astype(np.int32)
  for step in range(trainer.step, trainer.step + steps):
    for _ in range(MICRO):
      trainer.do_step(step, jax.numpy.asarray(words))


def save_and_restore(state, fresh, folder):
  """Go through a checkpoint as nanodo's `_restore_ckpt` does."""
  save = ocp.CheckpointManager(
    folder.resolve(), {"state": ocp.Checkpointer(ocp.PyTreeCheckpointHandler())}
  )
  save.save(1, {"state": state})
  args = ocp.checkpoint_utils.construct_restore_args(fresh)
  return save.restore(
    1, items={"state": fresh}, restore_kwargs={"state": {"restore_args": args}}
  )["state"]


@framework.each_kind
@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "fsdp"])
def test_a_trainer_ends_exactly_sparse_and_resumes(
  algorithm, fsdp, tmp_path, monkeypatch
):
  trainer = make(algorithm, fsdp, monkeypatch)
  run(trainer, STEPS - 10)
  again = make(algorithm, fsdp, monkeypatch)
  again.state = save_and_restore(trainer.state, again.state, tmp_path)
  assert_same(jax.tree.leaves(again.state), jax.tree.leaves(trainer.state))
  run(trainer, 10)
  run(again, 10)
  assert_same(jax.tree.leaves(again.state), jax.tree.leaves(trainer.state))
  assert trainer.step == STEPS == int(trainer.state.opt_state.gradient_step)
  params, opt_state = nn.unbox((trainer.state.params, trainer.state.opt_state))
  # The clock of the pruner counts real steps, not micro-steps.
  assert int(jaxpruner.find_state(opt_state).count) == STEPS
  assert_sparse(params, opt_state, grows=algorithm == "rigl")
