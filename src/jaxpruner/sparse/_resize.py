"""Run a program with some indices of its dims taken out."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import program as _program
from jaxpruner.program import Node, Program, Var
from jaxpruner.sparse import _branches
from jaxpruner.sparse._dims import (
  Axis,
  Dim,
  Dims,
  complete,
  is_depthwise,
  resolve,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
  """A program at its new sizes.

  Attributes:
    program: the operations, at their old sizes.
    dims: the dims of its arrays.
    keep: the indices that stay, for the dims that lose some.
    baked: constants to add to an operation's result, at its old size.
  """

  program: Program
  dims: Dims
  keep: Mapping[Dim, np.ndarray]
  baked: Mapping[Node, np.ndarray]

  def size(self, axis: Axis) -> int:
    """Return the new length of an axis."""
    return math.prod(
      len(self.keep[d]) if d in self.keep else d.size for d in resolve(axis)
    )

  def shape(self, var: Var) -> tuple[int, ...]:
    """Return the new shape of a variable."""
    return tuple(self.size(axis) for axis in self.dims.of(var))

  def take(self, array: Any, axes: Sequence[Axis]) -> Any:
    """Drop the removed indices of an array with these axes."""
    flat = resolve([d for axis in axes for d in axis])
    if not any(d in self.keep for d in flat):
      return array
    array = np.asarray(array).reshape([d.size for d in flat])
    for i, dim in enumerate(flat):
      if dim in self.keep:
        array = np.take(array, self.keep[dim], i)
    return array.reshape([self.size(axis) for axis in axes])

  def _changed(self, node: Node) -> dict[str, Any]:
    """Return the parameters of an operation that depend on sizes."""
    rule = _SIZES.get(node.name)
    return {} if rule is None else rule(self, node)

  def _constant(self, var: Var) -> Any:
    return self.take(var.value, self.dims.of(var))  # the array itself if whole

  def _delta(self, node: Node) -> np.ndarray:
    delta = self.baked[node]
    axes = zip(self.dims.of(node.outputs[0]), delta.shape, strict=True)
    return self.take(delta, [axis if size > 1 else [] for axis, size in axes])

  def run(self, arguments: Sequence[Any]) -> Any:
    """Apply the program to flat arguments of the new sizes."""

    def visit(node: Node, values: list[Any]) -> list[Any]:
      outs = _program.bind(node, values, **self._changed(node))
      if node in self.baked:
        outs[0] = outs[0] + self._delta(node).astype(outs[0].dtype)
      return outs

    outs = _program.run(self.program, arguments, visit, self._constant)
    return jax.tree.unflatten(
      self.program.out_tree, [jnp.asarray(out) for out in outs]
    )

  def at(self, other: Program, parameters: int) -> "Resized":
    """Carry the choice over to the same function at other input shapes.

    Raises:
      ValueError: if the function is another program there.
    """
    if [n.name for n in other.nodes] != [n.name for n in self.program.nodes]:
      raise ValueError("the function runs other operations at these shapes")
    dims = Dims(other, parameters)
    keep: dict[Dim, np.ndarray] = {}
    pairs = zip(self.program.inputs, other.inputs, strict=True)
    for old, new in list(pairs)[:parameters]:
      flat = zip(self.dims.flat(old), dims.flat(new), strict=True)
      for before, after in flat:
        kept = self.keep.get(before)
        if before.size != after.size or (kept is not None and after.blocked):
          raise ValueError(f"at these shapes {after.blocked or 'axes differ'}")
        if kept is not None:
          keep[after] = kept
    masks = {d: np.isin(np.arange(d.size), k) for d, k in keep.items()}
    for dim, mask in complete(dims.segments, masks).items():
      keep.setdefault(dim, np.flatnonzero(mask))
    matching = dict(zip(self.program.nodes, other.nodes, strict=True))
    baked = {matching[node]: delta for node, delta in self.baked.items()}
    for node, delta in baked.items():
      shapes = zip(delta.shape, node.outputs[0].shape, strict=True)
      if any(size not in (1, length) for size, length in shapes):
        raise ValueError(f"the constant added to {node} has another shape")
    return Resized(other, dims, keep, baked)


def _shape(name: str) -> Callable[[Resized, Node], dict[str, Any]]:
  """Make a rule: a parameter is the shape of the result."""
  return lambda resized, node: {name: resized.shape(node.outputs[0])}


def _gather(resized: Resized, node: Node) -> dict[str, Any]:
  source = node.inputs[0]
  sizes = zip(
    resized.shape(source), node.params["slice_sizes"], source.shape, strict=True
  )
  return {
    "slice_sizes": tuple(
      new if old == size else old for new, old, size in sizes
    )
  }


def _slice(resized: Resized, node: Node) -> dict[str, Any]:
  starts = list(node.params["start_indices"])
  limits = list(node.params["limit_indices"])
  old, new = node.outputs[0].shape, resized.shape(node.outputs[0])
  for i in range(len(old)):
    if new[i] != old[i]:
      starts[i] = starts[i] // old[i] * new[i]
      limits[i] = starts[i] + new[i]
  return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}


def _split(resized: Resized, node: Node) -> dict[str, Any]:
  axis = node.params["axis"]
  return {"sizes": tuple(resized.shape(v)[axis] for v in node.outputs)}


def _conv(resized: Resized, node: Node) -> dict[str, Any]:
  if not is_depthwise(node):
    return {}
  channel = node.params["dimension_numbers"].lhs_spec[1]
  return {"feature_group_count": resized.shape(node.inputs[0])[channel]}


# Primitive -> its parameters that depend on the sizes of arrays.
_SIZES: dict[str, Callable[[Resized, Node], dict[str, Any]]] = {
  "broadcast_in_dim": _shape("shape"),
  "conv_general_dilated": _conv,
  "dynamic_slice": _shape("slice_sizes"),
  "gather": _gather,
  "iota": _shape("shape"),
  "reshape": _shape("new_sizes"),
  "slice": _slice,
  "split": _split,
}


def function(
  fn: Callable[..., Any],
  resized: Resized,
  shapes: Any,
  gone: Sequence[tuple[int, int]] = (),
) -> Callable[..., Any]:
  """Return `fn` at the new sizes; other input shapes are traced on demand.

  Args:
    fn: the original `fn(params, *inputs)`.
    resized: its program at the example's shapes, and the choice.
    shapes: shapes and dtypes of the original parameters.
    gone: the residual blocks that it lost, see `_branches.without`.
  """
  treedef = jax.tree.structure(shapes)
  count = treedef.num_leaves
  cache: dict[Any, Resized] = {}

  def key(flat: Sequence[Any], tree: Any) -> Any:
    return tuple((np.shape(x), str(jnp.result_type(x))) for x in flat), tree

  def small_fn(params: Any, *inputs: Any) -> Any:
    flat, tree = jax.tree.flatten(inputs)
    kind = key(flat, tree)
    if kind not in cache:
      program = _program.trace(fn, shapes, *inputs)
      try:
        program, _ = _branches.without(program, gone)
        cache[kind] = resized.at(program, count)
      except ValueError as e:
        raise ValueError(
          f"inputs {kind[0]} differ too much from the example: {e}; call "
          "shrink again with such an example"
        ) from e
    leaves = treedef.flatten_up_to(params)
    return cache[kind].run([*leaves, *flat])

  return small_fn
