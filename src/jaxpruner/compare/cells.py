"""A cell of the table: an algorithm at a point of all axes."""

import urllib.parse
from typing import Any, NamedTuple, Optional

from jaxpruner.compare import spelling

BASELINES = ("dense", "small_dense")
# The prefix of rows that prune the dense row's trained weights.
AFTER = "after:"
# The prefix of rows that train the final masks of another row once more.
RETRAIN = "retrain:"
# Options of such a row, with their values; the first is the default. All other
# options in its braces are those of the row that found the masks.
RETRAIN_OPTIONS = {"weights": ("same", "new"), "mask": ("same", "shuffled")}


class Cell(NamedTuple):
  """One entry of the table: a point of all axes, over all seeds.

  Attributes:
    algorithm: a registered name with its options, "dense" or "small_dense".
    sparsity: the fraction removed.
    type: the sparsity type; "" is unstructured.
    distribution: the distribution; "" is the task's.
    options: options of the task that have several values, such as "width=64".

  Example:
    >>> Cell("rigl", 0.9).id
    'rigl@0.9'
    >>> Cell("rigl{drop_fraction=0.1}", 0.5, "2:4", "", "width=64").id
    'rigl{drop_fraction=0.1}@0.5+type=2%3A4+width=64'
  """

  algorithm: str
  sparsity: float
  type: str = ""
  distribution: str = ""
  options: str = ""

  @property
  def id(self) -> str:
    """Return a unique name that can be used as a file name.

    Example:
      >>> Cell("rigl", 0.999999).id, Cell("rigl", 0.9999991).id
      ('rigl@0.999999', 'rigl@0.9999991')
    """
    parts = [self.algorithm]
    if self.algorithm != "dense":
      parts[0] += f"@{float(self.sparsity)!r}"
    for name in ("type", "distribution"):
      if value := getattr(self, name):
        parts.append(f"{name}={value}")
    if self.options:
      parts.append(self.options)
    quoted = [urllib.parse.quote(part, safe="@{}=,") for part in parts]
    return "+".join(quoted)

  @property
  def dense(self) -> "Cell":
    """The dense baseline that this cell is compared with."""
    return Cell("dense", 0.0, options=self.options)

  @property
  def name(self) -> str:
    """The registered name of the algorithm, without options."""
    return self.algorithm.partition("{")[0]

  @property
  def method(self) -> str:
    """The algorithm with its structure and distribution, where they vary.

    Example:
      >>> Cell("rigl{drop_fraction=0.1}", 0.5, "2:4", "", "width=64").method
      'rigl{drop_fraction=0.1} 2:4'
    """
    return " ".join(
      filter(None, (self.algorithm, self.type, self.distribution))
    )

  @property
  def label(self) -> str:
    """The method with the options of the task that vary.

    Example:
      >>> Cell("rigl", 0.5, "2:4", "", "width=64").label
      'rigl 2:4 width=64'
    """
    return f"{self.method} {self.options}".strip()

  @property
  def source(self) -> Optional["Cell"]:
    """The cell whose trained networks this cell starts from or learns from.

    Example:
      >>> Cell("after:wanda", 0.5).source.id, Cell("rigl", 0.5).source
      ('dense', None)
      >>> Cell("retrain:imp{mask=shuffled}", 0.8).source.id
      'imp@0.8'
    """
    name, options = spelling.algorithm_of(self.algorithm)
    if name.startswith(RETRAIN):
      return self._replace(algorithm=ticket_of(self.algorithm)[0])
    if name.startswith(AFTER) or "distill" in options:
      return self.dense
    return None


def ticket_of(algorithm: str) -> tuple[str, dict[str, Any]]:
  """Return (the row that finds the masks, the options of training them again).

  Args:
    algorithm: such as `retrain:imp{mask=shuffled}`.

  Returns:
    The algorithm of the other row, and values for all of `RETRAIN_OPTIONS`.

  Example:
    >>> ticket_of("retrain:imp{mask=shuffled,rewind_step=50}")
    ('imp{rewind_step=50}', {'weights': 'same', 'mask': 'shuffled'})
  """
  name, options = spelling.algorithm_of(algorithm)
  chosen = {key: values[0] for key, values in RETRAIN_OPTIONS.items()}
  chosen |= {k: v for k, v in options.items() if k in RETRAIN_OPTIONS}
  theirs = {k: v for k, v in options.items() if k not in RETRAIN_OPTIONS}
  name = name.removeprefix(RETRAIN)
  return f"{name}{{{spelling.spelled(theirs)}}}" if theirs else name, chosen


DENSE = Cell("dense", 0.0)
