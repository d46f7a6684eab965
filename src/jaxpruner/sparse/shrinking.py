"""Remove unused channels, neurons and heads from the arrays."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves
from jaxpruner import program as _program
from jaxpruner.inspect.summary import warn_if_contradicted
from jaxpruner.program.owners import Owners, per_weight
from jaxpruner.sparse import _branches, _resize, _stacks, artifacts
from jaxpruner.sparse._dims import Dims
from jaxpruner.sparse._removal import Removal


class Removed(NamedTuple):
  """A parameter that became smaller.

  Attributes:
    name: path of the parameter.
    before: its shape in the given model.
    after: its shape in the smaller model.

  Example:
    >>> Removed("up/kernel", (8, 16), (8, 12)).after
    (8, 12)
  """

  name: str
  before: tuple[int, ...]
  after: tuple[int, ...]


class Blocked(NamedTuple):
  """Slices of a parameter that are all zero but could not be removed.

  Attributes:
    name: path of the parameter.
    axis: the axis of the slices.
    slices: how many there are.
    reason: the operation that needs them.

  Example:
    >>> Blocked("up/kernel", 1, 4, "an output of the function").slices
    4
  """

  name: str
  axis: int
  slices: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Shrunk:
  """A smaller dense model, the result of `shrink`.

  Attributes:
    params: the smaller parameters, in the structure of the given ones.
    fn: the function of the smaller parameters. It can be jitted and exported,
      and accepts other batch sizes than the example's; custom derivative rules
      inside the original function are replaced by their primal computation.
    same_code: whether the original function, traced with the smaller
      parameters, is the same program as `fn`. If True, continue with the
      original function. If False, it contains fixed sizes (a number of heads, a
      mean over features), or constants for which there was no bias.
    removed: the parameters that became smaller.
    blocked: zero slices that could not be removed, with the reason.

  Example:
    >>> params = {"up": np.eye(3, 4), "down": np.ones((4, 2))}
    >>> mlp = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    >>> small = shrink(mlp, params, np.ones((1, 3)))
    >>> [(r.name, r.before, r.after) for r in small.removed]
    [('down', (4, 2), (3, 2)), ('up', (3, 4), (3, 3))]
    >>> jax.tree.map(np.shape, small.shrink({"up": np.ones((3, 4))}))
    {'up': (3, 3)}
  """

  params: Any
  fn: Callable[..., Any]
  same_code: bool
  removed: list[Removed]
  blocked: list[Blocked]
  _take: Callable[[int, Any], Any] = dataclasses.field(repr=False)
  _owners: Owners = dataclasses.field(repr=False)
  _shapes: list[tuple[int, ...]] = dataclasses.field(repr=False)
  _inputs: tuple[Any, ...] = dataclasses.field(repr=False)

  def save(
    self,
    path: str | os.PathLike,
    *more_inputs: tuple[Any, ...],
    metadata: Mapping[str, Any] | None = None,
  ) -> None:
    """Write the smaller model to one file that `load_model` runs anywhere.

    It holds the parameters and `fn` as StableHLO for the shapes of the example
    inputs, so the code that made the model is not needed, also where
    `same_code` is false. It is written whole or not at all. Needs the extra
    `serve` (flatbuffers).

    Args:
      path: the file, for example `model.jaxpruner`.
      *more_inputs: further tuples of inputs, or of their shapes.
      metadata: JSON values to store in the file.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxpruner import sparse
      >>> params = {"up": np.eye(3, 4), "down": np.ones((4, 2))}
      >>> mlp = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
      >>> small = shrink(mlp, params, np.ones((1, 3), np.float32))
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "small.jaxpruner"
      >>> small.save(path, (np.ones((8, 3), np.float32),))
      >>> sparse.load_model(path)(np.ones((8, 3), np.float32)).shape
      (8, 2)
    """
    parts = [
      artifacts.Part(self.fn, self.fn, self.params, inputs)
      for inputs in (self._inputs, *more_inputs)
    ]
    artifacts.write(path, parts, metadata)

  def __reduce__(self) -> Any:
    raise TypeError(
      "a shrunk model holds code, which cannot be pickled; use "
      "small.save(path) and jaxpruner.sparse.load_model(path), or pickle "
      "small.params if your own function runs them (small.same_code)"
    )

  def __copy__(self) -> "Shrunk":
    return self  # nothing of it changes

  def __deepcopy__(self, memo: Any) -> "Shrunk":
    return self

  def shrink(self, tree: Any) -> Any:
    """Shrink trees that accompany the parameters: optimizer state, masks.

    A leaf belongs to a parameter if its path ends with the parameter's path and
    its shape is the parameter's, with at most one more leading axis.

    Args:
      tree: any pytree, for example an Optax state.

    Returns:
      The tree with the same slices removed as from the parameters.
    """

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
      owner = self._owners.find(path)
      if owner is None or np.ndim(x) == 0:
        return x
      shape = self._shapes[owner]
      if np.shape(x) == shape:
        return jnp.asarray(self._take(owner, np.asarray(x)))
      if per_weight(x, shape):
        rows = [self._take(owner, row) for row in np.asarray(x)]
        return jnp.asarray(np.stack(rows))
      name = _leaves.join(_leaves.path_names(self._owners.paths[owner]))
      if np.size(x) > 1 and name in {r.name for r in self.removed}:
        raise ValueError(
          f"{_leaves.join(_leaves.path_names(path))}: shape {np.shape(x)} "
          f"belongs to the shrunk parameter {name!r} of shape {shape}, but "
          "not weight by weight; initialise this optimizer again on the "
          "shrunk parameters"
        )
      return x

    return jax.tree_util.tree_map_with_path(leaf, tree)

  def __str__(self) -> str:
    lines = [
      f"{name}: {_shape(before)} -> {_shape(after)}"
      for name, before, after in self.removed
    ] or ["nothing could be removed"]
    lines += [
      f"{b.name}: {b.slices} empty slices of axis {b.axis} stay: {b.reason}"
      for b in self.blocked
    ]
    return "\n".join(lines)


def _shape(shape: tuple[int, ...]) -> str:
  return "x".join(map(str, shape))


def shrink(
  apply_fn: Callable[..., Any],
  params: Any,
  *example_inputs: Any,
  masks: Any = None,
  blocks: bool = False,
) -> Shrunk:
  """Remove masked channels, neurons and heads from all coupled arrays.

  The function is traced once. Axes that must have the same length (a layer's
  outputs, its bias, its norm, the next layer's inputs, residual partners,
  grouped heads) are found from the operations. An index is removed from all of
  them if its term in every sum over the axis is zero or a known constant. It is
  zero if one factor is known to be zero. It is a constant for a masked neuron
  with a bias; the constant is then added to the following bias, or inside `fn`
  if there is no bias.

  Args:
    apply_fn: `apply_fn(params, *inputs)`, the forward pass.
    params: any pytree of arrays. Other arrays of `apply_fn` that should become
      smaller too, for example batch statistics, belong here.
    *example_inputs: inputs, or their shapes.
    masks: a tree like `params` of uint8 masks (1 = kept) or None; by default
      the zeros of `params`.
    blocks: also take out residual blocks, f in x + f(x), that are zero for
      every input. Their parameters stay in the tree, with a first axis of
      length 0, and `same_code` is False.

  Returns:
    The smaller model; `print` it for the removed slices and for the zero slices
    that could not be removed, with the reason.

  Example:
    >>> w = {"up": np.eye(3, 4), "down": np.ones((4, 2))}
    >>> mlp = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    >>> small = shrink(mlp, w, np.ones((1, 3)))
    >>> print(small)
    down: 4x2 -> 3x2
    up: 3x4 -> 3x3
    >>> small.same_code
    True
  """
  warn_if_contradicted(params, masks, "shrink")
  paths, treedef = jax.tree_util.tree_flatten_with_path(params)
  values = [
    _masked(leaf, mask)
    for (_, leaf), mask in zip(paths, _leaves.align(params, masks), strict=True)
  ]
  shapes = treedef.unflatten(
    [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
  )
  program = _program.trace(apply_fn, shapes, *example_inputs)
  variables = program.inputs[: len(values)]
  given = dict(zip(variables, values, strict=True))
  gone: list[tuple[int, int]] = []
  if blocks:
    found = _branches.find(program, variables)
    gone = _branches.empty(program, found, given)
  program, lost = _branches.without(program, gone)
  dims = Dims(program, len(values))
  order = _stacks.Order(program, dims, given)
  removal = Removal(program, dims, {v: order(v, x) for v, x in given.items()})
  resized = _resize.Resized(program, dims, removal.keep, removal.baked)

  def cut(var: _program.Var, array: np.ndarray) -> np.ndarray:
    if var in lost:
      return array[:0] if array.ndim else array
    return resized.take(array, dims.of(var))

  def take(index: int, array: np.ndarray) -> np.ndarray:
    var = variables[index]
    return cut(var, order(var, array))

  small = [cut(v, removal.values[v]) for v in variables]
  new_params = treedef.unflatten([jnp.asarray(x) for x in small])
  new_fn = _resize.function(apply_fn, resized, shapes, gone)
  names = [_leaves.join(_leaves.path_names(path)) for path, _ in paths]
  rows = list(zip(names, variables, small, strict=True))
  return Shrunk(
    params=new_params,
    fn=new_fn,
    same_code=not gone and _same(apply_fn, new_fn, new_params, example_inputs),
    removed=[
      Removed(name, v.shape, x.shape)
      for name, v, x in rows
      if v.shape != x.shape
    ],
    blocked=[
      Blocked(name, axis, count, removal.reason(dims.of(v)[axis]))
      for name, v, x in rows
      if v not in lost
      for axis, count in enumerate(_empty(x))
      if count and x.shape[axis] > 1
    ],
    _take=take,
    _owners=Owners(params),
    _shapes=[np.shape(x) for _, x in paths],
    _inputs=jax.tree.map(artifacts.shape_of, example_inputs),
  )


def _masked(leaf: Any, mask: Any) -> np.ndarray:
  # Through JAX, so that the dtype is the one the function will see.
  array = np.asarray(jnp.asarray(leaf))
  if mask is None:
    return array
  return np.where(np.asarray(mask) != 0, array, np.zeros((), array.dtype))


def _empty(array: np.ndarray) -> list[int]:
  """Count, along each axis of a matrix or more, the slices that are zero."""
  if array.ndim < 2:
    return []
  zero = array == 0
  return [
    int(zero.all(tuple(a for a in range(array.ndim) if a != axis)).sum())
    for axis in range(array.ndim)
  ]


def _same(
  fn: Callable[..., Any],
  new_fn: Callable[..., Any],
  params: Any,
  inputs: Sequence[Any],
) -> bool:
  """Tell whether the user's code, run on the new sizes, is our program."""
  ours = _program.trace(new_fn, params, *inputs)
  try:
    theirs = _program.trace(fn, params, *inputs)
  except Exception:
    # Whatever user code raises on unforeseen sizes means one thing.
    return False
  return ours.signature() == theirs.signature()
