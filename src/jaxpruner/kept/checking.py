"""Refuse what has no kept form, with the way out."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpruner import _leaves, algorithms, base_updater, mask_calculator
from jaxpruner.algorithms import criteria
from jaxpruner.sparsity_types import Block, Unstructured

# Fields of `BaseUpdater` that mean something for masks only.
_MASKED_ONLY = (
  "continue_sparse",
  "master_dtype",
  "topk_fn",
  "track_exploration",
  "use_packed_masks",
)


class Form(NamedTuple):
  """How a leaf is kept.

  Attributes:
    name: its path.
    target: its sparsity.
    block: the type of its blocks; None: single weights.
    axis: the axis that numbers the layers of a stack; None if it is none.
  """

  name: str
  target: Any
  block: Block | None
  axis: int | None


def rewires(updater: Any) -> bool:
  """Return whether an updater ever changes its masks."""
  return isinstance(updater, algorithms.Rewiring)


def grows_by_gradient(updater: Any) -> bool:
  """Return whether mask updates need gradients of removed weights."""
  return rewires(updater) and isinstance(updater.grow, criteria.Gradient)


def check_kind(name: str, kind: Any) -> None:
  """Raise if a sparsity type has no kept form."""
  if type(kind) not in (Unstructured, Block):
    raise ValueError(
      f"params leaf {name!r}: {kind!r} has no kept form; use Unstructured or "
      "Block, or masked storage"
    )


def forms(view: Any) -> dict[int, Form]:
  """Return place -> how this leaf is kept.

  Args:
    view: the prunable leaves; a stack has one entry per layer.

  Returns:
    One form per prunable leaf of the tree, stacks whole: where layers differ by
    one weight, the target of the larger ones.
  """
  leaves = jax.tree.leaves(view.params)
  found: dict[int, Form] = {}
  for place, names, kind, target, cut in zip(
    view.places, view.names, view.kinds, view.targets, view.cuts, strict=True
  ):
    check_kind(_leaves.join(names), kind)
    own = _leaves.join((*names[:-1], str(names[-1])))
    block = kind if type(kind) is Block else None
    form = Form(own, target, block, None if cut is None else cut.axis)
    before = found.setdefault(place, form)
    shape = np.delete(leaves[place].shape, [] if cut is None else cut.axis)
    units = kind.units(tuple(shape))
    first, count = (
      int(mask_calculator.num_ones(units, s)) for s in (before.target, target)
    )
    # Totals are exact: layers of one sparsity may differ by one weight.
    if abs(first - count) > 1:
      raise ValueError(
        f"params leaf {_leaves.join(names)!r}: its sparsity is {target}, that "
        f"of the first layer of its stack is {before.target}; a kept stack "
        "keeps as many weights in each layer: give them one sparsity, or use "
        "masked storage"
      )
    if count > first:
      found[place] = form
  return found


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
