"""Checkpoints: sums see all bits, any mesh restores, damage gets words."""

import functools
import itertools
import shutil
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("orbax.checkpoint")

import jaxpruner
from jaxpruner.integrations import orbax

ADAM = optax.adam(0.1)


def make_pruner(sparsity=0.5, name="magnitude", end=4):
  schedule = jaxpruner.sparsity_schedules.PolynomialSchedule(
    update_freq=1, update_start_step=1, update_end_step=end
  )
  distribution = functools.partial(
    jaxpruner.sparsity_distributions.uniform, sparsity=sparsity
  )
  return jaxpruner.api.algorithm_class(name)(
    sparsity_distribution_fn=distribution, scheduler=schedule
  )


def make_params():
  w = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
  return {"w": jnp.asarray(w), "b": jnp.zeros(8)}


def step_fn(tx):
  @jax.jit
  def step(params, state):
    grads = jax.tree.map(lambda p: p + 1, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


def spread(tree, count, kind="Auto"):
  """Put a tree on a mesh of so many devices, matrices split by rows."""
  if not count:
    return jax.device_put(tree, jax.devices()[-1])
  kind = getattr(jax.sharding.AxisType, kind)
  mesh = jax.make_mesh(
    (count,), ("d",), axis_types=(kind,), devices=jax.devices()[:count]
  )

  def put(x):
    spec = jax.P("d") if np.ndim(x) == 2 else jax.P()
    return jax.device_put(x, jax.NamedSharding(mesh, spec))

  return jax.tree.map(put, tree)


# --- sums --------------------------------------------------------------------

DTYPES = (
  "float64", "int64", "uint64", "complex64", "complex128", "float32", "int32",
  "bfloat16", "float16", "int16", "uint8", "int8", "float8_e4m3fn", "bool",
)  # fmt: skip


def flips(x):
  """Every array that differs from x in one bit of its second element."""
  width = x.dtype.itemsize
  for bit in range(1 if x.dtype == bool else 8 * width):
    raw = np.array(x).reshape(-1).view(np.uint8)
    raw[width + bit // 8] ^= 1 << bit % 8
    yield raw.view(x.dtype).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_manifest_sees_every_bit_on_host_and_device(dtype):
  x = (np.arange(6) % 5).reshape(2, 3).astype(jnp.dtype(dtype))
  with jax.enable_x64(True):
    sums = [orbax.manifest(y) for y in (x, *flips(x))]
    placed = [orbax.manifest(jnp.asarray(y)) for y in (x, *flips(x))]
  assert sums == placed
  assert len({tuple(s.values()) for s in sums}) == len(sums)
  # Without x64 too: what lies on the host keeps its bits.
  assert orbax.manifest(x) == sums[0]


def test_the_manifest_sees_keys_shapes_and_dtypes():
  x = np.zeros(4, np.float32)
  leaves = [
    jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg"),
    jax.random.split(jax.random.key(0)), x, x.reshape(2, 2), x.view(np.int32),
    x[:0], x[:3], jnp.zeros(4, jnp.int4), 0, 1, 0.0, -0.0,
  ]  # fmt: skip
  texts = {tuple(orbax.manifest(leaf).values()) for leaf in leaves}
  assert len(texts) == len(leaves)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_manifest_does_not_see_devices(kind):
  tree = make_params() | {"z": jnp.ones((8, 8), jnp.complex64)}
  here = orbax.manifest(tree)
  for count in (2, 4, 8):
    assert orbax.manifest(spread(tree, count, kind)) == here


def test_typed_keys_come_back(tmp_path):
  pruner, params = make_pruner(), make_params()
  state = {"key": jax.random.key(3), "n": np.float64(1 + 2**-50)}
  like = {"key": jax.random.key(0), "n": np.float64(0)}
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    saved.save(1, params, state)
    _, found = saved.restore(params, like)
  assert found["n"] == state["n"]
  assert jnp.array_equal(
    jax.random.key_data(found["key"]), jax.random.key_data(state["key"])
  )
  other = like | {"key": jax.random.key(0, impl="rbg")}
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    with pytest.raises(ValueError, match=r"key<fry>.*key<rbg>"):
      saved.restore(params, other)


# --- meshes ------------------------------------------------------------------


# Devices of the mesh; 0 stands for the last device alone, without a mesh.
@pytest.mark.parametrize(
  "source, target", [(1, 4), (4, 1), (4, 8), (8, 2), (4, 0), (0, 4)]
)
def test_the_documented_restore_continues_on_any_mesh(tmp_path, source, target):
  pruner = make_pruner()
  tx = pruner.wrap_optax(ADAM)
  step = step_fn(tx)
  params = spread(make_params(), source)
  state = tx.init(params)
  for _ in range(3):
    params, state = step(params, state)
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    saved.save(3, params, state)
    like = spread(make_params(), target)
    found = saved.restore(like, tx.init(like))
  devices = jax.tree.leaves(like)[0].devices()
  assert all(x.devices() == devices for x in jax.tree.leaves(found))
  expected = step(params, state)
  for _ in range(2):
    found = step(*found)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected
    )
    expected = step(*expected)


def test_shapes_with_shardings_are_a_template(tmp_path):
  pruner = make_pruner()
  tx = pruner.wrap_optax(ADAM)
  params = make_params()
  state = tx.init(params)
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    saved.save(1, params, state)
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      spread(params, 4),
    )
    found = saved.restore(like, jax.eval_shape(tx.init, like))
  assert all(len(x.devices()) == 4 for x in jax.tree.leaves(found))
  step_fn(tx)(*found)


