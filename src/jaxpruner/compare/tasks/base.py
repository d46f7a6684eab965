"""Base classes of tasks: data, a network, a loss, batches and a metric."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import _tools, datasets
from jaxpruner.compare import layers

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Task:
  """Base class of all tasks: pure functions with a few numbers as fields.

  All methods but `load` are traced. `data` is the result of `load`, and `key`
  is the random key of the seed. Nothing may depend on the pruning algorithm, so
  that all algorithms with one seed get the same initial weights and the same
  batches.

  Attributes:
    width: the size that the small dense baseline reduces.
    steps: the number of optimizer steps (rounds, for federated tasks).
    batch_size: the number of examples per step.
    learning_rate: the peak of the optimizer's schedule.

  Example:
    >>> @dataclasses.dataclass(frozen=True)
    ... class Line(Task):
    ...   metric = "error"
    ...   def load(self, folder=None): return {"x": jnp.ones((8, 2))}
    ...   def init(self, key): return {"w": jax.random.normal(key, (2, 1))}
    ...   def apply(self, params, inputs): return inputs @ params["w"]
    ...   def loss(self, params, batch, key):
    ...     return jnp.mean((self.apply(params, batch) - 1) ** 2)
    ...   def batches(self, data, key, step): return data["x"]
    ...   def evaluate(self, params, data):
    ...     return {"error": self.loss(params, data["x"], None)}
    >>> task = Line(steps=10)
    >>> task.evaluate({"w": jnp.full((2, 1), 0.5)}, task.load())["error"].item()
    0.0
  """

  width: int = 64
  steps: int = 1000
  batch_size: int = 64
  learning_rate: float = 1e-3

  name: ClassVar[str] = ""
  metric: ClassVar[str] = "accuracy"
  unit: ClassVar[str] = "%"
  higher_is_better: ClassVar[bool] = True
  distribution: ClassVar[str] = "erk"
  # Widths the small dense baseline may take are multiples of this.
  width_multiple: ClassVar[int] = 1
  # Keyword arguments for every updater: which leaves stay dense, and so on.
  pruning: ClassVar[dict[str, Any]] = {}
  # Whether a cell can be stored during training: not if its environment runs
  # outside JAX, as an emulator does.
  resumable: ClassVar[bool] = True
  # "vmap" trains all seeds at the same time, in larger products; "map" trains
  # one seed after another inside the program, for environments that cannot be
  # batched; "auto" is "map" on a CPU, where the activations of all seeds
  # together do not fit into the cache, and "vmap" elsewhere.
  batching: ClassVar[str] = "vmap"
  # Whether the network has state that training changes without a gradient,
  # such as batch statistics. `apply`, `loss` and `evaluate` then take it after
  # the parameters, and `loss` returns (loss, the new state).
  has_state: ClassVar[bool] = False
  # Whether `evaluate` is called outside of JAX, once per seed, with arrays.
  on_host: ClassVar[bool] = False

  @property
  def streamed(self) -> bool:
    """Whether batches come from `stream`, on the host, during training."""
    return type(self).stream is not Task.stream

  @property
  def narrowable(self) -> bool:
    """Whether a smaller `width` gives a smaller network."""
    return True

  @property
  def in_turn(self) -> bool:
    """Whether seeds run one after another inside the program."""
    on_cpu = jax.default_backend() == "cpu"
    return self.batching == "map" or (self.batching == "auto" and on_cpu)

  def load(self, folder: str | None = None) -> PyTree:
    """Return the data as arrays, from `folder` or from the default place."""
    raise NotImplementedError

  def init(self, key: jax.Array) -> PyTree:
    """Return the network's initial parameters."""
    raise NotImplementedError

  def apply(self, params: PyTree, inputs: jax.Array) -> jax.Array:
    """Return the network's outputs; FLOPs and latency are measured on it."""
    raise NotImplementedError

  def example(self, data: PyTree) -> jax.Array:
    """Return the inputs that FLOPs and latency are measured with."""
    return data["test_x"][: self.batch_size]

  def inputs(self, batch: PyTree) -> PyTree:
    """Return what `apply` takes, from a batch; calibration needs it."""
    del batch
    raise ValueError(
      f"task {self.name!r} does not say which part of a batch its network "
      "takes; define `inputs(batch)`"
    )

  def loss(self, params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    """Return the loss of a batch, a scalar."""
    raise NotImplementedError

  def with_temperature(self, temperature: float) -> "Task":
    """Return this task with the network's outputs divided by a temperature."""
    task = copy.copy(self)
    apply = lambda params, x: self.apply(params, x) / temperature
    object.__setattr__(task, "apply", apply)  # frozen for users, not for us
    return task

  def batches(self, data: PyTree, key: jax.Array, step: jax.Array) -> PyTree:
    """Return the batch of a step; it depends on the seed and the step only."""
    raise NotImplementedError

  def evaluate(self, params: PyTree, data: PyTree) -> dict[str, jax.Array]:
    """Return name -> value: the metric, and any further numbers."""
    raise NotImplementedError

  def schedule(self) -> optax.Schedule:
    """Return the learning rate: a warm-up of 5 %, then cosine decay."""
    warmup = max(1, self.steps // 20)
    return optax.warmup_cosine_decay_schedule(
      0.0, self.learning_rate, warmup, max(self.steps, warmup + 1)
    )

  def optimizer(self) -> optax.GradientTransformation:
    """Return the optimizer that every algorithm wraps."""
    return optax.adam(self.schedule())

  @property
  def own_optimizer(self) -> bool:
    """Whether the task has an optimizer of its own."""
    return type(self).optimizer is not Task.optimizer

  def init_state(self, key: jax.Array) -> PyTree:
    """Return the network's initial state; empty unless `has_state`."""
    del key
    return ()

  def stream(self, seed: int, step: int) -> Iterator[PyTree]:
    """Yield the batches of a seed from a step on, as NumPy arrays.

    A task that defines `stream` needs no `batches`, and its data need not fit
    on the device. All batches have one shape. Two calls must yield the same
    batches, and a call that starts later must continue the same sequence; both
    are checked.

    Args:
      seed: the number of the seed: 0, 1, ...
      step: the step of the first batch.
    """
    raise NotImplementedError

  # What the training calls; the state is passed on, or left out.

  def forward(self, params: PyTree, state: PyTree, inputs: PyTree) -> PyTree:
    """Return `apply` with the state if the task has one."""
    if self.has_state:
      return self.apply(params, state, inputs)  # pyright: ignore
    return self.apply(params, inputs)

  def loss_and_state(
    self, params: PyTree, state: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    """Return (loss, the new state)."""
    if self.has_state:
      return self.loss(params, state, batch, key)  # pyright: ignore
    return self.loss(params, batch, key), state

  def measure(self, params: PyTree, state: PyTree, data: PyTree) -> Any:
    """Return `evaluate` with the state if the task has one."""
    if self.has_state:
      return self.evaluate(params, state, data)  # pyright: ignore
    return self.evaluate(params, data)

  # The next three methods are for tasks that do not train on a fixed data set:
  # federated tasks override `gradient`; reinforcement learning keeps its
  # environments and replay memory in an `env_state`.

  def gradient(
    self, loss_fn: Any, params: PyTree, batch: PyTree, key: jax.Array
  ) -> tuple[jax.Array, PyTree]:
    """Return (loss, gradient) of `loss_fn(params, batch, key)`."""
    return jax.value_and_grad(loss_fn)(params, batch, key)

  def start(self, params: PyTree, data: PyTree, key: jax.Array) -> PyTree:
    """Return the initial state of the environments; by default empty."""
    del params, data, key
    return ()

  def interact(
    self,
    env_state: PyTree,
    params: PyTree,
    data: PyTree,
    key: jax.Array,
    step: jax.Array,
  ) -> tuple[PyTree, PyTree]:
    """Return (the next state, this step's batch)."""
    del params
    return env_state, self.batches(data, key, step)


# What --optimizer names, each with the task's learning-rate schedule.
OPTIMIZERS: dict[str, Any] = {
  "adam": optax.adam,
  "adamw": optax.adamw,
  "lion": optax.lion,
  "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
  "rmsprop": optax.rmsprop,
  "sgd": optax.sgd,
}


def with_optimizer(task: Task, name: str) -> Task:
  """Return a task with another optimizer at the same learning rates.

  Args:
    task: a task without an optimizer of its own.
    name: a name in `OPTIMIZERS`.

  Returns:
    The task.

  Raises:
    ValueError: the name is unknown, or the task has an optimizer of its own.

  Example:
    >>> with_optimizer(Task(), "sgd").optimizer() is None
    False
  """
  if name not in OPTIMIZERS:
    hint = _tools.nearest(name, OPTIMIZERS)
    raise ValueError(f"--optimizer {name!r} is unknown; {hint}")
  if task.own_optimizer:
    raise ValueError(
      f"--optimizer {name!r}: task {task.name!r} has an optimizer of its own; "
      "make it an option of the task, and use --set"
    )
  changed = copy.copy(task)
  optimizer = lambda: OPTIMIZERS[name](task.schedule())
  object.__setattr__(changed, "optimizer", optimizer)
  return changed


@dataclasses.dataclass(frozen=True)
class Classification(Task):
  """A task with images or vectors `x` and integer labels `y`.

  `data` holds `train_x, train_y, test_x, test_y`. Images may be uint8;
  `prepare` turns each batch into floats. A subclass defines `load`, `init` and
  `apply`.

  Attributes:
    share: the part of the training data that is used: its first rows.
    noise: the standard deviation of the noise in `noise_accuracy`.

  Example:
    >>> from jaxpruner.compare.tasks.digits import Digits
    >>> issubclass(Digits, Classification), Digits.metric
    (True, 'accuracy')
  """

  share: float = 1.0

  noise: ClassVar[float] = 0.5

  def __post_init__(self):
    if not 0 < self.share <= 1:
      raise ValueError(
        f"share={self.share!r}: the part of the training data must be above 0 "
        "and at most 1"
      )

  def prepare(self, inputs: jax.Array) -> jax.Array:
    """Return stored inputs as the network's standardised floats."""
    return inputs

  def batches(self, data: PyTree, key: jax.Array, step: jax.Array) -> PyTree:
    """Draw a batch uniformly, with replacement."""
    key = jax.random.fold_in(key, step)
    size = (self.batch_size,)
    used = max(1, round(self.share * data["train_y"].shape[0]))
    rows = jax.random.randint(key, size, 0, used)
    return {
      "x": self.prepare(data["train_x"][rows]),
      "y": data["train_y"][rows],
    }

  def inputs(self, batch: PyTree) -> jax.Array:
    return batch["x"]

  def example(self, data: PyTree) -> jax.Array:
    return self.prepare(data["test_x"][: self.batch_size])

  def loss(self, params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    del key
    return layers.cross_entropy(self.apply(params, batch["x"]), batch["y"])

  def evaluate(self, params: PyTree, data: PyTree) -> dict[str, jax.Array]:
    """Return accuracy, accuracy under Gaussian noise, and ECE, in percent."""
    x, y = data["test_x"], data["test_y"]
    slices = max(1, round(len(y) / 1000))
    size = -(-len(y) // slices)

    def piece(start: jax.Array):
      # The last slice starts earlier to stay in range; `fresh` excludes the
      # examples that it repeats.
      first = jnp.minimum(start, len(y) - size)
      fresh = jnp.arange(size) + first >= start
      inputs = self.prepare(jax.lax.dynamic_slice_in_dim(x, first, size))
      labels = jax.lax.dynamic_slice_in_dim(y, first, size)
      key = jax.random.fold_in(jax.random.key(0), start)
      noisy = inputs + self.noise * jax.random.normal(key, inputs.shape)
      probabilities = jax.nn.softmax(self.apply(params, inputs))
      guess = self.apply(params, noisy).argmax(-1)
      return (
        probabilities.max(-1),
        probabilities.argmax(-1) == labels,
        guess == labels,
        fresh,
      )

    starts = jnp.arange(slices) * size
    confidence, right, right_noisy, fresh = jax.lax.map(piece, starts)
    total = fresh.sum()
    return {
      "accuracy": 100 * (right & fresh).sum() / total,
      "noise_accuracy": 100 * (right_noisy & fresh).sum() / total,
      "ece": 100 * calibration_error(confidence, right, fresh),
    }

  def second(self, data: PyTree) -> PyTree:
    """Return a second task with inputs of the same shape, and few examples.

    By default the embedded handwritten digits, scaled to the size of the
    images. Vectors are reversed, with their labels.

    Args:
      data: the result of `load`.

    Returns:
      `train_x, train_y, test_x, test_y`, as `load` returns them.
    """
    shape = data["test_x"].shape[1:]
    if len(shape) < 2:
      names = ("train_x", "train_y", "test_x", "test_y")
      parts = {name: data[name][:400] for name in names}
      return {k: v[:, ::-1] if k.endswith("x") else v for k, v in parts.items()}
    images, labels = datasets.load_digits()
    rows, columns = (np.arange(size) * 8 // size for size in shape[:2])
    images = images.reshape(-1, 8, 8)[:, rows][:, :, columns] / images.max()
    images = images.reshape(*images.shape, *[1] * (len(shape) - 2))
    low, high = data["test_x"].min(), data["test_x"].max()
    x = low + (high - low) * jnp.broadcast_to(images, (len(images), *shape))
    y = jnp.asarray(labels)
    return {
      "train_x": x[:400],
      "train_y": y[:400],
      "test_x": x[400:800],
      "test_y": y[400:800],
    }

  def outside(self, data: PyTree) -> jax.Array:
    """Return inputs unlike the task's, for the detection of other data.

    Args:
      data: the result of `load`.

    Returns:
      Inputs of the network: those of `second`; for vectors, the test inputs
      with their places in another order.
    """
    x = data["test_x"]
    if x.ndim == 2:
      order = np.random.default_rng(0).permutation(x.shape[1])
      return self.prepare(x[:400, order])
    return self.prepare(self.second(data)["test_x"])


def calibration_error(
  confidence: jax.Array, right: jax.Array, weight: jax.Array, bins: int = 15
) -> jax.Array:
  """Return the expected calibration error over equal-width bins.

  ECE is the sum over bins of |accuracy - mean confidence|, weighted by the
  fraction of examples in the bin (Guo et al., "On Calibration of Modern Neural
  Networks", 2017).

  Args:
    confidence: the probability of the predicted class, per example.
    right: whether the prediction is right, per example.
    weight: the weight of each example; 0 leaves it out.
    bins: the number of bins.

  Returns:
    The error, between 0 and 1.

  Example:
    >>> sure = jnp.array([0.75, 0.75, 0.75, 0.75])
    >>> right = jnp.array([True, True, False, False])
    >>> float(calibration_error(sure, right, jnp.ones(4)))
    0.25
  """
  weight = weight.ravel().astype(jnp.float32)
  which = jnp.clip((confidence.ravel() * bins).astype(jnp.int32), 0, bins - 1)
  gap = (right.ravel().astype(jnp.float32) - confidence.ravel()) * weight
  per_bin = jnp.zeros(bins).at[which].add(gap)
  return jnp.abs(per_bin).sum() / weight.sum()
