"""Predict sparse products on TPU and GPU from the bytes that they move.

    python benchmarks/predict.py [--write]

No device is needed, and none is used: each kernel of `jaxpruner.sparse._pallas`
is described by the bytes it reads and writes and by its arithmetic, and takes
the longer of the two times on a chip. A dense product takes the longer of its
own two. `--write` renews docs/results/accelerators.md.
"""

import argparse
import math
from typing import NamedTuple

import page

from jaxpruner.sparse._pallas import block, strided_nm

SIDE = 4096
BATCHES = (16, 256, 4096)
BYTES = 2  # bfloat16


class Chip(NamedTuple):
  """Published figures: bytes and operations per second (bfloat16)."""

  title: str
  platform: str
  bandwidth: float
  matrix_unit: float


CHIPS = (
  Chip("TPU v5e", "tpu", 819e9, 197e12),
  Chip("H100 SXM", "cuda", 3350e9, 989e12),
)


class Cost(NamedTuple):
  """What a product moves and computes."""

  bytes: float
  flops: float

  def seconds(self, chip: Chip) -> float:
    return max(self.bytes / chip.bandwidth, self.flops / chip.matrix_unit)


def dense(batch: int) -> Cost:
  """x, w and y once each, as a perfect dense product does."""
  moved = BYTES * (SIDE * SIDE + 2 * batch * SIDE)
  return Cost(moved, 2 * batch * SIDE * SIDE)


def blocks(batch: int, density: float, chip: Chip, side: int = 128) -> Cost:
  """Per visited block: the block and its part of x; y once."""
  tile = min(block.TILES[chip.platform], batch)
  count = math.ceil(batch / tile) * density * (SIDE / side) ** 2
  moved = count * (side * side + tile * side) + batch * SIDE
  return Cost(BYTES * moved, count * 2 * tile * side * side)


def groups(batch: int, n: int, m: int) -> Cost:
  """Packed weights once per tile of the batch, x once per tile of columns."""
  tiles = math.ceil(batch / strided_nm.TILE)
  bits = 2 if m <= 4 else 4
  packed = SIDE * SIDE * n / m * (BYTES + bits / 8)
  x = batch * SIDE * (SIDE / strided_nm.COLUMNS)
  moved = tiles * packed + BYTES * (x + batch * SIDE)
  return Cost(moved, 2 * batch * SIDE * SIDE)


def rows():
  """Return one line per chip, structure and batch."""
  for chip in CHIPS:
    kinds = [
      (f"blocks of 128², {d:.0%} kept", lambda b, d=d, c=chip: blocks(b, d, c))
      for d in (0.5, 0.2, 0.1, 0.05)
    ]
    if chip.platform == "tpu":
      kinds += [
        (f"{n}:{m}, stride 128", lambda b, n=n, m=m: groups(b, n, m))
        for n, m in ((2, 4), (1, 4), (1, 8))
      ]
    for title, cost in kinds:
      ratios = [dense(b).seconds(chip) / cost(b).seconds(chip) for b in BATCHES]
      yield [chip.title, title, *(f"{r:.2f}" for r in ratios)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--write", action="store_true")
  arguments = parser.parse_args()
  head = ["chip", "weights", *(f"batch {b}" for b in BATCHES)]
  table = page.table(head, list(rows()))
  print(table)
  if arguments.write:
    path = page.RESULTS / "accelerators.md"
    start, end = "<!-- predictions -->", "<!-- end -->"
    before, _, rest = path.read_text().partition(start)
    after = rest.partition(end)[2]
    parts = [before, start, f"\n\n{table}\n\n", end, after]
    path.write_text("".join(parts))


if __name__ == "__main__":
  main()
