# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Count where scores may be sharded: only counters cross devices.

A pass is one sum over all axes of each leaf, without a reshape, which the
partitioner turns into local sums and an exchange of `PROBES` numbers.
"""

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

  def count(table: Array) -> UInt[Array, "segments probes"]:
    counts: list[Array] = []
    for i, leaf in enumerate(group.leaves):
      segment = 0 if group.together else i
      row = lax.slice_in_dim(table, segment, segment + 1)
      index = flat_index(leaf.shape) + np.uint32(group.offsets[i])
      hits = search.reached(leaf.keys(inputs[i]), index, row)
      counts.append(jnp.stack(search.totals(hits)))
    each = jnp.stack(counts)
    return each.sum(0, keepdims=True) if group.together else each

  if hint is None:
    guess = search.even_guess(group)
  else:
    guess = warm_start.guess(hint, group.dtype)
  table = vary(search.start(group, keep, guess).pack(), (inputs, keep))
  table = search.search(table, search.in_loop(count, inputs))
  return search.found(group, table)
