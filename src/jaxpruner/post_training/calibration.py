"""Statistics of the activations that each weight of a function multiplies."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner import program as _program
from jaxpruner.post_training import _graph, _stream
from jaxpruner.sparsity_distributions import default_filter

ApplyFn: TypeAlias = Callable[[Any, Any], Any]
FilterFn: TypeAlias = Callable[[_leaves.Names, Any], bool]


@dataclasses.dataclass(frozen=True)
class Statistics:
  """Moments of the inputs of a weight on the calibration data, in float32.

  The first axis of each array holds groups: experts, or groups of a
  convolution; otherwise its length is 1.

  Attributes:
    count: number of input vectors.
    mean: E[x], (groups, inputs).
    square: E[x²], (groups, inputs).
    gram: E[x xᵀ], (groups, inputs, inputs); None if it was not collected.

  Example:
    >>> Statistics(2, jnp.array([[1.0]]), jnp.array([[9.0]])).norm.tolist()
    [[3.0]]
  """

  count: int
  mean: Any
  square: Any
  gram: Any = None

  @property
  def norm(self) -> Any:
    """The root mean square of each input; Wanda's ‖x‖ up to a factor."""
    return jnp.sqrt(self.square)


class Model:
  """A function traced with its parameters; batches are streamed through it.

  Args:
    apply_fn: `apply_fn(params, batch)`.
    params: its parameters, any tree; leaves that are not arrays are constants.
    batches: an iterable of batches of equal shapes, read once.
    filter_fn: `(names, param) -> bool`, the leaves to calibrate.
    mesh: spread batches over this mesh's `data_axis`.
    data_axis: the name of that axis.
  """

  def __init__(
    self,
    apply_fn: ApplyFn,
    params: Any,
    batches: Iterable[Any],
    filter_fn: FilterFn = default_filter,
    mesh: Any = None,
    data_axis: str = "data",
  ):
    named, self.treedef = _leaves.flatten_with_names(params)
    self._all = [leaf for _, leaf in named]
    arrays = [hasattr(x, "shape") and hasattr(x, "dtype") for x in self._all]
    self.places = [i for i, array in enumerate(arrays) if array]
    self.names = [named[i][0] for i in self.places]
    self.leaves = [self._all[i] for i in self.places]
    self._mesh, self._axis = mesh, data_axis
    rows = iter(batches)
    first = next(rows, None)
    if first is None:
      raise ValueError("batches is empty; give at least one batch")
    self.program = self._trace(apply_fn, first)
    self.graph = _graph.find(self.program, self.names)
    self.batches: Iterable[list[np.ndarray]] = map(
      flat_batch, itertools.chain([first], rows)
    )
    chosen = [
      i for i, leaf in enumerate(self.leaves) if filter_fn(self.names[i], leaf)
    ]
    self.skipped = self._reasons(chosen)
    self.parts = [
      part
      for part in self.graph.parts
      if part.leaf in chosen and part.leaf not in self.graph.other
    ]
    if not self.parts:
      raise ValueError(
        "no weight that filter_fn takes is multiplied by activations: "
        f"{self.skipped or 'filter_fn takes no leaf'}"
      )

  def _trace(self, apply_fn: ApplyFn, batch: Any) -> _program.Program:
    treedef = jax.tree.structure(batch)

    def run(leaves, inputs):
      return apply_fn(self.tree(leaves), jax.tree.unflatten(treedef, inputs))

    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _program.trace(
      run, list(map(like, self.leaves)), list(map(like, flat_batch(batch)))
    )

  def _reasons(self, chosen: list[int]) -> dict[str, str]:
    """Return the reason for each leaf of `filter_fn` that is not pruned."""
    found = {part.leaf for part in self.graph.parts}
    reasons: dict[str, str] = {}
    for i in chosen:
      if i in self.graph.other:
        names = ", ".join(sorted(self.graph.other[i]))
        if names == "scan":
          names = (
            f"a scan of more than {_program.UNROLL} steps: calibrate "
            "on shorter sequences"
          )
        reasons[self.name(i)] = f"also used by {names}"
      elif i not in found:
        reasons[self.name(i)] = "not used by a product"
    return reasons

  def name(self, leaf: int) -> str:
    return _leaves.join(self.names[leaf])

  def tree(self, leaves: list[Any], rest: Any = ...) -> Any:
    """Return a tree like params with these arrays as leaves."""
    every = list(self._all) if rest is ... else [rest] * len(self._all)
    for i, leaf in zip(self.places, leaves, strict=True):
      every[i] = leaf
    return self.treedef.unflatten(every)

  def place(self, x: Any, spread: bool) -> Any:
    """Put an array on its devices."""
    if self._mesh is None:  # constants are copied once, not once per batch
      return x if spread else jnp.asarray(x)
    mesh = jax.sharding.Mesh(self._mesh.devices, self._mesh.axis_names)
    spec = jax.sharding.PartitionSpec()
    size = mesh.shape[self._axis]
    if spread and np.ndim(x) and np.shape(x)[0] % size == 0:
      spec = jax.sharding.PartitionSpec(self._axis)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

  def stream(
    self, gram: bool, norms: bool, skip: Callable[[_stream.Cut], bool]
  ) -> tuple[_stream.Stream, Generator[tuple[_stream.Cut, Any]]]:
    cuts = _stream.cuts(self.parts, self.graph.norms if norms else ())
    stream = _stream.Stream(
      self.graph, list(self.leaves), cuts, gram, self.place
    )
    return stream, stream.run(self.batches, skip)


