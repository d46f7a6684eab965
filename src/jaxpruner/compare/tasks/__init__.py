"""The tasks of a comparison, one file each, and the table of their names.

A new task is a frozen dataclass that defines `load, init, apply, loss, batches,
evaluate` (see `base.Task`), or a few functions (`functions.task`). The command
finds it as `--task module:NAME`, or by the name that `@register_task("name")`
gave it in a module that `--import` names. The library's own are in `TASKS`.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jaxpruner import _tools
from jaxpruner.api import Registry
from jaxpruner.compare.tasks.base import Classification as Classification
from jaxpruner.compare.tasks.base import Task as Task
from jaxpruner.compare.tasks.base import with_optimizer as with_optimizer
from jaxpruner.compare.tasks.functions import task as task

T = TypeVar("T", bound=type[Task])
_HERE = "jaxpruner.compare.tasks"

TASKS: Registry[Any] = Registry(
  "task",
  "jaxpruner.compare.register_task",
  {
    "digits": f"{_HERE}.digits:Digits",
    "fashion": f"{_HERE}.fashion:Fashion",
    "fashion-mlp": f"{_HERE}.fashion:FashionMLP",
    "cifar10": f"{_HERE}.cifar10:ResNet",
    "cifar10-vit": f"{_HERE}.cifar10:ViT",
    "sotu": f"{_HERE}.sotu:Sotu",
    "enwik8": f"{_HERE}.sotu:Enwik8",
    "t5-spans": f"{_HERE}.t5_spans:T5Spans",
    "fed-fashion": f"{_HERE}.fed_fashion:FedFashion",
    "fed-sotu": f"{_HERE}.fed_sotu:FedSotu",
    "addition": f"{_HERE}.algorithmic:Addition",
    "copy": f"{_HERE}.algorithmic:Copy",
    "word-problems": f"{_HERE}.word_problems:WordProblems",
    "translation": f"{_HERE}.translation:Translation",
    "digits-dropout": f"{_HERE}.dropout:DigitsDropout",
    "fashion-dropout": f"{_HERE}.dropout:FashionDropout",
    "digits-longtail": f"{_HERE}.long_tail:DigitsLongTail",
    "fashion-longtail": f"{_HERE}.long_tail:FashionLongTail",
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


def task_class(name: str) -> Any:
  """Return the entry of a task: a class, a task, or a function that makes one.

  Args:
    name: the registered name of the task.

  Returns:
    The entry; a subclass of `Task` for the library's own.

  Raises:
    ValueError: the name is unknown; the message shows the nearest one.

  Example:
    >>> task_class("digits").__name__
    'Digits'
  """
  if ":" in name and name not in TASKS:
    raise ValueError(
      f"task {name!r} is not imported: a file imports nothing by itself; if "
      f"you trust that module, type --task {name}"
    )
  return TASKS.find(name)


@contextlib.contextmanager
def bound(name: str, made: Task) -> Iterator[None]:
  """Give a task a name for the length of a `with` block.

  Args:
    name: the name; one that is taken is refused.
    made: the task.
  """
  if name in TASKS:
    raise ValueError(f"name={name!r}: is a task already; choose another name")
  TASKS[name] = made
  try:
    yield
  finally:
    del TASKS[name]


def task_options(name: str) -> dict[str, Any]:
  """Return the options of a task and their defaults.

  Args:
    name: the registered name of the task.

  Returns:
    Option -> default; `inspect.Parameter.empty` where there is none.

  Raises:
    ValueError: the name is unknown; the message shows the nearest one.

  Example:
    >>> task_options("digits")["width"]
    256
  """
  entry = task_class(name)
  if isinstance(entry, Task):  # functions cannot be options
    plain = (int, float, str)
    named = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}
    fixed = "width" if hasattr(entry, "functions") else ""
    return {
      key: value
      for key, value in named.items()
      if isinstance(value, plain) and key != fixed
    }
  if isinstance(entry, type):
    return {
      field.name: field.default
      for field in dataclasses.fields(entry)
      if field.init
    }
  taken = inspect.signature(entry).parameters.values()
  return {p.name: p.default for p in taken if p.kind not in (2, 4)}


def make_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
  """Return a task, with some of its options replaced.

  Args:
    name: the registered name of the task.
    options: option -> value, such as `steps` or `width`.

  Returns:
    The task.

  Raises:
    ValueError: the task or one of the options is unknown.

  Example:
    >>> make_task("digits", {"steps": 10}).steps
    10
  """
  options = dict(options or {})
  known = task_options(name)
  for option in options:
    if option not in known:
      raise ValueError(
        f"task {name!r} has no option {option!r}; "
        f"{_tools.nearest(option, known)}"
      )
  entry = task_class(name)
  if isinstance(entry, Task):
    return dataclasses.replace(entry, **options)
  missing = [
    option
    for option, default in known.items()
    if default in (inspect.Parameter.empty, dataclasses.MISSING)
    and option not in options
  ]
  if missing and not isinstance(entry, type):
    raise ValueError(
      f"task {name!r} needs --set {missing[0]}=VALUE, or a default for it"
    )
  made = entry(**options)
  if not isinstance(made, Task):
    raise ValueError(
      f"task {name!r} made {made!r:.60}; it must return a "
      "jaxpruner.compare.Task (`jaxpruner.compare.task` makes one of functions)"
    )
  return made
