"""Summaries of sparsity, under the name they have in the paper's library.

Here, as there, leaves that are `None` have an entry: None.
"""

import functools
from typing import Any

import jax

from jaxpruner import _leaves
from jaxpruner.inspect import summary
from jaxpruner.inspect.summary import sparsity_table as sparsity_table


def _with_dense(summarize: Any) -> Any:
  @functools.wraps(summarize)
  def summarized(*args: Any, **kwargs: Any) -> dict[str, Any]:
    found = summarize(*args, **kwargs)
    total = kwargs.get("only_total_sparsity", args[1:2] == (True,))
    if total or kwargs.get("only_total_intersection") or True in args:
      return found
    tree = args[0] if args else next(iter(kwargs.values()))
    leaves = jax.tree_util.tree_flatten_with_path(
      tree, is_leaf=lambda leaf: leaf is None
    )[0]
    dense = [path for path, leaf in leaves if leaf is None]
    names = [_leaves.join(_leaves.path_names(path)) for path in dense]
    return dict.fromkeys(names) | found

  return summarized


summarize_intersection = _with_dense(summary.summarize_intersection)
summarize_sparsity = _with_dense(summary.summarize_sparsity)
