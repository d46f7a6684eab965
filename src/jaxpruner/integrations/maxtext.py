"""MaxText: wrap the optimizer that its configuration selects.

MaxText builds its optimizer in `get_optimizer` and runs its own training loop.
"""

import contextlib
from collections.abc import Iterator

from maxtext.optimizers import optimizers

import jaxpruner


@contextlib.contextmanager
def pruned(pruner: jaxpruner.BaseUpdater) -> Iterator[None]:
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
  original = optimizers.get_optimizer

  def get_optimizer(*args, **kwargs):
    return pruner.wrap_optax(original(*args, **kwargs))

  optimizers.get_optimizer = get_optimizer
  try:
    yield
  finally:
    optimizers.get_optimizer = original
