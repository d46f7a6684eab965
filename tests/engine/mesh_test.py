"""Laws of selection over devices: same masks, and only counters cross."""

import contextlib
import re
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpruner import mask_calculator as mc
from jaxpruner.engine import search

SHAPES = [(64, 1040), (16, 24, 8)]
SPECS = [(P("a", "b"), P("a", None, "b")), (P(None, ("a", "b")), P())]
ONES = [9000, 100]


def weights(kind="few"):
  rng = np.random.default_rng(0)
  x = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
  return [np.round(8 * w) for w in x] if kind == "few" else x


def masks(*params):
  return mc.topk_masks([lambda w=w: jnp.abs(w) for w in params], ONES)


def joint_masks(*params):
  lazy = [lambda w=w: jnp.abs(w) for w in params]
  return mc.topk_masks(lazy, 5000, together=True)


def crossing_bytes(text: str) -> list[int]:
  """The size of each result of a collective in compiled HLO."""
  widths = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "s16": 2}
  collective = re.compile(
    r"= (.+?) (?:all-gather|all-reduce|all-to-all|collective-permute|"
    r"reduce-scatter|collective-broadcast|ragged-all-to-all)(?:-start)?\("
  )
  sizes = []
  for line in text.splitlines():
    match = collective.search(line)
    if match:
      for kind, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match.group(1)):
        shape = [int(d) for d in dims.split(",") if d]
        sizes.append(int(np.prod(shape)) * widths.get(kind, 4))
  return sizes


def place(params, specs, kind):
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
  # An Auto mesh is unknown while tracing: only the arrays carry it.
  explicit = kind == AxisType.Explicit
  context = jax.set_mesh(mesh) if explicit else contextlib.nullcontext()
  shardings = [NamedSharding(mesh, spec) for spec in specs]
  return context, list(map(jax.device_put, params, shardings)), shardings


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("specs", SPECS)
def test_eight_devices_give_the_masks_of_one(kind, specs):
  params = weights()
  alone = jax.jit(masks)(*params)
  context, sharded, shardings = place(params, specs, kind)
  with context:
    program = jax.jit(masks).lower(*sharded).compile()
    got = program(*sharded)
  for mask, want, sharding in zip(got, alone, shardings, strict=True):
    np.testing.assert_array_equal(mask, want)
    assert mask.sharding.is_equivalent_to(sharding, mask.ndim)
  crossing = crossing_bytes(program.as_text())
  assert crossing, "the weights are sharded, so something must cross"
  assert max(crossing) <= 100
  assert sum(crossing) <= 10_000 * len(params)


def test_only_counts_of_large_leaves_cross(monkeypatch):
  # Sums over rows first would cross devices where columns are sharded.
  monkeypatch.setattr(search, "ONE_THREAD", 0)
  context, sharded, _ = place(weights()[:1], [P("a", "b")], AxisType.Auto)
  with context:
    choose = jax.jit(lambda w: mc.topk_masks([w], [9001])[0])
    program = choose.lower(*sharded).compile()
  crossing = crossing_bytes(program.as_text())
  assert crossing
  assert max(crossing) <= 100


def test_leaves_ranked_together_over_devices_are_those_of_one():
  params = weights()
  alone = jax.jit(joint_masks)(*params)
  context, sharded, _ = place(params, SPECS[0], AxisType.Auto)
  with context:
    got = jax.jit(joint_masks)(*sharded)
    eager = joint_masks(*sharded)
  for mask, again, want in zip(got, eager, alone, strict=True):
    np.testing.assert_array_equal(mask, want)
    np.testing.assert_array_equal(again, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_n_by_m_stays_where_the_weights_are(kind):
  params = weights("normal")
  alone = mc.n_by_m_mask(params[0], 2, 4)
  context, sharded, _ = place(params[:1], [P("a", "b")], kind)
  with context:
    program = jax.jit(lambda w: mc.n_by_m_mask(w, 2, 4)).lower(*sharded)
    program = program.compile()
    np.testing.assert_array_equal(program(*sharded), alone)
  assert not crossing_bytes(program.as_text())


@pytest.mark.parametrize("checked", [True, False])
def test_inside_shard_map_selection_is_local(checked):
  mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
  x = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
  local = lambda x: mc.topk_masks([x], [100])[0]
  got = jax.jit(
    jax.shard_map(
      local, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=checked
    )
  )(x)
  for shard, mask in zip(np.split(x, 8), np.split(got, 8), strict=True):
    np.testing.assert_array_equal(mask, local(jnp.asarray(shard)))


WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(
  f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxpruner import mask_calculator as mc

mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
w = np.round(np.random.default_rng(0).standard_normal((64, 96)) * 8)
w = w.astype(np.float32)
make = lambda spec: jax.make_array_from_callback(
  w.shape, NamedSharding(mesh, spec), lambda index: w[index])
masks = jax.jit(lambda w: mc.topk_masks([lambda: jnp.abs(w)], [1000])[0])
order = np.argsort(-np.abs(w).ravel(), kind="stable")[:1000]
want = np.zeros(w.size, np.uint8)
want[order] = 1
want = want.reshape(w.shape)
for spec in (P("a"), P(None, "a")):
  for shard in masks(make(spec)).addressable_shards:
    np.testing.assert_array_equal(shard.data, want[shard.index])
print("same masks")
"""


@pytest.mark.slow
def test_two_processes_give_the_masks_of_one(tmp_path):
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = str(probe.getsockname()[1])
  script = tmp_path / "worker.py"
  script.write_text(textwrap.dedent(WORKER))
  workers = [
    subprocess.Popen(
      [sys.executable, str(script), port, str(rank)],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
  assert all("same masks" in output for output in outputs), outputs
