"""The settings of Table 1 of the JaxPruner paper, as configurations.

    from paper import pruner_config
    pruner = jaxpruner.create_updater_from_config(
      pruner_config("resnet50", "rigl"))

The paper (Lee et al., 2023, section 4) states sparsities, distributions, the
dense first layer and the schedule of the federated row. What it leaves out is
taken from the configurations that its authors published, and `docs/recipes.md`
says which is which.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

# The columns of the table -> our names.
ALGORITHMS = {
  "Dense": "no_prune",
  "Rand": "random",
  "Mag": "magnitude",
  "Sal": "saliency",
  "Mag-G": "global_magnitude",
  "STE": "magnitude_ste",
  "Static": "static_sparse",
  "SET": "set",
  "RigL": "rigl",
}
SPARSE_FROM_THE_START = ("static_sparse", "set", "rigl", "signal_rigl")


class Schedule(NamedTuple):
  """When masks are updated, in optimizer steps."""

  every: int
  start: int
  end: int


class Row(NamedTuple):
  """The settings of a row.

  Attributes:
    steps: optimizer steps of the whole training; rounds, in the federated row.
    sparsity: the fraction removed.
    distribution: how it is divided among leaves.
    gradual: for pruners and straight-through.
    rewiring: for algorithms that are sparse from the start.
    drop_fraction: the share of kept weights that SET and RigL replace.
  """

  steps: int
  sparsity: float
  distribution: str
  gradual: Schedule
  rewiring: Schedule
  drop_fraction: float


_IMAGENET = 1_281_167
# ImageNet: batches of 4,096 images, of which an epoch has 312.
_EPOCH = _IMAGENET // 4096

ROWS = {
  "resnet50": Row(
    steps=100 * _EPOCH,
    sparsity=0.8,
    distribution="uniform",
    gradual=Schedule(1000, 10_000, 25_000),
    rewiring=Schedule(100, 1, 25_000),
    drop_fraction=0.1,
  ),
  "vit_b16": Row(
    steps=90 * _EPOCH,
    sparsity=0.8,
    distribution="erk",
    gradual=Schedule(1000, 10_000, 20_000),
    rewiring=Schedule(100, 1, 20_000),
    drop_fraction=0.1,
  ),
  # ViT-B/16+: 300 epochs; the schedule is stretched with them.
  "vit_b16_long": Row(
    steps=300 * _EPOCH,
    sparsity=0.8,
    distribution="erk",
    gradual=Schedule(1000, 33_000, 67_000),
    rewiring=Schedule(100, 1, 67_000),
    drop_fraction=0.1,
  ),
  "t5_base": Row(
    steps=100_000,
    sparsity=0.8,
    distribution="erk",
    gradual=Schedule(1000, 25_000, 75_000),
    rewiring=Schedule(1000, 1, 75_000),
    drop_fraction=0.1,
  ),
  "emnist": Row(
    steps=1000,
    sparsity=0.8,
    distribution="erk",
    gradual=Schedule(10, 250, 750),
    rewiring=Schedule(10, 1, 750),
    drop_fraction=0.1,
  ),
  # 40 iterations of 250,000 agent steps, an optimizer step every fourth.
  "mspacman": Row(
    steps=2_500_000,
    sparsity=0.98,
    distribution="erk",
    gradual=Schedule(1000, 500_000, 2_000_000),
    rewiring=Schedule(5000, 1, 2_000_000),
    drop_fraction=0.3,
  ),
}


def pruner_config(
  row: str,
  algorithm: str,
  steps: int | None = None,
  dense: Iterable[str] = (),
) -> dict[str, Any]:
  """Return the configuration of a cell of the table.

  Args:
    row: a name in `ROWS`.
    algorithm: a registered name, or a column of the table, such as "Mag-G".
    steps: the length of your training; the schedule is scaled with it. By
      default the row's own.
    dense: paths of leaves that are not pruned.

  Returns:
    The argument of `jaxpruner.create_updater_from_config`.
  """
  if row not in ROWS:
    raise ValueError(f"row={row!r}: must be one of {', '.join(ROWS)}")
  found = ROWS[row]
  name = ALGORITHMS.get(algorithm, algorithm)
  if name == "no_prune":
    return {"algorithm": name}
  sparse = name in SPARSE_FROM_THE_START
  schedule = found.rewiring if sparse else found.gradual
  scale = 1 if steps is None else steps / found.steps
  at = lambda step: max(1, round(step * scale))
  config = {
    "algorithm": name,
    "sparsity": found.sparsity,
    "dist_type": found.distribution,
    "update_freq": at(schedule.every),
    "update_start_step": at(schedule.start),
    "update_end_step": at(schedule.end),
  }
  if sparse and name != "static_sparse":
    config["drop_fraction"] = found.drop_fraction
  if dense := tuple(dense):
    config["custom_sparsity_map"] = dict.fromkeys(dense)
  return config
