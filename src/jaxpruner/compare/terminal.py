"""What the terminal shows: a progress bar while running, then the table."""

from collections.abc import Sequence
from typing import Any

from rich import box, console, progress
from rich import table as rich_table

from jaxpruner.compare import table


class Progress:
  """Cells done, the current cell with its loss, the last metric, time left."""

  def __init__(self, cells: int, done: int, metric: str, quiet: bool = False):
    self._metric = metric
    self._last = ""
    self._parts: dict[str, float] = {}
    self._done = done
    self._bar = progress.Progress(
      progress.TextColumn("{task.completed:.1f}/{task.total:.0f} cells"),
      progress.BarColumn(bar_width=24),
      progress.TimeElapsedColumn(),
      progress.TextColumn("left"),
      progress.TimeRemainingColumn(elapsed_when_finished=False),
      progress.TextColumn("{task.description}"),
      console=console.Console(stderr=True),
      disable=quiet,
      speed_estimate_period=300,
    )
    self._task = self._bar.add_task("", total=cells, completed=done)

  def __enter__(self) -> "Progress":
    self._bar.start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._bar.stop()

  def stretch(self, record: dict[str, Any]) -> None:
    """Show how far the current cell is."""
    share = (record["start"] + record["count"]) / record["steps"]
    self._parts[record["cell"]] = 0.95 * share
    loss = sum(row[-1] for row in record["loss"]) / len(record["loss"])
    self._show(f"{record['cell']} loss {loss:.3f}")

  def finish(self, record: dict[str, Any]) -> None:
    """Count a cell as done and show its metric."""
    self._parts.pop(record["cell"], None)
    self._done += 1
    if record["problem"]:
      self._last = f"{record['cell']}: failed"
    else:
      values = record["metrics"][self._metric]
      mean = sum(values) / len(values)
      self._last = f"{record['cell']}: {self._metric} {mean:.2f}"
    self._show("")

  def _show(self, now: str) -> None:
    done = self._done + sum(self._parts.values())
    text = "  ".join(part for part in (now, self._last) if part)
    self._bar.update(self._task, completed=done, description=text)


def print_table(rows: Sequence[table.Row]) -> None:
  """Print one table per task and sparsity, grouped by category.

  Columns that do not fit the terminal are left out, the last ones first; all
  of them are in report.html and the exports.
  """
  out = console.Console()
  # A pipe or a file has no width of its own.
  width = out.width if out.is_terminal else 180
  out = console.Console(width=width)
  shown = table.used_columns(rows)
  drop = [2, 8, 11, 7, 5, 10, 9, 6]
  texts = [table.spelled(row) for row in rows if row.metric is not None]
  size = {
    i: max([len(table.COLUMNS[i]), *(len(t[i]) for t in texts)]) + 3
    for i in shown
  }
  size[0] = 3 + max(len(_short(row.group)) for row in rows)
  while sum(size[i] for i in shown) > width and set(drop) & set(shown):
    shown.remove(next(i for i in drop if i in shown))
  for title, block in table.blocks(rows):
    view = rich_table.Table(
      title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False
    )
    for i in shown:
      name = block[0].metric_name if i == 1 else table.COLUMNS[i]
      view.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    group = None
    for row in block:
      if row.group != group:
        if group is not None:
          view.add_section()
        group = row.group
        view.add_row(f"[italic]{_short(group)}[/]")
      cells = [text.replace("[", r"\[") for text in table.spelled(row)]
      view.add_row(*(cells[i] for i in shown))
    out.print(view)


def _short(group: str) -> str:
  return group.partition(":")[0]
