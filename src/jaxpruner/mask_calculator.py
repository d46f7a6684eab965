"""Exact top-k masks (first version, by sorting)."""
import fractions
import jax
import jax.numpy as jnp

MASK_DTYPE = jnp.uint8


def num_ones(size, sparsity):
  if isinstance(sparsity, jax.Array):
    return jnp.maximum(1, jnp.round(size * (1 - sparsity)).astype(jnp.int32))
  return max(1, round(size * (1 - fractions.Fraction(float(sparsity)))))


def topk_masks(scores, ones, *, together=False):
  scores = [s() if callable(s) else s for s in scores]
  flat = [s.reshape(-1) for s in scores]
  if together:
    flat, ones = [jnp.concatenate(flat)], [ones]
  out = []
  for f, k in zip(flat, ones):
    order = jnp.argsort(f, descending=True, stable=True)
    rank = jnp.zeros(f.size, jnp.int32).at[order].set(jnp.arange(f.size))
    out.append((rank < k).astype(MASK_DTYPE))
  if together:
    cuts = [int(c) for c in __import__("numpy").cumsum([s.size for s in scores])[:-1]]
    out = jnp.split(out[0], cuts)
  return [m.reshape(s.shape) for m, s in zip(out, scores)]
