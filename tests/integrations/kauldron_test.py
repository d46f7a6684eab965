"""Kauldron: `Trainer(optimizer=…)`, one line."""

import framework
from framework import SGD, assert_same, assert_sparse, make_batch, make_pruner

framework.require("kauldron", "kauldron")

import flax.linen as nn
from kauldron import kd


class Model(nn.Module):
  x: kd.kontext.Key = "batch.x"

  @nn.compact
  def __call__(self, x):
    return {"y": nn.Dense(4)(nn.relu(nn.Dense(16)(x)))}


def load():
  x, y = make_batch()
  return {"x": x, "y": y}


def make(algorithm, folder, seed):
  return kd.train.Trainer(
    seed=seed,
    workdir=str(folder),
    train_ds=kd.data.InMemoryPipeline(batch_size=16, loader=load),
    model=Model(),
    num_train_steps=framework.STEPS,
    optimizer=make_pruner(algorithm).wrap_optax(SGD),  # added
    train_losses={"loss": kd.losses.L2(preds="preds.y", targets="batch.y")},
    checkpointer=kd.ckpts.Checkpointer(save_interval_steps=framework.STEPS),
  )


@framework.each_kind
def test_a_trainer_ends_exactly_sparse_and_restores(algorithm, tmp_path):
  state, _ = make(algorithm, tmp_path, seed=0).train()
  assert_sparse(state.params, state.opt_state, grows=algorithm == "rigl")
  # Another seed would end elsewhere, did it not find the checkpoint.
  again, _ = make(algorithm, tmp_path, seed=1).train()
  assert_same(again.opt_state, state.opt_state)
  assert_sparse(again.params, again.opt_state, grows=algorithm == "rigl")
