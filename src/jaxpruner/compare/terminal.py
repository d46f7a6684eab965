"""Terminal output: a progress bar while running, then the table."""

import textwrap
from collections.abc import Sequence

from rich import box, console, markup, progress
from rich import table as rich_table

from jaxpruner.compare import columns, files
from jaxpruner.compare.questions import asking
from jaxpruner.compare.records import Chunk, Failure, Record
from jaxpruner.compare.table import TableRow


class Progress:
  """A progress bar: finished cells, the current loss, the last metric."""

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

  def advance(self, chunk: Chunk) -> None:
    """Show the progress of the current cell."""
    share = (chunk.start + chunk.count) / chunk.steps
    self._parts[chunk.cell] = 0.95 * share
    last = [row[-1] for row in chunk.loss]
    known = [value for value in last if value is not None]
    loss = sum(known) / len(known) if known else float("nan")
    self._show(f"{chunk.cell} loss {loss:.3f}")

  def finish(self, record: Record | Failure) -> None:
    """Count a cell as done and show its metric."""
    self._parts.pop(record.cell, None)
    self._done += 1
    if isinstance(record, Failure) or record.problem:
      self._last = f"{record.cell}: failed"
    else:
      values = [v for v in record.metrics[self._metric] if v is not None]
      mean = sum(values) / len(values)
      self._last = f"{record.cell}: {self._metric} {mean:.2f}"
    self._show("")

  def _show(self, now: str) -> None:
    done = self._done + sum(self._parts.values())
    text = "  ".join(part for part in (now, self._last) if part)
    self._bar.update(
      self._task, completed=done, description=markup.escape(text)
    )


def print_answer(path: str) -> None:
  """Print the verdict of a run's question, if it has one."""
  if (answer := asking.answer_of(path)) is None:
    return
  print(f"\n{answer.question.asks}")
  for sentence in answer.words:
    print(
      textwrap.fill(
        files.printable(sentence),
        79,
        initial_indent="  ",
        subsequent_indent="  ",
      )
    )


def print_table(rows: Sequence[TableRow]) -> None:
  """Print one table per task and sparsity, grouped by category.

  Columns that do not fit the terminal are left out, those of low priority
  first; all of them are in report.html and the exports.

  Args:
    rows: of one or several runs.
  """
  out = console.Console()
  # A pipe or a file has no width.
  width = out.width if out.is_terminal else 180
  out = console.Console(width=width)
  shown = columns.fitting(
    columns.used(rows), lambda column: _size(column, rows), width
  )
  for block in columns.blocks(rows):
    out.print(_view(block, shown))


def _size(column: columns.Column, rows: Sequence[TableRow]) -> int:
  """Return the width of a column, with the space around it."""
  if column is columns.COLUMNS[0]:
    names = [columns.cells_as_text(row, columns.COLUMNS)[0] for row in rows]
    return 3 + max(map(len, [*names, *(_short(row.group) for row in rows)]))
  texts = [column.text(row) for row in rows if row.metric is not None]
  return 3 + max(map(len, [column.name, *texts]))


def _view(
  block: columns.Block, shown: Sequence[columns.Column]
) -> rich_table.Table:
  view = rich_table.Table(
    title=markup.escape(block.title),
    box=box.SIMPLE_HEAD,
    title_justify="left",
    pad_edge=False,
  )
  for i, name in enumerate(block.names(shown)):
    justify = "right" if i else "left"
    view.add_column(markup.escape(name), justify=justify, no_wrap=True)
  for i, (group, rows) in enumerate(block.groups()):
    if i:
      view.add_section()
    view.add_row(f"[italic]{markup.escape(_short(group))}[/]")
    for row in rows:
      texts = columns.cells_as_text(row, shown)
      view.add_row(*map(markup.escape, texts))
  return view


def _short(group: str) -> str:
  return group.partition(":")[0]
