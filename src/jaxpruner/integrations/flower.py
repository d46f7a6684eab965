"""Flower: prune on the server, send kept weights only.

Messages are lists of arrays, as always in Flower. The server sends the kept
values of each leaf, its mask as bits, and its shape. A client sends only the
kept values, which Flower averages.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flwr import common
from flwr.server.strategy import FedAvg

import jaxpruner


def receive(arrays: common.NDArrays) -> tuple[common.NDArrays, common.NDArrays]:
  """Decode a message of the server.

  Args:
    arrays: per leaf the kept values, the mask as bits, and the shape.

  Returns:
    `(weights, masks)`: dense arrays with zeros where removed, and boolean
    masks, True = kept; one of each per leaf.

  Example:
    >>> bits = np.packbits([0, 1, 1, 0])
    >>> weights, masks = receive([np.array([5.0, 7.0]), bits, np.array([2, 2])])
    >>> weights[0].tolist(), masks[0].tolist()
    ([[0.0, 5.0], [7.0, 0.0]], [[False, True], [True, False]])
  """
  weights, masks = [], []
  for values, bits, shape in zip(*[iter(arrays)] * 3, strict=True):
    mask = np.unpackbits(bits, count=int(np.prod(shape))).reshape(shape)
    masks.append(mask.astype(bool))
    weights.append(np.zeros(shape, values.dtype))
    weights[-1][masks[-1]] = values
  return weights, masks


def reply(weights: common.NDArrays, masks: common.NDArrays) -> common.NDArrays:
  """Encode the message of a client: the kept values of each leaf.

  Args:
    weights: the trained weights, one array per leaf.
    masks: the masks that `receive` returned.

  Returns:
    One array of kept values per leaf.

  Example:
    >>> reply([np.array([0.0, 5.0])], [np.array([False, True])])[0].tolist()
    [5.0]
  """
  return [np.asarray(w)[m] for w, m in zip(weights, masks, strict=True)]


class SparseFedAvg(FedAvg):
  """Federated averaging with a pruner on the server.

  The averaged change of the clients is the gradient of a server optimizer,
  which the pruner wraps; SGD with learning rate 1 is FedAvg. One round is one
  step of the pruner's schedule. The metrics of a round are its sparsity, the
  bytes sent in both directions, and the bytes of a dense model.

  Straight-through algorithms, RigL and others that read gradients need the
  change of removed weights too: with them clients get the sparse model as dense
  arrays, with masks of ones, and send dense arrays back. Messages are not
  smaller then, only the model is.

  Args:
    pruner: an updater; magnitude and SET send kept weights only.
    params: the initial parameters, any tree; clients get its leaves in order.
    tx: the server's optimizer; by default SGD with learning rate 1.
    checkpoints: an `integrations.orbax.SparseCheckpoints`; every round is saved
      there, and a new server continues after the last round.
    **options: options of `flwr.server.strategy.FedAvg`.

  Example:
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "static_sparse", "sparsity": 0.75})
    >>> strategy = SparseFedAvg(pruner, {"w": np.ones((4, 4), np.float32)})
    >>> message = common.parameters_to_ndarrays(strategy.initial_parameters)
    >>> message[0].tolist(), message[2].tolist()
    ([1.0, 1.0, 1.0, 1.0], [4, 4])
  """

  def __init__(self, pruner, params: Any, tx=None, checkpoints=None, **options):
    self.pruner, self.checkpoints = pruner, checkpoints
    # Removed weights whose change the pruner reads are sent too, as zeros.
    self.dense = pruner.straight_through or "gradients" in pruner.needs
    tx = pruner.wrap_optax(optax.sgd(1.0) if tx is None else tx)
    self.update = jax.jit(tx.update)
    params = jax.tree.map(jnp.asarray, params)
    self.opt_state = tx.init(params)
    self.params = pruner.post_gradient_update(params, self.opt_state)
    if checkpoints and checkpoints.manager.latest_step() is not None:
      self.params, self.opt_state = checkpoints.restore(params, self.opt_state)
    first = common.ndarrays_to_parameters(self._message())
    super().__init__(initial_parameters=first, **options)

  def _message(self) -> common.NDArrays:
    ones = jax.tree.map(jnp.ones_like, self.params)
    masks = ones
    if not self.dense:
      masks = self.pruner.post_gradient_update(ones, self.opt_state)
    leaf = lambda w, m: [w[m], np.packbits(m), np.array(w.shape, np.int32)]
    as_numpy = lambda w, m: leaf(np.asarray(w), np.asarray(m, bool))
    return jax.tree.leaves(jax.tree.map(as_numpy, self.params, masks))

  def aggregate_fit(self, server_round, results, failures):
    average, metrics = super().aggregate_fit(server_round, results, failures)
    if average is None:
      return average, metrics
    message = self._message()
    message[::3] = common.parameters_to_ndarrays(average)
    leaves, treedef = jax.tree.flatten(self.params)
    grads = treedef.unflatten(map(jnp.subtract, leaves, receive(message)[0]))
    updates, self.opt_state = self.update(grads, self.opt_state, self.params)
    self.params = optax.apply_updates(self.params, updates)
    if self.checkpoints:
      step = int(jaxpruner.find_state(self.opt_state).count)
      self.checkpoints.save(step, self.params, self.opt_state)
    message = common.ndarrays_to_parameters(self._message())
    now = jaxpruner.state_metrics(self.opt_state)
    metrics |= {
      "bytes_up": sum(map(len, average.tensors)),
      "bytes_down": sum(map(len, message.tensors)),
      "bytes_dense": sum(w.nbytes for w in leaves),
      "sparsity": float(now.get("sparsity", 0)),
    }
    return message, metrics
