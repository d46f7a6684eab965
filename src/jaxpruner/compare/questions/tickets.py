"""Lottery tickets with the controls of the literature (handbook, 3.9).

Controls: the same mask with new weights, a shuffled mask, a random mask, and
rewinding to a later step (Frankle & Carbin, 2019; Frankle et al., 2020; Su et
al., "Sanity-Checking Pruning Methods", 2020). Connectivity: the metric on the
line between two trainings of one ticket. Pools: the mean of tickets with
weights searched on training batches (Yin et al., "Lottery Pools", 2023).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.compare import outcomes
from jaxpruner.compare.cells import Cell, ticket_of
from jaxpruner.compare.columns import percent
from jaxpruner.compare.questions import drawing
from jaxpruner.compare.questions.base import (
  Findings,
  Question,
  judged,
  signed,
)
from jaxpruner.compare.questions.measuring import Store, Trained
from jaxpruner.compare.statistics import estimate

POINTS = 11  # on the line between two networks
SHARES = np.linspace(0.0, 0.5, 6)  # weights of a candidate of the pool
BATCHES = 8  # training batches that a pool is searched on


def axes(task: Any) -> dict[str, Any]:
  """Return the ticket, its controls, and two sparsities."""
  late = f"rewind_step={max(1, task.steps // 10)}"
  return {
    "algorithms": (
      "imp",
      f"imp{{{late}}}",
      "retrain:imp",
      "retrain:imp{weights=new}",
      "retrain:imp{mask=shuffled}",
      f"retrain:imp{{{late}}}",
      "static_sparse",
      "magnitude",
    ),
    "sparsity": (0.8, 0.95),
  }


def late_of(cells: list[Cell]) -> str:
  """Return the ticket that rewinds to a later step, or ""."""
  names = [cell.algorithm for cell in cells]
  return next((n for n in names if n.startswith("imp{rewind_step")), "")


def measure(cell: Cell, store: Store) -> dict[str, list[float]]:
  """Measure connectivity, and the pool of two trainings of one ticket."""
  ticket = cell.source
  if not cell.name.startswith("retrain:") or ticket is None:
    return {}
  if ticket_of(cell.algorithm)[1] != {"weights": "same", "mask": "same"}:
    return {}
  if not store.has(ticket):
    return {}
  one, two = store.load(ticket), store.load(cell)
  metric = one.task.metric
  found = {}
  for share in np.linspace(0, 1, POINTS):
    mixed = jax.tree.map(
      lambda a, b, s=share: (1 - s) * a + s * b, one.params, two.params
    )
    values = outcomes.evaluate(one.task, mixed, one.state, one.data)[metric]
    found[f"path {share:.1f}"] = values
  pooled, shares = pool(one, two)
  values = outcomes.evaluate(one.task, pooled, one.state, one.data)[metric]
  return found | {"pool": values, "pool share": shares}


def pool(one: Trained, two: Trained) -> tuple[Any, list[float]]:
  """Return the mean of two tickets with the least loss on training batches.

  Args:
    one: the tickets of all seeds.
    two: networks with the same masks.

  Returns:
    The parameters of all seeds, and the share of `two` for each.
  """
  task, data = one.task, one.data
  losses = jax.jit(functools.partial(_loss, task))
  chosen = []
  for seed in range(one.seeds):
    first, _, state = one.seed(seed)
    second, _, _ = two.seed(seed)
    batches = _held_batches(task, data, seed)
    found = []
    for share in SHARES:
      mixed = jax.tree.map(
        lambda a, b, s=share: (1 - s) * a + s * b, first, second
      )
      found.append(sum(float(losses(mixed, state, b)) for b in batches))
    chosen.append(float(SHARES[int(np.argmin(found))]))
  weight = lambda x: jnp.asarray(chosen).reshape(-1, *[1] * (x.ndim - 1))
  mixed = jax.tree.map(
    lambda a, b: (1 - weight(a)) * a + weight(a) * b, one.params, two.params
  )
  return mixed, chosen


def _loss(task: Any, params: Any, state: Any, batch: Any) -> jax.Array:
  return task.loss_and_state(params, state, batch, jax.random.key(0))[0]


def _held_batches(task: Any, data: Any, seed: int) -> list[Any]:
  """Return training batches that come after those of the training."""
  if task.streamed:
    stream = task.stream(seed, task.steps)
    return [next(stream) for _ in range(BATCHES)]
  key, _ = jax.random.split(jax.random.fold_in(jax.random.key(seed), 2))
  steps = range(task.steps, task.steps + BATCHES)
  return [task.batches(data, key, jnp.array(step)) for step in steps]


def barrier(found: Findings, cell: Cell) -> list[float] | None:
  """Return how far the metric falls between two trainings, per seed.

  Args:
    found: the findings.
    cell: the cell with the second training.

  Returns:
    The largest gap below the straight line between the ends; 0 is connected.
  """
  names = [f"path {share:.1f}" for share in np.linspace(0, 1, POINTS)]
  path = [found.measures.get(cell.id, {}).get(name) for name in names]
  if any(values is None for values in path):
    return None
  table = np.array(path, float)
  share = np.linspace(0, 1, POINTS)[:, None]
  straight = (1 - share) * table[0] + share * table[-1]
  sign = 1 if found.higher_is_better else -1
  return (sign * (straight - table)).max(0).tolist()


CONTROLS = {
  "retrain:imp{weights=new}": "new weights under its mask",
  "retrain:imp{mask=shuffled}": "its mask shuffled within each leaf",
  "static_sparse": "a random mask",
  "magnitude": "gradual magnitude pruning in a single training",
}


def verdict(found: Findings) -> list[str]:
  """Say what the ticket's weights, its mask and rewinding are worth."""
  sentences = []
  late = late_of(found.cells)
  for ticket in [cell for cell in found.cells if cell.algorithm == "imp"]:
    parts = []
    named = dict(CONTROLS)
    if late:
      named[late] = f"rewinding to step {late.partition('=')[2].rstrip('}')}"
    for name, words in named.items():
      gain = found.better(ticket, ticket._replace(algorithm=name))
      if gain is not None:
        parts.append(f"{words} ({signed(gain)}, {judged(gain)})")
    sentences.append(
      f"At {percent(ticket.sparsity)} the ticket reaches "
      f"{estimate(found.values(ticket) or [np.nan]).mean:.2f}{found.suffix}. "
      f"Against: {'; '.join(parts) or 'nothing'}."
    )
    sentences += _lines_between(found, ticket, late)
  return sentences or ["No ticket was found."]


