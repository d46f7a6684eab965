"""Sparse training in an ordinary Optax loop: the three lines are marked.

Run: python examples/plain_optax.py [algorithm]      (about 10 s on 2 cores)
Expect: a loss near that of the dense network, with 90 % of the weights gone.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import jaxpruner


def main(algorithm: str = "magnitude", steps: int = 600) -> None:
  keys = jax.random.split(jax.random.key(0), 4)
  inputs = jax.random.normal(keys[0], (2048, 32))
  # Each output depends on a few inputs only: there is something to prune.
  wiring = jax.random.normal(keys[1], (32, 8)) * (
    jnp.arange(256) % 7 == 0
  ).reshape(32, 8)
  labels = jnp.tanh(inputs @ wiring)
  params = {
    "hidden": {
      "kernel": jax.random.normal(keys[2], (32, 256)) / 6,
      "bias": jnp.zeros(256),
    },
    "out": {"kernel": jax.random.normal(keys[3], (256, 8)) / 16},
  }

  def loss_fn(params, x, y):
    hidden = jax.nn.relu(
      x @ params["hidden"]["kernel"] + params["hidden"]["bias"]
    )
    return jnp.mean((hidden @ params["out"]["kernel"] - y) ** 2)

  pruner = jaxpruner.create_updater_from_config(  # 1: say what you want
    {"algorithm": algorithm, "sparsity": 0.9, "total_steps": steps}
  )
  tx = pruner.wrap_optax(optax.adam(3e-3))  # 2: wrap the optimizer
  opt_state = tx.init(params)
  params = pruner.post_gradient_update(params, opt_state)

  @jax.jit
  def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  for i in range(steps):
    rows = slice(128 * i % 2048, 128 * i % 2048 + 128)
    params, opt_state, loss = step(
      params, opt_state, inputs[rows], labels[rows]
    )
    if i % 100 == 99:
      print(f"step {i + 1:4d}  loss {loss:.4f}")
  print(jaxpruner.sparsity_table(params, updater=pruner, opt_state=opt_state))


if __name__ == "__main__":
  main(*sys.argv[1:2])
