"""Orbax: masks verified on restore, in one process and in two."""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

import framework
import jax
import numpy as np
import optax
import pytest
from framework import SGD, assert_same, assert_sparse, make_pruner

framework.require("core", "orbax")

import orbax.checkpoint as ocp

from jaxpruner.integrations import orbax


@functools.cache
def trained():
  pruner = make_pruner("rigl")
  rng = np.random.default_rng(0)
  params = {
    "a": jax.numpy.asarray(rng.normal(size=(8, 16)), "float32"),
    "bias": jax.numpy.zeros(16),
  }
  tx = pruner.wrap_optax(SGD)
  opt_state = tx.init(params)
  step = jax.jit(lambda p, s: tx.update(jax.tree.map(lambda x: x - 1, p), s, p))
  for _ in range(framework.STEPS):
    updates, opt_state = step(params, opt_state)
    params = optax.apply_updates(params, updates)
  return pruner, tx, params, opt_state


def test_a_checkpoint_gives_back_the_same_bits(tmp_path):
  pruner, tx, params, opt_state = trained()
  assert_sparse(params, opt_state)
  with orbax.SparseCheckpoints(tmp_path, pruner, max_to_keep=2) as saved:
    for step in (1, 2, 3):
      saved.save(step, params, opt_state)
    found = saved.restore(params, tx.init(params))
    assert saved.manager.all_steps() == [2, 3]
  assert_same(found, (params, opt_state))


def test_another_pruners_checkpoint_is_refused(tmp_path):
  pruner, tx, params, opt_state = trained()
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    saved.save(1, params, opt_state)
  with (
    orbax.SparseCheckpoints(tmp_path, make_pruner("set")) as other,
    pytest.raises(ValueError, match="saved by another pruner"),
  ):
    other.restore(params, opt_state)


def test_a_checkpoint_without_a_pruner_is_refused(tmp_path):
  pruner, tx, params, opt_state = trained()
  with ocp.CheckpointManager(tmp_path.resolve()) as bare:
    tree = {"params": params, "opt_state": opt_state}
    bare.save(1, args=ocp.args.StandardSave(tree))
  with (
    orbax.SparseCheckpoints(tmp_path, pruner) as saved,
    pytest.raises(ValueError, match="another pruner, None"),
  ):
    saved.restore(params, opt_state)


def test_a_template_without_masks_is_refused(tmp_path):
  pruner, tx, params, opt_state = trained()
  bare = opt_state._replace(masks={"a": None, "bias": None})
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    saved.save(1, params, opt_state)
    with pytest.raises((ValueError, KeyError), match="masks"):
      saved.restore(params, bare)


def test_a_mask_changed_on_disk_is_refused(tmp_path):
  pruner, tx, params, opt_state = trained()
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    saved.save(1, params, opt_state)
    saved.manager.wait_until_finished()
    other = opt_state.masks["a"].at[0, 0].set(1 - opt_state.masks["a"][0, 0])
    tree = {
      "params": params,
      "opt_state": opt_state._replace(masks={"a": other, "bias": None}),
    }
    with ocp.StandardCheckpointer() as writer:
      writer.save(tmp_path.resolve() / "1" / "default", tree, force=True)
    with pytest.raises(ValueError, match="masks.*was changed"):
      saved.restore(params, opt_state)


def test_an_empty_folder_says_so(tmp_path):
  pruner, tx, params, opt_state = trained()
  with (
    orbax.SparseCheckpoints(tmp_path, pruner) as saved,
    pytest.raises(FileNotFoundError, match="no checkpoint"),
  ):
    saved.restore(params, opt_state)


def test_the_manifest_sees_places_and_not_devices():
  x = jax.numpy.arange(64, dtype="uint8").reshape(8, 8) % 2
  here = orbax.manifest({"m": x})
  assert here != orbax.manifest({"m": x[:, ::-1]})
  assert here != orbax.manifest({"m": x.at[:2].set(x[:2, ::-1])})
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  spread = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d")))
  assert orbax.manifest({"m": spread}) == here


WORKER = """
import sys
import jax
port, rank, folder = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
import json, numpy as np, optax
import framework
from framework import SGD, make_pruner
from jaxpruner.integrations import orbax

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
split = jax.NamedSharding(mesh, jax.P("d"))
values = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
array = jax.make_array_from_callback((8, 16), split, lambda i: values[i])
params = {"a": array}
pruner = make_pruner()
tx = pruner.wrap_optax(SGD)
opt_state = jax.jit(tx.init)(params)

@jax.jit
def step(params, opt_state):
  updates, opt_state = tx.update(params, opt_state, params)
  return optax.apply_updates(params, updates), opt_state

for _ in range(framework.STEPS):
  params, opt_state = step(params, opt_state)
with orbax.SparseCheckpoints(folder, pruner) as saved:
  saved.save(1, params, opt_state)
  found, state = saved.restore(params, opt_state)
again = orbax.manifest((found, state))
ones = jax.jit(lambda m: m.sum(dtype="int32"))(state.masks["a"])
print(json.dumps({
  "same": again == orbax.manifest((params, opt_state)),
  "mask": again["[1].stored_masks['a']"],
  "ones": int(ones.addressable_data(0)),
  "here": len(state.masks["a"].addressable_shards),
}))
"""


@pytest.mark.slow
def test_two_processes_save_and_restore_one_checkpoint(tmp_path):
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
  environment = {
    **os.environ,
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    "PYTHONPATH": os.pathsep.join(
      [str(pathlib.Path(__file__).parent), *sys.path]
    ),
  }
  workers = [
    subprocess.Popen(
      [sys.executable, "-c", WORKER, str(port), str(rank), str(tmp_path)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=environment,
    )
    for rank in (0, 1)
  ]
  outs = [worker.communicate(timeout=240) for worker in workers]
  assert [w.returncode for w in workers] == [0, 0], outs[0][1] + outs[1][1]
  first, second = (json.loads(out.splitlines()[-1]) for out, _ in outs)
  assert first == second
  assert first["same"] and first["ones"] == 32 and first["here"] == 1
