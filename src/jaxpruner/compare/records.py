"""The stored results of a cell: chunks of its training, and its `Record`.

Each is a line of JSON in the run folder and in a worker's pipe. Reading checks
it: an error names fields that are missing, unknown or of a wrong type.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

# JSON has no NaN: a number that is not finite is stored as null.
Numbers = list[float | None]
T = TypeVar("T", bound="Stored")


class SchemaError(ValueError):
  """A stored object has the wrong fields; the message names file and line."""


def _whole(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda value: (
    isinstance(value, list | tuple) and all(map(check, value))
  )


def _named(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
  return lambda value: (
    isinstance(value, Mapping)
    and all(
      isinstance(name, str) and check(item) for name, item in value.items()
    )
  )


_text = lambda value: isinstance(value, str)
_gap = lambda value: value is None or _number(value)

# Annotation -> (its description, check)
KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
  str: ("text", _text),
  bool: ("true or false", lambda value: isinstance(value, bool)),
  int: ("a whole number", _whole),
  float: ("a number", _number),
  Numbers: ("a list of numbers", _list_of(_gap)),
  list[Numbers]: ("a list of lists of numbers", _list_of(_list_of(_gap))),
  list[str]: ("a list of texts", _list_of(_text)),
  list[list]: ("a list of lists", _list_of(lambda v: isinstance(v, list))),
  dict[str, float]: ("numbers by name", _named(_number)),
  dict[str, str]: ("texts by name", _named(_text)),
  dict[str, Numbers]: ("lists of numbers by name", _named(_list_of(_gap))),
  dict[str, Any]: ("an object", lambda value: isinstance(value, Mapping)),
}


@dataclasses.dataclass(frozen=True)
class Stored:
  """Base class of objects stored as JSON; annotations are the schema."""

  def to_json(self) -> dict[str, Any]:
    """Return field -> value."""
    return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

  @classmethod
  def from_json(cls: type[T], values: Any, where: str = "") -> T:
    """Return the object from the result of `to_json`, checked.

    Args:
      values: the value of a line of JSON.
      where: file and line, for the error message.

    Returns:
      The object.

    Raises:
      SchemaError: a field is missing, unknown or of a wrong type.
    """
    name = cls.__name__
    where = where or name
    if not isinstance(values, Mapping):
      raise SchemaError(f"{where}: a {name} is an object, found {values!r:.60}")
    fields = dataclasses.fields(cls)
    needed = [f.name for f in fields if _required(f)]
    missing = sorted(set(needed) - set(values))
    unknown = sorted(set(map(str, values)) - {f.name for f in fields})
    if missing or unknown:
      raise SchemaError(
        f"{where}: not a {name} of this version: missing fields "
        f"{missing or 'none'}, unknown fields {unknown or 'none'}"
      )
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
      words, fits = KINDS[hints[key]]
      if not fits(value):
        raise SchemaError(f"{where}: {key} is {value!r:.60}, must be {words}")
    return cls(**values)


def _required(field: dataclasses.Field) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


@dataclasses.dataclass(frozen=True)
class Chunk(Stored):
  """A twentieth of a cell's training, all seeds.

  Attributes:
    cell: the cell's id.
    start: the first step of the chunk.
    count: the number of steps in the chunk.
    steps: the number of steps in the whole training.
    loss: per seed, the loss of each step.
    density: per leaf, the fraction of weights that the forward pass uses.
    stored: per leaf, the fraction of weights that are trained.
    churn: per seed, weights that entered the mask since the last chunk,
      relative to the weights kept.
    explored: per seed, the fraction of weights that were kept at least once.
  """

  event: ClassVar[str] = "chunk"
  cell: str
  start: int
  count: int
  steps: int
  loss: list[Numbers]
  density: dict[str, float]
  stored: dict[str, float]
  churn: Numbers
  explored: Numbers


@dataclasses.dataclass(frozen=True)
class Record(Stored):
  """A finished cell.

  Attributes:
    cell: the cell's id.
    algorithm: its name.
    sparsity: the requested fraction.
    width: the network's width (smaller for the small dense baseline).
    metrics: per metric, a number for each seed.
    prunable: the number of weights with a mask.
    realised: per seed, the fraction removed.
    nonzero_pruned: the number of removed weights that are not zero.
    leaves: the number of leaves with a mask.
    weights: the number of kept weights, for the first seed.
    bytes: the size of the stored network, for the first seed.
    bytes_dense: its size if stored dense.
    inference_flops: the FLOPs of one forward pass.
    inference_flops_dense: those of the dense network.
    training_flops: the FLOPs of the whole training.
    training_flops_dense: those of the dense network.
    density: per leaf, the fraction of weights kept.
    seconds: wall time, including compilation.
    step_seconds: measured time of a step of one seed; 0 if unknown.
    training_bytes: the weights and the optimizer's state of one seed between
      steps, with masks or positions; 0 if unknown.
    collapsed: leaves that lost every weight with at least one seed.
    problem: the reason why the cell is not in the table, or "".
    batches: a checksum of the batches of a streamed task, or "".
    notes: what a reader must know, such as leaves that stay dense.
  """

  event: ClassVar[str] = "done"
  cell: str
  algorithm: str
  sparsity: float
  width: int
  metrics: dict[str, Numbers]
  prunable: int
  realised: Numbers
  nonzero_pruned: int
  leaves: int
  weights: int
  bytes: int
  bytes_dense: int
  inference_flops: float
  inference_flops_dense: float
  training_flops: float
  training_flops_dense: float
  density: dict[str, float]
  seconds: float
  collapsed: list[str] = dataclasses.field(default_factory=list)
  problem: str = ""
  batches: str = ""
  notes: list[str] = dataclasses.field(default_factory=list)
  step_seconds: float = 0.0
  training_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Failure(Stored):
  """A cell that raised; it is computed again when the run continues."""

  event: ClassVar[str] = "done"
  cell: str
  algorithm: str
  sparsity: float
  problem: str
  raised: bool = True


@dataclasses.dataclass(frozen=True)
class Latency(Stored):
  """Measured inference time of a cell's network, relative to dense."""

  cell: str
  ratio: float
  path: str  # "dense", "accelerate" or "masked dense"
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Measures(Stored):
  """What a question measured on the trained networks of a cell.

  Attributes:
    cell: the cell's id.
    values: measurement -> a number for each seed.
  """

  cell: str
  values: dict[str, Numbers]


Event = Chunk | Record | Failure


def result_from_json(values: Any, where: str = "") -> Record | Failure:
  """Return the `Record` or `Failure` in a line of results.jsonl."""
  raised = isinstance(values, Mapping) and "raised" in values
  return (Failure if raised else Record).from_json(values, where)


def event_to_json(event: Event) -> dict[str, Any]:
  """Return an event in the form that a worker sends."""
  return {"event": event.event, "record": event.to_json()}


def event_from_json(values: Any, where: str = "") -> Event:
  """Return the event from the result of `event_to_json`, checked."""
  if not isinstance(values, Mapping) or set(values) != {"event", "record"}:
    raise SchemaError(f"{where}: not an event: {values!r:.60}")
  if values["event"] == Chunk.event:
    return Chunk.from_json(values["record"], where)
  return result_from_json(values["record"], where)
