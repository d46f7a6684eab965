"""The tables of primitives, against the primitives of the installed JAX."""

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner.program import primitives, trace

INSTALLED = {
  getattr(module, name).name: getattr(module, name)
  for module in (jax.lax, jax.extend.core.primitives)
  for name in dir(module)
  if name.endswith("_p")
}
# JAX exports no object for these two: found by tracing a key.
TRACED = {"random_wrap", "random_unwrap"}


def release():
  major, minor, *_ = jax.__version__.split(".")
  return f"{major}.{minor}"


@pytest.mark.quick
@pytest.mark.parametrize("table", primitives.TABLES)
def test_every_name_in_a_table_is_a_primitive_of_this_jax(table):
  missing = primitives.TABLES[table] - set(INSTALLED) - TRACED
  elsewhere = {
    name for name, jax_ in primitives.ONLY_IN.items() if jax_ != release()
  }
  assert missing <= elsewhere


def test_names_of_one_release_are_in_the_tables():
  assert set(primitives.ONLY_IN) <= primitives.KNOWN


def test_traced_names_exist():
  def unwrapped(key):
    return jax.random.wrap_key_data(jax.random.key_data(key))

  program = trace(unwrapped, jax.random.key(0))
  assert {node.name for node in program.nodes} == TRACED


def test_a_primitive_has_one_kind():
  tables = primitives.TABLES
  for first, second in (
    ("ELEMENTWISE", "VIEWS"), ("ELEMENTWISE", "REDUCTIONS"),
    ("VIEWS", "MOVES"), ("ELEMENTWISE", "OPAQUE"), ("PRODUCTS", "OPAQUE"),
  ):  # fmt: skip
    assert not tables[first] & tables[second]


# Those that take other operands than arrays of floats.
INTEGERS = frozenset(
  """and clz mulhi not or population_count shift_left shift_right_arithmetic
  shift_right_logical xor""".split()
)
ARGUMENTS = {
  "conj": dict(input_dtype=np.dtype(np.complex64)),
  "convert_element_type": dict(
    new_dtype=np.dtype(np.float16), weak_type=False, sharding=None
  ),
  "integer_pow": dict(y=3),
  "name": dict(name="x"),
  "reduce_precision": dict(exponent_bits=5, mantissa_bits=10),
  "round": dict(rounding_method=jax.lax.RoundingMethod.AWAY_FROM_ZERO),
}
ACCURATE = (
  "cbrt cos exp exp2 expm1 log log1p log2 logistic rsqrt sin sqrt tan tanh"
)
THREE = {"clamp", "regularized_incomplete_beta", "select_n"}
TWO = frozenset(
  """add add_any and atan2 complex div eq ge gt igamma igamma_grad_a igammac le
  lt max min mul mulhi ne nextafter or polygamma pow rem shift_left
  shift_right_arithmetic shift_right_logical sub xor zeta""".split()
)


def operands(name):
  rng = np.random.default_rng(0)
  count = 3 if name in THREE else 2 if name in TWO else 1
  arrays = [rng.uniform(0.1, 0.9, 6).astype(np.float32) for _ in range(count)]
  if name in INTEGERS:
    arrays = [(8 * a).astype(np.int32) for a in arrays]
  if name == "clamp":
    arrays = sorted(arrays, key=np.sum)
  if name == "select_n":
    arrays[0] = arrays[0] > 0.5
  if name in ("conj", "imag", "real"):
    arrays = [a.astype(np.complex64) for a in arrays]
  return list(map(jnp.asarray, arrays))


@pytest.mark.parametrize("name", sorted(primitives.ELEMENTWISE))
def test_an_elementwise_primitive_computes_each_place_from_that_place(name):
  if name not in INSTALLED:
    pytest.skip(f"{name} is of JAX {primitives.ONLY_IN[name]}")
  params = dict(ARGUMENTS.get(name, {}))
  if name in ACCURATE.split():
    params["accuracy"] = None
  run = lambda *x: INSTALLED[name].bind(*x, **params)
  arrays = operands(name)
  order = np.array([3, 1, 5, 0, 4, 2])
  moved = run(*(a[order] for a in arrays))
  np.testing.assert_allclose(moved, run(*arrays)[order], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(primitives.VIEWS))
def test_a_view_has_no_elements_of_its_own(name):
  x = jnp.arange(1.0, 7.0).reshape(2, 3)
  views = {
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (4, 2, 3)),
    "reshape": lambda x: x.reshape(6),
    "rev": lambda x: jax.lax.rev(x, (0,)),
    "slice": lambda x: jax.lax.slice(x, (0, 1), (2, 3)),
    "split": lambda x: jax.lax.split(x, (1, 2), 1),
    "squeeze": lambda x: jax.lax.squeeze(x[None], (0,)),
    "tile": lambda x: jnp.tile(x, (2, 1)),
    "transpose": lambda x: x.T,
    "unstack": lambda x: jnp.unstack(x),
  }
  assert name in {node.name for node in trace(views[name], x).nodes}
  for part in jax.tree.leaves(views[name](x)):
    assert set(np.ravel(part)) <= set(np.ravel(x))
    if name in primitives.RESHAPES:
      assert set(np.ravel(part)) == set(np.ravel(x))


def test_calls_hold_their_function_where_the_table_says():
  @jax.custom_vjp
  def twice(x):
    return 2 * x

  twice.defvjp(lambda x: (twice(x), None), lambda _, g: (g,))
  functions = {
    "jit": jax.jit(jnp.sin),
    "remat2": jax.checkpoint(jnp.sin),
    "custom_jvp_call": jax.custom_jvp(jnp.sin),
    "custom_vjp_call": twice,
  }
  functions["custom_jvp_call"].defjvp(lambda p, t: (p[0], t[0]))
  for name, fn in functions.items():
    (node,) = trace(fn, 1.0, open_calls=False).nodes
    assert node.name == name
    assert primitives.CALLS[name] in node.params
    assert name not in {node.name for node in trace(fn, 1.0).nodes}
