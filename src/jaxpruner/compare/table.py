"""The table: records of finished cells turned into rows."""

import dataclasses
import math
from typing import Any

from jaxpruner.compare import run_folder, statistics
from jaxpruner.compare.cells import BASELINES, Cell
from jaxpruner.compare.groups import Listed
from jaxpruner.compare.records import Failure, Record
from jaxpruner.compare.statistics import Estimate

NOT_FINISHED = "not finished"  # the problem of a cell without a record


@dataclasses.dataclass(frozen=True)
class TableRow:
  """The results of one algorithm at one sparsity.

  Ratios are relative to the dense network. `latency`, `seconds` and
  `step_time` are measured; only they differ when a comparison runs twice.
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
  step_time: float | None = None  # measured, of a training step
  training_memory: float | None = None  # weights and optimizer state
  collapsed: str = ""  # leaves that lost every weight
  unit: str = ""
  higher_is_better: bool = True
  cell: str = ""
  structure: str = ""
  distribution: str = ""
  options: str = ""
  label: str = ""  # the algorithm, with the axes that have several values
  notes: str = ""

  @property
  def curve(self) -> str:
    """The name of the curve that the row is a point of."""
    return self.label or self.algorithm


def rows(path: str, times: bool = True) -> list[TableRow]:
  """Return the rows of a run folder: by sparsity, then by category.

  No module that the folder names is imported: algorithms, categories and the
  metric are read from its run.json.

  Args:
    path: the run folder.
    times: whether to fill the columns with measured times.

  Returns:
    The rows.
  """
  info = run_folder.read_run(path)
  settings = run_folder.settings_of(info, path)
  results = run_folder.read_results(path)
  latency = run_folder.read_latency(path)
  listed = run_folder.listed_cells(info, path)
  labels = _labels(listed)
  found = []
  for sparsity in dict.fromkeys(settings.sparsity):
    block = [
      entry
      for entry in listed
      if entry.cell == entry.cell.dense or entry.cell.sparsity == sparsity
    ]
    for entry in sorted(block, key=lambda entry: entry.group.order):
      cell = entry.cell
      head = TableRow(
        settings.task,
        sparsity,
        entry.group.title,
        cell.algorithm,
        info.metric or "accuracy",
        unit=info.unit,
        higher_is_better=info.higher_is_better,
        cell=cell.id,
        structure=_structure(cell),
        distribution=entry.distribution,
        options=cell.options,
        label=labels[cell],
      )
      record = results.get(cell.id)
      row = _filled(head, cell, record, results.get(cell.dense.id))
      if times and isinstance(record, Record) and not row.problem:
        ratio = latency[cell.id].ratio if cell.id in latency else None
        row = dataclasses.replace(row, latency=ratio, seconds=record.seconds)
        row = _with_step(row, record, results.get(cell.dense.id))
      found.append(row)
  return found


def _with_step(
  row: TableRow, record: Record, dense: Record | Failure | None
) -> TableRow:
  """Return a row with the measured cost of a training step."""
  if not isinstance(dense, Record):
    return row
  ratio = lambda own, theirs: own / theirs if own and theirs else None
  return dataclasses.replace(
    row,
    step_time=ratio(record.step_seconds, dense.step_seconds),
    training_memory=ratio(record.training_bytes, dense.training_bytes),
  )


def _structure(cell: Cell) -> str:
  return "" if cell.name in BASELINES else cell.type or "unstructured"


def _labels(listed: list[Listed]) -> dict[Cell, str]:
  """Return names that tell the cells of one sparsity apart."""
  pruned = [entry for entry in listed if entry.cell.name not in BASELINES]
  several = lambda values: len(set(values)) > 1
  kinds = several(_structure(entry.cell) for entry in pruned)
  shares = several(
    entry.distribution for entry in pruned if entry.cell.distribution
  )
  labels = {}
  for cell, share, _ in listed:
    parts = [cell.algorithm]
    if kinds and _structure(cell):
      parts.append(_structure(cell))
    if shares and share:
      parts.append(share)
    labels[cell] = " ".join([*parts, *filter(None, [cell.options])])
  return labels


def _filled(
  head: TableRow,
  cell: Cell,
  record: Record | Failure | None,
  dense: Record | Failure | None,
) -> TableRow:
  """Return a row with the numbers of its record, or with its problem."""
  if record is None:
    return dataclasses.replace(head, problem=NOT_FINISHED)
  if isinstance(record, Failure) or record.problem:
    return dataclasses.replace(head, problem=record.problem)
  values = _metric(record, head.metric_name)
  if values is None:
    problem = f"{head.metric_name} is missing or not finite in the record"
    return dataclasses.replace(head, problem=problem)
  theirs = None
  if isinstance(dense, Record) and not dense.problem:
    theirs = _metric(dense, head.metric_name)
  if _other_batches(record, dense):
    return dataclasses.replace(
      head,
      problem="its batches were not those of the dense row: the loader is not "
      "deterministic",
    )
  difference = None
  if cell != cell.dense and theirs and len(theirs) == len(values):
    difference = statistics.paired_difference(values, theirs)

  def optional(name: str) -> Estimate | None:
    found = _metric(record, name)
    return statistics.estimate(found) if found else None

  reference = record
  if cell.name == "small_dense" and isinstance(dense, Record):
    reference = dense
  share = lambda part, whole: part / whole if whole else None
  realised = [value for value in record.realised if value is not None]
  return dataclasses.replace(
    head,
    metric=statistics.estimate(values),
    difference=difference,
    realised=sum(realised) / len(realised) if realised else None,
    training_flops=share(record.training_flops, reference.training_flops_dense),
    inference_flops=share(
      record.inference_flops, reference.inference_flops_dense
    ),
    bytes=record.bytes,
    weights=record.weights,
    noise=optional("noise_accuracy"),
    ece=optional("ece"),
    collapsed=" ".join(record.collapsed),
    notes="; ".join(record.notes),
  )


def _other_batches(record: Record, dense: Record | Failure | None) -> bool:
  theirs = dense.batches if isinstance(dense, Record) else ""
  return bool(record.batches and theirs and record.batches != theirs)


def _metric(record: Record, name: str) -> list[float] | None:
  """Return the value of a metric for each seed; None if one is missing."""
  found = record.metrics.get(name) or []
  values = [value for value in found if value is not None]
  return values if values and len(values) == len(found) else None


_NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, 0)


def flat(row: TableRow) -> dict[str, Any]:
  """Return a row as a flat dict of plain values, None for empty columns."""
  metric = row.metric or _NOTHING
  difference = row.difference or _NOTHING
  values = {
    "task": row.task,
    "sparsity": row.sparsity,
    "group": row.group,
    "algorithm": row.algorithm,
    "structure": row.structure,
    "distribution": row.distribution,
    "options": row.options,
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
    "step_time": row.step_time,
    "training_memory": row.training_memory,
    "collapsed": row.collapsed,
    "notes": row.notes,
    "problem": row.problem,
  }
  nothing = lambda v: isinstance(v, float) and math.isnan(v)
  return {key: None if nothing(v) else v for key, v in values.items()}
