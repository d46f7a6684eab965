# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Select masks by counting: everything that searches for thresholds.

The door is `select`: scores and counts in, a `Selection` out. Groups of a few
weights (N:M, constant fan-in) are ranked by `mask_calculator` instead. Scores
may be arrays or expressions (`defer`, `apply`), which are never stored. The
README beside this file tells the algorithm.
"""

from jaxpruner.engine.expression import ScoreExpr, Scores, apply, defer, value
from jaxpruner.engine.leaves import row_from
from jaxpruner.engine.search import count_true, totals
from jaxpruner.engine.selection import Selection, all_finite, select
from jaxpruner.engine.warm_start import new as new_hint

__all__ = [
  "ScoreExpr",
  "Scores",
  "Selection",
  "all_finite",
  "apply",
  "count_true",
  "defer",
  "new_hint",
  "row_from",
  "select",
  "totals",
  "value",
]
