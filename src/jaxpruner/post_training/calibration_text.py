"""Texts of several kinds for calibration and evaluation."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxpruner._tools import regular
from jaxpruner.post_training import evaluation


def read(path: str | os.PathLike) -> str:
  """Return the text of a file; what is no UTF-8 is left out."""
  return regular.read_bytes(path).decode("utf-8", "ignore")


def mixed(
  texts: Sequence[str], encode: Callable[[str], Any], length: int, rows: int
) -> np.ndarray:
  """Return windows of tokens, taken from the texts in rotation.

  Args:
    texts: one long text per kind.
    encode: text -> token ids.
    length: tokens per window.
    rows: windows in all.
  """
  share = -(-rows // len(texts))
  columns = []
  for text in texts:
    # Some eight characters per token are enough for any of the tokenizers.
    ids = encode(text[: 8 * share * length])
    columns.append(evaluation.windows(ids, length)[:share])
  if min(map(len, columns)) < share:
    raise ValueError(
      f"a text is too short for {share} windows of {length} tokens; give more"
    )
  return np.stack(columns, axis=1).reshape(-1, length)[:rows]
