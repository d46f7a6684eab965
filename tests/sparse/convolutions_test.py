"""Convolutions by compiled windows and tap by tap equal XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpruner import sparse
from jaxpruner.sparse import _planes, kernels
from jaxpruner.sparse._taps import Taps

LAYOUTS = [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")]
has_kernel = pytest.mark.skipif(
  kernels.load(_planes.NAME) is None, reason="needs the compiled kernel"
)


def array(rng, *shape):
  return rng.standard_normal(shape).astype("f4")


def sparsely(rng, *shape):
  return array(rng, *shape) * (rng.random(shape) < 0.3)


def in_layout(x, axes, order):
  """Return an array whose axes are in `axes`, with those of `order`."""
  return np.transpose(x, [axes.index(a) for a in order])


@st.composite
def problems(draw, groups=False):
  """Return image, kernel and options of a convolution, as arrays in layouts."""
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  pick = lambda low, high: draw(st.integers(low, high))
  batch, high, wide = pick(1, 2), pick(6, 14), pick(6, 40)
  into, window = pick(1, 9), (pick(1, 3), pick(1, 3))
  out = into * pick(1, 2) if groups else pick(1, 40)
  layout = draw(st.sampled_from(LAYOUTS))
  image = array(rng, batch, high, wide, into)
  kernel = sparsely(rng, *window, 1 if groups else into, out)
  padding = draw(
    st.sampled_from(["SAME", "VALID", [(2, 0), (1, 3)], [(-1, 1), (0, -1)]])
  )
  options = {
    "window_strides": (pick(1, 3), pick(1, 3)),
    "padding": padding,
    # JAX takes this beside numbers only.
    "lhs_dilation": (1, 1 if isinstance(padding, str) else pick(1, 2)),
    "rhs_dilation": (pick(1, 2), pick(1, 2)),
    "dimension_numbers": layout,
  }
  return (
    in_layout(image, "NHWC", layout[0]),
    in_layout(kernel, "HWIO", layout[1]),
    options,
  )


@has_kernel
@settings(max_examples=12, deadline=None)
@given(problems())
def test_compiled_windows_equal_the_dense_convolution(problem):
  image, kernel, options = problem
  spec = jax.lax.conv_dimension_numbers(
    image.shape, kernel.shape, options["dimension_numbers"]
  )
  packed = sparse.pack(kernel, contract=sparse.conv_contract(spec))
  want = jax.lax.conv_general_dilated(image, kernel, **options)
  got = sparse.conv_general_dilated(jnp.asarray(image), packed, **options)
  assert got.shape == want.shape and got.dtype == want.dtype
  np.testing.assert_allclose(got, want, atol=2e-5)


@has_kernel
@pytest.mark.parametrize(
  ("shape", "kernel", "strides"),
  [
    ((1, 56, 56, 64), (3, 3, 64, 64), (1, 1)),  # many panels, in chunks
    ((1, 28, 28, 256), (1, 1, 256, 48), (2, 2)),  # whole tiles
    ((1, 7, 7, 300), (1, 1, 300, 1100), (1, 1)),  # several blocks of columns
    ((2, 9, 17, 3), (7, 7, 3, 70), (2, 2)),
  ],
)
def test_large_convolutions_equal_the_dense_one(shape, kernel, strides):
  rng = np.random.default_rng(0)
  image, weight = array(rng, *shape), sparsely(rng, *kernel)
  options = {
    "window_strides": strides, "padding": "SAME",
    "dimension_numbers": LAYOUTS[0],
  }  # fmt: skip
  packed = sparse.pack(weight, contract=(0, 1, 2))
  run = lambda w: sparse.conv_general_dilated(jnp.asarray(image), w, **options)
  assert "jaxpruner_conv" in str(jax.make_jaxpr(run)(packed))
  np.testing.assert_allclose(run(packed), run(weight), atol=1e-3, rtol=1e-4)


@has_kernel
def test_compiled_windows_have_the_dense_derivatives():
  rng = np.random.default_rng(0)
  image, weight = array(rng, 1, 8, 8, 5), sparsely(rng, 3, 3, 5, 6)
  options = {
    "window_strides": (1, 2), "padding": "SAME",
    "dimension_numbers": LAYOUTS[0],
  }  # fmt: skip

  def loss(x, w):
    return jnp.sin(sparse.conv_general_dilated(x, w, **options)).sum()

  packed = sparse.pack(weight, contract=(0, 1, 2))
  of_values = lambda x, v: loss(x, packed.with_values(v))
  image = jnp.asarray(image)
  dx, dv = jax.grad(of_values, (0, 1))(image, packed.values)
  want_x, want_w = jax.grad(loss, (0, 1))(image, jnp.asarray(weight))
  np.testing.assert_allclose(dx, want_x, atol=1e-5)
  got_w = packed.with_values(dv).todense()
  np.testing.assert_allclose(got_w, want_w * (weight != 0), atol=1e-5)
  images = jnp.stack([image, 2 * image])
  many = jax.vmap(loss, (0, None))(images, packed)
  np.testing.assert_allclose(many[1], loss(images[1], packed), rtol=1e-4)


@settings(max_examples=8, deadline=None)
@given(problems(groups=True))
def test_taps_equal_the_depthwise_convolution(problem):
  image, kernel, options = problem
  layout = options["dimension_numbers"]
  groups = image.shape[layout[0].index("C")]

  def model(w, x):
    return jax.lax.conv_general_dilated(
      x, w, feature_group_count=groups, **options
    )

  fast = sparse.Accelerated(model, Taps(jnp.asarray(kernel)))
  want = model(kernel, image)
  got = fast(jnp.asarray(image))
  assert got.shape == want.shape and got.dtype == want.dtype
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_accelerate_takes_taps_where_they_are_faster():
  rng = np.random.default_rng(0)
  weight, image = array(rng, 3, 3, 1, 8), array(rng, 1, 6, 6, 8)

  def model(w, x):
    return jax.lax.conv_general_dilated(
      x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[0], feature_group_count=8
    )

  faster = lambda thunks: {n: 2.0 if n == "dense" else 1.0 for n in thunks}
  slower = lambda thunks: {n: 1.0 if n == "dense" else 2.0 for n in thunks}
  fast, report = sparse.accelerate(
    model, weight, image, cache=None, timer=faster
  )
  assert isinstance(fast.params, Taps)
  (layer,) = report.layers
  assert layer.format == "taps" and "depthwise" in layer.rule
  assert layer.bytes == layer.dense_bytes == weight.nbytes
  np.testing.assert_allclose(fast(image), model(weight, image), atol=1e-5)
  _, report = sparse.accelerate(model, weight, image, cache=None, timer=slower)
  assert report.layers[0].rule == "dense is fastest of 2"


def test_a_saved_model_with_both_kinds_runs_again(tmp_path):
  pytest.importorskip("flatbuffers")
  rng = np.random.default_rng(0)
  params = {
    "wide": sparse.pack(sparsely(rng, 3, 3, 4, 64), contract=(0, 1, 2)),
    "each": Taps(jnp.asarray(array(rng, 3, 3, 1, 64))),
  }
  image = jnp.asarray(array(rng, 1, 8, 8, 4))

  def model(p, x):
    conv = lambda x, w, groups: jax.lax.conv_general_dilated(
      x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[0],
      feature_group_count=groups,
    )  # fmt: skip
    return conv(conv(x, p["wide"], 1), p["each"], 64)

  fast = sparse.Accelerated(model, params, (image,))
  fast.save(tmp_path / "model.jaxpruner")
  loaded = sparse.load_model(tmp_path / "model.jaxpruner")
  assert np.array_equal(loaded(image), fast(image))
