"""Images with few examples of most classes: a long tail.

Data: Fashion-MNIST, or scikit-learn's digits (embedded); class c keeps
`imbalance ** (-c / 9)` of its training images (Cui et al., "Class-Balanced
Loss", 2019). The test set is balanced; `tail` is the accuracy on the three
rarest classes.
Model: as `fashion` and `digits`.
Command: `jaxpruner compare --task fashion-longtail --question limits`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from jaxpruner.compare.tasks.digits import Digits
from jaxpruner.compare.tasks.fashion import Fashion


def imbalanced(
  data: dict[str, np.ndarray], imbalance: float
) -> dict[str, np.ndarray]:
  """Return data with exponentially fewer training examples of later classes.

  Args:
    data: `train_x, train_y, test_x, test_y`.
    imbalance: how many times more examples the first class has than the last.

  Returns:
    The data, with `tail_x, tail_y`: the test examples of the last three
    classes.

  Example:
    >>> y = np.repeat(np.arange(10), 100)
    >>> data = {"train_x": y, "train_y": y, "test_x": y, "test_y": y}
    >>> np.bincount(imbalanced(data, 100)["train_y"]).tolist()
    [100, 60, 36, 22, 13, 8, 5, 3, 2, 1]
  """
  if not imbalance >= 1:
    raise ValueError(f"imbalance={imbalance!r}: must be at least 1")
  labels = data["train_y"]
  last = int(labels.max())
  kept = []
  for c in range(last + 1):
    rows = np.flatnonzero(labels == c)
    kept.append(rows[: max(1, round(len(rows) * imbalance ** (-c / last)))])
  rows = np.sort(np.concatenate(kept))
  tail = data["test_y"] > last - 3
  return {
    "train_x": data["train_x"][rows],
    "train_y": labels[rows],
    "test_x": data["test_x"],
    "test_y": data["test_y"],
    "tail_x": data["test_x"][tail],
    "tail_y": data["test_y"][tail],
  }


def _tail(data: Any) -> dict[str, jax.Array]:
  return {"test_x": data["tail_x"], "test_y": data["tail_y"]}


@dataclasses.dataclass(frozen=True)
class FashionLongTail(Fashion):
  """Fashion-MNIST with few examples of most classes."""

  imbalance: float = 100.0
  name: ClassVar[str] = "fashion-longtail"

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    return imbalanced(super().load(folder), self.imbalance)

  def evaluate(self, params: Any, data: Any) -> dict[str, jax.Array]:
    tail = super().evaluate(params, _tail(data))["accuracy"]
    return super().evaluate(params, data) | {"tail": tail}


@dataclasses.dataclass(frozen=True)
class DigitsLongTail(Digits):
  """scikit-learn's digits with few examples of most classes."""

  imbalance: float = 100.0
  name: ClassVar[str] = "digits-longtail"

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    return imbalanced(super().load(folder), self.imbalance)

  def evaluate(self, params: Any, data: Any) -> dict[str, jax.Array]:
    tail = super().evaluate(params, _tail(data))["accuracy"]
    return super().evaluate(params, data) | {"tail": tail}
