"""A stacked leaf is many layers: each slice has its own target and mask."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxpruner
from jaxpruner import sparsity_distributions

LAYERS = 3


def normal(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stacked(axis=0):
  """Three layers in each leaf below `blocks`, and two leaves of their own."""
  move = lambda x: jnp.asarray(np.moveaxis(x, 0, axis))
  return {
    "blocks": {
      "up": {
        "bias": move(normal(0, 3, 12)),
        "kernel": move(normal(1, 3, 8, 12)),
      },
      "down": {"kernel": move(normal(2, 3, 12, 8))},
      "norm": {"scale": move(normal(3, 3, 8)), "bias": move(normal(4, 3, 8))},
    },
    "head": {"kernel": jnp.asarray(normal(5, 8, 6))},
  }


def separate(tree, axis=0):
  """The same weights, one module per layer."""
  take = lambda i: jax.tree.map(lambda x: jnp.take(x, i, axis), tree["blocks"])
  return {
    **{f"block_{i}": take(i) for i in range(LAYERS)},
    "head": tree["head"],
  }


def make(algorithm, **options):
  config = {"algorithm": algorithm, "sparsity": 0.75, "update_freq": 1}
  config |= {"update_start_step": 1, "update_end_step": 3, **options}
  return jaxpruner.create_updater_from_config(config)


def train(pruner, params, steps=4):
  tx = pruner.wrap_optax(optax.adam(0.1))

  # A loss without a sum over layers: stacked or not, the gradients are equal.
  def loss(params):
    square = lambda x: jnp.sum(jnp.sin(3 * x) + x * x)
    return sum(map(square, jax.tree.leaves(params)))

  @jax.jit
  def step(params, state):
    seen = lambda p: loss(pruner.pre_forward_update(p, state))
    updates, state = tx.update(jax.grad(seen)(params), state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  for _ in range(steps):
    params, state = step(params, state)
  return params, jaxpruner.find_state(state)


def assert_equal(one, two):
  assert jax.tree.structure(one) == jax.tree.structure(two)
  jax.tree.map(np.testing.assert_array_equal, one, two)


def start_sparse(params):
  zero = lambda path, x: (
    jnp.where(jnp.abs(x) > 1.0, x, 0) if path[-1].key == "kernel" else x
  )
  return jax.tree_util.tree_map_with_path(zero, params)


# --- what is a stack ---------------------------------------------------------


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return x + nn.Dense(6)(nn.LayerNorm()(x)), None


class Scanned(nn.Module):
  axis: int = 0
  annotated: bool = False

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.lecun_normal()
    init = nn.with_partitioning(init, ("embed", "mlp"))
    block = Block
    if self.annotated:

      class Annotated(nn.Module):
        @nn.compact
        def __call__(self, x, _):
          return x + nn.Dense(6, kernel_init=init)(x), None

      block = Annotated
    many = nn.scan(
      block,
      variable_axes={"params": self.axis},
      split_rngs={"params": True},
      length=LAYERS,
      metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return nn.Dense(4)(
      many(name="stem" if self.annotated else None)(x, None)[0]
    )


def shapes_of(model):
  x = jnp.ones((2, 6))
  return jax.eval_shape(model.init, jax.random.key(0), x)["params"]


def prunable(params, **options):
  pruner = make("magnitude", **options)
  return [jaxpruner._leaves.join(n) for n in pruner.view(params).names]


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scanned_module_is_found_by_itself(axis):
  assert prunable(shapes_of(Scanned(axis))) == [
    "Dense_0/kernel",
    *(f"ScanBlock_0/Dense_0/kernel[{i}]" for i in range(LAYERS)),
  ]


@pytest.mark.parametrize("axis", [0, 1])
def test_an_axis_named_layers_is_found_by_itself(axis):
  names = prunable(shapes_of(Scanned(axis, annotated=True)))
  assert names[1:] == [f"stem/Dense_0/kernel[{i}]" for i in range(LAYERS)]


def test_vmapped_nnx_and_equinox_layers_are_found():
  @nnx.vmap(in_axes=0, out_axes=0)
  def create(key):
    return nnx.Linear(4, 5, rngs=nnx.Rngs(params=key))

  class Net(nnx.Module):
    def __init__(self):
      self.layers = create(jax.random.split(jax.random.key(0), LAYERS))

  params = nnx.state(Net(), nnx.Param)
  assert prunable(params) == [f"layers/kernel[{i}]" for i in range(LAYERS)]

  class Mlp(eqx.Module):
    layers: eqx.nn.Linear

  keys = jax.random.split(jax.random.key(0), LAYERS)
  mlp = Mlp(eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 5, key=key))(keys))
  params = eqx.filter(mlp, eqx.is_array)
  assert prunable(params) == [f"layers/weight[{i}]" for i in range(LAYERS)]


@pytest.mark.parametrize(
  "params",
  [
    # Numbered layers have leaves of their own.
    {"layers": {str(i): {"kernel": (6, 6), "bias": (6,)} for i in range(3)}},
    # Matrices of one height prove nothing.
    {"blocks": {"w1": (8, 4), "w2": (8, 6)}},
    # Attention biases are 2-D, but the scale beside them is not.
    {
      "block": {
        "query": {"kernel": (8, 8, 4), "bias": (8, 4)},
        "norm": {"scale": (8,)},
      }
    },
    {"scanner": {"kernel": (6, 6), "bias": (6,)}},
  ],
)
def test_ordinary_trees_hold_no_stack(params):
  is_shape = lambda x: isinstance(x, tuple)
  make_leaf = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = jax.tree.map(make_leaf, params, is_leaf=is_shape)
  assert not any("[" in name for name in prunable(params))


@pytest.mark.parametrize(
  ("stacked_axis", "layers"),
  [
    ("none", 0),
    ({"blocks/*": 0}, 6),
    ({"blocks/up/kernel": -3}, 3),
    (lambda names, _: 0 if names[0] == "blocks" else None, 6),
    ({"blocks/*": "auto"}, 6),
  ],
)
def test_what_is_a_stack_can_be_said(stacked_axis, layers):
  names = prunable(stacked(), stacked_axis=stacked_axis)
  assert sum("[" in name for name in names) == layers


def test_one_axis_for_all_leaves_is_for_ensembles():
  member = {"kernel": normal(0, 4, 5), "bias": normal(1, 5)}
  ensemble = jax.tree.map(lambda x: jnp.stack([x] * 2), member)
  assert prunable(ensemble, stacked_axis=0) == ["kernel[0]", "kernel[1]"]


@pytest.mark.parametrize(
  ("stacked_axis", "words"),
  [
    ({"head/kernel": 5}, "'head/kernel'.*no such axis"),
    ({"blocs/*": 0}, "matches no leaf"),
    ("first", "'auto', 'none', an axis"),
    (True, "'auto', 'none', an axis"),
  ],
)
def test_a_wrong_stacked_axis_is_refused(stacked_axis, words):
  with pytest.raises(ValueError, match=words):
    prunable(stacked(), stacked_axis=stacked_axis)


def test_the_table_has_a_line_per_layer_and_says_why():
  table = jaxpruner.sparsity_table(stacked(), updater=make("magnitude"))
  lines = {line.split()[0]: line for line in table.splitlines()}
  for i in range(LAYERS):
    assert "8×12" in lines[f"blocks/up/kernel[{i}]"]
  why = "stack on axis 0, as all arrays below 'blocks'"
  assert why in lines["blocks/up/kernel[0]"]
  assert "3×8" in lines["blocks/norm/scale"]
  assert "a vector; stack on axis 0" in lines["blocks/norm/scale"]


# --- targets -----------------------------------------------------------------


def per_layer(tree):
  """Targets of the separate layers, in the form of the stacked ones."""
  parts = [jax.tree.leaves(tree[f"block_{i}"]) for i in range(LAYERS)]
  return np.stack(parts, 1)


@pytest.mark.parametrize("name", ["uniform", "erk"])
@pytest.mark.parametrize("sparsity", [0.3, 0.9])
def test_a_distribution_on_a_stack_equals_that_on_the_layers(name, sparsity):
  pruner = make("magnitude", dist_type=name, sparsity=sparsity)
  one = pruner.target_sparsities(stacked())
  two = pruner.target_sparsities(separate(stacked()))
  found = np.stack(jax.tree.leaves(one["blocks"]))
  # Which layer gets the odd weight depends on its name; the counts do not.
  np.testing.assert_allclose(
    np.sort(found, 1), np.sort(per_layer(two), 1), atol=1.01 / 96
  )
  ones = np.round((1 - found) * 96).sum()
  ones += round((1 - one["head"]["kernel"]) * 48)
  assert ones == jaxpruner.mask_calculator.num_ones(6 * 96 + 48, sparsity)


def test_distributions_that_read_weights_see_layers():
  layers = sparsity_distributions.unstack(stacked())
  for fn in (sparsity_distributions.lamp, sparsity_distributions.owl):
    plan = functools.partial(
      sparsity_distributions.fixed, sparsities=fn(layers, 0.6)
    )
    pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=plan)
    found = pruner.target_sparsities(stacked())["blocks"]["up"]["kernel"]
    assert found.shape == (LAYERS,)
    own = fn(separate(stacked()), 0.6)
    want = [own[f"block_{i}"]["up"]["kernel"] for i in range(LAYERS)]
    np.testing.assert_allclose(found, want, atol=1.01 / 96)


def test_one_number_of_a_users_distribution_stands_for_all_layers():
  plan = lambda _: {
    "blocks": {
      "up": {"bias": None, "kernel": 0.5},
      "down": {"kernel": [0.25, 0.5, 0.75]},
      "norm": {"scale": None, "bias": None},
    },
    "head": {"kernel": None},
  }
  pruner = jaxpruner.MagnitudePruning(sparsity_distribution_fn=plan)
  masks = pruner.instant_sparsify(stacked())[1]["blocks"]
  assert masks["up"]["kernel"].sum((1, 2)).tolist() == [48] * 3
  assert masks["down"]["kernel"].sum((1, 2)).tolist() == [72, 48, 24]


def test_patterns_name_a_stack_or_one_of_its_layers():
  custom = {"blocks/up/kernel": 0.5, "blocks/up/kernel[1]": 0.25}
  pruner = make("magnitude", custom_sparsity_map=custom)
  targets = pruner.target_sparsities(stacked())["blocks"]["up"]["kernel"]
  assert targets.tolist() == [0.5, 0.25, 0.5]
  pruner = make("magnitude", custom_sparsity_map={"blocks/up/kernel[1]": None})
  with pytest.raises(ValueError, match=r"kernel\[1\]' stays dense.*0\.0"):
    pruner.target_sparsities(stacked())


# --- masks -------------------------------------------------------------------

KINDS = [
  ("magnitude", {}),
  ("magnitude", {"sparsity_type": "4x4"}),
  ("magnitude", {"sparsity_type": "2:4", "sparsity": 0.5}),
  ("magnitude", {"sparsity_type": "channel_-1"}),
  ("global_magnitude", {}),
  ("magnitude_ste", {}),
  ("rigl", {"continue_sparse": True}),
]


@pytest.mark.parametrize(("name", "options"), KINDS)
def test_training_a_stack_equals_training_its_layers(name, options):
  axis, packed = KINDS.index((name, options)) % 2, len(name) % 2 == 1
  # Of 96 weights 75 % are removed: no layer gets an odd weight.
  prepare = start_sparse if "continue_sparse" in options else lambda p: p
  params = prepare(stacked(axis))
  pruner = make(name, use_packed_masks=packed, **options)
  new, state = train(pruner, params)
  alone, other = train(
    make(name, **options), prepare(separate(stacked(axis), axis))
  )
  # Fused in another order, a sine may round differently.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
    separate(new, axis),
    alone,
  )
  shown = pruner.view(params)
  masks = shown.put(None, shown.of(state.masks))
  slices = separate({"blocks": masks["blocks"], "head": masks["head"]}, axis)
  assert_equal(slices, other.masks)


def test_an_n_by_m_group_never_crosses_layers():
  pruner = make("magnitude", sparsity_type="2:4", sparsity=0.5)
  masks = pruner.instant_sparsify(stacked())[1]["blocks"]["up"]["kernel"]
  assert (masks.reshape(3, 2, 4, 12).sum(2) == 2).all()


def test_random_masks_differ_between_layers():
  state = make("set", rng_seed=0).init_state(stacked())
  masks = np.asarray(state.masks["blocks"]["up"]["kernel"])
  assert masks.sum((1, 2)).tolist() == [24] * 3
  assert (masks[0] != masks[1]).any()


def test_a_global_ranking_names_the_layer_that_it_empties():
  params = stacked()
  kernel = params["blocks"]["up"]["kernel"]
  params["blocks"]["up"]["kernel"] = kernel.at[1].multiply(1e-3)
  pruner = make("global_magnitude", sparsity=0.5)
  with pytest.warns(UserWarning, match=r"blocks/up/kernel\[1\]"):
    pruner.instant_sparsify(params)
  _, state = train(pruner, params)
  near = jaxpruner.layers_near_collapse(state)
  assert "blocks/up/kernel[1]" in near
  metrics = jaxpruner.state_metrics(state, per_leaf=True)
  assert float(metrics["sparsity/blocks/up/kernel[1]"]) > 0.9
  assert int(metrics["near_collapse"]) == len(near)


def test_a_layer_with_a_non_finite_score_keeps_its_mask_alone():
  params = stacked()
  pruner = make("magnitude")
  tx = pruner.wrap_optax(optax.sgd(0.0))
  state = tx.init(params)
  kernel = params["blocks"]["up"]["kernel"].at[1, 0, 0].set(jnp.inf)
  params["blocks"]["up"]["kernel"] = kernel
  grads = jax.tree.map(jnp.zeros_like, params)
  for _ in range(4):
    _, state = jax.jit(tx.update)(grads, state, params)
  kept = state.masks["blocks"]["up"]["kernel"].sum((1, 2)).tolist()
  assert kept[1] == 96 and kept[0] == kept[2] == 24
  names = [jaxpruner._leaves.join(n) for n in pruner.view(params).names]
  skipped = dict(zip(names, state.skipped.tolist(), strict=True))
  assert skipped["blocks/up/kernel[1]"] and not skipped["blocks/up/kernel[0]"]


def test_vmapped_trainings_of_stacks_equal_single_ones():
  params = jax.tree.map(lambda x: jnp.stack([x, -x[::-1]]), stacked())
  pruner = make("magnitude")
  select = lambda p: pruner.instant_sparsify(p)[0]
  both = jax.vmap(select)(params)
  for i in range(2):
    alone = select(jax.tree.map(lambda x, i=i: x[i], params))
    assert_equal(jax.tree.map(lambda x, i=i: x[i], both), alone)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
  ("kind", "name", "spec"),
  [
    (AxisType.Auto, "magnitude", ("x", None, "y")),
    (AxisType.Explicit, "magnitude", (None, "x", "y")),
    (AxisType.Explicit, "rigl", ("x", None, "y")),
  ],
)
def test_stacks_on_a_mesh_equal_those_on_one_device(kind, name, spec):
  mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
  shape = (4, 8, 12)
  params = {"blocks": {"kernel": jnp.asarray(normal(0, *shape))}}
  options = {"stacked_axis": 0, "rng_seed": 0, "use_packed_masks": False}
  pruner = make(name, **options)
  _, alone = train(pruner, params)
  where = NamedSharding(mesh, PartitionSpec(*spec))
  placed = jax.tree.map(lambda x: jax.device_put(x, where), params)
  with jax.set_mesh(mesh):
    _, state = train(pruner, placed)
  assert_equal(
    jax.tree.map(np.asarray, state.masks), jax.tree.map(np.asarray, alone.masks)
  )


def test_a_stack_survives_a_checkpoint(tmp_path):
  params, pruner = stacked(), make("magnitude")
  _, state = train(pruner, params)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", state)
  assert_equal(restored, state)


def test_a_chain_of_pruners_sees_the_same_stacks():
  first = make("magnitude", stacked_axis={"blocks/*": 0})
  second = make(
    "rigl",
    stacked_axis={"blocks/*": 0},
    update_start_step=5,
    update_end_step=7,
  )
  pruner = jaxpruner.chain((0, first), (4, second))
  _, state = train(pruner, stacked(), steps=8)
  kept = state.masks["blocks"]["up"]["kernel"].sum((1, 2))
  assert kept.tolist() == [24] * 3
