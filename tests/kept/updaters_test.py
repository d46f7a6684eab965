"""Training at kept size is training under masks, without the masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxpruner
from jaxpruner import kept
from jaxpruner.kept import choosing, rewiring

STEPS = 50


def model(p, x):
  h = jnp.tanh(x @ p["a"]["kernel"] + p["a"]["bias"])
  return h @ p["b"]["kernel"]


def dense_params():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)
  return {
    "a": {"kernel": draw(16, 40), "bias": jnp.zeros(40)},
    "b": {"kernel": draw(40, 8)},
  }


def batches():
  rng = np.random.default_rng(1)
  return rng.normal(size=(STEPS, 24, 24)).astype(np.float32)


def config(algorithm, **more):
  schedule = {"update_freq": 5, "update_start_step": 1, "update_end_step": 45}
  return {
    "algorithm": algorithm,
    "sparsity": 0.8,
    "rng_seed": 3,
    **({} if algorithm == "static_sparse" else schedule),
    **more,
  }


def adam():
  return optax.chain(optax.clip(1.0), optax.adam(1e-2))


class Run:
  """A masked run and the same run at kept size."""

  def __init__(self, algorithm, model=model, params=dense_params, **more):
    self.masked = jaxpruner.create_updater_from_config(
      config(algorithm, **more)
    )
    self.kept = jaxpruner.create_updater_from_config(
      config(algorithm, storage="kept", **more)
    )
    self.params = params
    self.tx, self.kept_tx = (u.wrap_optax(adam()) for u in self.both)
    apply = kept.lift(model)
    by_gradient = self.kept.grows_by_gradient
    self.traces = 0

    def loss(p, batch):
      return jnp.mean((model(p, batch[:, :16]) - batch[:, 16:]) ** 2)

    def kept_loss(p, state, batch):
      y = apply(self.kept.pre_forward_update(p, state), batch[:, :16])
      return jnp.mean((y - batch[:, 16:]) ** 2)

    @jax.jit
    def step(p, state, batch):
      grads = jax.grad(loss)(p, batch)
      updates, state = self.tx.update(grads, state, p)
      return optax.apply_updates(p, updates), state

    @jax.jit
    def kept_step(p, state, batch):
      self.traces += 1
      if by_gradient:
        _, grads, growth = self.kept.value_and_grad(kept_loss)(p, state, batch)
        more = {"growth": growth}
      else:
        grads, more = jax.grad(kept_loss)(p, state, batch), {}
      updates, state = self.kept_tx.update(grads, state, p, **more)
      return optax.apply_updates(p, updates), state

    self.step, self.kept_step = step, kept_step

  @property
  def both(self):
    return self.masked, self.kept

  def start(self):
    params = self.params()
    state = jax.jit(self.tx.init)(params)
    params = jax.jit(self.masked.post_gradient_update)(params, state)
    weights = self.kept.from_dense(params, state.masks)
    kept_state = self.kept_tx.init(weights)
    return (params, state), (kept.split(weights)[0], kept_state)

  def dense(self, params, state):
    return kept.todense(self.kept.pre_forward_update(params, state))

  def check(self, steps):
    """Run both; compare masks at every step, and weights at the end."""
    (params, state), (values, kept_state) = self.start()
    first, traces = jax.tree.map(np.asarray, state.masks), self.traces
    see = jax.jit(self.dense)
    for batch in batches()[:steps]:
      params, state = self.step(params, state, batch)
      values, kept_state = self.kept_step(values, kept_state, batch)
      dense, masks = see(values, kept_state)
      jax.tree.map(np.testing.assert_array_equal, masks, state.masks)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(
        a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max()
      ),
      dense,
      params,
    )
    assert self.traces - traces <= 1
    changed = [
      (np.asarray(a) != np.asarray(b)).any()
      for a, b in zip(
        jax.tree.leaves(first), jax.tree.leaves(state.masks), strict=True
      )
    ]
    assert all(changed) == ("static" not in type(self.masked).__name__.lower())


@functools.cache
def run(algorithm, kind="unstructured"):
  """Return a run whose compiled steps several tests share."""
  return Run(algorithm, sparsity_type=kind)


ALGORITHMS = ["static_sparse", "set", "rigl"]
# What changes masks does all that a static run does.
MOVING = [pytest.param("static_sparse", marks=pytest.mark.slow), "set", "rigl"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_dense_weights_without_masks_start_with_those_of_the_algorithm(
  algorithm,
):
  dense = dense_params()
  made = lambda **more: jaxpruner.create_updater_from_config(
    config(algorithm, **more)
  )
  state = made().init_state(dense)
  pruner = made(storage="kept")
  found, masks = jax.jit(kept.todense)(pruner.from_dense(dense))
  wanted = jax.tree.map(
    lambda p, m: p if m is None else np.where(m, p, np.float32(0)),
    dense,
    state.masks,
    is_leaf=lambda x: x is None,
  )
  for path in ("a", "b"):
    np.testing.assert_array_equal(
      masks[path]["kernel"], state.masks[path]["kernel"]
    )
    np.testing.assert_array_equal(found[path]["kernel"], wanted[path]["kernel"])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fifty_steps_give_the_masks_and_weights_of_the_masked_run(algorithm):
  run(algorithm).check(STEPS)


@pytest.mark.slow  # one mask update: `products_test`, for all kinds of scores
@pytest.mark.parametrize("algorithm", ["set", "rigl"])
def test_fifty_steps_with_bitmaps_give_them_too(algorithm, monkeypatch):
  monkeypatch.setattr(rewiring, "load", lambda: None)
  monkeypatch.setattr(choosing, "SMALL", 400)  # the way of a large leaf, once
  Run(algorithm).check(STEPS)


def scanned(p, x):
  step = lambda h, w: (h + jnp.tanh(h @ w["kernel"] + w["bias"]), None)
  return jax.lax.scan(step, x, p["blocks"])[0] @ p["out"]["kernel"]


def scanned_params():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)
  blocks = {"kernel": draw(3, 16, 16), "bias": jnp.zeros((3, 16))}
  return {"blocks": blocks, "out": {"kernel": draw(16, 8)}}


@pytest.mark.parametrize("algorithm", MOVING)
def test_scanned_layers_train_as_under_masks(algorithm):
  Run(algorithm, scanned, scanned_params).check(12)


@pytest.mark.parametrize("algorithm", MOVING)
def test_blocks_train_as_under_masks(algorithm):
  """No side is a multiple of the block's; scores are means, then maxima."""
  kind = "maxblock_3,2" if algorithm == "set" else "block_3,2"
  run(algorithm, kind).check(12)


