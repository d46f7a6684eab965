"""The table: records of finished cells turned into rows, and exported."""

import csv
import dataclasses
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxpruner.compare import folder, plan, statistics, tasks
from jaxpruner.compare.statistics import Estimate


@dataclasses.dataclass(frozen=True)
class Row:
  """One algorithm at one sparsity. Ratios are relative to the dense network.

  `latency` and `seconds` are measured times: the only columns that differ
  when the same comparison runs twice.
  """

  task: str
  sparsity: float
  group: str
  algorithm: str
  metric_name: str
  problem: str = ""
  metric: Estimate | None = None
  difference: Estimate | None = None
  realised: float | None = None
  training_flops: float | None = None
  inference_flops: float | None = None
  bytes: int | None = None
  weights: int | None = None
  noise: Estimate | None = None
  ece: Estimate | None = None
  latency: float | None = None
  seconds: float | None = None
  collapsed: str = ""  # leaves that lost every weight


TIMES = ("latency", "seconds")


def rows(path: str, times: bool = True) -> list[Row]:
  """Return the rows of a run folder: by sparsity, then by category.

  Args:
    path: the run folder.
    times: whether to fill the columns that hold measured times.
  """
  run = folder.read_run(path)
  settings = plan.from_dict(run["settings"])
  task = tasks.task_class(settings.task)
  results = folder.read_results(path)
  latency = {
    record["cell"]: record["ratio"]
    for record in folder.read_lines(pathlib.Path(path) / "latency.jsonl")
  }
  found = []
  for sparsity in settings.sparsity:
    cells = [plan.Cell("dense", 0.0)]
    cells += [c for c in plan.cells(settings) if c.sparsity == sparsity]
    cells.sort(key=lambda c: plan.group(c.algorithm).order)
    for cell in cells:
      record = results.get(cell.id)
      if record is None:
        record = {"problem": "not finished"}
      row = _row(task, sparsity, cell, record, results.get("dense", {}))
      if times and not row.problem:
        row = dataclasses.replace(
          row, latency=latency.get(cell.id), seconds=record["seconds"]
        )
      found.append(row)
  return found


def _row(task, sparsity, cell, record, dense) -> Row:
  head = Row(
    task.name,
    sparsity,
    plan.group(cell.algorithm).title,
    cell.algorithm,
    task.metric,
    record["problem"],
  )
  if head.problem:
    return head
  metrics = record["metrics"]
  values = metrics[task.metric]
  difference = None
  if cell.algorithm != "dense" and not dense.get("problem", "missing"):
    difference = statistics.paired_difference(
      values, dense["metrics"][task.metric]
    )

  def optional(name: str) -> Estimate | None:
    return statistics.estimate(metrics[name]) if name in metrics else None

  small = cell.algorithm == "small_dense" and "inference_flops" in dense
  reference = dense if small else record
  return dataclasses.replace(
    head,
    metric=statistics.estimate(values),
    difference=difference,
    realised=sum(record["realised"]) / len(record["realised"]),
    training_flops=record["training_flops"] / reference["training_flops_dense"],
    inference_flops=record["inference_flops"]
    / reference["inference_flops_dense"],
    bytes=record["bytes"],
    weights=record["weights"],
    noise=optional("noise_accuracy"),
    ece=optional("ece"),
    collapsed=" ".join(record.get("collapsed", ())),
  )


HEADER: Sequence[str] = (
  "task sparsity group algorithm metric mean std low high difference "
  "difference_low difference_high realised training_flops inference_flops "
  "bytes weights noise_accuracy ece latency seconds collapsed problem"
).split()


_NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, 0)


def flat(row: Row) -> dict[str, Any]:
  """Return a row as one level of plain values, None where there is none."""
  metric = row.metric or _NOTHING
  difference = row.difference or _NOTHING
  values = {
    "task": row.task,
    "sparsity": row.sparsity,
    "group": row.group,
    "algorithm": row.algorithm,
    "metric": row.metric_name,
    "mean": metric.mean,
    "std": metric.std,
    "low": metric.low,
    "high": metric.high,
    "difference": difference.mean,
    "difference_low": difference.low,
    "difference_high": difference.high,
    "realised": row.realised,
    "training_flops": row.training_flops,
    "inference_flops": row.inference_flops,
    "bytes": row.bytes,
    "weights": row.weights,
    "noise_accuracy": row.noise.mean if row.noise else None,
    "ece": row.ece.mean if row.ece else None,
    "latency": row.latency,
    "seconds": row.seconds,
    "collapsed": row.collapsed,
    "problem": row.problem,
  }
  nothing = lambda v: isinstance(v, float) and math.isnan(v)
  return {key: None if nothing(v) else v for key, v in values.items()}


def to_json(table: Sequence[Row]) -> str:
  """Return the table as a JSON list of objects."""
  return json.dumps([flat(row) for row in table], indent=2) + "\n"


