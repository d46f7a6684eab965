"""One evaluator: a program computes what its function computes."""

import doctest
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxpruner
from jaxpruner import program, sparse
from jaxpruner.inspect import cost
from jaxpruner.program import jaxprs, owners, windows

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


def scanned(x):
  step = lambda c, row: (jnp.tanh(c + row), c * row)
  return jax.lax.scan(step, jnp.zeros(4), x, reverse=True)


def nested(x):
  table = np.arange(4.0, dtype=np.float32)
  inner = jax.jit(lambda y: jax.nn.relu(y + table))
  return jax.checkpoint(inner)(x), jax.lax.cond(x[0, 0] > 0, jnp.sin, inner, x)


@pytest.mark.quick
@pytest.mark.parametrize("fn", [scanned, nested, lambda x: (x, 2.0)])
@pytest.mark.parametrize("unroll", [0, 128])
@pytest.mark.parametrize("open_calls", [False, True])
def test_running_a_program_is_calling_its_function(fn, unroll, open_calls):
  traced = program.trace(fn, X, unroll=unroll, open_calls=open_calls)
  ours = traced.out_tree.unflatten(program.run(traced, [X]))
  jax.tree.map(np.testing.assert_array_equal, ours, fn(X))
  names = {node.name for node in traced.nodes}
  assert not (open_calls and names & {"jit", "remat2", "custom_jvp_call"})
  assert not (unroll and "scan" in names)


def test_a_jaxpr_is_run_as_it_is_and_keeps_custom_derivatives():
  closed = jax.make_jaxpr(jax.nn.relu)(0.0)
  run = lambda x: program.run(closed, [x])[0]
  assert jax.grad(run)(0.0) == jax.grad(jax.nn.relu)(0.0) == 0.0


def test_a_visitor_sees_every_operation_once_and_in_order():
  seen = []

  def visit(node, values):
    seen.append(node.name)
    return program.bind(node, values)

  traced = program.trace(lambda x: jnp.cos(jnp.sin(x)) + 1, X)
  program.run(traced, [X], visit)
  assert seen == [node.name for node in traced.nodes] == ["sin", "cos", "add"]


def test_values_may_be_anything():
  depth = lambda _, values: [1 + max(values)]
  traced = program.trace(lambda x: jnp.cos(jnp.sin(x)) + 1, X)
  assert program.run(traced, [0], depth, constant=lambda _: 0) == [3]


def test_a_slice_holds_what_its_outputs_need_and_no_more():
  traced = program.trace(lambda x: (jnp.sin(x) + 1, jnp.cos(x)), X)
  part = traced.slice([traced.outputs[1]])
  assert [node.name for node in part.nodes] == ["cos"]
  np.testing.assert_array_equal(program.run(part, [X])[0], jnp.cos(X))


def test_a_scan_has_the_same_parts_in_every_release():
  fn = lambda c, xs: jax.lax.scan(lambda a, x: (a + c, x), c, xs, length=3)
  (node,) = program.trace(fn, jnp.ones(()), X, unroll=0).nodes
  scan = jaxprs.scan(node.eqn)
  assert (scan.constants, scan.carried, scan.length) == (1, 1, 3)
  assert len(node.inputs) == 3


def test_calls_are_made_of_what_is_in_them():
  (node,) = program.trace(jax.jit(jnp.sin), X, open_calls=False).nodes
  assert program.consists_of(node, {"sin"})
  assert not program.consists_of(node, {"cos"})


@pytest.mark.quick
@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 1), (0, 3)]])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_rows_times_kernel_is_the_convolution(padding, dilation):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 3, 9, 8)).astype(np.float32)  # NCHW
  w = rng.normal(size=(2, 3, 3, 5)).astype(np.float32)  # HWIO
  # JAX takes a spread input with numbers only.
  strides, spread = (2, 1), (1, 1 if isinstance(padding, str) else 2)
  expected = jax.lax.conv_general_dilated(
    x, w, strides, padding, spread, dilation, ("NCHW", "HWIO", "NHWC")
  )
  pads = windows.pads(padding, (9, 8), (2, 3), strides, spread, dilation)
  rows = windows.rows(
    jnp.asarray(x), (0, 1, 2, 3), (2, 3), strides, pads, spread, dilation
  )
  assert rows.shape == (*expected.shape[:3], 6, 3)
  ours = jnp.einsum("nhwtc,tco->nhwo", rows, w.reshape(6, 3, 5))
  np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_a_state_leaf_belongs_to_the_longest_path_that_ends_its_own():
  params = {"a": {"w": X}, "w": X[0]}
  found = owners.Owners(params)
  state = {"mu": params, "count": jnp.zeros(())}
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
  assert [found.find(path) for path in paths] == [None, 0, 1]
  assert owners.per_weight(X, X.shape)
  assert owners.per_weight(np.ones((7, *X.shape)), X.shape)
  assert not owners.per_weight(X[0], X.shape)


