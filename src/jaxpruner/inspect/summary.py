"""Summaries of sparse trees, in exact integers."""

import math
import warnings
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxpruner import _leaves, _tools, mask_calculator
from jaxpruner.updater import prunable
from jaxpruner.updater.state import find_state

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


def count_nonzero(leaf: Any, packed: bool = False, name: str = "kernel") -> Any:
  """Count the nonzero entries (the ones of packed bits) of a leaf, exactly.

  Under `jit` the count is traced: uint32, float32 from 2**32 entries on.
  """
  if isinstance(leaf, jax.core.Tracer) and not is_key(leaf):
    return _count_traced(leaf, packed)
  _check_values(leaf, name)
  if packed:
    return sum(
      int(np.bitwise_count(b).sum(dtype=np.int64)) for b in _blocks(leaf)
    )
  return sum(int(np.count_nonzero(b)) for b in _blocks(leaf))


def _count_traced(leaf: Any, packed: bool) -> Any:
  ones = (leaf != 0).astype(jnp.uint32)
  if packed:
    ones = jax.lax.population_count(leaf).astype(jnp.uint32)
  small = leaf.size * (8 if packed else 1) < 1 << 32
  return jnp.sum(ones, dtype=jnp.uint32 if small else jnp.float32)


def _refuse_packed(leaf: Any, count: Any, name: str) -> Any:
  """Return the count of a leaf; raise, or return NaN, if it is packed bits."""
  if getattr(leaf, "dtype", None) != np.uint8 or not _size(leaf):
    return count
  if isinstance(leaf, jax.core.Tracer):
    # The values are unknown here, so that nothing can be raised.
    return jnp.where(jnp.max(leaf) > 1, jnp.nan, count.astype(jnp.float32))
  if any(b.size and int(b.max()) > 1 for b in _blocks(leaf)):
    raise ValueError(
      f"leaf {name!r} is uint8 with values above 1: packed bits of a mask, "
      "whose shape is unknown here; pass the parameters too, "
      "summarize_sparsity(masks, params=params)"
    )
  return count


def _check_values(leaf: Any, name: str) -> None:
  if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct) and not is_key(
    leaf
  ):
    raise ValueError(
      f"leaf {name!r} is a {type(leaf).__name__} and holds no values to count; "
      "summarise concrete arrays, outside jit (sparsity_table takes shapes)"
    )
  if is_key(leaf):
    raise ValueError(
      f"leaf {name!r} is a PRNG key, {leaf.dtype} of shape {leaf.shape}, which "
      "has no zeros to count; leave it out of the tree, or pass "
      "jax.random.key_data of it"
    )
  if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
    raise ValueError(
      f"leaf {name!r} is {leaf!r}, not an array of numbers; leave it out of "
      "the tree"
    )