def to_csv(table: Sequence[Row]) -> str:
  """Return the table as CSV; text that a spreadsheet would run is quoted."""
  buffer = io.StringIO()
  writer = csv.DictWriter(buffer, HEADER, lineterminator="\n")
  writer.writeheader()
  for row in table:
    values = flat(row)
    for key, value in values.items():
      if isinstance(value, str) and value[:1] in "=+-@\t\r" and value:
        values[key] = "'" + value
    writer.writerow(values)
  return buffer.getvalue()


COLUMNS = (
  "algorithm",
  "metric",
  "95 % interval",
  "vs dense",
  "sparsity",
  "train FLOPs",
  "infer FLOPs",
  "kB",
  "latency",
  "noise",
  "ECE",
  "time",
)


def spelled(row: Row) -> list[str]:
  """Return the cells of a row as text, in the order of `COLUMNS`."""
  if row.metric is None:
    return [row.algorithm, f"failed: {row.problem}", *[""] * 10]
  m, d = row.metric, row.difference
  spread = "" if math.isnan(m.std) else f" ± {m.std:.2f}"
  interval = "" if math.isnan(m.low) else f"[{m.low:.2f}, {m.high:.2f}]"
  against = ""
  if d is not None:
    against = f"{d.mean:+.2f}"
    if not math.isnan(d.low):
      against += f" [{d.low:+.2f}, {d.high:+.2f}]"
  lost = f" (collapsed: {row.collapsed})" if row.collapsed else ""
  return [
    row.algorithm,
    f"{m.mean:.2f}{spread}",
    interval,
    against,
    f"{100 * row.realised:.2f} %{lost}" if row.realised else "–",
    f"{row.training_flops:.2f}×",
    f"{row.inference_flops:.2f}×",
    f"{(row.bytes or 0) / 1000:,.0f}",
    f"{row.latency:.2f}×" if row.latency is not None else "–",
    f"{row.noise.mean:.1f}" if row.noise else "–",
    f"{row.ece.mean:.1f}" if row.ece else "–",
    f"{row.seconds:.0f} s" if row.seconds is not None else "–",
  ]


def used_columns(table: Sequence[Row]) -> list[int]:
  """Return the indices of `COLUMNS` that some row has something in."""
  texts = [spelled(row) for row in table if row.metric is not None]
  return [
    i
    for i in range(len(COLUMNS))
    if i < 2 or any(text[i] not in ("", "–") for text in texts)
  ]


def blocks(table: Sequence[Row]) -> list[tuple[str, list[Row]]]:
  """Split the rows into (title, rows) by task and sparsity."""
  found: dict[str, list[Row]] = {}
  for row in table:
    title = f"{row.task}, {100 * row.sparsity:g} % sparse"
    found.setdefault(title, []).append(row)
  return list(found.items())


def to_latex(table: Sequence[Row]) -> str:
  """Return booktabs tables, one per task and sparsity."""
  lines = []
  shown = used_columns(table)
  for title, block in blocks(table):
    names: list[str] = list(COLUMNS)
    names[1] = block[0].metric_name
    lines += [
      f"% {_tex(title)}",
      r"\begin{tabular}{l" + "r" * (len(shown) - 1) + "}",
      r"\toprule",
      " & ".join(_tex(names[i]) for i in shown) + r" \\",
    ]
    group = None
    for row in block:
      if row.group != group:
        group = row.group
        lines.append(r"\midrule")
        lines.append(
          rf"\multicolumn{{{len(shown)}}}{{l}}{{\emph{{{_tex(group)}}}}} \\"
        )
      texts = spelled(row)
      if row.metric is None:
        span = len(shown) - 1
        cell = rf"\multicolumn{{{span}}}{{l}}{{{_tex(texts[1])}}}"
        lines.append(f"{_tex(texts[0])} & {cell} \\\\")
      else:
        lines.append(" & ".join(_tex(texts[i]) for i in shown) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", ""]
  return "\n".join(lines)


_TEX = {
  "\\": r"\textbackslash{}",
  "&": r"\&",
  "%": r"\%",
  "$": r"\$",
  "#": r"\#",
  "_": r"\_",
  "{": r"\{",
  "}": r"\}",
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
  "±": r"$\pm$",
  "×": r"$\times$",
  "–": "--",
}


def _tex(text: str) -> str:
  return "".join(_TEX.get(character, character) for character in text)


def to_markdown(table: Sequence[Row]) -> str:
  """Return one Markdown table per task and sparsity."""
  lines = []
  shown = used_columns(table)
  for title, block in blocks(table):
    names: list[str] = list(COLUMNS)
    names[1] = block[0].metric_name
    lines += [f"**{title}**", ""]
    lines.append("| " + " | ".join(names[i] for i in shown) + " |")
    lines.append("|---" + "|---:" * (len(shown) - 1) + "|")
    group = None
    for row in block:
      if row.group != group:
        group = row.group
        lines.append(f"| *{group}* |" + " |" * (len(shown) - 1))
      texts = [text.replace("|", r"\|") for text in spelled(row)]
      lines.append("| " + " | ".join(texts[i] for i in shown) + " |")
    lines.append("")
  return "\n".join(lines)