@pytest.mark.slow  # blocks and stacks are trained above, each alone
def test_stacks_of_blocks_train_as_under_masks():
  more = {"sparsity_type": "block_3,2", "sparsity": 0.7}
  Run("rigl", scanned, scanned_params, **more).check(12)


@pytest.mark.parametrize("algorithm", ["set", "rigl"])
def test_moments_of_grown_weights_are_fresh_and_others_stay(algorithm):
  both = run(algorithm)
  _, (values, state) = both.start()
  for batch in batches()[:6]:
    values, state = both.kept_step(values, state, batch)
  new, after = both.kept_step(values, state, batches()[6])  # a mask update
  old_at, new_at = (
    np.asarray(s.layouts["b"]["kernel"].positions())[
      np.argsort(np.asarray(s.layouts["b"]["kernel"].by_row.slots))
    ]
    for s in (state, after)
  )
  moved = old_at != new_at
  assert moved.any() and not moved.all()
  mu = lambda s: np.asarray(s.inner_state[1][0].mu["b"]["kernel"])
  assert (mu(after)[moved] == 0).all()
  np.testing.assert_array_equal(mu(after)[~moved], mu(state)[~moved])
  value = np.asarray(new["b"]["kernel"])
  assert (value[moved] == 0).all() and not np.signbit(value[moved]).any()
  np.testing.assert_array_equal(
    value[~moved], np.asarray(values["b"]["kernel"])[~moved]
  )


