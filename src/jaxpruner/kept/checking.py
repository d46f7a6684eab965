"""Refuse what has no kept form, with the way out."""

import dataclasses
from typing import Any

from jaxpruner import _leaves, algorithms, base_updater, sparsity_types
from jaxpruner.algorithms import criteria

# Fields of `BaseUpdater` that mean something for masks only.
_MASKED_ONLY = (
  "continue_sparse",
  "master_dtype",
  "topk_fn",
  "track_exploration",
  "use_packed_masks",
)


def rewires(updater: Any) -> bool:
  """Return whether an updater ever changes its masks."""
  return isinstance(updater, algorithms.Rewiring)


def check_kind(name: str, kind: Any) -> None:
  """Raise if a sparsity type has no kept form."""
  if type(kind) is not sparsity_types.Unstructured:
    raise ValueError(
      f"params leaf {name!r}: {kind!r} has no kept form; use Unstructured, or "
      "masked storage"
    )


def refuse_stacks(view: Any) -> None:
  """Raise if a leaf is a stack of layers."""
  for names, cut in zip(view.names, view.cuts, strict=True):
    if cut is not None:
      raise ValueError(
        f"params leaf {_leaves.join(names)!r} is a layer of a stack, which has "
        'no kept form; set stacked_axis="none" to keep one mask for the whole '
        "leaf, or use masked storage"
      )


def check_updater(updater: Any) -> None:
  """Raise if an updater cannot run at kept size."""
  name = type(updater).__name__
  if not isinstance(updater, base_updater.BaseUpdater):
    raise ValueError(
      f"KeptUpdater: updater={updater!r} must be an updater, such as "
      "jaxpruner.RigL(…)"
    )
  check_kind("every", updater.sparsity_type)
  if not isinstance(updater, algorithms.StaticRandomSparse):
    raise ValueError(
      f"KeptUpdater: {name} has no kept form: its number of weights is not "
      "constant, or it needs the weights that are removed; use static_sparse, "
      "set or rigl, or train masked and switch with from_masked"
    )
  if not updater.is_sparse_gradients:
    raise ValueError(
      f"KeptUpdater: {name} with is_sparse_gradients=False reads gradients of "
      "weights that are not stored; set it to True"
    )
  for field in dataclasses.fields(base_updater.BaseUpdater):
    value = vars(updater)[field.name]
    if field.name in _MASKED_ONLY and value != field.default:
      raise ValueError(
        f"KeptUpdater: {field.name}={value!r} has no effect at kept size; "
        "leave it out, or use masked storage"
      )
  own = type(updater).get_initial_masks
  if own is not algorithms.StaticRandomSparse.get_initial_masks:
    raise ValueError(
      f"KeptUpdater: {name} has get_initial_masks of its own, but positions "
      "are drawn at random; use masked storage"
    )
  if isinstance(updater, algorithms.Rewiring):
    _check_rewiring(updater)


def _check_rewiring(updater: algorithms.Rewiring) -> None:
  """Raise if a sparse trainer has parts without a kept form."""
  name, base = type(updater).__name__, algorithms.Rewiring
  plain = all(
    getattr(type(updater), part) is getattr(base, part)
    for part in ("update_state", "survivors", "goals", "drop_scores",
                 "grow_scores", "see")
  )  # fmt: skip
  if (
    not plain
    or type(updater.drop) is not criteria.Magnitude
    or type(updater.grow) not in (criteria.Random, criteria.Gradient)
    or updater.redistribute is not None
  ):
    raise ValueError(
      f"KeptUpdater: {name} with drop={updater.drop!r}, grow={updater.grow!r}, "
      f"redistribute={updater.redistribute!r} has no kept form; drop by "
      "Magnitude(), grow by Random() or Gradient(), without redistribution"
    )
  if not updater.skip_gradients:
    raise ValueError(
      f"KeptUpdater: {name} with skip_gradients=False trains weights in the "
      "step in which they grow, before they have a gradient; set it to True"
    )
