"""Small models to shrink, and the comparison with their masked selves."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.sparse import shrinking


def randomize(params, seed=0):
  rng = np.random.default_rng(seed)

  def leaf(p):
    return jnp.asarray(rng.standard_normal(p.shape) * 0.5 + 0.1, p.dtype)

  return jax.tree.map(leaf, params)


def nothing_masked(params):
  return jax.tree.map(lambda _p: None, params)


def mask_axis(param, axis, kept):
  """Return a mask that keeps these indices of one axis."""
  mask = np.zeros(param.shape, np.uint8)
  np.moveaxis(mask, axis, 0)[list(kept)] = 1
  return mask


def masked(params, masks):
  leaves, treedef = jax.tree.flatten(params)
  return treedef.unflatten(
    [
      p if m is None else jnp.asarray(np.where(m, p, np.zeros((), p.dtype)))
      for p, m in zip(leaves, treedef.flatten_up_to(masks), strict=True)
    ]
  )


def shrink_and_compare(fn, params, masks, *inputs, tolerance=1e-5):
  """Shrink, and require the masked model's outputs."""
  small = shrinking.shrink(fn, params, *inputs, masks=masks)
  expected = jax.jit(fn)(masked(params, masks), *inputs)
  actual = jax.jit(small.fn)(small.params, *inputs)
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    scale = np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
  return small


def shapes(small, *path):
  node = small.params
  for key in path:
    node = node[key]
  return jax.tree.map(lambda x: x.shape, node)


def mlp(params, x, activation=jax.nn.relu):
  *hidden, last = params
  for layer in hidden:
    x = activation(x @ layer["w"] + layer["b"])
  return x @ last["w"] + last["b"]


def mlp_params(*widths, seed=0):
  return randomize(
    [
      {"w": jnp.zeros((a, b)), "b": jnp.zeros(b)}
      for a, b in zip(widths[:-1], widths[1:], strict=True)
    ],
    seed,
  )


def rms_norm(x, scale):
  mean = jnp.mean(x * x, -1, keepdims=True)
  return x * jax.lax.rsqrt(mean + 1e-6) * scale


def decoder(params, ids, heads=4, groups=2, repeat=True):
  """A pre-norm decoder with grouped-query attention and a gated MLP."""
  x = params["embed"][ids]
  batch, length, _ = x.shape
  for p in params["layers"]:
    h = rms_norm(x, p["norm1"])
    q = (h @ p["q"]).reshape(batch, length, heads, -1)
    k = (h @ p["k"]).reshape(batch, length, groups, -1)
    v = (h @ p["v"]).reshape(batch, length, groups, -1)
    if repeat:
      k, v = (jnp.repeat(t, heads // groups, axis=2) for t in (k, v))
      scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
      causal = jnp.tril(jnp.ones((length, length), bool))
      scores = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1)
      out = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
    else:
      out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + out.reshape(batch, length, -1) @ p["o"]
    h = rms_norm(x, p["norm2"])
    x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
  return rms_norm(x, params["norm"]) @ params["embed"].T


def decoder_params(width=16, heads=4, groups=2, head=4, hidden=24, layers=2):
  def layer():
    return {
      "norm1": jnp.ones(width),
      "norm2": jnp.ones(width),
      "q": jnp.zeros((width, heads * head)),
      "k": jnp.zeros((width, groups * head)),
      "v": jnp.zeros((width, groups * head)),
      "o": jnp.zeros((heads * head, width)),
      "gate": jnp.zeros((width, hidden)),
      "up": jnp.zeros((width, hidden)),
      "down": jnp.zeros((hidden, width)),
    }

  return randomize(
    {
      "embed": jnp.zeros((11, width)),
      "norm": jnp.ones(width),
      "layers": [layer() for _ in range(layers)],
    }
  )
