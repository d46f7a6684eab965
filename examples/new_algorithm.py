"""Write an algorithm: keep weights that move away from zero.

Movement pruning (Sanh et al., 2020) scores a weight by -w · ∂L/∂w: positive
when the gradient step makes it larger. Scores are all an algorithm needs;
structures, schedules, exact counts and checkpoints come with the base class.

Run: python examples/new_algorithm.py      (about 10 s)
"""

import dataclasses

import jax
import plain_optax

import jaxpruner


@dataclasses.dataclass
class MovementPruning(jaxpruner.BaseUpdater):
  """Keep the weights with the largest -w · ∂L/∂w."""

  category = jaxpruner.Category(
    needs=frozenset({"gradients"}), paper="Sanh et al., 2020"
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state
    return jax.tree.map(lambda w, g: -w * g, params, grads)


jaxpruner.register_algorithm("movement", MovementPruning)

if __name__ == "__main__":
  plain_optax.main("movement")
