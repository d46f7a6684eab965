"""Knowledge distillation from the dense row's trained network."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxpruner.compare import spelling
from jaxpruner.compare.tasks.base import Task

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Distillation:
  """Learn from a teacher's outputs (Hinton et al., 2015).

  The loss of a step is (1 - share)·loss + share·T²·KL(teacher ‖ student), with
  the outputs of both networks divided by the temperature T. Outputs are taken
  as logits; classes are the last axis.

  Attributes:
    share: the weight of the teacher.
    temperature: T.

  Example:
    >>> logits = jnp.array([[1.0, 3.0]])
    >>> float(Distillation(0.5).divergence(logits, logits))
    0.0
  """

  share: float
  temperature: float = 2.0

  def __post_init__(self):
    if not _is_number(self.share) or not 0 < self.share <= 1:
      raise ValueError(
        f"distill={self.share!r}: the teacher's part of the loss must be above "
        "0, and at most 1"
      )
    if not _is_number(self.temperature) or not self.temperature > 0:
      raise ValueError(
        f"distill_temperature={self.temperature!r}: must be a positive number"
      )

  def divergence(self, student: jax.Array, teacher: jax.Array) -> jax.Array:
    """Return T²·KL(teacher ‖ student), mean over the examples."""
    ours = jax.nn.log_softmax(student / self.temperature)
    theirs = jax.nn.log_softmax(teacher / self.temperature)
    each = jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)
    return self.temperature**2 * each.mean()

  def mixed(
    self,
    task: Task,
    loss: jax.Array,
    params: PyTree,
    state: PyTree,
    batch: PyTree,
    teacher: tuple[PyTree, PyTree],
  ) -> jax.Array:
    """Return the loss of a batch with the teacher's part.

    Args:
      task: the task.
      loss: its loss of the batch.
      params: the student's parameters.
      state: the student's state.
      batch: the batch.
      teacher: the parameters and the state of the teacher.
    """
    inputs = task.inputs(batch)
    wanted = jax.lax.stop_gradient(task.forward(*teacher, inputs))
    found = task.forward(params, state, inputs)
    return (1 - self.share) * loss + self.share * self.divergence(found, wanted)


def _is_number(value: Any) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def distillation_of(algorithm: str) -> Distillation | None:
  """Return the distillation that an algorithm's options ask for.

  Args:
    algorithm: such as `rigl{distill=0.5,distill_temperature=4}`.

  Returns:
    The distillation, or None.

  Raises:
    ValueError: a value is wrong, or a temperature comes without `distill`.

  Example:
    >>> distillation_of("rigl{distill=0.5}")
    Distillation(share=0.5, temperature=2.0)
  """
  _, options = spelling.algorithm_of(algorithm)
  if "distill" not in options:
    if "distill_temperature" in options:
      raise ValueError("distill_temperature needs distill=SHARE beside it")
    return None
  return Distillation(
    options["distill"], options.get("distill_temperature", 2.0)
  )


def can_distill(task: Task) -> str:
  """Return why a task's rows cannot learn from a teacher, or ""."""
  if type(task).gradient is not Task.gradient:
    return f"task {task.name!r} computes its gradients by itself"
  if type(task).inputs is Task.inputs:
    return f"task {task.name!r} has no `inputs(batch)`"
  return ""
