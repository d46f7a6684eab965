"""Packages whose names are imported on first use."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_of(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
  """Return a package's `__getattr__`.

  Args:
    package: its `__name__`.
    modules: name -> the module below the package that defines it.
  """

  def get(name: str) -> Any:
    if name not in modules:
      raise AttributeError(
        f"module {package!r} has no attribute {name!r}; it has "
        f"{', '.join(sorted(modules))}"
      )
    module = importlib.import_module(f"{package}.{modules[name]}")
    # All of its names at once: importing a module puts the module itself into
    # the package, and must not hide a function of the same name.
    for other, home in modules.items():
      if home == modules[name]:
        setattr(sys.modules[package], other, getattr(module, other))
    return getattr(module, name)

  return get