def flat_batch(batch: Any) -> list[np.ndarray]:
  """Return a batch's arrays in the dtypes JAX gives them."""
  arrays = map(np.asarray, jax.tree.leaves(batch))
  return [
    x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) for x in arrays
  ]


def statistics(part: _graph.Part, sums: dict[Any, Any]) -> Statistics:
  """Return the means over all the places where a weight is used."""
  rows = [sums[site] for site in part.sites]
  count = sum(n for n, _ in rows)
  mean = lambda *x: _local(functools.reduce(jnp.add, x) / count)
  total = jax.tree.map(mean, *(moments for _, moments in rows))
  return Statistics(count, total.total, total.square, total.gram)


def _local(x: jax.Array) -> jax.Array:
  """Copy statistics from a mesh to the device that prunes the layers."""
  return x if len(x.devices()) == 1 else jnp.asarray(np.asarray(x))


def calibrate(
  apply_fn: ApplyFn,
  params: Any,
  batches: Iterable[Any],
  *,
  gram: bool = True,
  filter_fn: FilterFn = default_filter,
  mesh: Any = None,
  data_axis: str = "data",
) -> dict[str, list[Statistics]]:
  """Collect, for each weight, statistics of the inputs it is multiplied by.

  The function is traced, so that a weight is identified by its path in the
  tree, in any framework. The function runs in parts, and activations between
  the parts are stored in temporary files; memory holds one batch and the
  statistics.

  Args:
    apply_fn: `apply_fn(params, batch)`.
    params: its parameters.
    batches: an iterable of batches of equal shapes, read once.
    gram: also collect E[x xᵀ], inputs² numbers per weight.
    filter_fn: `(names, param) -> bool`, the leaves to calibrate.
    mesh: spread batches over this mesh's `data_axis`.
    data_axis: the name of that axis.

  Returns:
    Path -> one `Statistics` per use: one, or one per layer of a stack.

  Example:
    >>> import numpy as np
    >>> seen = calibrate(lambda p, x: x @ p["w"], {"w": np.ones((2, 3))},
    ...                  [np.array([[1.0, 2.0], [3.0, 2.0]])])
    >>> seen["w"][0].mean.tolist(), seen["w"][0].gram.tolist()
    ([[2.0, 2.0]], [[[5.0, 4.0], [4.0, 4.0]]])
  """
  model = Model(apply_fn, params, batches, filter_fn, mesh, data_axis)
  result: dict[str, list[Statistics]] = {}
  _, cuts = model.stream(gram, False, lambda _: False)
  for cut, sums in cuts:
    for part in cut.parts:
      rows = result.setdefault(model.name(part.leaf), [])
      rows.append(statistics(part, sums))
  return result
