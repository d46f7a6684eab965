"""Federated EMNIST by writer in FedJAX, pruned on the server.

    python examples/recipes/emnist_fedjax.py --algorithm rigl

The row Fed. MNIST of the paper's Table 1: 1,000 rounds of 50 writers, one epoch
of batches of 32 each, SGD on clients and Adam on the server, 80 % sparse with
ERK, a mask update every 10 rounds until round 750. Paper: dense 86.21,
straight-through 86.16, RigL 84.64. Needs FedJAX, which downloads EMNIST.
"""

import argparse
from typing import Any

import jax
import optax
import paper

import jaxpruner

if not hasattr(jax, "tree_map"):  # FedJAX calls a name that JAX has moved
  jax.tree_map = jax.tree.map  # pyright: ignore

import fedjax


def server_optimizer(algorithm: str, rounds: int) -> Any:
  """Return the server's Adam, wrapped by the pruner."""
  config = paper.pruner_config("emnist", algorithm, rounds)
  pruner = jaxpruner.create_updater_from_config(config)
  return pruner.wrap_optax(optax.adam(10**-2.5, eps=1e-4))


def train(
  algorithm: str,
  model: Any,
  clients: Any,
  rounds: int = 1000,
  per_round: int = 50,
  seed: int = 0,
) -> Any:
  """Train one cell of the table.

  Args:
    algorithm: a registered name.
    model: a FedJAX model.
    clients: FedJAX's federated data.
    rounds: the number of rounds; the schedule is scaled with it.
    per_round: the number of clients that are drawn for each.
    seed: of the weights and of the draws.

  Returns:
    The server's state: params, and opt_state with the masks.
  """

  def loss(params, batch, key):
    found = model.apply_for_train(params, batch, key)
    return model.train_loss(batch, found).mean()

  loop = fedjax.algorithms.fed_avg.federated_averaging(
    jax.jit(jax.grad(loss)),
    fedjax.optimizers.sgd(10**-1.5),
    fedjax.optimizers.create_optimizer_from_optax(
      server_optimizer(algorithm, rounds)
    ),
    fedjax.ShuffleRepeatBatchHParams(batch_size=32, num_epochs=1, seed=seed),
  )
  sampler = fedjax.client_samplers.UniformGetClientSampler(
    clients, per_round, seed
  )
  state = loop.init(model.init(jax.random.PRNGKey(seed)))
  for _ in range(rounds):
    state, _ = loop.apply(state, sampler.sample())
  return state


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--algorithm", default="magnitude")
  parser.add_argument("--rounds", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  clients, held_out = fedjax.datasets.emnist.load_data(only_digits=False)
  model = fedjax.models.emnist.create_conv_model(only_digits=False)
  state = train(args.algorithm, model, clients, args.rounds, seed=args.seed)
  batches = fedjax.padded_batch_federated_data(held_out, batch_size=256)
  found = fedjax.evaluate_model(model, state.params, batches)
  print(f"{args.algorithm}: {found}")
  print(jaxpruner.summarize_sparsity(state.params)["_total_sparsity"])


if __name__ == "__main__":
  main()