@pytest.mark.parametrize("algorithm", ["set", "rigl"])
def test_a_restored_run_equals_an_uninterrupted_one(algorithm, tmp_path):
  both = run(algorithm)
  _, (values, state) = both.start()
  for i, batch in enumerate(batches()[:12]):
    if i == 6:
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "six", {"p": values, "s": state})
      with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(
          tmp_path / "six", {"p": values, "s": state}
        )
    values, state = both.kept_step(values, state, batch)
  traces = both.traces
  again, other = restored["p"], restored["s"]
  for batch in batches()[6:12]:
    again, other = both.kept_step(again, other, batch)
  jax.tree.map(np.testing.assert_array_equal, (values, state), (again, other))
  assert both.traces == traces


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("kind", ["unstructured", "block_3,2"])
def test_eight_devices_equal_one(kind):
  both = run("rigl", kind)
  _, alone = both.start()
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  whole = jax.NamedSharding(mesh, jax.P())
  rows = jax.NamedSharding(mesh, jax.P("data"))
  spread = jax.device_put(alone, whole)
  for batch in batches()[:12]:
    alone = both.kept_step(*alone, batch)
    spread = both.kept_step(*spread, jax.device_put(batch, rows))
  layouts = lambda result: jax.tree.map(np.asarray, result[1].layouts)
  jax.tree.map(np.testing.assert_array_equal, layouts(alone), layouts(spread))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    *(jax.tree.map(np.asarray, result[0]) for result in (alone, spread)),
  )


def test_created_weights_have_the_masks_of_the_algorithm():
  masked, small = run("set").both
  init = lambda _: dense_params()
  weights = small.create(jax.random.key(7), init)
  _, masks = kept.todense(weights)
  wanted = masked.init_state(dense_params()).masks
  jax.tree.map(np.testing.assert_array_equal, masks, wanted)
  assert weights["a"]["bias"].tolist() == [0.0] * 40


def test_a_gradual_run_goes_on_at_kept_size():
  gradual = jaxpruner.create_updater_from_config({
    "algorithm": "magnitude", "sparsity": 0.8, "update_freq": 2,
    "update_start_step": 0, "update_end_step": 6,
  })  # fmt: skip
  tx, params = gradual.wrap_optax(adam()), dense_params()
  static = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
  kept_tx, apply = static.wrap_optax(adam()), kept.lift(model)

  def loss(p, batch, model=model):
    return jnp.mean((model(p, batch[:, :16]) - batch[:, 16:]) ** 2)

  @jax.jit
  def step(p, state, batch):
    updates, state = tx.update(jax.grad(loss)(p, batch), state, p)
    return optax.apply_updates(p, updates), state

  @jax.jit
  def kept_step(p, state, batch):
    seen = lambda p: loss(static.pre_forward_update(p, state), batch, apply)
    updates, state = kept_tx.update(jax.grad(seen)(p), state, p)
    return optax.apply_updates(p, updates), state

  state = tx.init(params)
  for batch in batches()[:8]:
    params, state = step(params, state, batch)
  weights, kept_state = static.from_masked(params, state)
  values, _ = kept.split(weights)
  for batch in batches()[8:12]:
    params, state = step(params, state, batch)
    values, kept_state = kept_step(values, kept_state, batch)
  dense, masks = kept.todense(static.pre_forward_update(values, kept_state))
  jax.tree.map(np.testing.assert_array_equal, masks, state.masks)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    dense,
    params,
  )
  assert int(kept_state.count) == int(state.count)


def test_non_finite_gradients_leave_the_leaf_as_it_was():
  both = run("rigl")
  _, (values, state) = both.start()
  values, state = both.kept_step(values, state, batches()[0])
  bad = batches()[1].copy()
  bad[0, 0] = np.nan
  _, after = both.kept_step(values, state, bad)
  jax.tree.map(np.testing.assert_array_equal, after.layouts, state.layouts)
  assert after.skipped.tolist() == [1, 1]


@pytest.mark.parametrize("way", ["kernel", "bitmaps"])
def test_an_overflowed_product_leaves_the_leaf_as_it_was(way, monkeypatch):
  """All factors are finite; only their product is not."""
  if way == "bitmaps":
    monkeypatch.setattr(rewiring, "load", lambda: None)
  pruner = jaxpruner.create_updater_from_config(config("rigl", storage="kept"))
  weights = pruner.create(jax.random.key(0), lambda _: dense_params())
  tx = pruner.wrap_optax(optax.sgd(1e-2))
  state = tx.init(weights)._replace(count=jnp.int32(1))
  values, _ = kept.split(weights)
  big = lambda rows, columns: [
    (jnp.full((2, rows), 1e25), jnp.full((2, columns), 1e25))
  ]
  small = lambda rows, columns: [(jnp.ones((2, rows)), jnp.ones((2, columns)))]
  growth = {"a/kernel": big(16, 40), "b/kernel": small(40, 8)}
  _, after = jax.jit(tx.update)(values, state, values, growth=growth)
  same = lambda name: (
    after.layouts[name]["kernel"].positions().tolist()
    == state.layouts[name]["kernel"].positions().tolist()
  )
  assert [same(name) for name in "ab"] == [True, False]
  assert after.skipped.tolist() == [1, 0]


