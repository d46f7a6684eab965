"""Orbax: checkpoints that know their pruner, and masks checked on restore.

Orbax restores what the template asks for: `None` in the template where a mask
was saved gives `None`, without a word. Here the template is made by the pruner,
and what comes back is compared with sums taken when it was saved.
"""

import hashlib
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jaxpruner


def fingerprint(pruner: jaxpruner.BaseUpdater) -> str:
  """Return a hash of the pruner's configuration, or of how it prints."""
  try:
    config = json.dumps(jaxpruner.config_from_updater(pruner), sort_keys=True)
  except ValueError:  # holds a function of the user's
    config = type(pruner).__name__
  return hashlib.sha256(config.encode()).hexdigest()


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[jax.Array]:
  def total(x):
    if jnp.issubdtype(x.dtype, jnp.inexact):
      x = x.astype(jnp.float32).view(jnp.uint32)
    x = x.astype(jnp.uint32)
    # Integer sums wrap alike in any order: they do not depend on devices or
    # processes. The factor makes them depend on the place.
    for axis in range(x.ndim):
      place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
      x = (x ^ (x >> 15)) * (2 * place + jnp.uint32(2654435761))
    return jnp.sum(x, dtype=jnp.uint32)

  return [total(leaf) for leaf in leaves]


def manifest(tree: Any) -> dict[str, int]:
  """Return a sum per leaf that changes when a leaf does."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  sums = _sums([leaf for _, leaf in leaves])
  return {
    jax.tree_util.keystr(path): int(np.asarray(value.addressable_data(0)))
    for (path, _), value in zip(leaves, sums, strict=True)
  }


class SparseCheckpoints:
  """An Orbax checkpoint manager for the parameters and state of a pruner.

  Saves `(params, opt_state)` with the pruner's fingerprint and a manifest;
  restores them onto the layout of the templates, in one process or several,
  and refuses what was saved by another pruner or came back changed.

  Example:
    with SparseCheckpoints(folder, pruner) as checkpoints:
      checkpoints.save(step, params, opt_state)
      params, opt_state = checkpoints.restore(params, tx.init(params))
  """

  def __init__(self, folder: Any, pruner: jaxpruner.BaseUpdater, **options):
    self.pruner = pruner
    self.manager = ocp.CheckpointManager(
      os.path.abspath(folder), options=ocp.CheckpointManagerOptions(**options)
    )

  def __enter__(self) -> "SparseCheckpoints":
    return self

  def __exit__(self, *_) -> None:
    self.manager.close()

  def save(self, step: int, params: Any, opt_state: Any) -> bool:
    """Save a step; return whether the manager's options let it."""
    tree = {"params": params, "opt_state": opt_state}
    about = {"pruner": fingerprint(self.pruner), "sums": manifest(tree)}
    return self.manager.save(
      step,
      args=ocp.args.Composite(
        tree=ocp.args.StandardSave(tree), about=ocp.args.JsonSave(about)
      ),
    )

  def restore(
    self, params: Any, opt_state: Any, step: int | None = None
  ) -> tuple[Any, Any]:
    """Restore a step, the last by default, into the shapes given."""
    self.manager.wait_until_finished()
    step = self.manager.latest_step() if step is None else step
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self.manager.directory}")
    template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      {"params": params, "opt_state": opt_state},
    )
    found: Any = self.manager.restore(
      step,
      args=ocp.args.Composite(
        tree=ocp.args.StandardRestore(template), about=ocp.args.JsonRestore()
      ),
    )
    if found.about["pruner"] != fingerprint(self.pruner):
      raise ValueError(
        f"checkpoint {step} was saved by another pruner than {self.pruner}; "
        "restore it with the configuration it was trained with"
      )
    sums, saved = manifest(found.tree), found.about["sums"]
    for name in sorted(saved.keys() | sums.keys()):
      if sums.get(name) != saved.get(name):
        raise ValueError(
          f"checkpoint {step}: {name} "
          + ("was changed" if name in sums and name in saved else "is missing")
          + "; restore into tx.init(params), or an earlier step"
        )
    return found.tree["params"], found.tree["opt_state"]