def _lines_between(found: Findings, ticket: Cell, late: str) -> list[str]:
  """Say whether two trainings of a ticket are connected, and what a pool is."""
  sentences = []
  for name, words in (("imp", "from the start"), (late, "rewound later")):
    again = ticket._replace(algorithm=f"retrain:{name}")
    gaps = barrier(found, again) if name else None
    if gaps is None:
      continue
    gap = estimate(gaps)
    pooled = found.gain(
      found.values(again, "pool"),
      found.values(ticket._replace(algorithm=name)),
    )
    sentences.append(
      f"Two trainings of the ticket {words}, at {percent(ticket.sparsity)}: on "
      f"the line between them the {found.metric} falls by at most "
      f"{gap.mean:.2f}{found.suffix} below the straight line "
      f"[{gap.low:.2f}, {gap.high:.2f}]. Their pool, weighted on training "
      f"batches, against the ticket: {signed(pooled)}."
    )
  return sentences


def pictures(found: Findings) -> dict[str, Any]:
  """Draw tickets and controls over sparsity, and the lines between networks."""
  figure, (left, right) = drawing.plt.subplots(
    1, 2, figsize=(9.6, 4.4), layout="constrained"
  )
  label = drawing.label_of(found.metric, found.unit)
  points: dict[str, list] = {}
  for cell in found.cells:
    values = found.values(cell)
    if values and cell.name not in ("dense", "small_dense"):
      points.setdefault(cell.algorithm, []).append((cell.sparsity, values))
  styles = drawing.styles(list(points))
  curves = [drawing.Curve(k, v, styles[k]) for k, v in points.items()]
  levels = {place for found_at in points.values() for place, _ in found_at}
  if len(levels) == 1:  # one above the other, they could not be told apart
    apart = [
      c._replace(points=[(i, values) for _, values in c.points])
      for i, c in enumerate(curves)
    ]
    drawing.draw(left, apart, f"at {percent(levels.pop())}", label)
    left.set_xticks(range(len(apart)), [*points], rotation=60, ha="right")
    left.tick_params(axis="x", labelsize=7)
  else:
    drawing.draw(left, curves, "sparsity", label)
    left.legend(loc="best", fontsize=7)
  left.set_title("The ticket and its controls")
  lines = _paths(found)
  styles = drawing.styles(list(lines))
  drawing.draw(
    right,
    [drawing.Curve(k, v, styles[k]) for k, v in lines.items()],
    "from one training (0) to another (1)",
    label,
  )
  if lines:
    right.legend(loc="best", fontsize=7)
  right.set_title("On the line between two trainings of a ticket")
  return {"tickets": figure}


def _paths(found: Findings) -> dict[str, list]:
  result: dict[str, list] = {}
  for cell in found.cells:
    for name, values in found.measures.get(cell.id, {}).items():
      if name.startswith("path "):
        label = f"{cell.algorithm}, {percent(cell.sparsity)}"
        place = (float(name.removeprefix("path ")), values)
        result.setdefault(label, []).append(place)
  return result


QUESTION = Question(
  name="tickets",
  asks="Does a lottery ticket owe its quality to its weights, to its mask, or "
  "to the search?",
  section="3.9",
  axes=axes,
  verdict=verdict,
  measure=measure,
  pictures=pictures,
  captions={
    "tickets": "Left: iterative magnitude pruning (imp) and its controls. "
    "Right: the metric on the straight line between the weights of two "
    "trainings of one ticket that differ in the order of their batches; a dip "
    "is a barrier. Bars are 95 % intervals."
  },
)