@pytest.mark.parametrize(
  ("sparsity", "most"), [(0.8, 0.36), (0.9, 0.19), (0.95, 0.10)]
)
def test_training_takes_the_bytes_that_the_law_allows(sparsity, most):
  pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
  weights = {"w": kept.create(jax.random.key(0), (1024, 1024), sparsity)}
  state = pruner.wrap_optax(optax.adam(1e-3)).init(weights)
  report = kept.training_bytes(kept.split(weights)[0], state)
  assert report.dense == 16 * 1024 * 1024
  assert report.ratio <= most
  assert "1024x1024" in str(report)


@pytest.mark.slow  # two processes of their own
def test_the_report_measures_what_it_tells():
  pruner = kept.KeptUpdater(jaxpruner.StaticRandomSparse())
  make = functools.partial(kept.create, jax.random.key(0))
  stack = make((3, 512, 512), 0.95, axis=0, name="stack")
  weights = {"stack": stack, "out": make((512, 512), 0.95, block=(64, 64))}

  def loss(p, x):
    step = lambda h, w: (jnp.tanh(h @ w), None)
    return jnp.mean((jax.lax.scan(step, x, p["stack"])[0] @ p["out"]) ** 2)

  report = kept.training_report(
    pruner, loss, weights, optax.adam(1e-3), jnp.ones((32, 512)), repeats=3
  )
  rows = {layer.name: layer.rows for layer in report.layers}
  assert rows == {"stack": 96, "out": 32}
  assert report.peak is not None and report.dense_peak is not None
  assert report.peak > report.bytes.total - report.bytes.dense // 64
  assert report.dense_peak > report.bytes.dense / 2
  assert "fresh process" in str(report) and "stack" in str(report)


def test_files_hold_values_and_positions(tmp_path):
  both = run("set")
  _, (values, state) = both.start()
  for batch in batches()[:7]:
    values, state = both.kept_step(values, state, batch)
  weights = both.kept.pre_forward_update(values, state)
  kept.save(tmp_path / "w.safetensors", weights, metadata={"step": 7})
  loaded = kept.load(tmp_path / "w.safetensors")
  jax.tree.map(np.testing.assert_array_equal, loaded, weights)
  for more in ({}, {"sparsity_type": "maxblock_4,3"}):  # a stack; and blocks
    weights = Run("set", scanned, scanned_params, **more).kept.create(
      jax.random.key(7), lambda _: scanned_params()
    )
    kept.save(tmp_path / "w.safetensors", weights)
    loaded = kept.load(tmp_path / "w.safetensors")
    jax.tree.map(np.testing.assert_array_equal, loaded, weights)
    assert jax.tree.structure(loaded) == jax.tree.structure(weights)
  with pytest.raises(jaxpruner.sparse.FileFormatError, match="sparse.load"):
    jaxpruner.sparse.save(tmp_path / "d.safetensors", dense_params())
    kept.load(tmp_path / "d.safetensors")


