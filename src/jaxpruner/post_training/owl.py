"""OWL: layers with more outliers are pruned less."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpruner import _leaves
from jaxpruner.post_training import calibration
from jaxpruner.sparsity_distributions import Plan, allocation

_TIMES = 5.0  # the mean of the scores: an outlier
_SPREAD = 0.08


def layer_of(name: str) -> str:
  """Return the layer a weight belongs to: its path up to the first number.

  >>> layer_of("layers/3/attention/q"), layer_of("head/kernel")
  ('layers/3', 'head/kernel')
  """
  names = name.split("/")
  for i, part in enumerate(names):
    if re.search(r"\d", part):
      return "/".join(names[: i + 1])
  return name


def sparsities(
  model: calibration.Model,
  shapes: Mapping[str, Any],
  sparsity: float,
  custom: Mapping[Any, float | None] | None,
) -> dict[str, float | None]:
  """Return the sparsity of each path: lower, the more outliers its layer has.

  Scores are Wanda's, |w| ‖x‖; all weights of a layer share its density (Yin et
  al., "OWL", 2024). One pass over the batches; the total is exact.
  """
  plan = Plan(shapes, lambda names, leaf: True, custom)
  names = {i: _leaves.join(plan.leaves[i][0]) for i in plan.free}
  free = set(names.values())
  found: dict[str, list[tuple[int, float]]] = {}
  _, cuts = model.stream(False, False, lambda cut: False)
  for cut, sums in cuts:
    for part in cut.parts:
      if (name := model.name(part.leaf)) in free:
        norm = np.asarray(calibration.statistics(part, sums).norm)
        w, _ = part.matrix(model.leaves[part.leaf])
        scores = w * norm[:, :, None]
        row = scores.size, allocation.outlier_ratio(scores, _TIMES)
        found.setdefault(layer_of(name), []).append(row)
  sizes = {k: sum(n for n, _ in rows) for k, rows in found.items()}
  ratios = [sum(n * r for n, r in found[k]) / sizes[k] for k in found]
  densities = allocation.owl_densities(
    ratios, list(sizes.values()), sparsity, _SPREAD
  )
  by_layer = dict(zip(found, densities, strict=True))
  return plan.fill(
    sparsity, {i: by_layer[layer_of(name)] for i, name in names.items()}
  )
