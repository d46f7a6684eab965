"""Federated averaging on Fashion-MNIST, pruned on the server.

Data: Fashion-MNIST's 60,000 images dealt to 100 clients of 600, each with its
own mixture of classes (Dirichlet, 0.3); 10,000 held out.
Model: the network of `fashion`. Each round 10 clients take 10 SGD steps from
the server's weights; the server applies Adam to their mean change, and prunes:
ERK, an update every 10 rounds until 75 %, gradual methods from 25 %.
Command: `jaxpruner compare --task fed-fashion --sparsity 0.8`.
Time and number: about 7 minutes a cell of 3 seeds on a busy core; dense 87.7 %,
magnitude at 80 % 88.3 %.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner.compare.tasks import fashion

CLIENTS, EXAMPLES, CONCENTRATION = 100, 600, 0.3


@dataclasses.dataclass(frozen=True)
class FedFashion(fashion.Fashion):
  """Fashion-MNIST by federated averaging over 100 uneven clients."""

  steps: int = 200
  batch_size: int = 20
  learning_rate: float = 3e-3
  clients: int = 10
  local_steps: int = 10
  local_rate: float = 0.05
  name: ClassVar[str] = "fed-fashion"
  pruning: ClassVar[dict[str, Any]] = {"update_freq": 10}

  def load(self, folder: str | None = None) -> dict[str, np.ndarray]:
    if self.share != 1:
      raise ValueError(
        f"share={self.share}: the clients of {self.name!r} share out all data; "
        "leave it at 1"
      )
    data = super().load(folder)
    return data | {"clients": dirichlet_split(data["train_y"])}

  def inputs(self, batch: Any) -> jax.Array:
    images = batch["x"].reshape(-1, *batch["x"].shape[3:])
    return self.prepare(images)

  def optimizer(self) -> optax.GradientTransformation:
    return optax.adam(self.learning_rate)

  def batches(self, data: Any, key: jax.Array, step: jax.Array) -> Any:
    """Return each chosen client's local batches."""
    who_key, row_key = jax.random.split(jax.random.fold_in(key, step))
    count = data["clients"].shape[0]
    who = jax.random.choice(who_key, count, (self.clients,), replace=False)
    shape = (self.clients, self.local_steps, self.batch_size)
    column = jax.random.randint(row_key, shape, 0, data["clients"].shape[1])
    rows = data["clients"][who[:, None, None], column]
    return {"x": data["train_x"][rows], "y": data["train_y"][rows]}

  def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
    prepared = {"x": self.prepare(batch["x"]), "y": batch["y"]}
    return super().loss(params, prepared, key)

  def gradient(self, loss_fn: Any, params: Any, batch: Any, key: jax.Array):
    return federated_gradient(loss_fn, params, batch, key, self.local_rate)


def federated_gradient(
  loss_fn: Any, params: Any, batch: Any, key: jax.Array, rate: float
) -> tuple[jax.Array, Any]:
  """Return (mean first loss, minus the mean change of the clients' weights).

  The server's optimizer uses the second value as a gradient (Reddi et al.,
  "Adaptive Federated Optimization", 2021).

  Args:
    loss_fn: `(params, batch, key) -> loss`.
    params: the server's weights, where every client starts.
    batch: tree with leading axes (clients, local steps).
    key: passed to `loss_fn`.
    rate: the learning rate of the clients' SGD.

  Returns:
    The loss and the pseudo-gradient.
  """

  def client(batches: Any):
    def local(weights, batch):
      loss, grads = jax.value_and_grad(loss_fn)(weights, batch, key)
      step = lambda w, g: w - rate * g
      return jax.tree.map(step, weights, grads), loss

    after, losses = jax.lax.scan(local, params, batches)
    return jax.tree.map(jnp.subtract, params, after), losses[0]

  changes, losses = jax.lax.map(client, batch)
  return losses.mean(), jax.tree.map(lambda x: x.mean(0), changes)


def dirichlet_split(labels: np.ndarray) -> np.ndarray:
  """Return the examples of each client; clients differ in their classes."""
  rng = np.random.default_rng(0)
  by_class = [np.flatnonzero(labels == c) for c in range(10)]
  rows = []
  for _ in range(CLIENTS):
    mixture = rng.dirichlet([CONCENTRATION] * 10)
    counts = rng.multinomial(EXAMPLES, mixture)
    rows.append(
      np.concatenate([rng.choice(by_class[c], n) for c, n in enumerate(counts)])
    )
  return np.stack(rows).astype(np.int32)
