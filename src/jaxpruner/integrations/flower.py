"""Flower: prune on the server, send kept weights only.

What travels is a list of arrays, as ever: down, the kept values of each leaf,
then its mask as bits and its shape; up, the kept values alone, which Flower
averages as they are. The strategy reports the bytes of both against dense.
"""

from typing import Any

import jax
import numpy as np
import optax
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.strategy import FedAvg

import jaxpruner

Arrays = list[np.ndarray]


def receive(arrays: Arrays) -> tuple[Arrays, list[np.ndarray | None]]:
  """Return the weights and masks the server sent (on the client)."""
  count = len(arrays) // 3
  weights, masks = [], []
  for values, bits, shape in zip(
    arrays[:count], arrays[count : 2 * count], arrays[2 * count :], strict=True
  ):
    if bits.size == 0:
      weights.append(values)
      masks.append(None)
      continue
    size = int(np.prod(shape))
    mask = np.unpackbits(bits, count=size).astype(bool)
    weight = np.zeros(size, values.dtype)
    weight[mask] = values
    weights.append(weight.reshape(shape))
    masks.append(mask.reshape(shape))
  return weights, masks


def reply(weights: Arrays, masks: list[np.ndarray | None]) -> Arrays:
  """Return what a client sends back: the kept values of each leaf."""
  return [
    np.asarray(w) if mask is None else np.asarray(w)[np.asarray(mask, bool)]
    for w, mask in zip(weights, masks, strict=True)
  ]


class SparseFedAvg(FedAvg):
  """Federated averaging with a pruner on the server.

  The averaged change of the clients is the gradient of a server optimizer
  (plain SGD at rate 1: FedAvg itself), which the pruner wraps. One round is
  one step of its schedule. `self.params` and `self.opt_state` are what a
  checkpoint of the server must hold.

  Args:
    pruner: an updater that needs no dense gradients.
    params: the initial parameters, any tree; clients see its leaves in order.
    tx: the server's optimizer.
    options: those of `flwr.server.strategy.FedAvg`.
  """

  def __init__(self, pruner, params: Any, tx=None, **options):
    if "gradients" in pruner.category.needs:
      raise ValueError(
        f"pruner={type(pruner).__name__} ranks pruned weights by gradient, "
        "which clients do not send; choose magnitude, random, set, …"
      )
    tx = optax.sgd(1.0) if tx is None else tx
    self.tx: Any = pruner.wrap_optax(tx)
    self.opt_state = self.tx.init(params)
    self.params = pruner.post_gradient_update(params, self.opt_state)
    self._step = jax.jit(self.tx.update)
    super().__init__(
      initial_parameters=ndarrays_to_parameters(self._message()), **options
    )

  def _masks(self) -> list[np.ndarray | None]:
    shapes = jax.tree.structure(self.params)
    masks = jaxpruner.find_state(self.opt_state).masks
    return [
      None if mask is None else np.asarray(mask)
      for mask in shapes.flatten_up_to(masks)
    ]

  def _message(self) -> Arrays:
    weights = [np.asarray(w) for w in jax.tree.leaves(self.params)]
    masks = self._masks()
    none = np.zeros(0, np.uint8)
    bits = [none if mask is None else np.packbits(mask) for mask in masks]
    shapes = [np.array(w.shape, np.int32) for w in weights]
    return [*reply(weights, masks), *bits, *shapes]

  def aggregate_fit(self, server_round, results, failures):
    average, metrics = super().aggregate_fit(server_round, results, failures)
    if average is None:
      return average, metrics
    old = self._message()
    count = len(old) // 3
    new, _ = receive([*parameters_to_ndarrays(average), *old[count:]])
    leaves, treedef = jax.tree.flatten(self.params)
    grads = treedef.unflatten(
      [np.asarray(w) - v for w, v in zip(leaves, new, strict=True)]
    )
    updates, self.opt_state = self._step(grads, self.opt_state, self.params)
    self.params = optax.apply_updates(self.params, updates)
    message = ndarrays_to_parameters(self._message())
    dense = sum(np.asarray(w).nbytes for w in leaves)
    metrics |= {
      "bytes_up": sum(map(len, average.tensors)),
      "bytes_down": sum(map(len, message.tensors)),
      "bytes_dense": dense,
      "sparsity": jaxpruner.summarize_sparsity(
        jaxpruner.find_state(self.opt_state).masks, only_total_sparsity=True
      )["_total_sparsity"],
    }
    return message, metrics
