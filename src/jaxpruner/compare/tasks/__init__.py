"""The tasks of a comparison, one file each, and the table of their names.

A new task is a frozen dataclass that defines `load, init, apply, loss, batches,
evaluate` (see `base.Task`). It is registered with `@register_task("name")` in
any module that `--import` names. The library's own are listed in `TASKS`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxpruner import _tools
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

  Afterwards `jaxpruner compare --import your_module --task name` trains on the
  task. The module must be importable, because cells run in other processes.

  Args:
    name: the name; a name that is taken is refused.

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
  """Return the class of a task.

  Args:
    name: the registered name of the task.

  Returns:
    The subclass of `Task`.

  Raises:
    ValueError: the name is unknown; the message shows the nearest one.

  Example:
    >>> task_class("digits").__name__
    'Digits'
  """
  return TASKS.find(name)


def make_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
  """Return a task, with some of its fields replaced.

  Args:
    name: the registered name of the task.
    options: field -> value, such as `steps` or `width`.

  Returns:
    The task.

  Raises:
    ValueError: the task or one of the fields is unknown.

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
        f"task {name!r} has no option {option!r}; "
        f"{_tools.nearest(option, fields)}"
      )
  return cls(**options)
