"""Does the optimizer decide between SET and RigL?

    python benchmarks/rewiring.py

Trains the digits perceptron with four kinds of masks, everything equal
but the optimizer, and prints accuracy and paired differences over seeds. What
the differences mean, and what they do not, is in `docs/results/table1.md`.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpruner
from jaxpruner.compare import statistics, training
from jaxpruner.compare.tasks import digits

ALGORITHMS = ("static_sparse", "set", "rigl", "signal_rigl")


@dataclasses.dataclass(frozen=True)
class Digits(digits.Digits):
  """Digits with a choice of optimizer, each at a rate that suits it."""

  name_of_optimizer: str = "adam"

  def optimizer(self) -> optax.GradientTransformation:
    rate = 0.05 if self.name_of_optimizer == "sgd" else self.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
      0.0, rate, self.steps // 20, self.steps
    )
    return {
      "adam": optax.adam(schedule),
      "adam, b2 = 0.9": optax.adam(schedule, b2=0.9),
      "sgd": optax.sgd(schedule, momentum=0.9),
    }[self.name_of_optimizer]


def train(
  optimizer: str, algorithm: str, args, data
) -> tuple[np.ndarray, float]:
  """Return (accuracy per seed, training loss of the last 50 steps)."""
  task = Digits(name_of_optimizer=optimizer)
  config = {"algorithm": algorithm, "sparsity": args.sparsity}
  config |= {"dist_type": "erk", "total_steps": task.steps}
  updater = jaxpruner.create_updater_from_config(config)
  built = training.build(task, updater, data)
  keys = jax.vmap(jax.random.key)(jnp.arange(args.seeds))
  carry = built.start(keys, data)
  carry, losses, _ = built.train(carry, keys, data, 0, task.steps, task.steps)
  found = jax.vmap(task.evaluate, in_axes=(0, None))(built.final(carry), data)
  loss = float(np.asarray(losses)[:, -50:].mean())
  return np.asarray(found["accuracy"], np.float64), loss


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--sparsity", type=float, default=0.9)
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument(
    "--optimizers", nargs="*", default=["adam", "adam, b2 = 0.9", "sgd"]
  )
  args = parser.parse_args()
  data = jax.tree.map(jnp.asarray, digits.Digits().load())
  print("| optimizer | algorithm | accuracy | training loss |")
  print("|---|---|---:|---:|")
  for optimizer in args.optimizers:
    found = {}
    for algorithm in ALGORITHMS:
      found[algorithm], loss = train(optimizer, algorithm, args, data)
      mean = found[algorithm].mean()
      print(f"| {optimizer} | {algorithm} | {mean:.2f} | {loss:.4f} |")
    for better, other in (
      ("set", "static_sparse"),
      ("rigl", "set"),
      ("signal_rigl", "set"),
    ):
      d = statistics.estimate(list(found[better] - found[other]))
      between = f"[{d.low:+.2f}, {d.high:+.2f}]"
      print(f"| {optimizer} | {better} − {other} | {d.mean:+.2f} {between} | |")


if __name__ == "__main__":
  main()
