"""Block-wise reconstruction and distillation, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpruner import post_training
from jaxpruner import program as _program
from jaxpruner.post_training import _blocks, _stream, calibration, contrib

RNG = np.random.default_rng(0)
MIX = RNG.normal(size=(8, 8)).astype(np.float32)
BATCHES = [
  RNG.normal(size=(4, 16, 8)).astype(np.float32) @ MIX for _ in range(4)
]
FRESH = RNG.normal(size=(32, 16, 8)).astype(np.float32) @ MIX


def layer(p, x):
  """A residual sum twice, as in a transformer."""
  x = x + jnp.tanh(x * p["scale"]) @ p["a"]
  return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def net(params, x):
  for p in params["layers"]:
    x = layer(p, x)
  return x @ params["head"]


def net_params(layers=2, seed=1):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 3
  one = lambda: {
    "scale": np.ones(8, np.float32), "a": draw(8, 8), "up": draw(8, 16),
    "down": draw(16, 8),
  }  # fmt: skip
  return {"head": draw(8, 5), "layers": [one() for _ in range(layers)]}


def inner(names, leaf):
  return names[0] != "head" and leaf.ndim == 2


PARAMS = net_params()
prune_blocks = functools.partial(
  contrib.prune_blocks, net, PARAMS, BATCHES, filter_fn=inner, sparsity=0.5
)


@functools.lru_cache
def reconstructed():
  return prune_blocks(epochs=20, learning_rate=3e-3)


def split(fn, params, batches, span, filter_fn=inner):
  model = calibration.Model(fn, params, batches, filter_fn)
  count = len(model.leaves)
  return model, _blocks.split(model.graph, model.parts, count, span)


@pytest.mark.parametrize("span, blocks", [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_blocks_in_a_row_are_the_function(span, blocks):
  model, found = split(net, PARAMS, BATCHES, span)
  assert len(found) == blocks
  live = [BATCHES[0]]
  for block in found:
    leaves = [model.leaves[i] for i in block.leaves]
    live = _program.run(block.program, [*leaves, *live])
  # What is left is the head, which the filter leaves out.
  np.testing.assert_allclose(
    live[0] @ PARAMS["head"], net(PARAMS, BATCHES[0]), rtol=1e-5, atol=1e-5
  )


def test_a_shared_weight_is_never_cut_apart():
  def twice(p, x):
    return layer(p, layer(p, x))

  _, found = split(
    twice, PARAMS["layers"][0], BATCHES, 1, lambda _, x: x.ndim > 1
  )
  assert len(found) == 1 and len(found[0].parts) == 3


def test_what_the_batch_alone_decides_passes_along():
  def masked(params, batch):
    keep = jnp.where(batch["keep"], 1.0, 0.5)[..., None]
    x = batch["x"]
    for p in params["layers"]:
      x = layer(p, x * keep)
    return x

  params = {"layers": PARAMS["layers"]}
  batches = [{"x": x, "keep": x[..., 0] > 0} for x in BATCHES]
  _, found = split(masked, params, batches, 2)
  assert [len(block.inputs) for block in found] == [2, 2]
  options = {"sparsity": 0.5, "filter_fn": lambda _, x: x.ndim > 1}
  options["method"] = "wanda"  # compiles less than SparseGPT
  new, masks, _ = contrib.prune_blocks(masked, params, batches, **options)
  expected = post_training.prune(masked, params, batches, **options)[1]
  np.testing.assert_array_equal(
    masks["layers"][0]["a"], expected["layers"][0]["a"]
  )
  assert np.isfinite(masked(new, batches[0])).all()


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_without_training_it_is_prune(method):
  new, masks, report = prune_blocks(method=method, epochs=0)
  other = post_training.prune(
    net, PARAMS, BATCHES, filter_fn=inner, sparsity=0.5, method=method
  )
  jax.tree.map(np.testing.assert_array_equal, masks, other[1])
  same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(same, new, other[0])
  assert [l.name for l in report.layers] == [l.name for l in other[2].layers]


def adam_in_float64(w, mask, rows, goals, epochs, rate):
  """y = x w, by the definitions: loss, gradient, Adam, cosine decay."""
  w, m, v, t = w.astype(np.float64), 0.0, 0.0, 0
  rng, total = np.random.default_rng(0), epochs * len(rows)
  for _ in range(epochs):
    for i in rng.permutation(len(rows)):
      x, goal = (a.astype(np.float64).reshape(-1, a.shape[-1])
                 for a in (rows[i], goals[i]))  # fmt: skip
      size = (goal**2).mean(-1, keepdims=True)
      size = np.maximum(size, 1e-3 * size.mean())
      grad = 2 * x.T @ ((x @ w - goal) / size) / goal.size * mask
      t += 1
      m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
      step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
      w = w - rate * (1 + np.cos(np.pi * (t - 1) / total)) / 2 * step
  return w * mask


def test_one_block_follows_adam_in_float64():
  w = net_params()["head"]
  fn = lambda p, x: x @ p["w"]
  start, masks, _ = contrib.prune_blocks(
    fn, {"w": w}, BATCHES, sparsity=0.5, epochs=0
  )
  new, _, _ = contrib.prune_blocks(
    fn, {"w": w}, BATCHES, sparsity=0.5, epochs=3, learning_rate=1e-2
  )
  goals = [x @ w for x in BATCHES]
  expected = adam_in_float64(
    start["w"], np.asarray(masks["w"]), BATCHES, goals, 3, 1e-2
  )
  assert np.abs(expected - start["w"]).max() > 1e-2
  np.testing.assert_allclose(new["w"], expected, rtol=1e-4, atol=1e-5)


def test_one_block_reaches_the_least_squares_under_its_mask():
  w = net_params()["head"]
  new, masks, _ = contrib.prune_blocks(
    lambda p, x: x @ p["w"], {"w": w}, BATCHES, sparsity=0.5,
    method="magnitude", epochs=150, learning_rate=2e-2,
  )  # fmt: skip
  x = np.concatenate(BATCHES).reshape(-1, 8).astype(np.float64)
  goal = x @ w
  size = np.concatenate(
    [np.maximum(s, 1e-3 * s.mean()) for s in np.split((goal**2).mean(-1), 4)]
  )
  best = np.zeros(w.shape)
  for o in range(w.shape[1]):
    kept = np.flatnonzero(masks["w"][:, o])
    scale = 1 / np.sqrt(size)[:, None]
    best[kept, o] = np.linalg.lstsq(
      x[:, kept] * scale, goal[:, o] * scale[:, 0], rcond=None
    )[0]
  loss = lambda w: (((x @ w - goal) ** 2).mean(-1) / size).mean()
  assert loss(best) < 0.9 * loss(np.where(masks["w"], w, 0))
  assert loss(np.asarray(new["w"])) < 1.02 * loss(best)


def test_training_brings_fresh_outputs_nearer_to_the_dense_ones():
  dense = np.asarray(net(PARAMS, FRESH))
  far = lambda p: ((np.asarray(net(p, FRESH)) - dense) ** 2).mean()
  alone = prune_blocks(epochs=0)[0]
  assert far(reconstructed()[0]) < 0.6 * far(alone)


def test_pruned_weights_stay_zero_and_the_count_is_exact():
  new, masks, report = reconstructed()
  assert report.sparsity == 0.5
  for p, mask in zip(
    jax.tree.leaves(new["layers"]),
    jax.tree.leaves(masks["layers"], is_leaf=lambda x: x is None),
    strict=True,
  ):
    if mask is not None:
      assert mask.sum() == mask.size // 2
      assert not np.asarray(p).view(np.uint32)[mask == 0].any()  # +0.0
  np.testing.assert_array_equal(new["head"], PARAMS["head"])
  assert (new["layers"][0]["scale"] != 1).any()
  assert not any(x is y for x, y in zip(
    jax.tree.leaves(new["layers"]), jax.tree.leaves(PARAMS["layers"]),
    strict=True))  # fmt: skip


def test_stacked_layers_are_blocks_of_their_own():
  stack = jax.tree.map(lambda *x: np.stack(x), *PARAMS["layers"])

  def scanned(p, x):
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0]

  take = lambda names, _: names[-1] != "scale"
  new, masks, _ = contrib.prune_blocks(
    scanned, stack, BATCHES, sparsity=0.5, filter_fn=take, epochs=2
  )
  for name in ("a", "up", "down"):
    assert [int(m.sum()) for m in masks[name]] == [masks[name][0].size // 2] * 2
    assert not np.asarray(new[name])[masks[name] == 0].any()


def test_weights_keep_their_dtype():
  half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), net_params(1))
  new, _, _ = contrib.prune_blocks(
    net, half, BATCHES[:1], filter_fn=inner, sparsity_type="2:4", epochs=1,
    method="wanda",
  )  # fmt: skip
  assert {x.dtype for x in jax.tree.leaves(new)} == {jnp.dtype(jnp.bfloat16)}


def test_leaves_may_stay_dense():
  new, masks, _ = prune_blocks(
    epochs=1, custom_sparsity_map={"layers/0/*": None}
  )
  assert all(
    x is None
    for x in jax.tree.leaves(masks["layers"][0], is_leaf=lambda x: x is None)
  )
  np.testing.assert_array_equal(new["layers"][0]["a"], PARAMS["layers"][0]["a"])


def test_an_interrupted_run_goes_on_with_the_same_result(tmp_path, monkeypatch):
  whole = prune_blocks(epochs=2)

  def stop(done, total, name):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    prune_blocks(epochs=2, folder=tmp_path, progress=stop)
  first = (tmp_path / "block-0.safetensors").stat().st_mtime_ns
  again = prune_blocks(epochs=2, folder=tmp_path)
  assert (tmp_path / "block-0.safetensors").stat().st_mtime_ns == first
  for old, new in zip(whole[:2], again[:2], strict=True):
    jax.tree.map(np.testing.assert_array_equal, old, new)
  assert [l.name for l in whole[2].layers] == [l.name for l in again[2].layers]
  with pytest.raises(ValueError, match="epochs"):
    prune_blocks(epochs=3, folder=tmp_path)
  # Where every block is finished, nothing is computed at all.
  monkeypatch.setattr(
    contrib.reconstruction._Trainer, "forward", lambda *_: None
  )
  done = prune_blocks(epochs=2, folder=tmp_path)
  jax.tree.map(np.testing.assert_array_equal, whole[0], done[0])


def test_equal_blocks_are_compiled_once(monkeypatch):
  pieces = set()
  compile_ = _stream.Stream._compile

  def counted(self, *args):
    pieces.add(id(step := compile_(self, *args)))
    return step

  monkeypatch.setattr(_stream.Stream, "_compile", counted)
  found = []
  for layers in (2, 4):
    pieces.clear()
    contrib.prune_blocks(
      net, net_params(layers), BATCHES, filter_fn=inner, sparsity=0.5, epochs=0
    )
    found.append(len(pieces))
  assert found[0] == found[1] == 3
  # Nor does a call with another sparsity compile any of them again.
  before = set(pieces)
  contrib.prune_blocks(
    net, net_params(4), BATCHES, filter_fn=inner, sparsity=0.75, epochs=0
  )
  assert pieces == before


def test_other_rates_and_passes_share_what_is_compiled():
  compiled = contrib.reconstruction._compiled
  prune_blocks(epochs=2)
  before = list(compiled._kept.values())
  prune_blocks(epochs=1, learning_rate=1e-4)
  assert list(map(id, compiled._kept.values())) == list(map(id, before))


@pytest.mark.parametrize(
  "given, told",
  [
    ({"epochs": -1}, "epochs=-1"),
    ({"span": 0}, "span=0"),
    ({"learning_rate": 0.0}, "learning_rate=0.0"),
    ({"sparsity": None}, "sparsity is missing"),
    ({"allocation": "even"}, "allocation='even'"),
    ({"custom_sparsity_map": {"layers/*": None}}, "keeps every weight dense"),
  ],
)
def test_bad_arguments_are_told(given, told):
  with pytest.raises(ValueError, match=told):
    prune_blocks(**given)


@pytest.mark.parametrize("weight", [0, 0.5])
def test_distillation_follows_its_gradient_in_float64(weight):
  dense = net_params()["head"].astype(np.float64)
  mask = (np.abs(dense) > np.median(np.abs(dense))).astype(np.uint8)
  x = BATCHES[0].reshape(-1, 8)[:6].astype(np.float64)
  softmax = lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True)
  w = dense * mask
  start = w.astype(np.float32)
  for _ in range(5):  # T² KL at T = 2; its gradient is T (q - p) / rows
    gap = softmax(x @ w / 2) - softmax(x @ dense / 2)
    grad = x.T @ (2 * gap + weight * (x @ w)) / len(x)
    w = w - 0.1 * mask * grad
  found = contrib.distill(
    lambda p, x: x @ p, start, mask, dense.astype(np.float32),
    [x.astype(np.float32)] * 5, tx=optax.sgd(0.1), temperature=2.0,
    loss_fn=(lambda z, _: weight * (z**2).sum() / 12) if weight else None,
  )  # fmt: skip
  assert np.abs(w - start).max() > 1e-2
  np.testing.assert_allclose(found, w, rtol=1e-4, atol=1e-5)
  assert not np.asarray(found).view(np.uint32)[mask == 0].any()


def test_distillation_slows_down_until_its_time_is_over():
  now = iter(range(100))  # one second per look at the clock
  start, seen = np.zeros((8, 4), np.float32), []
  apply_fn = lambda p, x: x @ p
  teacher = np.ones((8, 4), np.float32) * np.arange(4, dtype=np.float32)
  for seconds in (1.0, 8.0):
    new = contrib.distill(
      apply_fn, start, np.ones((8, 4), np.uint8), teacher,
      [np.ones((2, 8), np.float32)] * 9, learning_rate=0.01, seconds=seconds,
      clock=lambda: next(now),
    )  # fmt: skip
    seen.append(np.abs(new).max())
  # Adam's steps are about the rate: spent is 1 / 1, then 1/8, 3/8, 5/8, 7/8.
  rates = [(1 + np.cos(np.pi * s)) / 2 for s in (1, 1 / 8, 3 / 8, 5 / 8, 7 / 8)]
  np.testing.assert_allclose(seen, [0.0, 0.01 * sum(rates[1:])], rtol=0.05)


def test_distillation_stops_in_time_and_refuses_nothing_to_learn_from():
  run = functools.partial(
    contrib.distill, lambda p, x: x @ p, MIX, np.ones_like(MIX, np.uint8), MIX
  )
  steps = []
  run([BATCHES[0]] * 3, seconds=0, progress=lambda n, _: steps.append(n))
  assert steps == [1]
  with pytest.raises(ValueError, match="learning_rate=-1"):
    run(BATCHES, learning_rate=-1)
  with pytest.raises(ValueError, match="batches is empty"):
    run([])
  with pytest.raises(ValueError, match="temperature=0"):
    run(BATCHES, temperature=0)
