"""Perceptrons with Dropout on their hidden units.

Data and models: as `digits` and `fashion-mlp`; while training, each hidden unit
is dropped with probability `dropout` (Srivastava et al., 2014).
Command: `jaxpruner compare --task digits-dropout --question ensemble`, which
compares both values of `dropout`.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxpruner.compare import layers
from jaxpruner.compare.tasks.digits import Digits
from jaxpruner.compare.tasks.fashion import FashionMLP


def dropped(
  params: Any, x: jax.Array, key: jax.Array, rate: float
) -> jax.Array:
  """Apply a perceptron with Dropout on its hidden units.

  Args:
    params: layers `layer_0, layer_1, ...`.
    x: the inputs.
    key: the random key of the step.
    rate: the probability of dropping a unit; 0 is the plain perceptron.

  Returns:
    The outputs.

  Example:
    >>> params = layers.mlp_init(jax.random.key(0), (2, 3, 4))
    >>> x = jnp.ones((1, 2))
    >>> same = dropped(params, x, jax.random.key(1), 0.0)
    >>> bool((same == layers.mlp(params, x)).all())
    True
  """
  for i in range(len(params)):
    if i:
      x = jax.nn.relu(x)
      kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - rate, x.shape)
      x = jnp.where(kept, x / (1 - rate), 0)
    x = layers.dense(params[f"layer_{i}"], x)
  return x


def _check(rate: float) -> None:
  if not 0 <= rate < 1:
    raise ValueError(f"dropout={rate!r}: must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True)
class DigitsDropout(Digits):
  """scikit-learn's digits with a perceptron and Dropout."""

  dropout: float = 0.2
  name: ClassVar[str] = "digits-dropout"

  def __post_init__(self):
    super().__post_init__()
    _check(self.dropout)

  def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
    outputs = dropped(params, batch["x"], key, self.dropout)
    return layers.cross_entropy(outputs, batch["y"])


@dataclasses.dataclass(frozen=True)
class FashionDropout(FashionMLP):
  """Fashion-MNIST with LeNet-300-100 and Dropout."""

  dropout: float = 0.2
  name: ClassVar[str] = "fashion-dropout"

  def __post_init__(self):
    super().__post_init__()
    _check(self.dropout)

  def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
    outputs = dropped(params, batch["x"], key, self.dropout)
    return layers.cross_entropy(outputs, batch["y"])
