"""A task made of the functions of an existing training script."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxpruner import _tools
from jaxpruner.compare.tasks import base, narrowing

PyTree = Any
CHANNELS = "channels"  # a narrower network that the library finds
_NETWORK = ("init", "apply", "loss", "evaluate")  # what a width changes
WIDTHS = 128  # `narrower` is called with multiples of 1 / WIDTHS
# Names under which batches of common loaders hold the network's inputs.
INPUTS = ("x", "image", "images", "inputs", "input_ids", "tokens")


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
  """The functions and names of a task, as `compare.task` takes them."""

  init: Callable[..., Any]
  apply: Callable[..., Any]
  loss: Callable[..., Any]
  batches: Callable[..., Any]
  evaluate: Callable[..., Any]
  test: Callable[[], Iterable[Any]] | None = None
  inputs: Callable[[Any], Any] | None = None
  optimizer: Any = None
  narrower: Callable[[float], Any] | str | None = None
  has_state: bool = False
  name: str = "task"
  metric: str = "accuracy"
  unit: str = ""
  higher_is_better: bool = True
  distribution: str = "erk"
  pruning: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  batching: str = "auto"
  axis_name: str | tuple[str, ...] = ()

  def __post_init__(self):
    for name in ("init", "apply", "loss", "batches", "evaluate"):
      if not callable(getattr(self, name)):
        raise ValueError(f"{name}={getattr(self, name)!r:.60} must be callable")
    for name in ("test", "inputs", "narrower"):
      value = getattr(self, name)
      if name == "narrower" and value == CHANNELS:
        continue
      if value is not None and not callable(value):
        also = f", or {CHANNELS!r}" if name == "narrower" else ""
        raise ValueError(f"{name}={value!r:.60} must be a function{also}")
    if self.batching not in ("auto", "map", "vmap"):
      raise ValueError(f"batching={self.batching!r}: need auto, map or vmap")
    if not self.name or ":" in self.name or "/" in self.name:
      raise ValueError(f"name={self.name!r}: need a name without ':' and '/'")
    if not all(isinstance(name, str) and name for name in self.axes):
      raise ValueError(
        f"axis_name={self.axis_name!r}: need the name of an axis, such as "
        "'batch', or several"
      )

  @property
  def axes(self) -> tuple[str, ...]:
    """The names of axes that `apply`, `loss` and `evaluate` may use."""
    given = self.axis_name
    return (given,) if isinstance(given, str) else tuple(given)

  @functools.cached_property
  def from_step(self) -> bool:
    """Whether `batches` takes (seed, step) and returns a batch."""
    try:
      taken = inspect.signature(self.batches).parameters.values()
    except (TypeError, ValueError):
      return False
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in taken if p.default is p.empty and p.kind not in kinds]
    if len(needed) not in (1, 2):
      raise ValueError(
        f"batches{inspect.signature(self.batches)}: must take (seed, step) and "
        "return a batch, or take (seed) and return an iterable of batches"
      )
    return len(needed) == 2

  @functools.cached_property
  def measured(self) -> Callable[..., Any]:
    """`evaluate` on a batch, compiled."""
    return jax.jit(with_axes(self.evaluate, self.axes))


def with_axes(fn: Callable[..., Any], names: Iterable[str]) -> Callable:
  """Return a function that may use named axes, each of size one.

  A script written for several devices averages over a named axis
  (`jax.lax.pmean(x, "batch")`, `nn.BatchNorm(axis_name="batch")`). On one
  device the mean is the value itself.

  Args:
    fn: the function.
    names: the names of the axes.

  Returns:
    The function of the same arguments.

  Example:
    >>> mean = lambda x: jax.lax.pmean(x.mean(), "batch")
    >>> float(with_axes(mean, ["batch"])(np.array([1.0, 3.0])))
    2.0
  """
  for name in names:
    fn = _with_axis(fn, name)
  return fn


def _with_axis(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
  def bound(*args: Any) -> Any:
    mapped = jax.vmap(fn, in_axes=None, axis_name=name, axis_size=1)  # pyright: ignore
    return jax.tree.map(lambda x: x[0], mapped(*args))

  return bound


@functools.lru_cache(maxsize=256)
def _narrowed(functions: Functions, width: int) -> Functions:
  """Return the functions at a width; `WIDTHS` is the network itself."""
  if width == WIDTHS or not callable(functions.narrower):
    return functions
  changed = functions.narrower(width / WIDTHS)
  if isinstance(changed, FunctionTask):
    changed = {name: getattr(changed.functions, name) for name in _NETWORK}
  if not isinstance(changed, Mapping):
    raise ValueError(
      f"narrower({width / WIDTHS}) returned {changed!r:.60}; it must return a "
      "task, or a dict with the functions that change: init, apply, loss, "
      "evaluate, ..."
    )
  names = {f.name for f in dataclasses.fields(Functions)} - {"narrower"}
  for name in changed:
    if name not in names:
      raise ValueError(
        f"narrower: unknown key {name!r}; {_tools.nearest(name, names)}"
      )
  return dataclasses.replace(functions, **changed)


@dataclasses.dataclass(frozen=True)
class FunctionTask(base.Task):
  """A task made of functions; `compare.task` makes it.

  Attributes:
    functions: the functions of the network at its full width.

  Example:
    >>> issubclass(FunctionTask, base.Task)
    True
  """

  width: int = WIDTHS
  functions: Any = None

  def __post_init__(self):
    if self.functions is not None:
      _ = self._own  # a rule may compute, which it cannot inside a trace

  @property
  def _own(self) -> Functions:
    return _narrowed(self.functions, self.width)

  # The class attributes of other tasks, here from the functions.
  name = property(lambda self: self.functions.name)  # pyright: ignore
  metric = property(lambda self: self.functions.metric)  # pyright: ignore
  unit = property(lambda self: self.functions.unit)  # pyright: ignore
  higher_is_better = property(  # pyright: ignore
    lambda self: self.functions.higher_is_better
  )
  distribution = property(  # pyright: ignore
    lambda self: self.functions.distribution
  )
  pruning = property(  # pyright: ignore
    lambda self: dict(self.functions.pruning)
  )
  batching = property(lambda self: self.functions.batching)  # pyright: ignore
  has_state = property(lambda self: self.functions.has_state)  # pyright: ignore
  on_host = True

  @property
  def narrowable(self) -> bool:
    return self.functions.narrower is not None

  def load(self, folder: str | None = None) -> PyTree:
    """Return the first batch, which FLOPs and latency are measured with."""
    del folder
    first = next(iter(self.stream(0, 0)), None)
    if first is None:
      raise ValueError("batches: the stream of seed 0 is empty")
    return {"batch": jax.tree.map(np.asarray, first)}

  def example(self, data: PyTree) -> Any:
    return self.inputs(data["batch"])

  def inputs(self, batch: PyTree) -> Any:
    if self.functions.inputs is not None:
      return self.functions.inputs(batch)
    if isinstance(batch, Mapping):
      found = [name for name in INPUTS if name in batch]
      if found:
        return batch[found[0]]
    elif isinstance(batch, list | tuple) and batch:
      return batch[0]
    raise ValueError(
      "inputs: which part of a batch does the network take? Pass "
      "inputs=lambda batch: ...; without it the batch must be a tuple that "
      f"starts with them, or a dict with one of {', '.join(INPUTS)}"
    )

  def _made(self, key: jax.Array) -> Any:
    made = self._own.init(key)
    if self.has_state and not (isinstance(made, tuple) and len(made) == 2):
      raise ValueError(
        "has_state=True: init must return (params, state), returned "
        f"{type(made).__name__}"
      )
    return made

  def init(self, key: jax.Array) -> PyTree:
    made = self._made(key)
    return made[0] if self.has_state else made

  def init_state(self, key: jax.Array) -> PyTree:
    return self._made(key)[1] if self.has_state else ()

  def apply(self, *args: Any) -> Any:  # pyright: ignore
    return with_axes(self._own.apply, self._own.axes)(*args)

  def loss(self, *args: Any) -> Any:  # pyright: ignore
    return with_axes(self._own.loss, self._own.axes)(*args)

  def with_temperature(self, temperature: float) -> base.Task:
    """Return this task: its loss does not go through `apply`."""
    del temperature
    return self

  def stream(self, seed: int, step: int) -> Iterator[PyTree]:
    if self.functions.from_step:
      for t in itertools.count(step):
        yield self.functions.batches(seed, t)
    source = self.functions.batches(seed)
    if not isinstance(source, Iterable):
      raise ValueError(
        f"batches(seed={seed}) returned {type(source).__name__}, not an "
        "iterable of batches"
      )
    yield from itertools.islice(_repeated(source), step, None)

  def evaluate(self, params: PyTree, *rest: Any) -> dict[str, float]:  # pyright: ignore
    """Return the metrics; called on the host, once per seed."""
    *state, _ = rest  # the last is `data`, the first batch
    own = self._own
    if own.test is None:
      return self._named(own.evaluate(params, *state))
    totals: dict[str, float] = {}
    examples = 0
    for batch in own.test():
      batch = jax.tree.map(np.asarray, batch)
      size = len(jax.tree.leaves(batch)[0])
      found = self._named(own.measured(params, *state, batch))
      for name, value in found.items():
        totals[name] = totals.get(name, 0.0) + size * value
      examples += size
    if not examples:
      raise ValueError("test: yields no batch")
    return {name: total / examples for name, total in totals.items()}

  def _named(self, found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
      found = {self.metric: found}
    if self.metric not in found:
      raise ValueError(
        f"evaluate returned {', '.join(map(str, found))}, but the metric is "
        f"{self.metric!r}: pass metric=..."
      )
    return {str(name): float(value) for name, value in found.items()}

  @property
  def own_optimizer(self) -> bool:
    return self.functions.optimizer is not None

  def optimizer(self) -> optax.GradientTransformation:
    chosen = self.functions.optimizer
    if chosen is None:
      return super().optimizer()
    return chosen if hasattr(chosen, "update") else chosen(self.steps)


def _repeated(source: Iterable[PyTree]) -> Iterator[PyTree]:
  """Yield the batches of an iterable, epoch after epoch."""
  while True:
    empty = True
    for batch in source:
      empty = False
      yield batch
    # An iterator cannot start again; a loader shuffles its next epoch.
    if empty or isinstance(source, Iterator):
      return


def task(
  *,
  init: Callable[..., Any],
  apply: Callable[..., Any],
  loss: Callable[..., Any],
  batches: Callable[..., Any],
  evaluate: Callable[..., Any],
  steps: int = 1000,
  learning_rate: float = 1e-3,
  **rest: Any,
) -> FunctionTask:
  """Make a task of functions on any tree of parameters.

  The model may be plain functions, Flax Linen or NNX, Equinox or Haiku: only
  its parameters and these functions count. With `has_state=True`, `init`
  returns (params, state); `apply`, `loss` and `evaluate` take the state after
  the parameters; and `loss` returns (loss, new state).

  Args:
    init: key -> params.
    apply: (params, inputs) -> outputs, as in inference: FLOPs and latency are
      measured on it.
    loss: (params, batch, key) -> scalar; the key is for dropout.
    batches: (seed, step) -> batch; or seed -> an iterable of batches, such as
      a loader of grain, tf.data or PyTorch. Called outside of JAX; it must give
      the same batches each time.
    evaluate: (params) -> {metric: value}; or, with `test`, (params, batch) ->
      {metric: mean over the batch}, which is compiled.
    steps: the number of optimizer steps.
    learning_rate: the peak of the default optimizer's schedule (Adam, warm-up
      and cosine decay).
    **rest: `test` (a function that returns the batches to evaluate on),
      `inputs` (batch -> what `apply` takes), `optimizer` (an Optax optimizer,
      or steps -> one), `narrower` (for the small dense baseline: width factor
      in (0, 1] -> a narrower task, or a dict of those arguments that change; or
      "channels", where the functions take weights of any width), `has_state`,
      `name`, `metric` ("accuracy"), `unit`, `higher_is_better`,
      `distribution` ("erk"), `pruning` (further keys of the updater's
      configuration, such as `custom_sparsity_map`), `batching`: seeds train
      together ("vmap") or in turn ("map"), `axis_name`: the axis, or axes, that
      the functions average over with `jax.lax.pmean` or `nn.BatchNorm`.

  Returns:
    The task, for `compare.run` or for `--task your_module:NAME`.

  Raises:
    ValueError: an argument is unknown or wrong.

  Example:
    >>> import jax.numpy as jnp
    >>> x = np.ones((8, 2), np.float32)
    >>> mean_error = lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2)
    >>> line = task(
    ...   init=lambda key: {"w": jax.random.normal(key, (2, 4))},
    ...   apply=lambda p, x: x @ p["w"],
    ...   loss=lambda p, batch, key: mean_error(p, batch["x"]),
    ...   batches=lambda seed, step: {"x": x},
    ...   evaluate=lambda p: mean_error(p, x),
    ...   metric="error", higher_is_better=False, steps=10)
    >>> line.metric, line.streamed, line.narrowable
    ('error', True, False)
  """
  known = {f.name for f in dataclasses.fields(Functions)}
  for name in rest:
    if name not in known:
      raise ValueError(
        f"unknown argument {name!r}; {_tools.nearest(name, known)}"
      )
  for name, value in (("steps", steps), ("learning_rate", learning_rate)):
    if isinstance(value, bool) or not value > 0:
      raise ValueError(f"{name}={value!r}: must be a positive number")
  if steps != int(steps):
    raise ValueError(f"steps={steps!r}: must be a whole number")
  functions = Functions(init, apply, loss, batches, evaluate, **rest)
  _ = functions.from_step  # refuse a wrong signature now
  made = FunctionTask(
    steps=int(steps), learning_rate=learning_rate, functions=functions
  )
  if functions.narrower != CHANNELS:
    return made
  rule = narrowing.Channels(made)
  found = dataclasses.replace(functions, narrower=rule)
  return dataclasses.replace(made, functions=found)
