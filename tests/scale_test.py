"""Pruning a model of a billion weights takes little beyond the model."""

import subprocess
import sys

import pytest

PROGRAM = """
import functools, resource
import jax, jax.numpy as jnp
import jaxpruner

params = {
  f"layer{i}": {"kernel": jax.random.bits(
    jax.random.key(i), (8192, 8192), jnp.uint16
  ).view(jnp.bfloat16)}
  for i in range(15)
}
# Random bits hold NaN and infinities; weights do not.
clean = jax.jit(lambda w: jnp.where(jnp.isfinite(w), w, 0), donate_argnums=0)
params = jax.block_until_ready(jax.tree.map(clean, params))
size = sum(leaf.size for leaf in jax.tree.leaves(params))
assert size > 1e9

def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
pruner = jaxpruner.MagnitudePruning(
  sparsity_distribution_fn=functools.partial(
    jaxpruner.sparsity_distributions.uniform, sparsity=0.9
  )
)
pruned, masks = jax.block_until_ready(pruner.instant_sparsify(params))
ones = sum(int(jnp.sum(m, dtype=jnp.int32)) for m in jax.tree.leaves(masks))
assert ones == round(0.1 * size), (ones, size)
print((peak() - before) / 2**30)
"""


@pytest.mark.slow
def test_a_billion_weights_are_pruned_within_six_gigabytes():
  run = subprocess.run(
    [sys.executable, "-c", PROGRAM], capture_output=True, text=True
  )
  assert run.returncode == 0, run.stderr
  assert float(run.stdout) <= 6
