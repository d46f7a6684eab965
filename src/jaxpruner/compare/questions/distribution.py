"""Distributions of sparsity over layers, with the spectra of each layer.

The open question of the paper: ERK against uniform (and LAMP, OWL), and what
each leaves of a layer. A layer's spectrum is summed up by its effective rank,
the exponential of the entropy of its normalised singular values (Roy &
Vetterli, 2007), relative to the largest possible one.
"""

from typing import Any

import jax
import numpy as np

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
from jaxpruner.compare.questions.measuring import Store
from jaxpruner.compare.statistics import estimate
from jaxpruner.inspect import cost

RANK, DENSITY = "rank of ", "density of "


def axes(task: Any) -> dict[str, Any]:
  """Return pruning during and after training, with four distributions."""
  del task
  return {
    "algorithms": ("magnitude", "rigl", "after:wanda"),
    "distribution": ("erk", "uniform", "lamp", "owl"),
    "sparsity": (0.8, 0.9),
  }


def effective_rank(weights: np.ndarray) -> float:
  """Return the effective rank of a leaf, relative to the largest possible.

  Args:
    weights: a leaf; all axes but the last are its inputs.

  Returns:
    1 for equal singular values, 1 / n for a single one; 0 for zeros.

  Example:
    >>> effective_rank(np.eye(4)), effective_rank(np.ones((4, 4)))
    (1.0, 0.25)
  """
  matrix = np.asarray(weights, np.float64)
  matrix = matrix.reshape(-1, matrix.shape[-1])
  values = np.linalg.svd(matrix, compute_uv=False)
  total = values.sum()
  if not total > 0:
    return 0.0
  parts = values[values > 1e-12 * values[0]] / total
  entropy = -(parts * np.log(parts)).sum()
  return round(float(np.exp(entropy)) / min(matrix.shape), 12)


def measure(cell: Cell, store: Store) -> dict[str, list[float]]:
  """Measure the spectrum and the density of each leaf with a mask."""
  if cell.name == "small_dense":
    return {}
  trained = store.load(cell)
  named = jax.tree_util.tree_flatten_with_path(trained.params)[0]
  found: dict[str, list[float]] = {}
  for path, leaf in named:
    if leaf.ndim < 3:  # the seeds are one axis
      continue
    name = cost.path_name(path)
    each = [np.asarray(one) for one in leaf]
    found[RANK + name] = [effective_rank(one) for one in each]
    found[DENSITY + name] = [float(np.mean(one != 0)) for one in each]
  return found


def _groups(found: Findings) -> dict[tuple[str, float], list[Cell]]:
  result: dict[tuple[str, float], list[Cell]] = {}
  for cell in found.cells:
    if cell.distribution:
      name = cell._replace(distribution="").label
      result.setdefault((name, cell.sparsity), []).append(cell)
  return result


def mean_rank(found: Findings, cell: Cell) -> list[float] | None:
  """Return the mean effective rank over layers, for each seed."""
  values = found.measures.get(cell.id, {})
  ranks = [v for name, v in values.items() if name.startswith(RANK)]
  return np.mean(ranks, axis=0).tolist() if ranks else None


def verdict(found: Findings) -> list[str]:
  """Hold each distribution against uniform, in metric and in rank."""
  sentences = []
  for (name, sparsity), cells in _groups(found).items():
    plain = [cell for cell in cells if cell.distribution == "uniform"]
    parts = []
    for cell in cells if plain else ():
      if cell.distribution == "uniform":
        continue
      gain = found.better(cell, plain[0])
      rank = found.gain(
        mean_rank(found, cell), mean_rank(found, plain[0]), True
      )
      text = f"{cell.distribution} {signed(gain)} ({judged(gain)})"
      parts.append(text + (f", rank {signed(rank, 3)}" if rank else ""))
    if parts:
      sentences.append(
        f"{name} at {percent(sparsity)}, against uniform: {'; '.join(parts)}."
      )
  return sentences or ["Give several distributions, uniform among them."]


def tables(found: Findings) -> list[Table]:
  """Return layer × distribution: density and effective rank."""
  result = []
  for (name, sparsity), cells in _groups(found).items():
    shown = [cells[0].dense, *cells]
    shown = [cell for cell in shown if cell.id in found.measures]
    names = dict.fromkeys(
      key.removeprefix(RANK)
      for cell in shown
      for key in found.measures[cell.id]
      if key.startswith(RANK)
    )
    lines = []
    for leaf in names:
      texts = []
      for cell in shown:
        pair = [found.values(cell, kind + leaf) for kind in (DENSITY, RANK)]
        means = [f"{estimate(v).mean:.2f}" if v else "–" for v in pair]
        texts.append(" / ".join(means))
      lines.append([leaf, *texts])
    head = ["layer", *(cell.distribution or "dense" for cell in shown)]
    title = f"Density / effective rank of each layer: {name}, "
    if lines:
      result.append(Table(title + percent(sparsity), head, lines))
  return result


def pictures(found: Findings) -> dict[str, Any]:
  """Draw density and effective rank of each layer, a curve per distribution."""
  groups = _groups(found)
  if not groups:
    return {}
  (name, sparsity), cells = next(iter(groups.items()))
  figure, panels = drawing.plt.subplots(
    2, 1, figsize=(7.2, 5.6), sharex=True, layout="constrained"
  )
  styles = drawing.styles([cell.distribution for cell in cells])
  for axis, kind in zip(panels, (DENSITY, RANK), strict=True):
    curves, leaves = [], {}
    for cell in cells:
      values = found.measures.get(cell.id, {})
      mine = [key for key in values if key.startswith(kind)]
      for key in mine:
        leaves.setdefault(key.removeprefix(kind), len(leaves))
      points = [(leaves[k.removeprefix(kind)], values[k]) for k in mine]
      style = styles[cell.distribution]
      curves.append(drawing.Curve(cell.distribution, points, style))
    words = "density" if kind == DENSITY else "effective rank"
    drawing.draw(axis, curves, "", words)
    axis.set_xticks(range(len(leaves)), [*leaves], rotation=60, ha="right")
    axis.tick_params(axis="x", labelsize=6)
  panels[0].legend(loc="best", fontsize=7)
  panels[0].set_title(f"Layers of {name} at {percent(sparsity)}")
  return {"distribution": figure}


QUESTION = Question(
  name="distribution",
  asks="Which distribution of sparsity over layers is best, and what does it "
  "leave of each layer's spectrum?",
  section="3.10, and the paper's open questions",
  axes=axes,
  verdict=verdict,
  measure=measure,
  tables=tables,
  pictures=pictures,
  captions={
    "distribution": "Of each layer, the share of weights kept, and the "
    "effective rank: the exponential of the entropy of the normalised singular "
    "values, relative to the largest possible. Bars are 95 % intervals."
  },
)
