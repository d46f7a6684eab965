"""Batches from loaders of torch, tf.data and grain, as the docs write them."""

import importlib.util

import framework
import jax
import numpy as np
import optax
import pytest

from jaxpruner import compare
from jaxpruner.compare import streams

RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 8)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(np.int32)
LOADERS = ("torch", "tensorflow", "grain")

if not any(importlib.util.find_spec(name) for name in LOADERS):
  framework.require("loaders", *LOADERS)


def torch_loader(seeded):
  torch = pytest.importorskip("torch")
  dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
  chosen = lambda seed: torch.Generator().manual_seed(seed) if seeded else None
  return lambda seed: torch.utils.data.DataLoader(
    dataset,
    16,
    shuffle=True,
    drop_last=True,
    generator=chosen(seed),
  )


def tensorflow_loader(seeded):
  tf = pytest.importorskip("tensorflow")
  source = tf.data.Dataset.from_tensor_slices((X, Y))
  shuffled = lambda seed: source.shuffle(
    1000, seed=seed if seeded else None
  ).batch(16, drop_remainder=True)
  return shuffled


class Pairs:
  """A source for grain: rows of inputs and labels."""

  def __len__(self):
    return len(X)

  def __getitem__(self, row):
    return X[row], Y[row]


def grain_loader(seeded):
  grain = pytest.importorskip("grain")
  chosen = lambda seed: seed if seeded else int(RNG.integers(1 << 30))
  return lambda seed: (
    grain.MapDataset.source(Pairs()).shuffle(chosen(seed)).repeat().batch(16)
  )


MADE = {
  "torch": torch_loader,
  "tensorflow": tensorflow_loader,
  "grain": grain_loader,
}


def make_task(batches):
  init = lambda key: {
    "hidden": jax.random.normal(key, (8, 16)) / 3,
    "out": jax.random.normal(key, (16, 2)) / 5,
  }
  apply = lambda p, x: jax.nn.relu(x @ p["hidden"]) @ p["out"]
  labels = optax.softmax_cross_entropy_with_integer_labels
  return compare.task(
    init=init,
    apply=apply,
    loss=lambda p, batch, _: labels(apply(p, batch[0]), batch[1]).mean(),
    batches=batches,
    evaluate=lambda p: 100 * (apply(p, X).argmax(-1) == Y).mean(),
    steps=20,  # three epochs
  )


@pytest.mark.parametrize("name", LOADERS)
def test_a_seeded_loader_gives_every_row_the_same_batches(name, tmp_path):
  made = make_task(MADE[name](seeded=True))
  done = compare.run(
    made, algorithms="rigl", sparsity=0.5, seeds=2, out=tmp_path, quiet=True
  )
  assert [row.problem for row in done.rows] == ["", ""]


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_without_a_seed_is_caught_and_named(name):
  made = make_task(MADE[name](seeded=False))
  with pytest.raises(streams.StreamError, match="seed 0, step 0 is not determ"):
    streams.check(made)
