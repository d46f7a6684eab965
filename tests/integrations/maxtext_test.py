"""MaxText: its own training loop, with a pruner around its optimizer."""

import pathlib

import framework
import jax
from framework import STEPS, assert_sparse, make_pruner

import jaxpruner

framework.require("maxtext", "maxtext")

import flax.linen as nn
import maxtext
from flax import nnx
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, train_utils

from jaxpruner.integrations.maxtext import pruned


def settings(folder, steps):
  base = pathlib.Path(maxtext.__file__).parent / "configs" / "base.yml"
  return [
    "train",
    str(base),
    "run_name=sparse",
    f"base_output_directory={folder}",
    "dataset_type=synthetic",
    f"steps={steps}",
    "enable_checkpointing=true",
    f"checkpoint_period={STEPS - 1}",
    "async_checkpointing=false",
    "base_emb_dim=32",
    "base_mlp_dim=64",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "base_num_decoder_layers=2",
    "head_dim=16",
    "vocab_size=128",
    "max_target_length=16",
    "per_device_batch_size=1",
    "hardware=cpu",
    "skip_jax_distributed_system=true",
    "attention=dot_product",
    "enable_goodput_recording=false",
    "gcs_metrics=false",
  ]


def pick(tree, masks):
  """Return the entries of a tree that have a mask, and the masks."""
  if not hasattr(masks, "items"):
    return tree, masks
  pairs = {
    key: pick(tree[key], mask)
    for key, mask in masks.items()
    if jax.tree.leaves(mask)
  }
  return tuple({k: pair[i] for k, pair in pairs.items()} for i in (0, 1))


def parts(state):
  """Parameters and masks; NNX turns an Optax state into dictionaries."""
  found = nnx.to_pure_dict(state)
  masks = found["optimizer"]["opt_state"]["stored_masks"]
  params, masks = pick(found["model"], masks)
  return params, jaxpruner.SparseState(masks)


@framework.each_kind
def test_maxtext_ends_exactly_sparse_and_resumes(algorithm, tmp_path):
  grows = algorithm == "rigl"
  with pruned(make_pruner(algorithm)):  # added
    state = train.train_loop(*train.initialize(settings(tmp_path, STEPS)))
    assert_sparse(*parts(state), grows=grows)
    again = settings(tmp_path, STEPS + 2)
    state = train.train_loop(*train.initialize(again))
    params, opt_state = parts(state)
    assert_sparse(params, opt_state, grows=grows)


def with_dense(params, masks):
  """Return masks for all leaves, None where NNX left a dense one out."""
  if not hasattr(params, "items"):
    return masks if hasattr(masks, "shape") else None
  return {
    key: with_dense(node, masks.get(key, {})) for key, node in params.items()
  }


def test_straight_through_equals_a_plain_loop(tmp_path):
  pruner = make_pruner("magnitude_ste")
  options = [*settings(tmp_path / "own", STEPS), "dtype=float32"]
  with pruned(pruner):
    end = nnx.to_pure_dict(train.train_loop(*train.initialize(options)))
  # What MaxText sets up for a run without a pruner, for a loop of ours.
  options = [*settings(tmp_path / "plain", STEPS), "dtype=float32"]
  config, recorder = train.initialize(options)
  setup = train_utils.setup_train_loop(config, recorder)
  mesh, schedule, loader, start = setup[4], setup[5], setup[7], setup[-1]
  graph, params, rest = nnx.split(start.model, nnx.Param, ...)
  batch = loader.load_next_batch()

  @jax.jit
  @jax.grad
  def grad_of_loss(params):
    nnx.replace_by_pure_dict(state := jax.tree.map(lambda x: x, shown), params)
    model = nnx.merge(graph, state, rest)
    return train.loss_fn(model, config, dict(batch), None, None)[0]

  shown, params = params, nnx.to_pure_dict(params)

  def grad(params):
    with jax.set_mesh(mesh), nn.logical_axis_rules(config.logical_axis_rules):
      grads = grad_of_loss(params)
    limit = config.gradient_clipping_threshold
    return maxtext_utils.apply_gradient_clipping(grads, None, limit)

  masks = with_dense(params, end["optimizer"]["opt_state"]["stored_masks"])
  framework.assert_straight_through(
    pruner,
    optimizers.get_optimizer(config, schedule),
    params,
    grad,
    (pick(end["model"], params)[0], jaxpruner.SparseState(masks)),
    # MaxText scans its layers, along the second axis.
    stacked=lambda path: 1 if "'layers'" in path else None,
  )


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("maxtext")
