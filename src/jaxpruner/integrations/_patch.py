"""Wrap the optimizers of a framework that owns its training loop."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jaxpruner


@contextlib.contextmanager
def wrapped(
  module: Any, name: str, pruner: jaxpruner.BaseUpdater
) -> Iterator[None]:
  """Return a context in which what `module.name(…)` makes is wrapped.

  Args:
    module: the framework's module; callers look the function up in it.
    name: the name of the function that makes an Optax optimizer.
    pruner: the updater.

  Returns:
    A context manager; after it, the module is as before.
  """
  original = getattr(module, name)

  @functools.wraps(original)
  def make(*args, **kwargs):
    return pruner.wrap_optax(original(*args, **kwargs))

  setattr(module, name, make)
  try:
    yield
  finally:
    setattr(module, name, original)
