# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Count where scores may be sharded: only counters cross devices.

A pass is one sum over all axes of each leaf, without a reshape, which the
partitioner turns into local sums and an exchange of `PROBES` numbers.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, UInt

from jaxpruner.engine import search, warm_start
from jaxpruner.engine.leaves import Group, flat_index, vary


def find_thresholds(
  group: Group,
  inputs: list[tuple[Array, ...]],
  keep: UInt[Array, " segments"],
  hint: Float[Array, "leaves 3"] | None,
) -> search.Found:
  """Find the thresholds of leaves of any sharding."""

  def count(table: Array) -> UInt[Array, "leaves probes"]:
    def run(table: Array) -> Any:
      counts: list[Array] = []
      for i, leaf in enumerate(group.leaves):
        segment = int(group.segments[i])
        row = lax.slice_in_dim(table, segment, segment + 1)
        index = flat_index(leaf.shape) + np.uint32(group.offsets[i])
        ranks = search.ranked(leaf.keys(inputs[i]), index, row)
        axes = tuple(range(len(leaf.shape)))
        counts.append(jnp.stack(search.reached(ranks, row, axes)))
      return vary(jnp.stack(counts), (table, inputs))

    # What XLA does: it moves the keys, which no pass changes, out of the loop
    # and stores them. What we do: a conditional, out of which nothing is moved.
    # What it saves: 4 bytes per weight. When it can go: when that motion weighs
    # memory against arithmetic.
    blank = jnp.zeros((len(group.leaves), search.PROBES), search.COUNT)
    skip = lambda table: vary(blank, (table, inputs))
    done = search.State.unpack(table).done
    return lax.cond(jnp.all(done), skip, run, table)

  if hint is None:
    guess = search.even_guess(group)
  else:
    guess = warm_start.guess(hint, group.dtype)
  return search.search(group, count, keep, guess, inputs)
