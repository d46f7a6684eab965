"""The tasks of a comparison, one file each, found by name.

A new task is a file with a frozen dataclass that has `load, init, apply,
loss, batches, evaluate` (see `base.Task`) and one line in `TASKS`.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from jaxpruner.compare.tasks.base import Task

# name -> (module, class)
TASKS = {
  "digits": ("digits", "Digits"),
  "fashion": ("fashion", "Fashion"),
  "cifar10": ("cifar10", "ResNet"),
  "cifar10-vit": ("cifar10", "ViT"),
  "sotu": ("sotu", "Sotu"),
  "enwik8": ("sotu", "Enwik8"),
  "t5-spans": ("t5_spans", "T5Spans"),
  "fed-fashion": ("fed_fashion", "FedFashion"),
  "fed-sotu": ("fed_sotu", "FedSotu"),
  "dqn-minatar": ("dqn_minatar", "DqnMinatar"),
  "dqn-mspacman": ("dqn_mspacman", "DqnMsPacman"),
}


def task_class(name: str) -> type[Task]:
  """Return the task's class; an unknown name raises with the nearest one."""
  if name not in TASKS:
    near = difflib.get_close_matches(name, TASKS, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(TASKS)
    raise ValueError(f"task {name!r} is unknown; {hint}known: {known}")
  module, attribute = TASKS[name]
  found = importlib.import_module(f"jaxpruner.compare.tasks.{module}")
  return getattr(found, attribute)


def make_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
  """Return the task with its fields (steps, width, ...) overridden.

  Example:
    >>> make_task("digits", {"steps": 10}).steps
    10
  """
  cls = task_class(name)
  options = dict(options or {})
  fields = {field.name for field in dataclasses.fields(cls)}
  for option in options:
    if option not in fields:
      raise ValueError(
        f"task {name!r} has no option {option!r}; it has "
        f"{', '.join(sorted(fields))}"
      )
  return cls(**options)
