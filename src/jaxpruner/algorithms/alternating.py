"""Alternating compressed and decompressed training."""

import dataclasses
from typing import ClassVar

from jaxpruner import base_updater
from jaxpruner.algorithms import pruners


@dataclasses.dataclass(eq=False)
class ACDC(pruners.MagnitudePruning):
  """Train by turns sparse and dense (Peste et al., 2021).

  AC/DC: every sparse phase keeps the largest |w| and trains them alone; every
  dense phase lets the others grow again from zero, with fresh moments. The
  phases are those of an `AlternatingSchedule`; the last one is sparse.
  """

  is_sparse_gradients: bool = True

  category: ClassVar[base_updater.Category] = base_updater.Category(
    dynamic=True,
    paper="Peste et al., 2021",
    cost="sparse and dense steps by turns; one selection per phase",
    default_schedule="alternating",
  )
  regrows: ClassVar[bool] = True
