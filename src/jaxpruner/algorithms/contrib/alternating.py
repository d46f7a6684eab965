"""Alternating compressed and decompressed training."""

import dataclasses
from typing import ClassVar

from jaxpruner import base_updater
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(eq=False)
class ACDC(pruners.MagnitudePruning):
  """Alternate sparse and dense training phases (AC/DC; Peste et al., 2021).

  A sparse phase keeps the largest |w| of each leaf and trains `m·w` only. A
  dense phase trains all weights; those that were removed start at zero with
  fresh optimizer moments. An `AlternatingSchedule` defines the phases; the last
  one is sparse.

  Attributes:
    is_sparse_gradients: whether gradients of pruned weights are set to zero
      before the optimizer sees them.

  Example:
    >>> import jaxpruner
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "acdc", "sparsity": 0.5, "update_freq": 2,
    ...    "update_start_step": 1, "update_end_step": 6})
    >>> sparsity_at = pruner.scheduler.get_sparsity_at_step
    >>> [float(sparsity_at(0.5, step)) for step in range(8)]
    [0.0, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5, 0.5]
  """

  is_sparse_gradients: bool = True

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Peste et al., 2021",
    cost="sparse and dense steps by turns; one selection per phase",
    default_schedule="alternating",
  )
  regrows: ClassVar[bool] = True
