"""Make a pruned model fast without editing it."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpruner import _leaves
from jaxpruner.inspect.summary import warn_if_contradicted
from jaxpruner.sparse import _choose, _layers, _rewrite, artifacts
from jaxpruner.sparse.formats import Sparse
from jaxpruner.sparse.reports import Report


class Accelerated:
  """A function with sparse weights; call it as `fast(*inputs)`.

  `accelerate` returns it. `fast.params` is the tree with sparse leaves, and
  `fast.apply(params, *inputs)` is the pure function of both, for use in a
  larger `jit`, in `grad` (with respect to inputs, or to `leaf.values`) or in
  `jax.export` (see `register_kernels`). `fast.save(path)` writes it to a file
  that another process runs without the code of the model.

  Args:
    function: `function(params, *inputs)`.
    params: its parameters, with sparse or dense leaves.
    example_inputs: inputs, or their shapes: those that `save` saves for.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> params = {"w": sparse.pack(jnp.eye(4), format="bitmask")}
    >>> fast = Accelerated(lambda p, x: jnp.sin(x) @ p["w"], params)
    >>> fast(jnp.zeros((1, 4))).tolist()
    [[0.0, 0.0, 0.0, 0.0]]
  """

  def __init__(
    self,
    function: Callable[..., Any],
    params: Any,
    example_inputs: tuple[Any, ...] | None = None,
  ):
    self._function = function
    self.params = params
    self._inputs = None
    if example_inputs is not None:
      self._inputs = jax.tree.map(artifacts.shape_of, example_inputs)
    leaves, treedef = jax.tree.flatten(params)
    arrays = [hasattr(leaf, "dtype") for leaf in leaves]

    def call(values, *inputs):
      given = iter(values)
      full = [
        next(given) if a else leaf
        for leaf, a in zip(leaves_static, arrays, strict=True)
      ]
      return self.apply(treedef.unflatten(full), *inputs)

    # Weights are arguments of the compiled program, never its constants.
    leaves_static = [
      None if a else leaf for leaf, a in zip(leaves, arrays, strict=True)
    ]
    values = [leaf for leaf, a in zip(leaves, arrays, strict=True) if a]
    self._values = jax.device_put(values)  # NumPy's would be copied each call
    self._jitted = jax.jit(call)

  def apply(self, params: Any, *inputs: Any) -> Any:
    """Return `function(params, *inputs)`; sparse leaves are multiplied sparse.

    Args:
      params: a tree like `self.params`.
      *inputs: the other arguments of the function.

    Returns:
      The result of the function.
    """
    return _rewrite.run(self._function, params, inputs)

  def __call__(self, *inputs: Any) -> Any:
    return self._jitted(self._values, *inputs)

  def save(
    self,
    path: str | os.PathLike,
    *others: "Accelerated",
    metadata: Mapping[str, Any] | None = None,
  ) -> None:
    """Write the model to one file that `load_model` runs anywhere.

    The file holds the packed weights, the function as StableHLO for the shapes
    of the example inputs, the names and versions of the compiled products it
    calls, and a dense function for machines without them. It is written whole
    or not at all. Needs the extra `serve` (flatbuffers).

    Args:
      path: the file, for example `model.jaxpruner`.
      *others: the same model at other shapes, or other functions of other
        inputs: `accelerate` chose formats for each. Arrays that they share are
        stored once.
      metadata: JSON values to store in the file.

    Example:
      >>> import pathlib, tempfile
      >>> import jax.numpy as jnp
      >>> from jaxpruner import sparse
      >>> w = sparse.pack(2 * jnp.eye(16))
      >>> one, two = (
      ...   Accelerated(lambda w, x: x @ w, w, (jnp.ones((n, 16)),))
      ...   for n in (1, 2))
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "double.jaxpruner"
      >>> one.save(path, two)
      >>> model = sparse.load_model(path)
      >>> model(jnp.ones((1, 16)))[0, 0], model(jnp.ones((2, 16))).shape
      (Array(2., dtype=float32), (2, 16))
    """
    parts = []
    for model in (self, *others):
      if model._inputs is None:
        raise ValueError(
          "example_inputs are not known; `accelerate` keeps them, or give "
          "them to Accelerated(function, params, example_inputs)"
        )
      parts.append(
        artifacts.Part(
          model.apply, model._function, model.params, model._inputs
        )
      )
    artifacts.write(path, parts, metadata)

  def __reduce__(self) -> Any:
    raise TypeError(
      "an accelerated function holds code, which cannot be pickled; use "
      "fast.save(path) and jaxpruner.sparse.load_model(path)"
    )

  def __copy__(self) -> "Accelerated":
    return self  # nothing of it changes

  def __deepcopy__(self, memo: Any) -> "Accelerated":
    return self


def accelerate(
  apply_fn: Callable[..., Any],
  params: Any,
  *example_inputs: Any,
  masks: Any = None,
  cache: str | pathlib.Path | None = "default",
  timer: _choose.Timer = _choose.measure,
) -> tuple[Accelerated, Report]:
  """Store weights in sparse formats wherever a measurement shows a gain.

  `apply_fn` is traced, not edited. A sparse weight is a candidate if only
  products use it (dense layers, attention, convolutions, experts; also inside
  `jit`, loops, branches, `remat` and custom derivatives), or products and
  lookups (tied embeddings). A fused weight of which slices are multiplied is
  packed slice by slice. A weight is packed in the formats that suit
  its structure, each is timed on the model's own product, and the fastest is
  chosen if it beats dense by 10 %. Then the whole function is timed: if it is
  not faster than the dense function, the dense function is returned.

  Args:
    apply_fn: `apply_fn(params, *inputs)`, from any framework.
    params: its parameters, pruned.
    *example_inputs: inputs of the shapes to optimise for. Other shapes work
      too.
    masks: 1 = kept, `None` for dense leaves; by default nonzero weights are
      kept. A kept zero stays trainable in `fast.params`.
    cache: file for timings; None measures every time and stores nothing.
    timer: `{name: thunk} -> {name: seconds}`, a replacement for the built-in
      measurement.

  Returns:
    `(fast, report)`: `fast(*inputs)` equals `apply_fn(params, *inputs)` up to
    rounding; `print(report)` shows the chosen formats and the reasons.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxpruner import sparse
    >>> params = {"w": jnp.zeros((64, 64)).at[:16].set(1.0)}
    >>> model = lambda params, x: x @ params["w"]
    >>> timer = lambda thunks: {  # fixed times in place of a measurement
    ...   name: 2.0 if name in ("dense", "sell") else 1.0 for name in thunks}
    >>> fast, report = sparse.accelerate(
    ...   model, params, jnp.ones((1, 64)), cache=None, timer=timer)
    >>> report.layers[0].format, report.layers[0].speedup
    ('compact', 2.0)
    >>> fast(jnp.ones((1, 64)))[0, :3].tolist()
    [16.0, 16.0, 16.0]
  """
  path = _choose.default_cache() if cache == "default" else cache
  timings = _choose.Timings(None if path is None else pathlib.Path(path))
  named, treedef = _leaves.flatten_with_names(params)
  all_masks = _leaves.align(params, masks)
  warn_if_contradicted(params, masks, "accelerate")
  inputs = jax.tree.map(_choose.concrete, example_inputs)
  uses = _rewrite.find_uses(apply_fn, params, inputs)
  total = sum(getattr(leaf, "nbytes", 0) for _, leaf in named)
  clock = _layers.Clock(timings, timer, total > _choose.cache_size())
  leaves, layers = [], []
  for (names, leaf), mask, where in zip(named, all_masks, uses, strict=True):
    weight = _layers.Leaf(_leaves.join(names), leaf, mask, where)
    new, reports = _layers.replace(weight, clock)
    leaves.append(new)
    layers += reports
  timings.save()
  dense_leaves = [
    leaf if mask is None else jax.numpy.where(mask, leaf, 0)
    for (_, leaf), mask in zip(named, all_masks, strict=True)
  ]
  dense = Accelerated(apply_fn, treedef.unflatten(dense_leaves), inputs)
  fast = Accelerated(apply_fn, treedef.unflatten(leaves), inputs)
  if not any(isinstance(leaf, Sparse) for leaf in leaves):
    seconds = timer({"dense": lambda: dense(*inputs)})["dense"]
    rule = "no weight gains from a sparse format: dense kept"
    return dense, _report(layers, seconds, seconds, rule)
  times = timer({
    "dense": lambda: dense(*inputs), "sparse": lambda: fast(*inputs)
  })  # fmt: skip
  if _choose.fastest(times) == "dense":
    layers = [
      dataclasses.replace(l, format="dense", bytes=l.dense_bytes)
      for l in layers
    ]
    rule = "the whole function was not faster: dense kept"
    return dense, _report(layers, times["dense"], times["dense"], rule)
  rule = "sparse where measured faster"
  return fast, _report(layers, times["dense"], times["sparse"], rule)


def _report(layers: Any, dense: float, now: float, rule: str) -> Report:
  return Report(tuple(layers), dense, now, rule)
