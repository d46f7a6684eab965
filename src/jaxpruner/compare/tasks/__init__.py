"""The tasks of a comparison, one file each, found by name.

A new task is a frozen dataclass that has `load, init, apply, loss, batches,
evaluate` (see `base.Task`) under `@register_task("name")`, in any module that
`--import` names; or a file here and one line in `TASKS`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxpruner.api import Registry
from jaxpruner.compare.tasks.base import Classification as Classification
from jaxpruner.compare.tasks.base import Task as Task

T = TypeVar("T", bound=type[Task])
_HERE = "jaxpruner.compare.tasks"

TASKS: Registry[type[Task]] = Registry(
  "task",
  "jaxpruner.compare.register_task",
  {
    "digits": f"{_HERE}.digits:Digits",
    "fashion": f"{_HERE}.fashion:Fashion",
    "cifar10": f"{_HERE}.cifar10:ResNet",
    "cifar10-vit": f"{_HERE}.cifar10:ViT",
    "sotu": f"{_HERE}.sotu:Sotu",
    "enwik8": f"{_HERE}.sotu:Enwik8",
    "t5-spans": f"{_HERE}.t5_spans:T5Spans",
    "fed-fashion": f"{_HERE}.fed_fashion:FedFashion",
    "fed-sotu": f"{_HERE}.fed_sotu:FedSotu",
    "dqn-minatar": f"{_HERE}.dqn_minatar:DqnMinatar",
    "dqn-mspacman": f"{_HERE}.dqn_mspacman:DqnMsPacman",
  },
)


def register_task(name: str) -> Callable[[T], T]:
  """Give a comparison task a name: a class decorator.

  `jaxpruner compare --import your_module --task name` then compares on it; the
  module must be importable, since cells run in processes of their own.

  Args:
    name: the name; a taken one is refused.

  Returns:
    A function that registers a subclass of `Task` and returns it.

  Example:
    >>> import dataclasses
    >>> from jaxpruner.compare import register_task
    >>> from jaxpruner.compare.tasks.digits import Digits
    >>> @register_task("tiny-digits")
    ... @dataclasses.dataclass(frozen=True)
    ... class TinyDigits(Digits):
    ...   width: int = 16
    >>> make_task("tiny-digits").width
    16
  """

  def register(cls: T) -> T:
    if not (isinstance(cls, type) and issubclass(cls, Task)):
      raise ValueError(
        f"task={cls!r} must be a subclass of jaxpruner.compare.Task"
      )
    TASKS.register(name, cls)
    return cls

  return register


def task_class(name: str) -> type[Task]:
  """Return the task's class; an unknown name raises with the nearest one."""
  return TASKS.find(name)


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
