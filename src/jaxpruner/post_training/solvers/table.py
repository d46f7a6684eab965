"""Solvers by name: the open table behind `method`."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jaxpruner._tools import registry

F = TypeVar("F", bound=Callable[..., Any])
_HERE = "jaxpruner.post_training.solvers"
# Each needs all that those before it need.
NEEDS = ("none", "square", "gram")


@dataclasses.dataclass(frozen=True)
class Solver:
  """A function that prunes one weight, and the statistics it needs.

  Attributes:
    solve: `(w, statistics, sparsity, pattern) -> (w, mask)`, float32 and uint8,
      all of shape (groups, inputs, outputs). If it has parameters `damping` or
      `block_size`, it gets the values given to `prune`.
    needs: "none" (statistics may be None), "square" (means and squares of the
      inputs), or "gram" (also their second moments).

  Example:
    >>> import jax.numpy as jnp
    >>> def smallest_inputs_go(w, statistics, sparsity, pattern):
    ...   size = jnp.broadcast_to(statistics.norm[:, :, None], w.shape)
    ...   mask = pattern.mask(size, sparsity)
    ...   return jnp.where(mask, w, 0), mask
    >>> Solver(smallest_inputs_go, needs="square").options
    ()
  """

  solve: Callable[..., Any]
  needs: str = "gram"

  def __post_init__(self):
    if not callable(self.solve):
      raise ValueError(
        f"solve={self.solve!r} must be a function (w, statistics, sparsity, "
        "pattern) -> (w, mask)"
      )
    if self.needs not in NEEDS:
      raise ValueError(f"needs={self.needs!r} must be one of {NEEDS}")

  @property
  def options(self) -> tuple[str, ...]:
    """The arguments of `prune` that `solve` takes in addition."""
    known = inspect.signature(self.solve).parameters
    return tuple(o for o in ("damping", "block_size") if o in known)

  def __str__(self) -> str:
    return f"{self.solve.__module__}:{self.solve.__qualname__}"


SOLVERS: registry.Registry[Solver] = registry.Registry(
  "method",
  "jaxpruner.post_training.register_solver",
  {"dsnot": "jaxpruner.post_training.contrib.dsnot:SOLVER"}
  | {
    name: f"{_HERE}.{name}:SOLVER"
    for name in (
      "magnitude",
      "wanda",
      "ria",
      "sparsegpt",
      "sparsegpt_int8",
      "obc",
      "alps",
      "sparseswaps",
    )
  },
  owner=lambda solver: solver.solve,
)


def register_solver(name: str, needs: str = "gram") -> Callable[[F], F]:
  """Register a post-training solver under a name; use it as a decorator.

  `prune(…, method="name")` then uses the solver.

  Args:
    name: the name; a name that is already taken is refused.
    needs: the statistics it needs: "none", "square" or "gram", see `Solver`.

  Returns:
    A function that registers `(w, statistics, sparsity, pattern) -> (w, mask)`
    and returns it.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import post_training
    >>> @post_training.register_solver("squares", needs="none")
    ... def squares(w, statistics, sparsity, pattern):
    ...   mask = pattern.mask(w**2, sparsity)
    ...   return jnp.where(mask, w, 0), mask
    >>> post_training.prune(
    ...   lambda p, x: x @ p["w"], {"w": jnp.eye(4)}, [jnp.ones((2, 4))],
    ...   method="squares", sparsity=0.75)[1]["w"].sum().item()
    4
  """

  def register(solve: F) -> F:
    SOLVERS.register(name, Solver(solve, needs))
    return solve

  return register
