"""A narrower network of the same functions, from the coupled channels."""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

import jaxpruner
from jaxpruner.compare.tasks.base import Task

PyTree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Channels:
  """Keep a part of every group of coupled channels, at initialisation.

  The groups are those of `jaxpruner.prune_to`. Initial weights are drawn as for
  the whole network, and divided by the square root of what is left of their
  inputs, so that a narrow layer starts as large as a wide one.

  Attributes:
    task: a task whose network takes weights of any width, as functions of
      arrays do; Flax and Haiku compare widths with their own.

  Example:
    >>> from jaxpruner.compare import tasks
    >>> x = np.ones((2, 3), np.float32)
    >>> init = lambda key: {"a": jax.random.normal(key, (3, 8)),
    ...                     "b": jax.random.normal(key, (8, 2))}
    >>> loss = lambda p, batch, key: (batch[0] @ p["a"] @ p["b"]).sum()
    >>> task = tasks.task(
    ...   init=init, apply=lambda p, x: x @ p["a"] @ p["b"], loss=loss,
    ...   batches=lambda seed, step: (x,), evaluate=lambda p: 0.0)
    >>> narrow = Channels(task)(0.5)["init"](jax.random.key(0))
    >>> narrow["a"].shape, narrow["b"].shape
    ((3, 4), (4, 2))
  """

  task: Task

  def __call__(self, factor: float) -> Mapping[str, Any]:
    task = self.task
    init = cast(Any, task).functions.init
    whole = jax.jit(init)(jax.random.key(0))

    def network(made: PyTree, x: PyTree) -> PyTree:
      params, state = made if task.has_state else (made, ())
      return task.forward(params, state, x)

    shape = lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype)
    example = jax.tree.map(shape, task.example(task.load()))
    try:
      pruned = jaxpruner.prune_to(network, whole, example, width=factor)
    except ValueError as error:
      raise ValueError(_refusal(str(error))) from error
    if not pruned.small.same_code:
      raise ValueError(_refusal("its functions contain fixed sizes"))
    places = [_places(mask) for mask in jax.tree.leaves(pruned.masks)]
    scales = [share**-0.5 for share in jax.tree.leaves(pruned.fan_in)]

    def narrow(key: jax.Array) -> PyTree:
      leaves, treedef = jax.tree.flatten(init(key))
      kept = zip(leaves, places, scales, strict=True)
      return treedef.unflatten(
        [x[at] if s == 1 else (s * x[at]).astype(x.dtype) for x, at, s in kept]
      )

    return {"init": narrow}


def _places(mask: Any) -> Any:
  """Return the indices that a mask keeps; it is a product of its axes."""
  kept = np.asarray(mask)
  axes = range(kept.ndim)
  lines = [kept.any(tuple(j for j in axes if j != i)) for i in axes]
  return np.ix_(*map(np.flatnonzero, lines)) if lines else ()


def _refusal(reason: str) -> str:
  return (
    f"narrower='channels': the library finds no narrower network: {reason}. "
    "Pass narrower=lambda factor: {'init': ..., 'apply': ..., 'loss': ..., "
    "'evaluate': ...}"
  )
