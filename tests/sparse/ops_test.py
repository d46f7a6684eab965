"""Products with sparse weights equal those with dense ones."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse
from jaxpruner.sparse import kernels

RNG = np.random.default_rng(0)
BATCHES = (1, 8, 9, 33)
# In float32, sums of K terms differ by rounding only.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


def weight(shape, density=0.3, dtype="float32"):
  mask = RNG.random(shape) < density
  return jnp.asarray(np.where(mask, RNG.standard_normal(shape), 0), dtype)


def normal(*shape, dtype="float32"):
  return jnp.asarray(RNG.standard_normal(shape), dtype)


def times(x, w):
  """Return the product in float64, by NumPy."""
  return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


def close(actual, expected, dtype="float32"):
  actual, expected = (np.asarray(a, np.float32) for a in (actual, expected))
  assert actual.shape == expected.shape
  scale = max(1.0, float(np.abs(expected).max(initial=0)))
  np.testing.assert_allclose(actual, expected, atol=TOLERANCE[dtype] * scale)


FORMATS = {
  "sell": {},
  "bitmask": {},
  "nm": {"n": 4, "m": 4},
  "block": {"block_shape": (4, 8)},
  "compact": {},
  "diagonals": {},
  "strided_nm": {"n": 2, "m": 2, "stride": 2},
  "panel": {},
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("format", FORMATS)
def test_products_equal_dense_for_every_batch(format, dtype):
  dense = weight((260, 70), dtype=dtype)
  packed = sparse.pack(dense, format=format, **FORMATS[format])
  product = jax.jit(lambda x, w: x @ w)
  for batch in BATCHES:
    x = normal(batch, 260, dtype=dtype)
    y = product(x, packed)
    assert y.dtype == dense.dtype
    close(y, times(x, dense), dtype)


@pytest.mark.parametrize(
  "shape", [(1, 1), (5, 3), (255, 65), (256, 256), (513, 1030)]
)
def test_the_kernel_handles_every_edge(shape):
  dense = weight(shape, 0.1)
  packed = sparse.pack(dense)

  @jax.jit
  def both(x, g):
    y, pullback = jax.vjp(lambda x: sparse.matmul(x, packed), x)
    return y, pullback(g)[0]

  for batch in (1, 7, 40):
    x, g = normal(batch, shape[0]), normal(batch, shape[1])
    y, dx = both(x, g)
    close(y, times(x, dense))
    close(dx, times(g, dense.T))


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_empty_and_full_weights(density):
  dense = weight((300, 80), density)
  x = normal(3, 300)
  packed = sparse.pack(dense)
  close(x @ packed, times(x, dense))
  close(x[0] @ packed, times(x[0], dense))


def test_a_large_batch_is_shared_between_threads_rightly():
  dense = weight((300, 1100), 0.2)
  packed = sparse.pack(dense)
  for batch in (64, 300, 1500):
    x = normal(batch, 300)
    close(sparse.matmul(x, packed), times(x, dense))


def test_leading_axes_none_and_empty():
  dense = weight((12, 7))
  packed = sparse.pack(dense)
  for lead in [(), (0,), (2, 3), (2, 0, 3)]:
    x = normal(*lead, 12)
    close(sparse.matmul(x, packed), times(x, dense))
  ones = np.ones((2, 12), np.float32)
  close(ones @ packed, times(ones, dense))


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_equal_dense_at_kept_weights(format):
  mask = np.asarray(weight((264, 70))) != 0
  # Kept zeros must learn, removed weights must not.
  dense = mask * np.asarray(weight((264, 70), 0.5))
  packed = sparse.pack(dense, mask, format=format, **FORMATS[format])
  x = normal(9, 264)

  def loss(x, values):
    return jnp.sin(x @ packed.with_values(values)).sum()

  @jax.jit
  def slope(x, values):
    dx, values = jax.grad(loss, (0, 1))(x, values)
    return dx, packed.with_values(values).todense()

  dx, got = slope(x, packed.values)
  factor = np.cos(times(x, dense))
  want_dx, want_w = times(factor, dense.T), times(np.asarray(x).T, factor)
  close(dx, want_dx)
  if format not in (
    "block",
    "nm",
    "compact",
    "panel",
    "diagonals",
    "strided_nm",
  ):  # these train whole blocks
    close(got, mask * want_w)
  else:
    close(mask * np.asarray(got), mask * want_w)


@pytest.mark.parametrize("format", ["sell", "bitmask", "panel"])
def test_forward_mode_equals_dense_alone_and_over_reverse(format):
  dense = weight((264, 70))
  packed = sparse.pack(dense, format=format)
  dense = np.asarray(dense)
  move = np.where(dense != 0, 0.5 * dense + 1, 0)
  moved = sparse.pack(move, dense != 0, format=format)
  x, x_dot = normal(9, 264), normal(9, 264)

  def product(x, values):
    return jnp.sin(x @ packed.with_values(values))

  def dense_product(x, w):
    return jnp.sin(x @ w)

  point, moves = (x, packed.values), (x_dot, moved.values)
  dense_point, dense_moves = (x, dense), (x_dot, move)

  def all_of(f):
    slope = jax.grad(lambda x, w: f(x, w).sum())
    return jax.jit(lambda p, m: (jax.jvp(f, p, m), jax.jvp(slope, p, m)[1]))

  got = all_of(product)(point, moves)
  want = all_of(dense_product)(dense_point, dense_moves)
  jax.tree.map(close, got, want)


def test_second_use_in_a_chain_has_the_right_gradient():
  dense = weight((20, 20))
  packed = sparse.pack(dense)
  x = normal(4, 20)
  close(
    jax.jit(jax.grad(lambda x: ((jnp.tanh(x @ packed)) @ packed).sum()))(x),
    jax.jit(jax.grad(lambda x: ((jnp.tanh(x @ dense)) @ dense).sum()))(x),
  )


def test_vmap_over_the_batch_the_weights_and_both():
  dense = [weight((20, 6)) for _ in range(3)]
  x = normal(3, 5, 20)
  one = sparse.pack(dense[0])
  many = lambda f: jax.jit(jax.vmap(f))
  close(many(lambda x: x @ one)(x), times(x, dense[0]))
  close(many(jax.vmap(lambda x: x @ one))(x), times(x, dense[0]))
  # Same pattern, other values: what an ensemble of fine-tuned weights is.
  stack = jax.tree.map(lambda a: np.stack([a] * 3), one)
  factors = np.arange(3, dtype=np.float32).reshape(3, 1, 1)
  scaled = stack.with_values(stack.values * factors)
  close(many(lambda x, w: x @ w)(x, scaled), times(x, dense[0]) * factors)
  want = times(x[0], dense[0]) * factors
  close(many(lambda w: x[0] @ w)(scaled), want)
  close(
    many(jax.grad(lambda x: (x @ one).sum()))(x),
    np.broadcast_to(np.asarray(dense[0]).sum(1), x.shape),
  )


EINSUMS = [
  ("bd,df->bf", (3, 8), (8, 5), (0,)),
  ("...d,dhk->...hk", (2, 3, 8), (8, 2, 4), (0,)),
  ("bsd,dhk->bhsk", (2, 3, 8), (8, 2, 4), (0,)),
  ("bshk,hkd->bsd", (2, 3, 2, 4), (2, 4, 8), (0, 1)),
  ("bskh,hkd->bsd", (2, 3, 4, 2), (2, 4, 8), (0, 1)),
  ("bd,fd->bf", (3, 8), (5, 8), (1,)),
  # The rest falls back to the decoded weight.
  ("bd,df->b", (3, 8), (8, 5), (0,)),
  ("bd,bdf->bf", (3, 8), (3, 8, 5), (1,)),
  ("bd,df->bf", (3, 8), (8, 5), (1,)),
]


@pytest.mark.parametrize(("spec", "x", "w", "contract"), EINSUMS)
def test_einsum_equals_dense_from_either_side(spec, x, w, contract):
  x, dense = normal(*x), weight(w)
  packed = sparse.pack(dense, contract=contract)
  want = np.einsum(spec, x, dense)
  left, right, out = spec.replace("->", ",").split(",")
  turned = f"{right},{left}->{out}"
  found = jax.jit(
    lambda x, w: (sparse.einsum(spec, x, w), sparse.einsum(turned, w, x))
  )(x, packed)
  close(found[0], want)
  close(found[1], want)


CONVOLUTIONS = [
  dict(window=(3, 3), strides=(1, 1), padding="SAME"),
  dict(window=(1, 1), strides=(2, 2), padding="VALID"),
  dict(window=(3, 2), strides=(2, 1), padding=[(1, 2), (0, 1)],
       lhs_dilation=(1, 2), rhs_dilation=(2, 1)),
  dict(window=(3, 3), strides=(2, 2), padding="SAME", groups=2),
]  # fmt: skip


@pytest.mark.parametrize("layout", [("NHWC", "HWIO"), ("NCHW", "OIHW")])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_equal_dense(case, layout):
  groups = case.get("groups", 1)
  shape = {"N": 2, "H": 9, "W": 8, "C": 4}
  x = normal(*(shape[c] for c in layout[0]))
  window = dict(zip("HW", case["window"], strict=True))
  kernel = {**window, "I": 4 // groups, "O": 10}
  dense = weight([kernel[c] for c in layout[1]])
  dimensions = (*layout, layout[0])
  spec = jax.lax.conv_dimension_numbers(x.shape, dense.shape, dimensions)
  packed = sparse.pack(dense, contract=sparse.conv_contract(spec))
  arguments = (
    case["strides"], case["padding"], case.get("lhs_dilation"),
    case.get("rhs_dilation"), dimensions, groups,
  )  # fmt: skip
  close(
    jax.jit(lambda x, w: sparse.conv_general_dilated(x, w, *arguments))(
      x, packed
    ),
    jax.lax.conv_general_dilated(x, dense, *arguments),
  )


def test_dense_weights_pass_through():
  x, dense = normal(3, 8), weight((8, 5))
  close(sparse.matmul(x, dense), x @ dense)
  close(sparse.einsum("bd,df->bf", x, dense), x @ dense)


def test_wrong_shapes_are_refused():
  packed = sparse.pack(weight((8, 5)))
  with pytest.raises(ValueError, match="last axis must have length 8"):
    sparse.matmul(jnp.ones((2, 5)), packed)
  with pytest.raises(TypeError, match="takes the sparse weight second"):
    sparse.matmul(packed, jnp.ones((5, 2)))


def test_double_precision_decodes_and_is_exact():
  with jax.enable_x64(True):
    dense = jnp.asarray(RNG.integers(-4, 5, (20, 6)), jnp.float64)
    x = jnp.asarray(RNG.integers(-4, 5, (3, 20)), jnp.float64)
    y = x @ sparse.pack(dense)
    assert y.dtype == jnp.float64
    np.testing.assert_array_equal(y, x @ dense)


def test_one_program_exports_to_platforms_without_the_kernel():
  packed = sparse.pack(weight((20, 6)))
  program = jax.jit(lambda x, w: x @ w)
  exported = jax.export.export(program, platforms=["cuda", "tpu"])(
    jnp.ones((2, 20)), packed
  )
  assert "jaxpruner_sell" not in exported.mlir_module()
  lowered = program.lower(jnp.ones((2, 20)), packed).as_text()
  assert "jaxpruner_sell" in lowered and "callback" not in lowered


def test_without_numba_products_work_and_say_so_once(monkeypatch):
  monkeypatch.setitem(sys.modules, "numba", None)
  kernels.load.cache_clear()
  kernels._has_numba.cache_clear()
  dense = weight((20, 6))
  packed, x = sparse.pack(dense), normal(3, 20)
  try:
    with pytest.warns(UserWarning, match=r"jaxpruner\[sparse\]"):
      close(x @ packed, x @ dense)
    close(x @ packed, x @ dense)  # silent now: warnings are errors
    close(
      jax.grad(lambda v: (x @ packed.with_values(v)).sum())(packed.values),
      packed.matrix.gather(jnp.broadcast_to(x.sum(0)[:, None], (20, 6))),
    )
  finally:
    kernels.load.cache_clear()
    kernels._has_numba.cache_clear()