def test_what_has_no_kept_form_is_refused():
  make = jaxpruner.create_updater_from_config
  with pytest.raises(ValueError, match="MagnitudePruning has no kept form"):
    make({"algorithm": "magnitude", "sparsity": 0.5, "storage": "kept"})
  with pytest.raises(ValueError, match="grow=Momentum"):
    make(config("rigl", grow="momentum", storage="kept"))
  with pytest.raises(ValueError, match="skip_gradients"):
    make(config("rigl", skip_gradients=False, storage="kept"))
  with pytest.raises(ValueError, match="storage='packed'.*masked.*kept"):
    make(config("rigl", storage="packed"))
  conv = {"conv": {"kernel": jnp.ones((3, 3, 6, 8))}}
  blocks = make(config("set", sparsity_type="block_4,4", storage="kept"))
  with pytest.raises(ValueError, match="conv/kernel.*divides 6.*filter_fn"):
    blocks.create(jax.random.key(0), lambda _: conv)
  with pytest.raises(ValueError, match="NByM.*no kept form.*Block"):
    make(config("rigl", sparsity_type="nm_2,4", sparsity=0.5, storage="kept"))
  both = run("rigl")
  _, (values, state) = both.start()
  with pytest.raises(ValueError, match="'a/kernel'.*value_and_grad"):
    both.kept_tx.update(values, state, values)
  with pytest.raises(ValueError, match="no KeptTensor leaf"):
    both.kept_tx.init(values)
  with pytest.raises(ValueError, match="from_masked"):
    both.kept_tx.update(values, both.start()[0][1], values)
  factored = both.masked.wrap_optax(
    optax.adafactor(1e-3, min_dim_size_to_factor=8)
  )
  with pytest.warns(UserWarning, match="shared statistics"):
    state = factored.init(dense_params())
  with pytest.raises(ValueError, match="no entry per weight"):
    both.kept.from_masked(dense_params(), state)


def test_a_gradual_run_goes_on_as_set():
  params = dense_params()
  gradual = jaxpruner.create_updater_from_config(
    {
      "algorithm": "magnitude",
      "sparsity": 0.8,
      "update_start_step": 0,
      "schedule": "one_shot",
    }
  )
  state = gradual.wrap_optax(adam()).init(params)
  params = gradual.post_gradient_update(params, state)
  pruner = jaxpruner.create_updater_from_config(config("set", storage="kept"))
  weights, state = pruner.from_masked(params, state)
  values, _ = kept.split(weights)
  tx = pruner.wrap_optax(adam())
  grads = jax.tree.map(jnp.ones_like, values)
  for _ in range(7):  # masks change at the second and the seventh step
    _, state = jax.jit(tx.update)(grads, state, values)
  assert int(state.count) == 7
  assert jax.tree.structure(state) == jax.tree.structure(tx.init(weights))


def test_the_state_is_found_inside_a_chain():
  pruner = jaxpruner.create_updater_from_config(config("set", storage="kept"))
  weights = pruner.create(jax.random.key(0), lambda _: dense_params())
  tx = optax.chain(optax.clip(1.0), pruner.wrap_optax(optax.sgd(0.1)))
  state = tx.init(weights)
  values, _ = kept.split(weights)
  seen = kept.todense(pruner.pre_forward_update(values, state))[0]
  want = kept.todense(weights)[0]
  jax.tree.map(np.testing.assert_array_equal, seen, want)
  assert kept.training_bytes(values, state).ratio < 1
  with pytest.raises(ValueError, match="holds 0 states of kept storage"):
    pruner.pre_forward_update(values, optax.sgd(0.1).init(values))
  with pytest.raises(ValueError, match="find_kept_state"):
    jaxpruner.find_state(state)


@pytest.mark.parametrize(
  "option",
  [
    {"master_dtype": "float32"},
    {"track_exploration": True},
    {"use_packed_masks": True},
    {"continue_sparse": True},
  ],
  ids=lambda option: next(iter(option)),
)
def test_options_of_masks_are_refused(option):
  with pytest.raises(ValueError, match=next(iter(option))):
    jaxpruner.create_updater_from_config(
      config("set", storage="kept", **option)
    )


def test_layers_of_a_stack_must_keep_as_many():
  make = jaxpruner.create_updater_from_config
  pruner = make(config("set", storage="kept", stacked_axis=0))
  masks = {"blocks": {"kernel": np.tril(np.ones((3, 8, 8), np.uint8))}}
  masks["blocks"]["kernel"][1] = 1
  params = {"blocks": {"kernel": jnp.ones((3, 8, 8))}}
  with pytest.raises(ValueError, match="blocks/kernel.*36 to 64 weights"):
    pruner.from_dense(params, masks)
  table = {"blocks/kernel[1]": 0.5, "blocks/kernel[2]": 0.6}
  pruner = make(
    config("set", storage="kept", stacked_axis=0, custom_sparsity_map=table)
  )
  with pytest.raises(ValueError, match=r"blocks/kernel\[1\].*as many weights"):
    pruner.create(jax.random.key(0), lambda _: params)


