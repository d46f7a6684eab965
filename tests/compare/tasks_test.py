"""Every task obeys the interface; layers agree with JAX's own."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.compare import layers, tasks
from jaxpruner.compare.tasks import (
  base,
  dqn_mspacman,
  fed_fashion,
  t5_spans,
)
from jaxpruner.inspect import cost as report

shape = jax.ShapeDtypeStruct
IMAGES = {
  "train_x": shape((30, 28, 28), jnp.uint8),
  "train_y": shape((30,), jnp.int32),
  "test_x": shape((20, 28, 28), jnp.uint8),
  "test_y": shape((20,), jnp.int32),
}
COLOUR = IMAGES | {
  "train_x": shape((30, 32, 32, 3), jnp.uint8),
  "test_x": shape((20, 32, 32, 3), jnp.uint8),
}
TEXT = {
  "train": shape((10_000,), jnp.uint8),
  "test": shape((90_000,), jnp.uint8),
}
DATA = {
  "digits": IMAGES
  | {
    "train_x": shape((30, 64), jnp.float32),
    "test_x": shape((20, 64), jnp.float32),
  },
  "fashion": IMAGES,
  "fashion-mlp": IMAGES,
  "cifar10": COLOUR,
  "cifar10-vit": COLOUR,
  "sotu": TEXT,
  "enwik8": TEXT,
  "t5-spans": TEXT,
  "fed-fashion": IMAGES | {"clients": shape((100, 9), jnp.int32)},
  "fed-sotu": TEXT
  | {"first": shape((20,), jnp.int32), "length": shape((20,), jnp.int32)},
  "addition": {
    "train": shape((30, 19), jnp.uint8),
    "test": shape((20, 19), jnp.uint8),
    "longer": shape((20, 19), jnp.uint8),
  },
  "copy": {
    "train": shape((30, 22), jnp.uint8),
    "test": shape((20, 22), jnp.uint8),
    "longer": shape((20, 22), jnp.uint8),
  },
  "word-problems": {
    "train": shape((30, 48), jnp.uint8),
    "test": shape((20, 48), jnp.uint8),
    "varied": shape((20, 48), jnp.uint8),
  },
  "digits-longtail": IMAGES
  | {
    "train_x": shape((30, 64), jnp.float32),
    "test_x": shape((20, 64), jnp.float32),
    "tail_x": shape((6, 64), jnp.float32),
    "tail_y": shape((6,), jnp.int32),
  },
  "fashion-longtail": IMAGES
  | {
    "tail_x": shape((6, 28, 28), jnp.uint8),
    "tail_y": shape((6,), jnp.int32),
  },
  "translation": {
    "train": shape((30, 58), jnp.uint8),
    "test": shape((20, 58), jnp.uint8),
  },
  "dqn-minatar": {"frame": shape((10, 10, 4), jnp.float32)},
  "dqn-mspacman": {"frame": shape((84, 84, 4), jnp.float32)},
}
DATA |= {
  "digits-dropout": DATA["digits"],
  "fashion-dropout": DATA["fashion"],
}
NEEDS = {"dqn-minatar": "gymnax", "dqn-mspacman": "ale_py"}


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_task_trains_and_evaluates_abstractly(name):
  """Traces everything a cell runs, without data and without compiling."""
  if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
    pytest.skip(f"{NEEDS[name]} is not installed")
  task = tasks.make_task(name)

  def everything(data, key):
    params = task.init(key)
    env_state = task.start(params, data, key)
    env_state, batch = task.interact(env_state, params, data, key, jnp.int32(3))
    loss, grads = task.gradient(task.loss, params, batch, key)
    return loss, params, grads, task.evaluate(params, data)

  draw = lambda data: task.batches(data, jax.random.key(0), jnp.int32(3))
  key = jax.eval_shape(lambda: jax.random.key(0))
  loss, params, grads, metrics = jax.eval_shape(everything, DATA[name], key)
  assert loss.shape == ()
  assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
  assert metrics[task.metric].shape == ()
  inputs = jax.eval_shape(task.example, DATA[name])
  if not name.startswith("dqn"):  # calibration on training batches
    found = jax.eval_shape(lambda data: task.inputs(draw(data)), DATA[name])
    draw_shapes = lambda tree: jax.tree.map(lambda x: x.shape[1:], tree)
    assert draw_shapes(found) == draw_shapes(inputs)
  flops = report.count_flops(task.apply, params, inputs)
  kernels = {
    report.path_name(path)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    if report.path_name(path).endswith("kernel")
  }
  assert kernels <= set(flops.leaves)


@pytest.mark.parametrize("size, stride, pad", [(3, 1, 1), (3, 2, 1), (8, 4, 0)])
def test_convolution_is_jaxs(size, stride, pad):
  params = layers.conv_init(jax.random.key(0), size, 2, 3)
  x = jax.random.normal(jax.random.key(1), (2, 12, 12, 2))
  expected = jax.lax.conv_general_dilated(
    x,
    params["kernel"],
    (stride, stride),
    [(pad, pad), (pad, pad)],
    dimension_numbers=("NHWC", "HWIO", "NHWC"),
  )
  found = layers.conv(params, x, stride, pad)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick
def test_calibration_error_is_the_sum_over_bins():
  rng = np.random.default_rng(0)
  confidence = rng.uniform(0.1, 1, 200).astype(np.float32)
  right = rng.uniform(size=200) < confidence**2
  expected = 0.0
  for low in range(15):
    inside = np.clip((confidence * 15).astype(int), 0, 14) == low
    if inside.any():
      gap = right[inside].mean() - confidence[inside].mean()
      expected += abs(gap) * inside.mean()
  found = base.calibration_error(
    jnp.asarray(confidence), jnp.asarray(right), jnp.ones(200)
  )
  assert float(found) == pytest.approx(expected, rel=1e-4)


def test_evaluation_counts_every_example_once():
  class Echo(base.Classification):
    def apply(self, params, inputs):
      del params
      return inputs

  rng = np.random.default_rng(0)
  labels = rng.integers(0, 4, 2345)
  right = rng.uniform(size=2345) < 0.7
  shown = np.where(right, labels, (labels + 1) % 4)
  data = {
    "test_x": jnp.asarray(9.0 * np.eye(4, dtype=np.float32)[shown]),
    "test_y": jnp.asarray(labels),
  }
  found = Echo().evaluate({}, data)
  assert float(found["accuracy"]) == pytest.approx(100 * right.mean(), abs=1e-3)


def test_one_local_step_of_one_client_is_its_gradient():
  loss = lambda w, batch, _key: ((w - batch) ** 2).sum()
  w = jnp.array([1.0, 2.0])
  batch = jnp.array([[[0.5, 0.5]]])  # one client, one step
  value, change = fed_fashion.federated_gradient(
    loss, w, batch, jax.random.key(0), 0.1
  )
  np.testing.assert_allclose(change, 0.1 * 2 * (w - batch[0, 0]), rtol=1e-5)
  assert float(value) == pytest.approx(2.5)


def test_every_client_has_its_own_mixture_and_only_valid_rows():
  labels = np.arange(1000) % 10
  rows = fed_fashion.dirichlet_split(labels)
  assert rows.shape == (100, 600) and rows.max() < 1000
  share = [np.bincount(labels[r], minlength=10).max() / 600 for r in rows]
  assert np.mean(share) > 0.35  # far from uniform


def test_corruption_loses_nothing():
  task = tasks.make_task("t5-spans")
  text = jax.random.randint(jax.random.key(0), (4, 128), 0, 256)
  source, target = task.corrupt(text, jax.random.key(1))
  for row in range(4):
    spans = np.asarray(target[row]).reshape(t5_spans.SPANS, -1)
    rebuilt = []
    for token in np.asarray(source[row]):
      if token >= 256:
        assert spans[token - 256][0] == token
        rebuilt += spans[token - 256][1:].tolist()
      else:
        rebuilt.append(int(token))
    assert rebuilt == np.asarray(text[row]).tolist()


def test_attention_cannot_see_the_future():
  params = layers.block_init(jax.random.key(0), 8)
  x = jax.random.normal(jax.random.key(1), (1, 5, 8))
  changed = x.at[0, 3:].add(1.0)
  before = layers.block(params, x, 2, causal=True)
  after = layers.block(params, changed, 2, causal=True)
  np.testing.assert_allclose(before[0, :3], after[0, :3], rtol=1e-5)
  assert not np.allclose(before[0, 3:], after[0, 3:])


def test_ms_pacman_is_judged_by_the_points_of_the_game():
  pytest.importorskip("ale_py")
  number, n = jnp.int32(77), 2
  dqn_mspacman._reset(number, n)
  rewards = [
    np.asarray(dqn_mspacman._step(number, jnp.full(n, t // 15 % 9))[1])
    for t in range(120)
  ]
  assert np.max(rewards) >= 10  # a pellet
