"""Run a program with some indices of its dims taken out."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.program import trace as _program
from jaxpruner.program.trace import Node, Program, Var
from jaxpruner.sparse._dims import Axis, Dim, Dims, is_depthwise, resolve


@dataclasses.dataclass(frozen=True, eq=False)
class Resized:
  """A program at its new sizes.

  Attributes:
    program: the operations, at their old sizes.
    dims: the dims of its arrays.
    keep: the indices that stay, for the dims that lose some.
    baked: what to add to an operation's result, at its old size.
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

  def _params(self, node: Node) -> dict[str, Any]:
    """Return an operation's parameters for the new sizes."""
    params = dict(node.params)
    if node.name in ("broadcast_in_dim", "iota"):
      params["shape"] = self.shape(node.outputs[0])
    elif node.name == "reshape":
      params["new_sizes"] = self.shape(node.outputs[0])
    elif node.name == "dynamic_slice":
      params["slice_sizes"] = self.shape(node.outputs[0])
    elif node.name == "gather":
      source = node.inputs[0]
      params["slice_sizes"] = tuple(
        new if old == size else old
        for new, old, size in zip(
          self.shape(source), params["slice_sizes"], source.shape, strict=True
        )
      )
    elif node.name == "slice":
      starts, limits = (
        list(params["start_indices"]),
        list(params["limit_indices"]),
      )
      old, new = node.outputs[0].shape, self.shape(node.outputs[0])
      for i in range(len(old)):
        if new[i] != old[i]:
          starts[i] = starts[i] // old[i] * new[i]
          limits[i] = starts[i] + new[i]
      params["start_indices"] = tuple(starts)
      params["limit_indices"] = tuple(limits)
    elif node.name == "split":
      axis = params["axis"]
      params["sizes"] = tuple(self.shape(v)[axis] for v in node.outputs)
    elif node.name == "conv_general_dilated" and is_depthwise(node):
      channel = params["dimension_numbers"].lhs_spec[1]
      params["feature_group_count"] = self.shape(node.inputs[0])[channel]
    return params

  def _constant(self, var: Var) -> Any:
    return self.take(var.value, self.dims.of(var))

  def _delta(self, node: Node) -> np.ndarray:
    delta = self.baked[node]
    axes = zip(self.dims.of(node.outputs[0]), delta.shape, strict=True)
    return self.take(delta, [axis if size > 1 else [] for axis, size in axes])

  def run(self, arguments: Sequence[Any]) -> Any:
    """Apply the program to flat arguments of the new sizes."""
    env = dict(zip(self.program.inputs, arguments, strict=True))

    def read(var: Var) -> Any:
      return env[var] if var.value is None else self._constant(var)

    for node in self.program.nodes:
      values = [read(v) for v in node.inputs]
      out = node.primitive.bind(*values, **self._params(node))
      outs = list(out) if node.primitive.multiple_results else [out]
      if node in self.baked:
        outs[0] = outs[0] + self._delta(node).astype(outs[0].dtype)
      env.update(zip(node.outputs, outs, strict=True))
    return jax.tree.unflatten(
      self.program.out_tree,
      [jnp.asarray(read(v)) for v in self.program.outputs],
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
    matching = dict(zip(self.program.nodes, other.nodes, strict=True))
    baked = {matching[node]: delta for node, delta in self.baked.items()}
    for node, delta in baked.items():
      shapes = zip(delta.shape, node.outputs[0].shape, strict=True)
      if any(size not in (1, length) for size, length in shapes):
        raise ValueError(f"the constant added to {node} has another shape")
    return Resized(other, dims, keep, baked)


def function(
  fn: Callable[..., Any], resized: Resized, shapes: Any
) -> Callable[..., Any]:
  """Return `fn` at the new sizes; other input shapes are traced on demand.

  Args:
    fn: the original `fn(params, *inputs)`.
    resized: its program at the example's shapes, and the choice.
    shapes: shapes and dtypes of the original parameters.
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
        cache[kind] = resized.at(program, count)
      except ValueError as e:
        raise ValueError(
          f"inputs {kind[0]} differ too much from the example: {e}; call "
          "shrink again with such an example"
        ) from e
    leaves = treedef.flatten_up_to(params)
    return cache[kind].run([*leaves, *flat])

  return small_fn