def is_key(leaf: Any) -> bool:
  """Tell whether a leaf is an array of typed PRNG keys."""
  dtype = getattr(leaf, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


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

  Works inside `jit` too, where fractions and `_nparams_nnz` are traced.

  Args:
    param_tree: tree of parameters, or of masks (`None` leaves are left out).
    only_total_sparsity: return the totals only, not the leaves.
    params: for packed masks, the parameters (or shapes) they belong to. Without
      them packed masks are refused; inside `jit`, where their values are
      unknown, the result is NaN.

  Returns:
    `{"a/b/kernel": fraction, …, "_total_sparsity": float, "_nparams": int,
    "_nparams_nnz": int}`.

  Raises:
    ValueError: a leaf is packed bits and `params` is missing.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> jaxpruner.summarize_sparsity({"w": jnp.array([0.0, 1.0, 0.0, 2.0])})
    {'w': 0.5, '_total_sparsity': 0.5, '_nparams': 4, '_nparams_nnz': 2}
  """
  rows = []
  if params is None:
    for names, leaf in _leaves.flatten_with_names(param_tree)[0]:
      name = _leaves.join(names)
      count = _refuse_packed(leaf, count_nonzero(leaf, name=name), name)
      rows.append((names, _size(leaf), count))
  else:
    leaves = _leaves.flatten_with_names(params)[0]
    entries = _leaves.align(params, param_tree)
    for (names, leaf), entry in zip(leaves, entries, strict=True):
      if entry is not None:
        name = _leaves.join(names)
        packed = _is_packed(entry, leaf, name)
        rows.append((names, _size(leaf), count_nonzero(entry, packed, name)))
  size, ones = sum(r[1] for r in rows), _total(rows)
  summary: dict[str, Any] = {}
  if not only_total_sparsity:
    summary = {_leaves.join(names): _removed(k, n) for names, n, k in rows}
  summary["_total_sparsity"] = _removed(ones, size)
  summary["_nparams"] = size
  summary["_nparams_nnz"] = ones
  return summary


def _total(rows: list[Any]) -> Any:
  """Add the counts: exactly outside `jit`, and in uint32 inside if it fits."""
  counts = [count for *_, count in rows]
  if not any(isinstance(count, jax.Array) for count in counts):
    return sum(counts)
  whole = all(jnp.issubdtype(jnp.result_type(c), jnp.integer) for c in counts)
  fits = sum(size for _, size, _ in rows) < 1 << 32
  dtype = jnp.uint32 if whole and fits else jnp.float32
  return jnp.sum(jnp.stack([jnp.asarray(c).astype(dtype) for c in counts]))


def _removed(ones: Any, size: int) -> Any:
  """Return the fraction of zeros, given the number of nonzeros."""
  if not isinstance(ones, jax.Array):
    return _fraction(size - ones, size)
  if jnp.issubdtype(ones.dtype, jnp.integer):
    return (np.uint32(size) - ones).astype(jnp.float32) / np.float32(size)
  return 1 - ones / np.float32(size)


def warn_if_contradicted(params: PyTree, masks: PyTree, caller: str) -> None:
  """Warn of weights that masks remove although they are not zero.

  Args:
    params: the parameters.
    masks: their masks, `None` for dense leaves; traced leaves are left out.
    caller: the function that goes on with the masks, for the message.
  """
  found = {}
  leaves = _leaves.flatten_with_names(params)[0]
  for (names, leaf), mask in zip(
    leaves, _leaves.align(params, masks), strict=True
  ):
    traced = isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct)
    if mask is None or traced or np.shape(mask) != np.shape(leaf):
      continue
    pairs = zip(_blocks(leaf), _blocks(mask), strict=True)
    with np.errstate(invalid="ignore"):  # NaN is not zero
      count = sum(int(np.count_nonzero((w != 0) & (m == 0))) for w, m in pairs)
    if count:
      found[_leaves.join(names)] = count
  if found:
    first = ", ".join(f"{name} ({count:,})" for name, count in found.items())
    first = first if len(found) <= 4 else f"{first.split(', ')[0]}, …"
    warnings.warn(
      f"{caller}: the masks remove {sum(found.values()):,} weights that are "
      f"not zero in params: {first}; the masks win, so the result differs from "
      "params. If these masks belong to other params or to an earlier step, "
      "pass the right ones; else mask the params first with "
      "pruner.post_gradient_update(params, opt_state)",
      stacklevel=3,
    )


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
    updater: adds sparsity types, targets and the reason why a leaf is pruned or
      not, and computes counts if there are neither masks nor values. A stacked
      leaf has a line for each of its layers.
    opt_state: the optimizer state; adds the number of skipped mask updates.

  Returns:
    One line per leaf, then the totals of the prunable leaves and of all leaves.

  Example:
    >>> import jax.numpy as jnp, jaxpruner
    >>> params = {"w": jnp.array([[0.0, 2.0], [0.0, 1.0]])}
    >>> print(jaxpruner.sparsity_table(params).splitlines()[-1])
    all                             50.00%    2 of 4
  """
  skipped = None
  if opt_state is not None:
    state = find_state(opt_state)
    masks = state.masks if masks is None else masks
    skipped = state.skipped
  table: list[tuple[str, ...]] = [
    ("leaf", "shape", "type", "target", "realised", "ones", "why")
  ]
  counts: dict[str, list[tuple[int, int]]] = {"prunable": [], "all": []}
  for row in _rows(params, masks, updater):
    size = _size(row.leaf)
    ones = _ones(*row[1:5], masks, row.name)
    counts["all"].append((ones, size))
    if row.is_pruned:
      counts["prunable"].append((ones, size))
    masked = "masked" if row.kind is None else str(row.kind)
    table.append(
      (
        row.name,
        "×".join(map(str, np.shape(row.leaf))) or "scalar",
        masked if row.is_pruned else "dense",
        "" if row.target is None else f"{row.target:.2%}",
        *_realised(ones, size),
        row.why,
      )
    )
  if updater is None:
    table = [row[:-1] for row in table]
  for label, pairs in counts.items():
    total = _realised(sum(k for k, _ in pairs), sum(n for _, n in pairs))
    table.append((label, "", "", "", *total, "")[: len(table[0])])
  lines = _tools.align_columns(table)
  rule = "─" * max(map(len, lines))
  lines = [lines[0], rule, *lines[1:-2], rule, *lines[-2:]]
  absent = _leaves.is_absent(skipped)
  refused = 0 if absent else int(np.sum(np.asarray(skipped)))
  if refused:
    lines.append(f"{refused} mask updates were skipped: a score was not finite")
  return "\n".join(lines)


class _Row(NamedTuple):
  """One line of `sparsity_table`: a leaf, or a layer of a stacked leaf."""

  name: str
  leaf: Any
  mask: Any
  target: Any
  kind: Any
  why: str

  @property
  def is_pruned(self) -> bool:
    return self.mask is not None or self.target is not None


def _rows(params: PyTree, masks: PyTree, updater: Any) -> list[_Row]:
  leaves = _leaves.flatten_with_names(params)[0]
  entries = _leaves.align(params, masks)
  whole = [
    _Row(_leaves.join(names), leaf, entry, None, None, "")
    for (names, leaf), entry in zip(leaves, entries, strict=True)
  ]
  if updater is None:
    return whole
  why = prunable.reasons(updater, params)
  view = updater.view(params)
  own: dict[int, list[_Row]] = {}
  for place, cut, names, target, kind in zip(
    view.places, view.cuts, view.names, view.targets, view.kinds, strict=True
  ):
    leaf, mask = leaves[place][1], entries[place]
    if cut is not None:
      if mask is not None and _is_packed(mask, leaf, _leaves.join(names)):
        mask = mask_calculator.unpack_mask(jnp.asarray(mask), leaf.shape)
      mask = None if mask is None else cut.take(mask, leaf.shape)
      leaf = cut.take(leaf, leaf.shape)
    row = _Row(_leaves.join(names), leaf, mask, target, kind, why[place])
    own.setdefault(place, []).append(row)
  dense = [[row._replace(why=why[i])] for i, row in enumerate(whole)]
  return [row for i, rows in enumerate(dense) for row in own.get(i, rows)]


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
  known = not isinstance(leaf, jax.ShapeDtypeStruct) and not is_key(leaf)
  if not known or masks is not None:
    return _size(leaf)
  return count_nonzero(leaf, name=name)