def unknown():
  """A primitive that no table knows."""
  from jax.extend import core
  from jax.interpreters import mlir

  primitive = core.Primitive("strange")
  primitive.def_impl(lambda x: x)
  primitive.def_abstract_eval(lambda x: x)
  lower = mlir.lower_fun(lambda x: x, multiple_results=False)
  mlir.register_lowering(primitive, lower)
  return primitive


STRANGE = unknown()
ANSWER = r"strange \(a primitive unknown to jaxpruner.program\)"


def test_an_unknown_primitive_gets_the_same_answer_everywhere():
  w = np.zeros((64, 64), np.float32)
  w[:32] = 1
  apply = lambda p, x: x @ STRANGE.bind(p["w"]) @ p["w"]
  params, x = {"w": jnp.asarray(w)}, jnp.ones((1, 64))
  timer = lambda thunks: dict.fromkeys(thunks, 1.0)
  _, report = sparse.accelerate(apply, params, x, cache=None, timer=timer)
  assert re.search(ANSWER, report.layers[0].rule)
  shrunk = sparse.shrink(apply, params, x)
  assert not shrunk.removed
  assert re.search(ANSWER, shrunk.blocked[0].reason)
  with pytest.raises(ValueError, match=ANSWER):
    jaxpruner.post_training.calibrate(apply, params, [np.ones((1, 64))])
  assert cost.count_flops(apply, params, x).unknown == ("strange",)


def test_an_operation_that_cannot_be_counted_is_named_with_its_parameter():
  def apply(p, x):
    return jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ p["w"], x)

  with pytest.raises(program.Unsupported, match="'w'.*use scan") as error:
    cost.count_flops(apply, {"w": X[:, :3]}, X[:, :3])
  assert error.value.primitive == "while"
  assert error.value.path == "w"


def test_names_of_residuals_do_not_hide_a_weight():
  w = np.zeros((64, 64), np.float32)
  w[:4, :4] = 1
  apply = lambda p, x: x @ checkpoint_name(p, "w") @ p
  timer = lambda thunks: {k: 1.0 + (k == "dense") for k in thunks}
  _, report = sparse.accelerate(
    apply, jnp.asarray(w), jnp.ones((1, 64)), cache=None, timer=timer
  )
  assert "also used" not in report.layers[0].rule
  assert cost.count_flops(apply, jnp.asarray(w), jnp.ones((1, 64))).other == 0


def test_stacked_and_tiled_activations_do_not_stop_shrink():
  up, down = np.ones((3, 4), np.float32), np.ones((4, 2), np.float32)
  up[:, 1] = 0
  params = {"up": jnp.asarray(up), "down": jnp.asarray(down)}

  def apply(p, x):
    h = jnp.tanh(x @ p["up"])
    h = jnp.stack([h, jnp.sin(h)])
    first, second = jnp.unstack(jnp.tile(h, (1, 2, 1)))
    return (first + second) @ p["down"]

  x = np.linspace(-1, 1, 6).reshape(2, 3).astype(np.float32)
  small = sparse.shrink(apply, params, x)
  assert small.params["up"].shape == (3, 3)
  np.testing.assert_allclose(small.fn(small.params, x), apply(params, x))


def test_the_readme_runs():
  path = pathlib.Path(program.__file__).parent / "README.md"
  text = re.sub(r"^```.*$", "", path.read_text(), flags=re.MULTILINE)
  test = doctest.DocTestParser().get_doctest(text, {}, "README", None, 0)
  assert test.examples
  runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
  assert not runner.run(test).failed
