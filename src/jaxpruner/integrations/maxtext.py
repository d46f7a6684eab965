"""MaxText: wrap the optimizer that its configuration asks for.

MaxText builds its optimizer in `get_optimizer` and owns the loop from there.
"""

import contextlib
from collections.abc import Iterator

from maxtext.optimizers import optimizers

import jaxpruner


@contextlib.contextmanager
def pruned(pruner: jaxpruner.BaseUpdater) -> Iterator[None]:
  """Within this block MaxText trains with the pruner around its optimizer.

  Example:
    with pruned(pruner):
      train.main(["", "base.yml", "steps=1000", ...])
  """
  original = optimizers.get_optimizer

  def get_optimizer(*args, **kwargs):
    return pruner.wrap_optax(original(*args, **kwargs))

  optimizers.get_optimizer = get_optimizer
  try:
    yield
  finally:
    optimizers.get_optimizer = original
