"""The task of the law in `scaling_law.py`: speeches, at small widths."""

import dataclasses
from typing import ClassVar

from jaxpruner.compare.tasks import sotu


@dataclasses.dataclass(frozen=True)
class Speeches(sotu.Sotu):
  """`sotu` with a short context, and without the small dense baseline."""

  width: int = 32
  steps: int = 600
  heads: int = 2
  context: int = 64
  name: ClassVar[str] = "speeches"

  @property
  def narrowable(self) -> bool:
    """Return False: the widths of the law are the narrow networks."""
    return False
