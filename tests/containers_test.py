"""Any pytree: containers and leaves of every kind train, prune, and resume."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax
import flax.core
import flax.linen
import flax.serialization
import flax.training.train_state
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx

import jaxpruner

# The same two leaves in each container, in the same order: one program.
SHAPE = (4, 6)
_rng = np.random.default_rng(0)
KERNEL = _rng.normal(size=SHAPE).astype(np.float32)
BIAS = _rng.normal(size=SHAPE[-1:]).astype(np.float32)
kernel = lambda: jnp.asarray(KERNEL)
bias = lambda: jnp.asarray(BIAS)


class Layer(NamedTuple):
  bias: Any
  kernel: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
  bias: Any
  kernel: Any


@flax.struct.dataclass
class Struct:
  bias: Any
  kernel: Any
  name: str = flax.struct.field(pytree_node=False, default="static")


@jax.tree_util.register_pytree_with_keys_class
class Custom:
  def __init__(self, bias, kernel):
    self.bias, self.kernel = bias, kernel

  def tree_flatten_with_keys(self):
    name = jax.tree_util.GetAttrKey
    return ((name("bias"), self.bias), (name("kernel"), self.kernel)), None

  @classmethod
  def tree_unflatten(cls, _, children):
    return cls(*children)


@jax.tree_util.register_pytree_node_class
class Unnamed(Custom):
  """Registered without names: its leaves are numbered."""

  def tree_flatten(self):
    return (self.bias, self.kernel), None


class Module(eqx.Module):
  bias: Any
  weight: Any
  activation: Any
  off: None = None


def equinox_module():
  return eqx.filter(Module(bias(), kernel(), jax.nn.relu), eqx.is_array)


class Linear(nnx.Module):
  def __init__(self):
    self.bias = nnx.Param(bias())
    self.kernel = nnx.Param(kernel())


def haiku_params():
  net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([SHAPE[1]])(x)))
  params = net.init(jax.random.key(0), jnp.ones((1, SHAPE[0])))
  leaves, treedef = jax.tree.flatten(params)
  assert [x.shape for x in leaves] == [BIAS.shape, SHAPE]
  return treedef.unflatten([bias(), kernel()])


def train_state():
  return flax.training.train_state.TrainState.create(
    apply_fn=None,
    params={"dense": {"bias": bias(), "kernel": kernel()}},
    tx=optax.sgd(0.1),
  ).params


def boxed():
  box = lambda x, names: flax.linen.Partitioned(x, names)
  return {
    "bias": box(bias(), ("out",)),
    "kernel": box(kernel(), ("in", "out")),
  }


def deep(depth):
  tree = {"bias": bias(), "kernel": kernel()}
  for level in range(depth):
    tree = [tree] if level % 2 else {f"level_{level}": tree}
  return tree


CONTAINERS = {
  "dict": lambda: {"bias": bias(), "kernel": kernel()},
  "nested dict": lambda: {"x": {"y": {"bias": bias(), "kernel": kernel()}}},
  "list": lambda: [bias(), kernel()],
  "tuple": lambda: (bias(), kernel()),
  "namedtuple": lambda: Layer(bias(), kernel()),
  "list of namedtuples": lambda: [Layer(bias(), kernel())],
  "dataclass": lambda: Data(bias(), kernel()),
  "flax struct": lambda: Struct(bias(), kernel()),
  "frozen dict": lambda: flax.core.freeze({"bias": bias(), "kernel": kernel()}),
  "flax boxes": boxed,
  "flax train state": train_state,
  "nnx state": lambda: nnx.state(Linear(), nnx.Param),
  "equinox module": equinox_module,
  "haiku dict": haiku_params,
  "custom node": lambda: Custom(bias(), kernel()),
  "unnamed node": lambda: Unnamed(bias(), kernel()),
  "ordered dict": lambda: collections.OrderedDict(bias=bias(), kernel=kernel()),
  "default dict": lambda: collections.defaultdict(
    None, bias=bias(), kernel=kernel()
  ),
  "masked nodes": lambda: {
    "frozen": optax.MaskedNode(),
    "dense": {"bias": bias(), "kernel": kernel()},
  },
  "none leaves": lambda: {"a": None, "bias": bias(), "kernel": kernel()},
  "empty parts": lambda: {"a": {}, "b": [], "c": (bias(), kernel())},
  "deep nesting": lambda: deep(30),
  "numpy leaves": lambda: {"bias": BIAS, "kernel": KERNEL},
}


def pruner(**options):
  return jaxpruner.create_updater_from_config(
    {
      "algorithm": "magnitude",
      "sparsity": 0.5,
      "update_start_step": 0,
      "update_end_step": 0,
      **options,
    }
  )


@functools.cache
def everything():
  """One step of training and an instant pruning, in one program."""
  updater = pruner()
  tx = updater.wrap_optax(optax.adam(0.1))

  def run(params, state, grads):
    updates, state = tx.update(grads, state, params)
    params_after = optax.apply_updates(params, updates)
    held = updater.post_gradient_update(params_after, state)
    return params_after, held, state, updater.instant_sparsify(params)

  return tx.init, jax.jit(run)


def matrices(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree) if np.ndim(x) >= 2]


def equal(one, two):
  return all(
    np.array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
  )


def through_bytes(tree):
  leaves, treedef = jax.tree.flatten(tree)
  blob = flax.serialization.msgpack_serialize(
    {str(i): np.asarray(x) for i, x in enumerate(leaves)}
  )
  found = flax.serialization.msgpack_restore(blob)
  return treedef.unflatten([found[str(i)] for i in range(len(leaves))])


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_trains_prunes_and_resumes(name):
  params = CONTAINERS[name]()
  grads = jax.tree.map(jnp.ones_like, params)
  init, run = everything()
  state = init(params)
  # A mask tree is shaped like the parameters, None where a leaf is dense.
  assert matrices(state.masks)[0].tolist() == np.ones(SHAPE).tolist()
  assert len(jax.tree.leaves(state.masks)) == 1

  after, held, state, (pruned, masks) = run(params, state, grads)
  wanted = reference.unstructured(np.abs(KERNEL), 0.5)
  structure = jax.tree.structure(params)
  for tree in (after, held, pruned):
    assert jax.tree.structure(tree) == structure
    assert np.array_equal(matrices(tree)[0] != 0, wanted == 1)
  assert equal(after, held)
  assert np.array_equal(matrices(state.masks)[0], wanted)
  assert np.array_equal(matrices(masks)[0], wanted)

  summary = jaxpruner.summarize_sparsity(pruned)
  assert summary["_nparams"] == KERNEL.size + BIAS.size
  assert summary["_nparams_nnz"] == KERNEL.size // 2 + BIAS.size
  path = [k for k in summary if k[0] != "_" and summary[k] == 0.5]
  assert len(path) == 1
  table = jaxpruner.sparsity_table(after, opt_state=state)
  assert f"{path[0]} " in table and "12 of 24" in table

  resumed = through_bytes((after, state))
  assert equal(run(*resumed, grads), run(after, state, grads))


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, np.float64]
)
def test_every_float_is_pruned_and_keeps_its_dtype(dtype):
  params = {"kernel": np.asarray(KERNEL).astype(dtype)}
  updater = pruner()
  pruned, masks = jax.jit(updater.instant_sparsify)(params)
  held = jnp.asarray(params["kernel"]).dtype  # float64 only with x64
  assert pruned["kernel"].dtype == held
  scores = np.abs(np.asarray(jnp.asarray(params["kernel"])).astype(np.float32))
  wanted = reference.unstructured(scores, 0.5)
  assert np.array_equal(np.asarray(masks["kernel"]), wanted)


def test_other_leaves_stay_as_they_are():
  params = {
    "kernel": kernel(),
    "bias": bias(),
    "steps": jnp.arange(6).reshape(2, 3),
    "flags": jnp.ones((2, 2), bool),
    "rate": jnp.float32(0.5),
    "temperature": 0.25,
    "empty": jnp.zeros((0, 3)),
  }
  only = lambda names, _p: names[-1] == "kernel"
  updater = pruner(filter_fn=only)
  for use in (updater.instant_sparsify, jax.jit(updater.instant_sparsify)):
    pruned, masks = use(params)
    assert [k for k, m in masks.items() if m is not None] == ["kernel"]
    assert equal({**pruned, "kernel": 0}, {**params, "kernel": 0})
  state = updater.wrap_optax(optax.sgd(0.1)).init(params)
  assert jax.tree.leaves(state.masks)[0].shape == SHAPE


def test_stacked_layers_are_pruned_as_one_leaf():
  params = {"layers": {"kernel": jnp.stack([kernel(), 9 * kernel()])}}
  _, masks = jax.jit(pruner().instant_sparsify)(params)
  wanted = reference.unstructured(np.abs(params["layers"]["kernel"]), 0.5)
  assert np.array_equal(np.asarray(masks["layers"]["kernel"]), wanted)


def test_trees_without_leaves_pass_through():
  updater = pruner()
  tx = updater.wrap_optax(optax.adam(0.1))
  for params in ({}, [], (None, {})):
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    assert updates == params
    assert jax.tree.leaves(state.masks) == []


def test_a_bare_array_is_a_tree_of_one_kernel():
  pruned, mask = jax.jit(pruner().instant_sparsify)(kernel())
  assert np.array_equal(mask, reference.unstructured(np.abs(KERNEL), 0.5))
  assert jaxpruner.summarize_sparsity(pruned)["kernel"] == 0.5


UNPRUNABLE = {
  "vectors only": ({"x": {"b1": bias()}}, {}, "x/b1"),
  "integers": (
    {"kernel": kernel(), "x": {"ids": jnp.ones((2, 2), int)}},
    {"custom_sparsity_map": {"x/ids": 0.5}},
    "x/ids",
  ),
  "flags": (
    {"kernel": kernel(), "on": jnp.ones((2, 2), bool)},
    {"custom_sparsity_map": {"on": 0.5}},
    "on",
  ),
  "no weights": ({"x": {"kernel": jnp.zeros((0, 4))}}, {}, "x/kernel"),
  "python number": (
    {"kernel": kernel(), "t": 0.5},
    {"custom_sparsity_map": {"t": 0.5}},
    "'t'",
  ),
  "string": (
    {"kernel": kernel(), "name": "net"},
    {"custom_sparsity_map": {"name": 0.5}},
    "'name'",
  ),
  "complex": (
    {"x": {"kernel": jnp.ones((2, 2), jnp.complex64)}},
    {"filter_fn": lambda _names, _p: True},
    "x/kernel",
  ),
  "indivisible groups": (
    {"x": {"kernel": jnp.ones((6, 4))}},
    {"sparsity_type": "2:4"},
    "x/kernel",
  ),
  "missing channel axis": (
    {"x": {"kernel": kernel()}},
    {"sparsity_type": "channel_2"},
    "x/kernel",
  ),
}


@pytest.mark.parametrize("name", UNPRUNABLE)
def test_what_cannot_be_pruned_is_an_error_with_the_path(name):
  params, options, path = UNPRUNABLE[name]
  updater = pruner(**options)
  with pytest.raises(ValueError, match=path):
    updater.instant_sparsify(params)
  with pytest.raises(ValueError, match=path):
    updater.init_state(params)
