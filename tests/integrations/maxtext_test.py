"""MaxText: its own training loop, with a pruner around its optimizer."""

import pathlib

import framework
import jax
from framework import STEPS, assert_sparse, make_pruner

import jaxpruner

framework.require("maxtext", "maxtext")

import maxtext
from flax import nnx
from maxtext.trainers.pre_train import train

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


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("maxtext")
