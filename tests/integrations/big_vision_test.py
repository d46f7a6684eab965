"""big_vision: its train loop, fully sharded; wrap after `bv_optax.make`."""

import sys
import types

import framework
import jax
import numpy as np
from framework import STEPS, assert_same, assert_sparse, make_pruner

framework.require("big_vision --source big_vision=DIR", "big_vision", "einops")

import ml_collections
import pytest
import tensorflow as tf
from big_vision import optax as bv_optax
from big_vision import train
from big_vision import utils as u


class DataSource:
  """Sixteen images, one batch."""

  total_examples = 16

  def get_tfdata(self, ordered, **options):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(16, 8, 8, 3)).astype(np.float32)
    labels = np.eye(4, dtype=np.float32)[rng.integers(4, size=16)]
    return tf.data.Dataset.from_tensor_slices(
      {"image": images, "labels": labels}
    )


def make_config(steps):
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "total_steps": steps,
      "num_classes": 4,
      "input": {
        "data": {"name": "bv:sixteen"},
        "batch_size": 16,
        "pp": "keep('image', 'labels')",
      },
      "log_training_steps": 100,
      "ckpt_steps": 1000,
      "model_name": "vit",
      "model": {"variant": "mu/4"},
      "optax_name": "scale_by_adam",
      "lr": 0.01,
      "schedule": {"decay_type": "rsqrt", "timescale": 50, "warmup_steps": 2},
      "mesh": [("data", -1)],
      "sharding_strategy": [
        (".*", 'fsdp(axis="data", min_size_to_shard_mb=0)')
      ],
      "evals": {},
    }
  )


@pytest.fixture
def run(monkeypatch):
  """Return `(pruner, folder, steps) -> the state big_vision saved last`."""
  module = types.ModuleType("big_vision.datasets.sixteen")
  module.DataSource = DataSource
  monkeypatch.setitem(sys.modules, module.__name__, module)
  make, save, saved = bv_optax.make, u.save_checkpoint_ts, []

  def record(manager, state, *rest):
    saved.append(jax.device_get(state))
    save(manager, state, *rest)

  monkeypatch.setattr(u, "save_checkpoint_ts", record)
  # Waits for other hosts at the end, with a name that JAX has removed.
  monkeypatch.setattr(u, "sync", lambda: None)
  monkeypatch.setattr(u, "startstop_prof", lambda *_: None)

  def run(pruner, folder, steps):
    def sparse_make(*args, **kwargs):
      tx, schedules = make(*args, **kwargs)
      return pruner.wrap_optax(tx), schedules  # added

    monkeypatch.setattr(bv_optax, "make", sparse_make)
    flags = types.SimpleNamespace(
      config=make_config(steps), workdir=str(folder), cleanup=False
    )
    monkeypatch.setattr(train.flags, "FLAGS", flags)
    u.chrono = u.Chrono()
    train.main(None)
    return saved[-1]["params"], saved[-1]["opt"]

  return run


@framework.each_kind
def test_a_loop_ends_exactly_sparse_and_resumes(algorithm, run, tmp_path):
  # big_vision takes its step from the learning rate's, which would rest while
  # masks change.
  pruner = make_pruner(algorithm, skip_gradients=False)
  params, state = run(pruner, tmp_path / "whole", STEPS)
  assert int(state.count) == STEPS
  assert_sparse(params, state, grows=algorithm == "rigl")
  run(pruner, tmp_path / "parts", STEPS - 20)
  assert_same(run(pruner, tmp_path / "parts", STEPS), (params, state))
