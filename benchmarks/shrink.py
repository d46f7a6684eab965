"""Speed of physically shrunk models against the masked ones.

    python benchmarks/shrink.py

Expected: 1.9x at 50 % and 3.5x at 75 % of the channels removed, or better, and
outputs within 1e-5 of the masked model's, relative to the largest.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import page

from jaxpruner import sparse


def weights(rng, *shape):
  return rng.standard_normal(shape, np.float32) / np.sqrt(np.prod(shape[:-1]))


def channels(rng, param, axis, sparsity, unit=1):
  """Keep a random choice of (groups of `unit`) channels."""
  count = param.shape[axis] // unit
  kept = rng.permutation(count)[: round(count * (1 - sparsity))]
  mask = np.zeros(param.shape, np.uint8)
  index = (kept[:, None] * unit + np.arange(unit)).ravel()
  np.moveaxis(mask, axis, 0)[index] = 1
  return mask


def mlp(rng, sparsity):
  """Five layers of width 2048, batch 256."""
  widths = (784, 2048, 2048, 2048, 2048, 10)
  pairs = list(zip(widths[:-1], widths[1:], strict=True))
  params = [{"w": weights(rng, a, b), "b": weights(rng, b)} for a, b in pairs]
  masks = [
    {"w": channels(rng, p["w"], 1, sparsity), "b": None} for p in params[:-1]
  ] + [{"w": None, "b": None}]

  def fn(params, x):
    for layer in params[:-1]:
      x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]

  return fn, params, masks, weights(rng, 256, 784)


def cnn(rng, sparsity):
  """Three residual blocks of width 128 with batch norm, batch 8 of 32x32."""
  width = 128
  shared = channels(rng, np.zeros(width), 0, sparsity)

  def norm():
    return {
      "scale": 1 + weights(rng, width), "bias": weights(rng, width),
      "mean": weights(rng, width), "var": 1 + weights(rng, width) ** 2,
    }  # fmt: skip

  def block():
    return {"a": weights(rng, 3, 3, width, width), "na": norm(),
            "b": weights(rng, 3, 3, width, width), "nb": norm()}  # fmt: skip

  params = {
    "stem": weights(rng, 3, 3, 3, width), "norm": norm(),
    "blocks": [block() for _ in range(3)], "head": weights(rng, width, 10),
  }  # fmt: skip
  masks = jax.tree.map(lambda _p: None, params)
  # Partners of one residual stream are pruned alike, inner channels freely.
  masks["stem"] = np.broadcast_to(shared, params["stem"].shape)
  for b, m in zip(params["blocks"], masks["blocks"], strict=True):
    m["a"] = channels(rng, b["a"], 3, sparsity)
    m["b"] = np.broadcast_to(shared, b["b"].shape)

  def conv(x, w):
    return jax.lax.conv_general_dilated(
      x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

  def normalize(x, p):
    scale = p["scale"] * jax.lax.rsqrt(p["var"] + 1e-5)
    return (x - p["mean"]) * scale + p["bias"]

  def fn(params, x):
    x = jax.nn.relu(normalize(conv(x, params["stem"]), params["norm"]))
    for p in params["blocks"]:
      y = jax.nn.relu(normalize(conv(x, p["a"]), p["na"]))
      x = jax.nn.relu(x + normalize(conv(y, p["b"]), p["nb"]))
    return x.mean((1, 2)) @ params["head"]

  return fn, params, masks, weights(rng, 8, 32, 32, 3)


def transformer(rng, sparsity):
  """Four blocks, d = 768, 12 heads in 4 groups of keys, 256 tokens."""
  width, head, heads, groups, hidden = 768, 64, 12, 4, 3072

  def block():
    return {
      "n1": np.ones(width, np.float32), "n2": np.ones(width, np.float32),
      "q": weights(rng, width, heads * head),
      "k": weights(rng, width, groups * head),
      "v": weights(rng, width, groups * head),
      "o": weights(rng, heads * head, width),
      "up": weights(rng, width, hidden), "bias": weights(rng, hidden),
      "down": weights(rng, hidden, width), "out": weights(rng, width),
    }  # fmt: skip

  params = [block() for _ in range(4)]
  masks = jax.tree.map(lambda _p: None, params)
  for p, m in zip(params, masks, strict=True):
    m["v"] = channels(rng, p["v"], 1, sparsity, unit=head)
    m["up"] = channels(rng, p["up"], 1, sparsity)

  def norm(x, scale):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

  def fn(params, x):
    batch, length, _ = x.shape
    for p in params:
      h = norm(x, p["n1"])
      q = (h @ p["q"]).reshape(batch, length, heads, head)
      k = (h @ p["k"]).reshape(batch, length, groups, head)
      v = (h @ p["v"]).reshape(batch, length, groups, head)
      a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
      x = x + a.reshape(batch, length, -1) @ p["o"]
      h = jax.nn.gelu(norm(x, p["n2"]) @ p["up"] + p["bias"])
      x = x + h @ p["down"] + p["out"]
    return x

  return fn, params, masks, weights(rng, 1, 256, width)


def measure(build, sparsity):
  fn, params, masks, x = build(np.random.default_rng(0), sparsity)
  leaves, treedef = jax.tree.flatten(params)
  dense = treedef.unflatten(
    [
      jnp.asarray(p if m is None else np.where(m, p, 0))
      for p, m in zip(leaves, treedef.flatten_up_to(masks), strict=True)
    ]
  )
  start = time.perf_counter()
  small = sparse.shrink(fn, params, x, masks=masks)
  shrinking = time.perf_counter() - start
  assert not small.blocked, str(small)
  run_dense, run_small = jax.jit(fn), jax.jit(small.fn)
  expected = np.asarray(run_dense(dense, x))
  actual = np.asarray(run_small(small.params, x))
  error = np.abs(actual - expected).max() / np.abs(expected).max()
  before, after = page.interleave(
    lambda: run_dense(dense, x), lambda: run_small(small.params, x)
  )
  count = [
    sum(np.size(p) for p in jax.tree.leaves(t)) for t in (dense, small.params)
  ]
  return (
    f"{build.__name__}: {build.__doc__.strip('.')}",
    f"{100 * sparsity:.0f} %",
    f"{count[0] / 1e6:.2f} M",
    f"{count[1] / 1e6:.2f} M",
    f"{1e3 * np.median(before):.1f} ms",
    f"{1e3 * np.median(after):.1f} ms",
    f"**{page.ratio(before, after):.2f}x**",
    f"{error:.1e}",
    "yes" if small.same_code else "no",
    f"{shrinking:.1f} s",
  )


def main() -> None:
  start = time.perf_counter()
  rows = [
    measure(build, sparsity)
    for build in (mlp, cnn, transformer)
    for sparsity in (0.5, 0.75)
  ]
  head = (
    "model", "channels removed", "parameters", "after", "masked, dense",
    "shrunk", "speed", "largest error", "same code", "shrinking took",
  )  # fmt: skip
  page.write(
    "shrink",
    "Physical shrinking",
    [
      "Masked dense model against the shrunk one, both jitted; medians of "
      "runs in turns, speed as the median of paired ratios. The error is "
      "relative to the largest output. In the convolutional network the "
      "residual stream is pruned too, so both sides of a kernel shrink.",
      page.table(head, rows),
    ],
    time.perf_counter() - start,
  )


if __name__ == "__main__":
  main()
