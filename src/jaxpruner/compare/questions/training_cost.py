"""Dense to sparse against sparse to sparse, with measured cost (3.7)."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxpruner
from jaxpruner.compare import groups, networks, training
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.columns import percent
from jaxpruner.compare.latency import ratio_of
from jaxpruner.compare.questions import drawing
from jaxpruner.compare.questions.base import (
  Findings,
  Question,
  Table,
  judged,
  signed,
)
from jaxpruner.compare.questions.measuring import Store
from jaxpruner.compare.statistics import estimate

LENGTH = 20  # steps of a timed call


def axes(task: Any) -> dict[str, Any]:
  """Return algorithms of both kinds, and three sparsities."""
  del task
  return {
    "algorithms": (
      "magnitude",
      "global_magnitude",
      "static_sparse",
      "set",
      "rigl",
      "static_sparse{storage=kept}",
      "set{storage=kept}",
      "rigl{storage=kept}",
    ),
    "sparsity": (0.8, 0.9, 0.95),
  }


def measure(cell: Cell, store: Store) -> dict[str, list[float]]:
  """Measure the time and the memory of a training step, relative to dense."""
  if cell.name.startswith(("after:", "retrain:")):
    return {}
  task = networks.cell_task(cell, store.settings)
  if task.streamed or not task.resumable:
    return {}
  ours, memory = _steps(cell, store)
  dense, dense_memory = _steps(cell.dense, store)
  ratio, _ = ratio_of(ours, dense, rounds=10)
  found = {"step time": [ratio]}
  if memory and dense_memory:
    found["step memory"] = [memory / dense_memory]
  return found


def _steps(cell: Cell, store: Store) -> tuple[Any, int]:
  """Return a function that runs some steps, and the bytes that they need."""
  settings = store.settings
  task = networks.cell_task(cell, settings)
  options = networks.task_options(settings, cell.options)
  data = networks.load_data(settings.task, settings.data, options)
  updater = jaxpruner.create_updater_from_config(
    networks.updater_config(task, cell)
  )
  temperature = groups.costs_of(cell).temperature
  built = training.build(task, updater, data, 1, temperature)
  keys = jax.vmap(jax.random.key)(jnp.arange(1))
  carry = built.start(keys, data)
  middle = task.steps // 2
  program: Any = built.train
  lowered = program.lower(carry, keys, data, middle, LENGTH, LENGTH)
  compiled = lowered.compile()
  analysis = compiled.memory_analysis()
  temporary = getattr(analysis, "temp_size_in_bytes", 0)
  # Snapshots of masks belong to the comparison, not to the training.
  own = carry._replace(masks=(), seen=())
  held = sum(x.nbytes for x in jax.tree.leaves(own))
  box = [carry]

  def run() -> Any:
    # The carry is donated: each call continues from the last one's result.
    box[0], losses, _ = compiled(box[0], keys, data, middle, LENGTH)
    return losses

  return run, held + temporary


def kind_of(cell: Cell) -> str:
  """Return "sparse to sparse" or "dense to sparse"."""
  title = groups.group(cell.algorithm).title
  return title.partition(":")[0].partition(",")[0].lower()


def verdict(found: Findings) -> list[str]:
  """Compare the best of each kind, and say what each cost."""
  sentences = []
  pruned = [c for c in found.cells if c.name not in ("dense", "small_dense")]
  for sparsity in dict.fromkeys(cell.sparsity for cell in pruned):
    best: dict[str, Cell] = {}
    for cell in [c for c in pruned if c.sparsity == sparsity]:
      kind, gain = kind_of(cell), found.better(cell, cell.dense)
      other = best.get(kind)
      if gain is None:
        continue
      if other is None or (found.better(cell, other) or gain).mean > 0:
        best[kind] = cell
    if len(best) < 2:
      continue
    late, early = best.get("dense to sparse"), best.get("sparse to sparse")
    if late is None or early is None:
      continue
    gain = found.better(early, late)
    sentences.append(
      f"At {percent(sparsity)} the best sparse-to-sparse row "
      f"({early.label}) against the best dense-to-sparse row "
      f"({late.label}): {signed(gain)}{found.suffix} ({judged(gain)}), at "
      f"{_flops(found, early):.2f} against {_flops(found, late):.2f} of "
      f"dense's training FLOPs{_measured(found, early, late)}."
    )
  note = (
    "Masked training computes with dense arrays: its measured time and memory "
    "are those of this library on this machine, its FLOPs those that hardware "
    "for sparse products could reach."
  )
  return [*sentences, note]


def _flops(found: Findings, cell: Cell) -> float:
  record = found.records[cell.id]
  return record.training_flops / record.training_flops_dense


def _measured(found: Findings, one: Cell, two: Cell) -> str:
  parts = []
  for name in ("step time", "step memory"):
    values = [found.values(cell, name) for cell in (one, two)]
    if all(values):
      means = [estimate(v or [0.0]).mean for v in values]
      parts.append(f"{name} {means[0]:.2f} against {means[1]:.2f} of dense's")
  return f"; measured {', '.join(parts)}" if parts else ""


def tables(found: Findings) -> list[Table]:
  """Return the costs of each row."""
  lines = []
  for cell in found.cells:
    if cell.name in ("dense", "small_dense"):
      continue
    row = [f"{cell.label} {percent(cell.sparsity)}", kind_of(cell)]
    row.append(signed(found.better(cell, cell.dense)))
    row.append(f"{_flops(found, cell):.2f}")
    for name in ("step time", "step memory"):
      values = found.values(cell, name)
      row.append(f"{estimate(values).mean:.2f}" if values else "–")
    lines.append(row)
  head = ["row", "kind", "vs dense", "training FLOPs"]
  head += ["step time", "step memory"]
  return [Table("Costs relative to dense", head, lines)] if lines else []


def pictures(found: Findings) -> dict[str, Any]:
  """Draw the metric over training FLOPs."""
  figure, axis = drawing.plt.subplots(figsize=(6.6, 4.2), layout="constrained")
  points: dict[str, list] = {}
  for cell in found.cells:
    values = found.values(cell)
    if values and cell.name != "small_dense":
      place = (_flops(found, cell), values)
      points.setdefault(cell.label, []).append(place)
  styles = drawing.styles(list(points))
  curves = [drawing.Curve(k, v, styles[k]) for k, v in points.items()]
  label = drawing.label_of(found.metric, found.unit)
  drawing.draw(axis, curves, "training FLOPs, relative to dense", label)
  axis.legend(loc="best", fontsize=8)
  axis.set_title("What a training costs, and what it reaches")
  return {"training-cost": figure}


QUESTION = Question(
  name="training-cost",
  asks="What does dense-to-sparse training reach beyond sparse-to-sparse "
  "training, and what does it cost?",
  section="3.7",
  axes=axes,
  verdict=verdict,
  measure=measure,
  tables=tables,
  pictures=pictures,
  captions={
    "training-cost": "The metric over the FLOPs of the whole training, one "
    "point per sparsity. Sparse-to-sparse rows are on the left: they never "
    "train a dense network. Bars are 95 % intervals."
  },
)
