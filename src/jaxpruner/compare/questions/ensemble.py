"""Static against dynamic masks, with Dropout, and FreeTickets (3.8)."""

from typing import Any

import jax

from jaxpruner.compare.cells import Cell
from jaxpruner.compare.columns import percent
from jaxpruner.compare.questions import drawing
from jaxpruner.compare.questions.base import (
  Findings,
  Question,
  Table,
  judged,
  signed,
)
from jaxpruner.compare.questions.free_tickets import MEMBERS, PART, program
from jaxpruner.compare.questions.measuring import Store
from jaxpruner.compare.statistics import estimate
from jaxpruner.compare.tasks.base import Classification

# How the masks of the next member change; others change none.
GROWTH = {"rigl": "gradient", "set": "random"}
NAMES = ("member", "last member", "ensemble", "disagreement")


def axes(task: Any) -> dict[str, Any]:
  """Return static and dynamic masks; with Dropout where the task has it."""
  if not isinstance(task, Classification):
    raise ValueError(
      f"--question ensemble: task {task.name!r} is not a classifier of arrays "
      "(jaxpruner.compare.Classification)"
    )
  found: dict[str, Any] = {
    "algorithms": ("static_sparse", "set", "rigl"),
    "sparsity": (0.8, 0.9, 0.95),
  }
  rate = getattr(task, "dropout", None)
  if rate is not None:
    found["options"] = {"dropout": (0.0, rate or 0.2)}
  return found


def measure(cell: Cell, store: Store) -> dict[str, list[float]]:
  """Train the further members of each seed, and judge them together."""
  if cell.name == "small_dense":
    return {}
  trained = store.load(cell)
  task: Any = trained.task
  masked = trained.masks is not None and cell.name != "dense"
  run = program(task, GROWTH.get(cell.name, ""), masked)
  found: dict[str, list[float]] = {}
  for number in range(trained.seeds):
    params, masks, _ = trained.seed(number)
    key = jax.random.fold_in(jax.random.key(number), 7)
    for name, value in run(params, masks, trained.data, key).items():
      found.setdefault(name, []).append(float(value))
  return found


def flops_of(found: Findings, cell: Cell) -> float:
  """Return the FLOPs of all members' trainings, relative to dense's one."""
  record = found.records[cell.id]
  first = record.training_flops / record.training_flops_dense
  dense = found.records[cell.dense.id]
  density = record.inference_flops / dense.inference_flops
  return first + (MEMBERS - 1) / PART * density


def _sparse(found: Findings) -> list[Cell]:
  return [
    cell
    for cell in found.cells
    if cell.name not in ("dense", "small_dense")
    and cell.dense.id in found.records
  ]


def verdict(found: Findings) -> list[str]:
  """Hold dynamic masks against static ones, ensembles against networks."""
  sentences = []
  for cell in _sparse(found):
    where = f"{cell.method} at {percent(cell.sparsity)}"
    where += f" ({cell.options})" if cell.options else ""
    parts = []
    if cell.name != "static_sparse":
      static = cell._replace(algorithm="static_sparse")
      gain = found.better(cell, static)
      if gain is not None:
        parts.append(f"against a static mask {signed(gain)} ({judged(gain)})")
    together = found.values(cell, "ensemble")
    alone = found.gain(together, found.values(cell, "last member"), True)
    dense = found.gain(together, found.values(cell.dense, "last member"), True)
    if alone is not None:
      parts.append(
        f"{MEMBERS} members of one chain against its last one {signed(alone)} "
        f"({judged(alone)}), against a dense network that was trained as long "
        f"{signed(dense)} ({judged(dense)}), at "
        f"{flops_of(found, cell):.2f} of one dense training's FLOPs"
      )
    if parts:
      sentences.append(f"{where}: {'; '.join(parts)}.")
  return [*sentences, *_dropout_words(found)] or ["No sparse row is finished."]


