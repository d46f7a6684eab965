"""MaxText: wrap the optimizer that its configuration selects.

MaxText builds its optimizer in `get_optimizer` and runs its own training loop.
"""

import contextlib

from maxtext.optimizers import optimizers

import jaxpruner
from jaxpruner.integrations import _patch


def pruned(
  pruner: jaxpruner.BaseUpdater,
) -> contextlib.AbstractContextManager[None]:
  """Return a context in which MaxText's optimizers are wrapped by a pruner.

  Call `train.main(["", "base.yml", "steps=1000", …])` inside it.

  Args:
    pruner: the updater.

  Returns:
    A context manager; after it, MaxText is as before.

  Example:
    >>> original = optimizers.get_optimizer
    >>> with pruned(jaxpruner.NoPruning()):
    ...   optimizers.get_optimizer is original
    False
    >>> optimizers.get_optimizer is original
    True
  """
  return _patch.wrapped(optimizers, "get_optimizer", pruner)
