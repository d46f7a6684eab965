"""`jaxpruner.compare.run`: a comparison from Python."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxpruner.compare import modules, settings, tasks
from jaxpruner.compare.command import Running, compare
from jaxpruner.compare.files import RunFolderError
from jaxpruner.compare.questions import asking
from jaxpruner.compare.table import TableRow, rows

# The arguments that `compare.task` takes, besides its functions.
_LISTED = ("algorithms", "sparsity")


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A finished comparison.

  Attributes:
    path: the run folder; it holds report.html.
    rows: the rows of the table.

  Example:
    >>> Comparison(pathlib.Path("runs/x"), []).path.name
    'x'
  """

  path: pathlib.Path
  rows: list[TableRow]


def run(
  task: str | tasks.Task | None = None,
  *,
  algorithms: str | Sequence[str] = (),
  sparsity: float | Sequence[float] = (),
  seeds: int = 3,
  out: str | None = None,
  jobs: int | None = None,
  quiet: bool = False,
  **rest: Any,
) -> Comparison:
  """Compare pruning algorithms on your model, as `jaxpruner compare` does.

  A task given by name runs in worker processes, like the command. Functions,
  and task objects, cannot be sent to another process: their cells are computed
  one after another in this process, and `jobs` must be left out or 1. Stop and
  call it again with the same arguments, and it continues.

  Args:
    task: the name of a task, `module:NAME`, or a task (see `compare.task`).
      Without it, pass the functions that `compare.task` takes.
    algorithms: registered names; by default the paper's.
    sparsity: fractions of weights removed; 0.8 and 0.95 by default.
    seeds: the number of seeds.
    out: the run folder; `runs/TASK-HASH` by default.
    jobs: the number of worker processes, for a task given by name.
    quiet: whether to print nothing.
    **rest: `type`, `distribution`, `devices`, `data`, `options` (of a task
      given by name), `checkpoint` (as --init), `question`; and, without a
      task, the arguments of `compare.task`: `init`, `apply`, `loss`, `batches`,
      `evaluate`, `steps`, ...

  Returns:
    The run folder and the rows of the table, also for cells that failed.

  Raises:
    ValueError: an argument is unknown or wrong.
    RunFolderError: the folder belongs to another comparison.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   done = run(
    ...     tasks.make_task("digits", {"steps": 4, "width": 8}), out=folder,
    ...     algorithms="magnitude", sparsity=0.5, seeds=2, quiet=True)
    >>> [row.algorithm for row in done.rows]
    ['dense', 'small_dense', 'magnitude']
  """
  known = {
    field.name for field in dataclasses.fields(settings.ComparisonSettings)
  }
  chosen = {key: rest.pop(key) for key in list(rest) if key in known}
  values = {"algorithms": algorithms, "sparsity": sparsity, "seeds": seeds}
  listed = {
    key: (value,) if isinstance(value, str | float) else tuple(value)
    for key, value in values.items()
    if key in _LISTED
  }
  chosen |= {"seeds": seeds, **listed}
  if isinstance(task, str):
    if rest:
      raise ValueError(
        f"unknown arguments {', '.join(sorted(rest))} for a task given by name"
      )
    modules.import_task(task)
    return _run(task, chosen, out, Running(jobs, quiet=quiet, table=not quiet))
  if jobs not in (None, 1):
    raise ValueError(
      f"jobs={jobs}: functions cannot be sent to another process; their cells "
      "run one after another in this one. For several processes put the task "
      'into a module and pass task="module:NAME"'
    )
  if task is None:
    missing = [name for name in _FUNCTIONS if name not in rest]
    if missing:
      raise ValueError(
        f"missing argument {missing[0]!r}: pass a task, or the functions "
        f"{', '.join(_FUNCTIONS)}"
      )
    task = tasks.task(**rest)
  elif rest:
    raise ValueError(f"unknown arguments {', '.join(sorted(rest))}")
  name = task.name or type(task).__name__
  if name in tasks.TASKS:
    name = f"own-{name}"
  with tasks.bound(name, task):
    running = Running(in_process=True, quiet=quiet, table=not quiet)
    return _run(name, chosen, out, running)


_FUNCTIONS = ("init", "apply", "loss", "batches", "evaluate")


def _run(
  name: str, values: dict[str, Any], out: str | None, running: Running
) -> Comparison:
  asked = asking.with_axes({**values, "task": name})
  if not asked["sparsity"]:
    del asked["sparsity"]
  chosen = settings.ComparisonSettings(**asked)
  settings.check_names(chosen)
  folder = out or settings.default_folder(chosen)
  compare(chosen, folder, running)
  return Comparison(pathlib.Path(folder), rows(folder))


__all__ = ["Comparison", "RunFolderError", "run"]
