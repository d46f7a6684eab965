"""Orbax: checkpoints that know their pruner, and masks checked on restore.

Orbax restores what the template asks for: `None` in the template where a mask
was saved gives `None`, without a word. Here what comes back is compared with
sums taken when it was saved.
"""

import contextlib
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import jaxpruner


def fingerprint(pruner: jaxpruner.BaseUpdater) -> str:
  """Return the configuration as text; the class's name, if it has none."""
  try:
    return json.dumps(jaxpruner.config_from_updater(pruner), sort_keys=True)
  except ValueError:  # holds a function of the user's
    return type(pruner).__name__


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
  if jnp.issubdtype(x.dtype, jnp.inexact):
    x = x.astype(jnp.float32).view(jnp.uint32)
  x = x.astype(jnp.uint32)
  # Integer sums wrap alike in any order: they do not depend on devices or
  # processes. The odd factor makes them depend on the place.
  place = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
  mixed = x ^ (x >> 15) ^ jnp.uint32(0x9E3779B9)
  return jnp.sum(mixed * (2 * place + 1), dtype=jnp.uint32)


def manifest(tree: Any) -> dict[str, int]:
  """Return a sum per leaf that changes when a leaf does."""
  return {
    jax.tree_util.keystr(path): int(_sum(leaf))
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


class SparseCheckpoints(contextlib.AbstractContextManager):
  """An Orbax checkpoint manager for the parameters and state of a pruner.

  Saves `(params, opt_state)` with the pruner's fingerprint and a manifest;
  restores them onto the layout of the templates, in one process or several,
  and refuses what was saved by another pruner or came back changed.

  Example:
    with SparseCheckpoints(folder, pruner, max_to_keep=3) as checkpoints:
      checkpoints.save(step, params, opt_state)
      params, opt_state = checkpoints.restore(params, tx.init(params))
  """

  def __init__(self, folder: Any, pruner: jaxpruner.BaseUpdater, **options):
    self.pruner = pruner
    self.manager = ocp.CheckpointManager(
      os.path.abspath(folder), options=ocp.CheckpointManagerOptions(**options)
    )

  def __exit__(self, *_) -> None:
    self.manager.close()

  def save(self, step: int, params: Any, opt_state: Any) -> bool:
    """Save a step; return whether the manager's options let it."""
    tree = {"params": params, "opt_state": opt_state}
    about = {"pruner": fingerprint(self.pruner), "sums": manifest(tree)}
    args = ocp.args.StandardSave(tree)
    return self.manager.save(step, args=args, custom_metadata=about)

  def restore(
    self, params: Any, opt_state: Any, step: int | None = None
  ) -> tuple[Any, Any]:
    """Return `(params, opt_state)` of a step, the last by default."""
    self.manager.wait_until_finished()
    step = self.manager.latest_step() if step is None else step
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self.manager.directory}")
    template = {"params": params, "opt_state": opt_state}
    about = self.manager.metadata(step).custom_metadata or {}
    if about.get("pruner") != fingerprint(self.pruner):
      raise ValueError(
        f"checkpoint {step} was saved by another pruner, {about.get('pruner')}"
        f", than {fingerprint(self.pruner)}; restore it with its own"
      )
    tree = self.manager.restore(step, args=ocp.args.StandardRestore(template))
    changed = dict(manifest(tree).items() ^ about["sums"].items())
    if changed:
      raise ValueError(
        f"checkpoint {step}: {min(changed)} is missing or was changed; "
        "restore into tx.init(params), or an earlier step"
      )
    return tree["params"], tree["opt_state"]
