"""Prune one weight, given the statistics of its inputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training import _pattern
from jaxpruner.post_training.calibration import Statistics
from jaxpruner.post_training.solvers import alps
from jaxpruner.post_training.solvers.table import NEEDS, SOLVERS, Solver


@dataclasses.dataclass(frozen=True)
class Settings:
  """How each layer is pruned; see `prune`."""

  method: str | Solver | Callable[..., Any] = "sparsegpt"
  damping: float = 0.01
  block_size: int = 128
  refine: int = 0

  def __post_init__(self):
    if not 0 <= self.damping < np.inf:
      raise ValueError(f"damping={self.damping!r} must be at least 0")
    if self.block_size < 1 or self.refine < 0:
      raise ValueError(
        f"block_size={self.block_size!r} must be at least 1, "
        f"refine={self.refine!r} at least 0"
      )
    _ = self.solver  # an unknown name is told at once

  @property
  def solver(self) -> Solver:
    """The solver: `method` itself, or the registered one of this name."""
    if isinstance(self.method, Solver):
      return self.method
    if callable(self.method):
      return Solver(self.method)
    return SOLVERS.find(self.method)

  @property
  def needs(self) -> str:
    """The statistics that the solver and the refinement need."""
    return NEEDS[-1] if self.refine else self.solver.needs

  def as_dict(self) -> dict[str, Any]:
    """Return the settings as JSON can hold them."""
    name = self.method if isinstance(self.method, str) else str(self.solver)
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return fields | {"method": name}


DEFAULT = Settings()


def prune(
  w: Any,
  seen: Statistics | None,
  sparsity: float,
  pattern: _pattern.Pattern = _pattern.FREE,
  settings: Settings = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
  """Prune one weight, laid out as (groups, inputs, outputs).

  Returns:
    `(w, mask)`, float32 and uint8.
  """
  w = jnp.asarray(w, jnp.float32)
  solver = settings.solver
  options = {name: getattr(settings, name) for name in solver.options}
  new, mask = solver.solve(w, seen, sparsity, pattern, **options)
  if np.shape(new) != w.shape or np.shape(mask) != w.shape:
    raise ValueError(
      f"method={str(solver)!r} returned shapes {np.shape(new)} and "
      f"{np.shape(mask)} for a weight of {w.shape}; return (w, mask) of its "
      "shape"
    )
  mask = jnp.asarray(mask).astype(jnp.uint8)
  new = jnp.where(mask, jnp.asarray(new, jnp.float32), 0)
  if settings.refine:
    assert seen is not None
    new = jnp.stack(
      [
        alps.refine(
          new[g],
          mask[g],
          w[g],
          seen.gram[g],
          settings.damping,
          settings.refine,
        )
        for g in range(len(w))
      ]
    )
  return new, mask


@jax.jit
def error(change, w, gram):
  """Return ‖x change‖² / ‖x w‖² over the inputs that gave the moments."""
  size = lambda x: jnp.einsum("gio,gij,gjo->", x, gram, x)
  return size(change) / jnp.maximum(size(w), 1e-30)
