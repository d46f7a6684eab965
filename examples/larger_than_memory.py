"""Train a network whose dense form would not fit in memory.

Run: bash -c "ulimit -v 9000000; python examples/larger_than_memory.py"
(about 2 minutes on 2 cores). Its two layers have 2 × 2²⁹ weights: 4.3 GB of
dense weights, 17 GB with gradients and Adam's moments, under a limit of 9 GB
for everything the process maps.
Expect: a loss that falls, and a training state of about 0.02 of the dense one.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import jaxpruner
from jaxpruner import kept


def init(key, x, width):
  del key
  # Never computed: `create` draws the kept weights only.
  return {
    "in": {"kernel": jnp.zeros((x.shape[1], width))},
    "out": {"kernel": jnp.zeros((width, x.shape[1]))},
  }


def model(params, x):
  return jax.nn.relu(x @ params["in"]["kernel"]) @ params["out"]["kernel"]


def main(width: int = 2**15, size: int = 2**14, steps: int = 5) -> float:
  pruner = jaxpruner.create_updater_from_config({
    "algorithm": "static_sparse", "sparsity": 0.99, "rng_seed": 0,
    "storage": "kept",
  })  # fmt: skip
  x = jax.random.normal(jax.random.key(1), (16, size))
  weights = pruner.create(
    jax.random.key(0), lambda key, x: init(key, x, width), x
  )
  tx = pruner.wrap_optax(optax.adam(1e-3))
  opt_state = tx.init(weights)
  params, _ = kept.split(weights)
  del weights
  report = kept.training_bytes(params, opt_state)
  print(report)
  apply = kept.lift(model)

  def loss(params, opt_state, x):
    seen = pruner.pre_forward_update(params, opt_state)
    return jnp.mean((apply(seen, x) - x) ** 2)

  @jax.jit
  def step(params, opt_state, x):
    value, grads = jax.value_and_grad(loss)(params, opt_state, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  for i in range(steps):
    params, opt_state, value = step(params, opt_state, x)
    print(f"step {i}: loss {float(value):.4f}")
  return report.ratio


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