def test_layers_that_rounding_gave_one_weight_less_get_one_more():
  """43 of 3 × 72 weights: the total under masks is exact."""
  make = lambda **more: jaxpruner.create_updater_from_config(
    config("set", stacked_axis=0, **more)
  )
  rng = np.random.default_rng(0)
  params = {"w": jnp.asarray(rng.normal(size=(3, 8, 9)), jnp.float32)}
  pruner, masks = make(storage="kept"), make().init_state(params).masks
  assert np.asarray(masks["w"]).sum((1, 2)).tolist() == [15, 14, 14]
  weights = pruner.from_dense(params, masks)
  check_evened(params, masks, weights, 15)
  created = pruner.create(jax.random.key(0), lambda _: params)
  assert created["w"].values.shape == weights["w"].values.shape == (3, 15)
  units = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]], np.uint8)  # 1 to 2 blocks
  masks = {"w": units[:, None, :].repeat(8, 1).repeat(3, 2)}
  pruner = make(storage="kept", sparsity_type="block_8,3")
  check_evened(params, masks, pruner.from_dense(params, masks), 48)


def check_evened(params, masks, weights, count):
  dense, found = kept.todense(weights)
  wanted = jnp.where(masks["w"] == 1, params["w"], 0)
  np.testing.assert_array_equal(dense["w"], wanted)
  assert (np.asarray(found["w"]) >= np.asarray(masks["w"])).all()
  assert set(np.asarray(found["w"]).sum((1, 2))) == {count}


def test_created_stacks_and_blocks_have_the_masks_of_the_algorithm():
  for more in ({}, {"sparsity_type": "block_4,3"}):
    both = Run("set", scanned, scanned_params, **more)
    weights = both.kept.create(jax.random.key(7), lambda _: scanned_params())
    wanted = both.masked.init_state(scanned_params()).masks
    _, masks = kept.todense(weights)
    jax.tree.map(np.testing.assert_array_equal, masks, wanted)


def test_the_state_can_be_walked():
  """No None in it, and Optax finds the parts that are like the parameters."""
  both = run("set")
  _, (values, state) = both.start()
  leaves = jax.tree.leaves(state, is_leaf=lambda x: x is None)
  assert all(leaf is not None for leaf in leaves)
  marked = optax.tree_map_params(
    both.kept_tx, lambda _: "param", state, transform_non_params=lambda _: "own"
  )
  adam_state = marked.inner_state[1][0]
  assert set(jax.tree.leaves((adam_state.mu, adam_state.nu))) == {"param"}
  assert adam_state.count == marked.count == marked.key == "own"
  assert len(jax.tree.leaves(adam_state.mu)) == len(jax.tree.leaves(values))
  own = jax.tree.leaves(marked.layouts)
  assert own == ["own"] * len(jax.tree.leaves(state.layouts))


def test_a_jitted_loss_is_refused_with_the_cure():
  pruner = jaxpruner.create_updater_from_config(config("rigl", storage="kept"))
  weights = pruner.create(jax.random.key(0), lambda _: dense_params())
  state = pruner.wrap_optax(adam()).init(weights)
  values, _ = kept.split(weights)
  apply = kept.lift(model)

  @jax.jit
  def loss(values, state, x):
    return jnp.sum(apply(pruner.pre_forward_update(values, state), x))

  x = jnp.ones((4, 16))
  with pytest.raises(ValueError, match="without jit"):
    pruner.value_and_grad(loss)(values, state, x)


def test_creation_compiles_for_a_shape_not_for_a_name(caplog):
  """A model of many layers would hold a program for each of them."""
  pruner = jaxpruner.create_updater_from_config(
    {"algorithm": "set", "sparsity": 0.5, "storage": "kept", "rng_seed": 0}
  )

  def create(names):
    leaf = lambda _: {n: {"kernel": jnp.zeros((24, 40))} for n in names}
    with jax.log_compiles(), caplog.at_level("WARNING"):
      caplog.clear()
      pruner.create(jax.random.key(0), leaf)
    return [m for m in caplog.messages if "Finished XLA compilation" in m]

  create("a")
  assert len(create("bcdef")) <= 1  # leaves that stay dense: once for a tree