def _dropout_words(found: Findings) -> list[str]:
  """Say what Dropout changes for each row."""
  sentences = []
  for cell in found.cells:
    if "dropout=" not in cell.options or "dropout=0.0" in cell.options:
      continue
    rate = cell.options.partition("dropout=")[2].partition(",")[0]
    plain = cell._replace(
      options=cell.options.replace(f"dropout={rate}", "dropout=0.0")
    )
    gain = found.better(cell, plain)
    if gain is not None and cell.name != "small_dense":
      name = cell.method
      name += "" if name == "dense" else f" at {percent(cell.sparsity)}"
      sentences.append(
        f"Dropout of {rate} on {name}: {signed(gain)}{found.suffix} "
        f"({judged(gain)})."
      )
  return sentences


def tables(found: Findings) -> list[Table]:
  """Return network × what its members are worth."""
  lines = []
  for cell in found.cells:
    if cell.id not in found.measures or cell.name == "small_dense":
      continue
    title = cell.method
    title += "" if cell.name == "dense" else f" {percent(cell.sparsity)}"
    title += f" ({cell.options})" if cell.options else ""
    texts = []
    for name in NAMES:
      values = found.values(cell, name)
      texts.append(f"{estimate(values).mean:.2f}" if values else "–")
    alone = found.gain(
      found.values(cell, "ensemble"), found.values(cell, "last member"), True
    )
    nll = found.gain(
      found.values(cell, "ensemble NLL"), found.values(cell, "last NLL"), False
    )
    known = cell.dense.id in found.records
    cost = f"{flops_of(found, cell):.2f}" if known else "–"
    lines.append([title, *texts, signed(alone), signed(nll, 3), cost])
  head = ["chain", *NAMES, "ensemble − last", "NLL gained", "training FLOPs"]
  title = f"Chains of {MEMBERS} members; % of test images; FLOPs of the chain "
  title += "relative to one dense training"
  return [Table(title, head, lines)] if lines else []


def pictures(found: Findings) -> dict[str, Any]:
  """Draw networks and ensembles over sparsity, and gain over disagreement."""
  figure, (left, right) = drawing.plt.subplots(
    1, 2, figsize=(9.6, 4.2), layout="constrained"
  )
  curves: dict[str, list] = {}
  spread: dict[str, list] = {}
  for cell in _sparse(found):
    label = cell.label
    last, all_ = (
      found.values(cell, "last member"),
      found.values(cell, "ensemble"),
    )
    apart = found.values(cell, "disagreement")
    if last is None or all_ is None or apart is None:
      continue
    curves.setdefault(label, []).append((cell.sparsity, all_))
    gains = [a - b for a, b in zip(all_, last, strict=True)]
    place = (estimate(apart).mean, gains)
    spread.setdefault(label, []).append(place)
  styles = drawing.styles(list(curves))
  draw = lambda axis, points, x, y: drawing.draw(
    axis, [drawing.Curve(k, v, styles[k]) for k, v in points.items()], x, y
  )
  label = drawing.label_of(found.metric, found.unit)
  draw(left, curves, "sparsity", f"{label}, members together")
  draw(right, spread, "disagreement of two members, %", "gain over the last")
  left.set_title(f"{MEMBERS} members of one chain")
  right.set_title("What members that differ are worth")
  if curves:
    right.axhline(0, color="black", lw=0.8)
    left.legend(loc="best", fontsize=7)
  return {"ensemble": figure}


QUESTION = Question(
  name="ensemble",
  asks="Are dynamic masks better than static ones, what does Dropout add, and "
  "what is an ensemble from one chain of sparse trainings worth?",
  section="3.8",
  axes=axes,
  verdict=verdict,
  measure=measure,
  tables=tables,
  pictures=pictures,
  captions={
    "ensemble": "Left: the accuracy of three members of one chain together. "
    "Between members half of the kept weights of a dynamic row are replaced, "
    "then the network is refined for half of the training's steps "
    "(FreeTickets); a static row keeps its mask. Right: the ensemble's gain "
    "over its last member. Bars are 95 % intervals."
  },
)
