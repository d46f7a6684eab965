"""Prune one weight, given what is known of its inputs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner.post_training import _pattern, alps, obc, sparsegpt
from jaxpruner.post_training.calibration import Statistics

# Method -> the statistics it lives on.
METHODS = {
  "magnitude": "none",
  "wanda": "square",
  "sparsegpt": "gram",
  "obc": "gram",
  "alps": "gram",
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """How each layer is pruned; see `prune`."""

  method: str = "sparsegpt"
  damping: float = 0.01
  block_size: int = 128
  refine: int = 0

  def __post_init__(self):
    if self.method not in METHODS:
      raise ValueError(
        f"method={self.method!r} is unknown; "
        f"{_leaves.nearest(self.method, METHODS)}"
      )
    if not 0 <= self.damping < np.inf:
      raise ValueError(f"damping={self.damping!r} must be at least 0")
    if self.block_size < 1 or self.refine < 0:
      raise ValueError(
        f"block_size={self.block_size!r} must be at least 1, "
        f"refine={self.refine!r} at least 0"
      )

  @property
  def needs(self) -> str:
    return "gram" if self.refine else METHODS[self.method]


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
  if settings.method in ("magnitude", "wanda"):
    scores = jnp.abs(w)
    if settings.method == "wanda":
      assert seen is not None
      # Wanda ranks the inputs of each output among themselves.
      scores = scores * seen.norm[:, :, None]
    mask = _mask(pattern, scores, sparsity, settings.method == "wanda")
    new = jnp.where(mask, w, 0)
  else:
    assert seen is not None
    damping = settings.damping
    solve: Callable[..., Any] = {
      "sparsegpt": functools.partial(
        sparsegpt.prune, damping=damping, block_size=settings.block_size
      ),
      "obc": lambda *args: obc.prune(*args, damping),
      "alps": lambda *args: alps.prune(*args, damping),
    }[settings.method]
    pairs = [
      solve(w[g], seen.gram[g], sparsity, pattern) for g in range(len(w))
    ]
    new, mask = (jnp.stack(x) for x in zip(*pairs, strict=True))
  if settings.refine:
    assert seen is not None
    fit = functools.partial(
      alps.refine, damping=settings.damping, steps=settings.refine
    )
    new = jnp.stack(
      [fit(new[g], mask[g], w[g], seen.gram[g]) for g in range(len(w))]
    )
  return new, mask


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _mask(pattern, scores, sparsity, per_output):
  return pattern.mask(scores, sparsity, per_output)


@jax.jit
def error(change, w, gram):
  """Return ‖x change‖² / ‖x w‖² over the inputs that gave the moments."""
  size = lambda x: jnp.einsum("gio,gij,gjo->", x, gram, x)
  return size(change) / jnp.maximum(size(w), 1e-30)
