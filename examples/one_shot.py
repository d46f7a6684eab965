"""Prune a tree of parameters at once, look at it, and store it smaller.

Run: python examples/one_shot.py      (a few seconds)
Expect: exact counts, and the bytes before and after.
"""

import functools

import jax
import jax.numpy as jnp

import jaxpruner


def main() -> None:
  keys = jax.random.split(jax.random.key(0), 3)
  params = {
    "embed": {"table": jax.random.normal(keys[0], (1000, 64))},
    "dense": {
      "kernel": jax.random.normal(keys[1], (64, 256)),
      "bias": jnp.zeros(256),
    },
    "head": {"kernel": jax.random.normal(keys[2], (256, 1000))},
  }

  # A sparsity for all, one for the embedding, and the hidden layer in 2:4.
  pruner = jaxpruner.MagnitudePruning(
    sparsity_distribution_fn=functools.partial(
      jaxpruner.sparsity_distributions.uniform,
      sparsity=0.95,
      custom_sparsity_map={"embed/table": 0.8, "dense/kernel": 0.5},
    ),
    sparsity_type={"dense/kernel": jaxpruner.NByM(2, 4)},
  )
  params, masks = pruner.instant_sparsify(params)
  print(jaxpruner.sparsity_table(params, masks, updater=pruner))

  sparse = jaxpruner.sparse.to_bcoo(params, masks)
  sizes = jaxpruner.sparse.bytes_report(sparse)
  print(f"bytes: {sizes.dense:,} dense, {sizes.sparse:,} as BCOO")
  dense = jaxpruner.sparse.from_bcoo(sparse)
  same = jax.tree.map(lambda a, b: bool((a == b).all()), dense, params)
  assert all(jax.tree.leaves(same))


if __name__ == "__main__":
  main()
