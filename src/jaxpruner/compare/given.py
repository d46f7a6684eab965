"""What a training starts from: a checkpoint, or the networks of another row."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpruner
from jaxpruner.compare import outcomes, pretrained
from jaxpruner.compare.cells import AFTER, RETRAIN, Cell, ticket_of
from jaxpruner.compare.settings import ComparisonSettings
from jaxpruner.compare.tasks.base import Task
from jaxpruner.compare.training import Given
from jaxpruner.inspect import cost

PyTree = Any
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(eq=False)
class GivenMasks(jaxpruner.StaticRandomSparse):
  """Hold masks that another training found.

  Attributes:
    masks: uint8 of the parameters' shapes, None where dense.

  Example:
    >>> import optax
    >>> masks = {"w": jnp.array([[1, 0]], jnp.uint8)}
    >>> held = GivenMasks(masks=masks, sparsity_distribution_fn=(
    ...   lambda params: {"w": 0.5}))
    >>> held.wrap_optax(optax.sgd(1.0)).init({"w": jnp.ones((1, 2))}).masks
    {'w': Array([[1, 0]], dtype=uint8)}
  """

  masks: Any = None

  def get_initial_masks(self, params, target_sparsities):
    del params, target_sparsities
    # A copy: the carry is donated, and must not hold a buffer twice.
    return jax.tree.map(jnp.copy, self.masks)


def holding(updater: Any) -> GivenMasks:
  """Return an updater that holds given masks, configured as another one.

  Args:
    updater: a `StaticRandomSparse`.

  Returns:
    The updater; `dataclasses.replace(updater, masks=...)` gives it the masks.

  Example:
    >>> holding(jaxpruner.StaticRandomSparse(
    ...   sparsity_distribution_fn=lambda params: None)).masks is None
    True
  """
  fields = dataclasses.fields(jaxpruner.StaticRandomSparse)
  return GivenMasks(**{f.name: getattr(updater, f.name) for f in fields})


def given_for(
  cell: Cell,
  task: Task,
  settings: ComparisonSettings,
  trained: Arrays | None,
  keys: jax.Array,
) -> Given:
  """Return what a cell's training starts from.

  Args:
    cell: the cell.
    task: its task.
    settings: the comparison.
    trained: the arrays of all seeds of its source, if it has one.
    keys: the random key of each seed.

  Returns:
    The parts that are given; seeds are the leading axis.
  """
  given = Given()
  if settings.checkpoint:
    params, state = pretrained.read(settings.checkpoint, task)
    every = lambda tree: jax.tree.map(
      lambda x: jnp.broadcast_to(x, (len(keys), *x.shape)), tree
    )
    given = given._replace(params=every(params))
    if task.has_state and state is not None:
      given = given._replace(state=every(state))
  if cell.source is None or cell.name.startswith(AFTER):
    return given
  if trained is None:
    raise ValueError(f"{cell.source.id} has no trained weights: it failed")
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  if cell.name.startswith(RETRAIN):
    return _ticket(cell, task, given, shapes, trained, keys)
  params = outcomes.filled(shapes, trained, "param")
  return given._replace(teacher=(params, trained_state(task, trained)))


def trained_state(task: Task, trained: Arrays) -> PyTree:
  """Return the stored states of all seeds; empty if the task has none."""
  if not task.has_state:
    return ()
  initial = jax.jit(task.init_state)(jax.random.key(0))
  return outcomes.filled(initial, trained, "state")


def _ticket(
  cell: Cell,
  task: Task,
  given: Given,
  shapes: PyTree,
  trained: Arrays,
  keys: jax.Array,
) -> Given:
  """Return the masks of another row, and the weights to train again."""
  _, chosen = ticket_of(cell.algorithm)
  masks = outcomes.filled(shapes, trained, "mask", optional=True)
  if not jax.tree.leaves(masks):
    raise ValueError("the row it takes its masks from has none")
  if chosen["mask"] == "shuffled":
    masks = jax.tree_util.tree_map_with_path(shuffled, masks)
  if chosen["weights"] == "new":
    other = jax.vmap(lambda key: jax.random.fold_in(key, 1000))(keys)
    drawn = jax.jit(jax.vmap(task.init))(other)
    return given._replace(params=drawn, masks=masks)
  early = outcomes.filled(shapes, trained, "start", optional=True)
  if jax.tree.leaves(early):  # rewound to a later step than the first
    given = given._replace(params=early)
  return given._replace(masks=masks)


def shuffled(path: Any, masks: jax.Array) -> jax.Array:
  """Return the masks of a leaf, each permuted; every seed has its own order.

  Args:
    path: the path of the leaf, as JAX gives it.
    masks: seeds are the leading axis.

  Returns:
    Masks with as many ones.

  Example:
    >>> shuffled((), jnp.array([[1, 0, 0, 0]])).sum().item()
    1
  """
  place = zlib.crc32(cost.path_name(path).encode())
  found = np.asarray(masks)
  mixed = [
    np.random.default_rng((place, seed)).permutation(one.ravel())
    for seed, one in enumerate(found)
  ]
  return jnp.asarray(np.stack(mixed).reshape(found.shape))
