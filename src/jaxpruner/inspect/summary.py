"""Summaries of sparse trees, in exact integers."""

import math
from typing import Any, TypeAlias

import jax
import jax.core
import numpy as np

from jaxpruner import _leaves, _tools
from jaxpruner._state import find_state

PyTree: TypeAlias = Any

# Entries counted at once: few enough for int32 and for memory.
_CHUNK = 1 << 26


def _blocks(leaf: Any):
  """Yield a leaf in pieces; a broadcast leaf is never materialised."""
  array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
  if array.size <= _CHUNK or array.ndim == 0:
    yield array
    return
  rows = max(1, _CHUNK // max(1, array[0].size))
  for start in range(0, array.shape[0], rows):
    piece = array[start : start + rows]
    if piece.shape[0] == 1 and piece.size > _CHUNK:
      yield from _blocks(piece[0])
    else:
      yield piece


def _size(leaf: Any) -> int:
  return math.prod(np.shape(leaf))


def count_nonzero(leaf: Any, packed: bool = False, name: str = "kernel") -> int:
  """Count the nonzero entries (the ones of packed bits) of a leaf, exactly."""
  _check_values(leaf, name)
  if packed:
    return sum(
      int(np.bitwise_count(b).sum(dtype=np.int64)) for b in _blocks(leaf)
    )
  return sum(int(np.count_nonzero(b)) for b in _blocks(leaf))


def _check_values(leaf: Any, name: str) -> None:
  if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
    raise ValueError(
      f"leaf {name!r} is a {type(leaf).__name__} and holds no values to count; "
      "summarise concrete arrays, outside jit (sparsity_table takes shapes)"
    )
  if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
    raise ValueError(
      f"leaf {name!r} is {leaf!r}, not an array of numbers; leave it out of "
      "the tree"
    )


def _is_packed(mask: Any, param: Any, name: str) -> bool:
  if np.shape(mask) == np.shape(param):
    return False
  if math.prod(np.shape(mask)) != -(-_size(param) // 8):
    raise ValueError(
      f"mask of {name!r} has shape {np.shape(mask)}, neither that of the "
      f"parameter, {np.shape(param)}, nor packed; pass the params it was made "
      "for"
    )
  return True


def summarize_sparsity(
  param_tree: PyTree,
  only_total_sparsity: bool = False,
  *,
  params: PyTree = None,
) -> dict[str, Any]:
  """Return the fraction of zeros of each leaf, and of all together.

  Args:
    param_tree: tree of parameters, or of masks (`None` leaves are left out).
    only_total_sparsity: return the totals only, not the leaves.
    params: for packed masks, the parameters (or shapes) they belong to.

  Returns:
    `{"a/b/kernel": fraction, …, "_total_sparsity": float, "_nparams": int,
    "_nparams_nnz": int}`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> jaxpruner.summarize_sparsity({"w": jnp.array([0.0, 1.0, 0.0, 2.0])})
    {'w': 0.5, '_total_sparsity': 0.5, '_nparams': 4, '_nparams_nnz': 2}
  """
  rows = []
  if params is None:
    for names, leaf in _leaves.flatten_with_names(param_tree)[0]:
      count = count_nonzero(leaf, name=_leaves.join(names))
      rows.append((names, _size(leaf), count))
  else:
    leaves = _leaves.flatten_with_names(params)[0]
    entries = _leaves.align(params, param_tree)
    for (names, leaf), entry in zip(leaves, entries, strict=True):
      if entry is not None:
        name = _leaves.join(names)
        packed = _is_packed(entry, leaf, name)
        rows.append((names, _size(leaf), count_nonzero(entry, packed, name)))
  size, ones = sum(r[1] for r in rows), sum(r[2] for r in rows)
  summary: dict[str, Any] = {}
  if not only_total_sparsity:
    summary = {_leaves.join(names): _fraction(n - k, n) for names, n, k in rows}
  summary["_total_sparsity"] = _fraction(size - ones, size)
  summary["_nparams"] = size
  summary["_nparams_nnz"] = ones
  return summary


def summarize_intersection(
  mask_tree1: PyTree,
  mask_tree2: PyTree,
  only_total_intersection: bool = False,
) -> dict[str, Any]:
  """Return the fraction of the first masks' ones that the second masks share.

  Leaves without a mask in either tree are left out. Both trees may be packed.

  Args:
    mask_tree1: the masks whose ones are counted.
    mask_tree2: the masks they are compared with, of the same structure.
    only_total_intersection: return the total only, not the leaves.

  Returns:
    `{"a/b/kernel": fraction, …, "_total_intersection": fraction}`.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> first = {"w": jnp.array([1, 1, 0, 0], jnp.uint8)}
    >>> second = {"w": jnp.array([1, 0, 0, 1], jnp.uint8)}
    >>> jaxpruner.summarize_intersection(first, second)
    {'w': 0.5, '_total_intersection': 0.5}
  """
  leaves = _leaves.flatten_with_names(mask_tree1)[0]
  others = _leaves.align(mask_tree1, mask_tree2)
  summary: dict[str, Any] = {}
  shared_total = ones_total = 0
  for (names, mask), other in zip(leaves, others, strict=True):
    if other is None:
      continue
    for each in (mask, other):
      _check_values(each, _leaves.join(names))
      if not np.issubdtype(np.asarray(each).dtype, np.integer):
        raise ValueError(
          f"leaf {_leaves.join(names)!r} is {np.asarray(each).dtype}, not a "
          "uint8 mask; pass masks, such as find_state(opt_state).masks"
        )
    if np.shape(mask) != np.shape(other):
      raise ValueError(
        f"masks of {_leaves.join(names)!r} have shapes {np.shape(mask)} and "
        f"{np.shape(other)}; compare masks of the same parameters, both packed "
        "or both not"
      )
    shared = ones = 0
    for a, b in zip(_blocks(mask), _blocks(other), strict=True):
      shared += int(np.bitwise_count(a & b).sum(dtype=np.int64))
      ones += int(np.bitwise_count(a).sum(dtype=np.int64))
    if not only_total_intersection:
      summary[_leaves.join(names)] = _fraction(shared, ones)
    shared_total += shared
    ones_total += ones
  summary["_total_intersection"] = _fraction(shared_total, ones_total)
  return summary


def _fraction(part: int, whole: int) -> float:
  return part / whole if whole else 0.0


def sparsity_table(
  params: PyTree,
  masks: PyTree = None,
  *,
  updater: Any = None,
  opt_state: PyTree = None,
) -> str:
  """Return a table of the sparsity of every leaf, as text.

  Args:
    params: tree of parameters, or of shapes (`jax.eval_shape`'s result) to see
      the targets before anything is allocated.
    masks: masks, packed or not; by default the masks of `opt_state`, and
      without these the zeros of `params`.
    updater: adds sparsity types and targets, and computes counts if there are
      neither masks nor values.
    opt_state: the optimizer state; adds the number of skipped mask updates.

  Returns:
    One line per leaf, then the totals of the prunable leaves and of all leaves.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {"w": jnp.array([[0.0, 2.0], [0.0, 1.0]])}
    >>> print(jaxpruner.sparsity_table(params).splitlines()[-1])
    all                             50.00%    2 of 4
  """
  leaves = _leaves.flatten_with_names(params)[0]
  skipped = None
  if opt_state is not None:
    state = find_state(opt_state)
    masks = state.masks if masks is None else masks
    skipped = state.skipped
  entries = _leaves.align(params, masks)
  targets: list[Any] = [None] * len(leaves)
  kinds: list[Any] = [None] * len(leaves)
  if updater is not None:
    view = updater.view(params)
    for i, target, kind in zip(
      view.places, view.targets, view.kinds, strict=True
    ):
      targets[i], kinds[i] = target, kind
  table = [("leaf", "shape", "type", "target", "realised", "ones")]
  counts: dict[str, list[tuple[int, int]]] = {"prunable": [], "all": []}
  for row, (names, leaf) in enumerate(leaves):
    mask, target, kind = entries[row], targets[row], kinds[row]
    is_pruned = mask is not None or target is not None
    name = _leaves.join(names)
    ones, size = _ones(leaf, mask, target, kind, masks, name), _size(leaf)
    counts["all"].append((ones, size))
    if is_pruned:
      counts["prunable"].append((ones, size))
    shape = "×".join(map(str, np.shape(leaf))) or "scalar"
    masked = "masked" if kind is None else str(kind)
    table.append(
      (
        name,
        shape,
        masked if is_pruned else "dense",
        "" if target is None else f"{target:.2%}",
        *_realised(ones, size),
      )
    )
  for label, pairs in counts.items():
    total = _realised(sum(k for k, _ in pairs), sum(n for _, n in pairs))
    table.append((label, "", "", "", *total))
  lines = _tools.align_columns(table)
  rule = "─" * max(map(len, lines))
  lines = [lines[0], rule, *lines[1:-2], rule, *lines[-2:]]
  absent = _leaves.is_absent(skipped)
  refused = 0 if absent else int(np.sum(np.asarray(skipped)))
  if refused:
    lines.append(f"{refused} mask updates were skipped: a score was not finite")
  return "\n".join(lines)


def _realised(ones: int, size: int) -> tuple[str, str]:
  """Return the last two cells of a row: sparsity, and number of ones."""
  return f"{_fraction(size - ones, size):.2%}", f"{ones:,} of {size:,}"


def _ones(
  leaf: Any, mask: Any, target: Any, kind: Any, masks: Any, name: str
) -> int:
  if mask is not None:
    return count_nonzero(mask, _is_packed(mask, leaf, name), name)
  if target is not None and hasattr(kind, "kept"):
    return kind.kept(np.shape(leaf), target)
  if isinstance(leaf, jax.ShapeDtypeStruct) or masks is not None:
    return _size(leaf)
  return count_nonzero(leaf, name=name)
