"""Import the modules that the user typed; never those that a file names."""

import importlib
import os
import pathlib
import sys
from collections.abc import Iterable
from types import ModuleType

from jaxpruner import _tools
from jaxpruner.compare import tasks


def import_modules(names: Iterable[str]) -> None:
  """Import the modules that the user typed after --import.

  Args:
    names: module names; never strings that a file holds.

  Raises:
    ValueError: a module is missing or raises while it is imported.
  """
  for name in names:
    _import(name, f"--import {name!r}")


def import_task(name: str) -> None:
  """Import and register a task that the user typed as `module:NAME`.

  `NAME` is a subclass of `Task`, a task, or a function that returns one and
  whose arguments are the task's options. A name without a colon is left alone.

  Args:
    name: what the user typed after --task; never a string that a file holds.

  Raises:
    ValueError: the module or the name is missing, or is not a task.
  """
  module_name, colon, attribute = name.partition(":")
  if not colon or name in tasks.TASKS:
    return
  module = _import(module_name, f"--task {name!r}")
  found = getattr(module, attribute, None)
  if found is None:
    known = [key for key in vars(module) if not key.startswith("_")]
    raise ValueError(
      f"--task {name!r}: {_place(module)} has no {attribute!r}; "
      f"{_tools.nearest(attribute, known)}"
    )
  if not callable(found) and not isinstance(found, tasks.Task):
    raise ValueError(
      f"--task {name!r}: is {found!r:.60}; it must be a subclass of "
      "jaxpruner.compare.Task, a task, or a function that returns a task"
    )
  tasks.TASKS.register(name, found)


def _place(module: ModuleType) -> str:
  return getattr(module, "__file__", None) or module.__name__


def _import(name: str, option: str) -> ModuleType:
  if not name:
    raise ValueError(f"{option}: is empty; give the name of a module")
  if name.startswith(".") or "/" in name:
    raise ValueError(
      f"{option}: is a path; give the name of a module, and run the command in "
      "its folder"
    )
  _find_beside(name)
  try:
    return importlib.import_module(name)
  except Exception as error:
    cure = (
      "the module must be importable: run the command in its folder, install "
      "it, or put its folder into PYTHONPATH"
    )
    if not isinstance(error, ModuleNotFoundError):
      cure = f"the module {name} was found, and cannot be imported"
    elif error.name and not f"{name}.".startswith(f"{error.name}."):
      cure = f"the module {name} was found; install what it imports"
    raise ValueError(
      f"{option}: {type(error).__name__}: {error}; {cure}"
    ) from error


def _find_beside(name: str) -> None:
  """Let Python find a module in the current folder, as `python -m` does."""
  here = pathlib.Path.cwd()
  top = name.partition(".")[0]
  beside = (here / f"{top}.py").is_file() or (here / top).is_dir()
  known = {os.path.abspath(entry) for entry in sys.path}
  if top and beside and str(here) not in known:
    sys.path.insert(0, str(here))
    importlib.invalidate_caches()
