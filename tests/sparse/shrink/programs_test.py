"""Random programs: whatever shrink takes out, the outputs stay."""

import hypothesis
import hypothesis.strategies as hst
import jax
import jax.numpy as jnp
import numpy as np
import shrink_models as models

BATCH, WIDTH = 2, 8


def dense(p, h, saved):
  return h @ p["w"]


def dense_left(p, h, saved):
  return jnp.einsum("oi,btoi->bto", p["w"], jnp.stack([h] * WIDTH, 2))


def biased(p, h, saved):
  return h + p["b"]


def scaled(p, h, saved):
  return h * p["b"]


def gated(p, h, saved):
  return jax.nn.sigmoid(h @ p["w"]) * h


def residual(p, h, saved):
  return h + saved


def relu(p, h, saved):
  return jax.nn.relu(h)


def sigmoid(p, h, saved):
  return jax.nn.sigmoid(h)


def layer_norm(p, h, saved):
  centred = h - h.mean(-1, keepdims=True)
  return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1) * p["b"]


def rms_norm(p, h, saved):
  return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1)


def softmax(p, h, saved):
  return jax.nn.softmax(h)


def heads(p, h, saved):
  split = h.reshape(*h.shape[:-1], 2, 4)
  scores = jnp.einsum("bqhd,bkhd->bhqk", split, split)
  out = jnp.einsum("bhqk,bkhd->bqhd", scores, split)
  return out.reshape(h.shape) @ p["w"]


def swapped(p, h, saved):
  split = h.reshape(*h.shape[:-1], 2, 4)
  return jnp.swapaxes(split, -1, -2).reshape(h.shape)


def repeated(p, h, saved):
  half = h.reshape(*h.shape[:-1], 4, 2)[..., 0]
  return jnp.repeat(half, 2, axis=-1)


def rolled(p, h, saved):
  return jnp.concatenate([h[..., 3:], h[..., :3]], -1)


def halves(p, h, saved):
  a, b = jnp.split(h, 2, -1)
  return jnp.concatenate([jnp.tanh(b), a * b], -1)


def rotated(p, h, saved):
  a, b = h[..., :4], h[..., 4:]
  return jnp.concatenate([a - b, a + b], -1) @ p["w"]


def fused(p, h, saved):
  both = h @ jnp.concatenate([p["w"], p["w"].T], 1)
  return both[..., :WIDTH] * jax.nn.silu(both[..., WIDTH:])


def padded(p, h, saved):
  return jnp.pad(h, ((0, 0), (1, 1), (0, 0)))[:, : h.shape[1]]


def pooled(p, h, saved):
  return h.mean(1, keepdims=True) + 0 * saved


def top(p, h, saved):
  return h.max(1, keepdims=True) + saved


def selected(p, h, saved):
  return jnp.where(h > saved, h, p["b"])


def self_product(p, h, saved):
  return jnp.einsum("bti,btj->btij", h, h).sum(-1)


def outer_square(p, h, saved):
  return jnp.einsum("bti,btj,ij->btj", h, h, p["w"])


def convolved(p, h, saved):
  return jax.lax.conv_general_dilated(
    h, p["w"][None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
  )


def smoothed(p, h, saved):
  kernel = jnp.stack([p["w"], p["w"].T])
  return jax.lax.conv_general_dilated(
    h, kernel, (1,), [(1, 0)], dimension_numbers=("NWC", "WIO", "NWC")
  )


def scanned(p, h, saved):
  step = lambda c, x: (jnp.tanh(c @ p["w"] + x), c)
  return jax.lax.scan(step, h[:, 0], jnp.swapaxes(h, 0, 1))[1].swapaxes(0, 1)


OPERATIONS = [
  dense, dense, dense_left, biased, scaled, gated, residual, relu, relu,
  sigmoid, layer_norm, rms_norm, softmax, heads, swapped, repeated, rolled,
  halves, rotated, fused,
  padded, pooled, top, selected, self_product, outer_square, convolved,
  smoothed, scanned,
]  # fmt: skip


@hypothesis.settings(max_examples=6)
@hypothesis.given(
  hst.lists(hst.sampled_from(OPERATIONS), min_size=1, max_size=7),
  hst.integers(0, 999),
  hst.sampled_from([0.3, 0.6]),
)
def test_a_random_program_keeps_its_outputs(operations, seed, sparsity):
  rng = np.random.default_rng(seed)

  def weight(*shape):
    w = rng.standard_normal(shape).astype(np.float32)
    for axis in range(len(shape)):
      # Whole slices, alike in many weights, or couplings never line up.
      dead = rng.random(shape[axis]) < sparsity * rng.integers(0, 2)
      if rng.random() < 0.5:
        dead = np.arange(shape[axis]) % 2 == 0
      np.moveaxis(w, axis, 0)[dead] = 0
    return w

  params = {
    "in": weight(3, WIDTH),
    "ops": [
      {"w": weight(WIDTH, WIDTH), "b": weight(WIDTH)} for _ in operations
    ],
    "out": weight(WIDTH, 2),
  }
  x = rng.standard_normal((BATCH, 3, 3)).astype(np.float32)

  def fn(params, x):
    h = saved = x @ params["in"]
    for operation, p in zip(operations, params["ops"], strict=True):
      h, saved = operation(p, h, saved), h
    return h @ params["out"]

  masks = models.nothing_masked(params)
  models.shrink_and_compare(fn, params, masks, x, tolerance=1e-4)