# --- other pruners -----------------------------------------------------------


@pytest.mark.parametrize(
  "other, named",
  [
    (dict(sparsity=0.75), "0.5 there, 0.75 here"),
    (dict(end=6), "4 there, 6 here"),
    (dict(name="set"), "'magnitude' there, 'set' here"),
  ],
)
def test_another_target_schedule_or_algorithm_is_refused(
  tmp_path, other, named
):
  params = make_params()
  pruner = make_pruner()
  state = pruner.wrap_optax(ADAM).init(params)
  with orbax.SparseCheckpoints(tmp_path, pruner) as saved:
    saved.save(1, params, state)
  with orbax.SparseCheckpoints(tmp_path, make_pruner(**other)) as saved:
    with pytest.raises(ValueError, match="saved by another pruner") as caught:
      saved.restore(params, state)
  assert named in str(caught.value)


def test_a_function_of_the_users_counts_by_what_it_holds(tmp_path):
  def pruner(sparsity):
    return jaxpruner.MagnitudePruning(
      sparsity_distribution_fn=lambda params: jax.tree.map(
        lambda x: sparsity if x.ndim > 1 else None, params
      ),
      scheduler=jaxpruner.sparsity_schedules.OneShotSchedule(0),
    )

  with pytest.raises(ValueError):
    jaxpruner.config_from_updater(pruner(0.5))
  assert orbax.fingerprint(pruner(0.5)) == orbax.fingerprint(pruner(0.5))
  assert orbax.fingerprint(pruner(0.5)) != orbax.fingerprint(pruner(0.75))


# --- damage ------------------------------------------------------------------


@functools.cache
def checkpoint(folder):
  """Save one step; return the pruner, templates, and what was saved."""
  pruner = make_pruner()
  tx = pruner.wrap_optax(ADAM)
  params, state = make_params(), tx.init(make_params())
  for _ in range(2):
    params, state = step_fn(tx)(params, state)
  with orbax.SparseCheckpoints(folder, pruner) as saved:
    saved.save(1, params, state)
  return pruner, (params, tx.init(params)), (params, state)


def damaged(path, how, rng):
  content = bytearray(path.read_bytes())
  if how == "gone":
    path.unlink()
    return
  if how == "cut":
    content = content[: rng.integers(len(content) + 1)]
  elif how == "flip" and content:
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
  elif how == "zeros":
    content = bytearray(len(content))
  elif how == "json":
    content = bytearray(rng.choice([b"{}", b"[]", b"null", b"3", b'{"a": 1}']))
  path.write_bytes(content)


def tried(original, work, rng, how, number):
  """Damage one file of a copy; return True if the damage was harmless."""
  shutil.rmtree(work, ignore_errors=True)
  shutil.copytree(original, work)
  files = sorted(p for p in work.rglob("*") if p.is_file())
  damaged(files[number % len(files)], how, rng)
  pruner, like, expected = checkpoint(original)
  try:
    with orbax.SparseCheckpoints(work, pruner, read_only=True) as saved:
      found = saved.restore(*like, step=1)
  except ValueError as error:
    assert "checkpoint" in str(error)
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    assert raised_in == orbax.__file__
    return False
  jax.tree.map(np.testing.assert_array_equal, found, expected)
  return True


HOWS = ("gone", "cut", "flip", "zeros", "json")


def damage_many(tmp_path, rounds):
  checkpoint(tmp_path / "original")
  rng = np.random.default_rng(0)
  files = [p for p in (tmp_path / "original").rglob("*") if p.is_file()]
  for how, i in itertools.product(HOWS, range(rounds * len(files))):
    tried(tmp_path / "original", tmp_path / "work", rng, how, i)
  return len(HOWS) * rounds * len(files)


def damage_many_apart(tmp_path, rounds):
  """Run `damage_many` in a process of its own.

  Orbax leaves the tasks of a failed restore behind. They complain whenever they
  are collected, which pytest would charge to another test.
  """
  code = (
    "import pathlib, runpy, sys\n"
    f"damage = runpy.run_path({__file__!r})['damage_many']\n"
    f"print(damage(pathlib.Path({str(tmp_path)!r}), {rounds}))"
  )
  done = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", code],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return int(done.stdout.split()[-1])


def test_a_damaged_checkpoint_is_refused_in_words_or_unchanged(tmp_path):
  assert damage_many_apart(tmp_path, 1) >= 40


@pytest.mark.slow
def test_many_damaged_checkpoints_are_refused_or_unchanged(tmp_path):
  assert damage_many_apart(tmp_path, 20) >= 800
