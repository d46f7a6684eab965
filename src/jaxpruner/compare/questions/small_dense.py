"""Large sparse against small dense, over width (handbook, 3.1 and 3.4)."""

from typing import Any

from jaxpruner.compare.cells import Cell
from jaxpruner.compare.columns import percent
from jaxpruner.compare.questions import drawing
from jaxpruner.compare.questions.base import (
  Findings,
  Question,
  counted,
  signed,
)


def axes(task: Any) -> dict[str, Any]:
  """Return three widths, four sparsities, one algorithm of each kind."""
  step = task.width_multiple
  widths = [max(step, task.width // part // step * step) for part in (4, 2, 1)]
  return {
    "algorithms": ("magnitude", "rigl"),
    "sparsity": (0.5, 0.8, 0.9, 0.95),
    "options": {"width": tuple(dict.fromkeys(widths))},
  }


def pairs(found: Findings) -> list[tuple[Cell, Cell]]:
  """Return each sparse cell and the dense one with as many weights."""
  result = []
  for cell in found.cells:
    twin = Cell("small_dense", cell.sparsity, options=cell.options)
    if cell.name not in ("dense", "small_dense") and twin.id in found.records:
      result.append((cell, twin))
  return result


def verdict(found: Findings) -> list[str]:
  """Say how often the sparse network beats the dense one of its size."""
  sentences = []
  twins = pairs(found)
  if not twins:
    return ["No cell has a dense network of the same size to compare with."]
  for name in dict.fromkeys(cell.method for cell, _ in twins):
    mine = [(cell, twin) for cell, twin in twins if cell.method == name]
    differences = [found.better(cell, twin) for cell, twin in mine]
    costs = [
      found.records[cell.id].training_flops
      / found.records[twin.id].training_flops
      for cell, twin in mine
    ]
    # Widths are whole numbers: the sizes of a pair are only nearly equal.
    sizes = [
      found.records[twin.id].weights / found.records[cell.id].weights
      for cell, twin in mine
    ]
    last, twin = max(mine, key=lambda pair: (_size(found, pair[0]), pair[0][1]))
    sentences.append(
      f"{name}, against a dense network with as many weights "
      f"({min(sizes):.2f} to {max(sizes):.2f} times): "
      f"{counted(differences)}. The largest network at "
      f"{percent(last.sparsity)}: {signed(found.better(last, twin))}"
      f"{found.suffix} {found.metric}. Training it took {min(costs):.1f} to "
      f"{max(costs):.1f} times the FLOPs of training the small dense network."
    )
  return sentences


def _size(found: Findings, cell: Cell) -> int:
  record = found.records.get(cell.dense.id)
  return record.weights if record else 0


def curves(found: Findings) -> list[drawing.Curve]:
  """Return the metric over kept weights: dense networks, and each algorithm."""
  points: dict[str, list] = {"dense": []}
  for cell in found.cells:
    values = found.values(cell)
    if values is None:
      continue
    dense = cell.name in ("dense", "small_dense")
    label = "dense" if dense else cell.label
    place = (found.records[cell.id].weights, values)
    points.setdefault(label, []).append(place)
    start = found.values(cell.dense)
    if not dense and start and len(points[label]) == 1:
      points[label].append((found.records[cell.dense.id].weights, start))
  styles = drawing.styles(list(points))
  return [drawing.Curve(k, v, styles[k]) for k, v in points.items()]


def pictures(found: Findings) -> dict[str, Any]:
  """Draw the scaling curve."""
  figure, axis = drawing.plt.subplots(figsize=(6.6, 4.2), layout="constrained")
  label = drawing.label_of(found.metric, found.unit)
  drawing.draw(axis, curves(found), "weights kept", label)
  axis.set_xscale("log")
  axis.legend(loc="best", fontsize=8)
  axis.set_title("Large sparse against small dense")
  return {"small-dense": figure}


QUESTION = Question(
  name="small-dense",
  asks="Is a large sparse network better than a small dense one with as many "
  "weights?",
  section="3.1",
  axes=axes,
  verdict=verdict,
  pictures=pictures,
  captions={
    "small-dense": "The metric over the number of weights that are kept. The "
    "black curve is dense networks of many widths; each coloured curve prunes "
    "one width and starts at its dense network. A sparse network is worth its "
    "width where its curve is above the black one. Bars are 95 % intervals."
  },
)
