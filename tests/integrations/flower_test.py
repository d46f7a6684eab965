"""Flower: a strategy that prunes on the server and sends kept weights only."""

import functools

import framework
import jax
import numpy as np
import optax
import pytest
from framework import SPARSITY, assert_same, assert_sparse, make_pruner

framework.require("flower", "flwr", "orbax")

from flwr.common import (
  Code,
  FitRes,
  Status,
  ndarrays_to_parameters,
  parameters_to_ndarrays,
)
from flwr.server import Server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from jaxpruner.integrations import flower, orbax

SHAPE = (32, 64)


def make_params():
  rng = np.random.default_rng(0)
  return {
    "dense": {
      "kernel": rng.normal(size=SHAPE).astype(np.float32),
      "bias": np.zeros(64, np.float32),
    }
  }


class Client(ClientProxy):
  """A client in this process: it pulls weights towards a matrix of its own."""

  def __init__(self, cid, seed):
    super().__init__(cid)
    self.goal = np.random.default_rng(seed).normal(size=SHAPE)
    self.sizes = []

  def fit(self, ins, timeout, group_id):
    arrays = parameters_to_ndarrays(ins.parameters)
    (bias, kernel), masks = flower.receive(arrays)
    kernel = kernel + 0.1 * (self.goal - kernel).astype(np.float32)
    answer = ndarrays_to_parameters(flower.reply([bias + 1, kernel], masks))
    self.sizes.append(sum(map(len, answer.tensors)))
    return FitRes(Status(Code.OK, ""), answer, 10, {})

  def evaluate(self, ins, timeout, group_id): ...
  def get_properties(self, ins, timeout, group_id): ...
  def get_parameters(self, ins, timeout, group_id): ...
  def reconnect(self, ins, timeout, group_id): ...


def make(algorithm, **options):
  return flower.SparseFedAvg(  # added
    make_pruner(algorithm), make_params(), fraction_evaluate=0.0, **options
  )


def run(strategy, rounds):
  manager = SimpleClientManager()
  clients = [Client(str(i), i) for i in range(2)]
  for client in clients:
    manager.register(client)
  server = Server(client_manager=manager, strategy=strategy)
  history, _ = server.fit(rounds, timeout=60)
  return strategy, history, clients


@functools.cache
def trained(algorithm="magnitude"):
  return run(make(algorithm), framework.STEPS)


@pytest.mark.parametrize("algorithm", ["magnitude", "set"])
def test_the_server_ends_exactly_sparse(algorithm):
  strategy, _, _ = trained(algorithm)
  assert_sparse(strategy.params, strategy.opt_state)
  bias = strategy.params["dense"]["bias"]
  assert (np.asarray(bias) > framework.STEPS * 0.6).all()  # averaged as ever


def test_bytes_on_the_wire_fall_and_are_reported():
  _, history, clients = trained()
  metrics = {k: dict(v) for k, v in history.metrics_distributed_fit.items()}
  last = framework.STEPS
  assert metrics["sparsity"][last] == SPARSITY
  # 4 bytes per kept weight and 1 bit per weight, and NumPy's headers.
  kept, size = (1 - SPARSITY) * np.prod(SHAPE), np.prod(SHAPE)
  assert metrics["bytes_up"][last] <= 4 * kept + 4 * 64 + 2 * 256
  assert metrics["bytes_down"][last] <= 4 * kept + 4 * 64 + size / 8 + 6 * 256
  assert metrics["bytes_up"][last] == clients[0].sizes[-1]
  assert metrics["bytes_dense"][last] == 4 * size + 4 * 64


def test_a_message_is_read_back_as_it_was():
  strategy, _, _ = trained()
  weights, masks = flower.receive(strategy._message())
  assert_same(
    weights, [np.asarray(x) for x in jax.tree.leaves(strategy.params)]
  )
  kernel = jax.tree.leaves(strategy.opt_state.masks)[0]
  np.testing.assert_array_equal(masks[1], np.asarray(kernel).astype(bool))


@pytest.mark.parametrize("algorithm", [*framework.KINDS, "set"])
def test_a_server_that_stops_and_resumes_ends_as_one_that_ran(
  algorithm, tmp_path
):
  for rounds in (framework.STEPS - 20, 20):
    with orbax.SparseCheckpoints(
      tmp_path, make_pruner(algorithm), max_to_keep=2
    ) as checkpoints:
      strategy = make(algorithm, checkpoints=checkpoints)
      run(strategy, rounds)
      assert checkpoints.manager.latest_step() == strategy.opt_state.count
  whole, _, _ = trained(algorithm)
  assert_same(strategy.params, whole.params)
  assert_same(strategy.opt_state, whole.opt_state)


def test_packed_masks_travel_as_plain_ones():
  packed = flower.SparseFedAvg(
    make_pruner("set", use_packed_masks=True), make_params()
  )
  plain = flower.SparseFedAvg(make_pruner("set"), make_params())
  assert_same(packed._message(), plain._message())


@pytest.mark.parametrize("algorithm", ["rigl", "magnitude_ste"])
def test_what_needs_removed_weights_gets_them_from_the_clients(algorithm):
  strategy, history, _ = trained(algorithm)
  assert_sparse(strategy.params, strategy.opt_state, grows=algorithm == "rigl")
  metrics = {k: dict(v) for k, v in history.metrics_distributed_fit.items()}
  last = framework.STEPS
  assert metrics["bytes_up"][last] >= metrics["bytes_dense"][last]
  # The clients start from the sparse model, and see it as such.
  weights, masks = flower.receive(strategy._message())
  assert_same(
    weights, [np.asarray(x) for x in jax.tree.leaves(strategy.params)]
  )
  assert masks[1].all()


def test_straight_through_on_the_server_equals_a_plain_loop():
  strategy, _, clients = trained("magnitude_ste")

  def grad(params):
    """The averaged change of the clients, from these params."""
    pull = lambda client: 0.1 * (client.goal - params["dense"]["kernel"])
    moved = [pull(client).astype(np.float32) for client in clients]
    bias = -np.ones_like(params["dense"]["bias"])
    return {"dense": {"kernel": -sum(moved) / len(moved), "bias": bias}}

  framework.assert_straight_through(
    strategy.pruner,
    optax.sgd(1.0),
    make_params(),
    grad,
    (strategy.params, strategy.opt_state),
  )


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("flower")
