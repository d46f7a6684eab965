"""Names that are imported on first use, and modules that moved."""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from importlib import machinery
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


class MovedModules:
  """Let `import` find modules under the paths that they had before.

  The old path gives the very module that the new path gives. It is imported on
  first use. An entry of `sys.meta_path`; the base classes of `importlib.abc`
  are left out, because importing them takes longer than this package.

  Args:
    package: the package's `__name__`.
    table: old path -> new path, both below the package.
  """

  def __init__(self, package: str, table: Mapping[str, str]):
    self._homes = {f"{package}.{a}": f"{package}.{b}" for a, b in table.items()}

  def find_spec(
    self, fullname: str, path: Any = None, target: Any = None
  ) -> machinery.ModuleSpec | None:
    """Return a spec for an old path, None for all others."""
    del path, target
    loader: Any = self
    known = fullname in self._homes
    return machinery.ModuleSpec(fullname, loader) if known else None

  def create_module(self, spec: machinery.ModuleSpec) -> None:
    """Return None: `import` makes an empty module first."""
    del spec

  def exec_module(self, module: types.ModuleType) -> None:
    """Put the module of the new path in the place of the empty one."""
    name = module.__name__
    sys.modules[name] = importlib.import_module(self._homes[name])
