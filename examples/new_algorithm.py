"""Write an algorithm: keep the weights that the next step makes larger.

A weight is scored by -w · ∂L/∂w: positive when the gradient step moves it away
from zero. (The library's `movement` adds these up over training; Sanh et al.,
2020.) Scores are all an algorithm needs; structures, schedules, exact counts
and checkpoints come with the base class.

Run: python examples/new_algorithm.py      (about 10 s)
"""

import dataclasses

import jax
import plain_optax

import jaxpruner


@dataclasses.dataclass(eq=False)
class GrowingWeights(jaxpruner.BaseUpdater):
  """Keep the weights with the largest -w · ∂L/∂w."""

  category = jaxpruner.Category(
    needs=frozenset({"gradients"}),
    paper="Sanh et al., 2020",
    cost="a product per update",
  )

  def calculate_scores(self, params, sparse_state=None, grads=None):
    del sparse_state
    return jax.tree.map(lambda w, g: -w * g, params, grads)


jaxpruner.register_algorithm("growing", GrowingWeights)

if __name__ == "__main__":
  plain_optax.main("growing")
