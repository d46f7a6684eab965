"""Small helpers that several rooms share; nothing in this file knows JAX."""

import difflib
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any


def nearest(word: Any, words: Iterable[str]) -> str:
  """Return a hint that names the valid word closest to a wrong one.

  Args:
    word: what the user wrote.
    words: the valid words.

  Returns:
    The end of an error message.

  Example:
    >>> nearest("magnitud", ["magnitude", "random"])
    "did you mean 'magnitude'?"
    >>> nearest("x", ["magnitude", "random"])
    "choose from 'magnitude', 'random'"
  """
  words = sorted(map(str, words))
  spelled = word if isinstance(word, str) else ""
  close = difflib.get_close_matches(spelled, words, n=1, cutoff=0.5)
  if close:
    return f"did you mean {close[0]!r}?"
  shown = ", ".join(map(repr, words[:12])) + (", …" if len(words) > 12 else "")
  return f"choose from {shown}" if words else "there is nothing to choose from"


def words(name: str) -> list[str]:
  """Return the words of a name in camel or snake case, and its numbers.

  Args:
    name: the name of a module or an array.

  Returns:
    The words as they are written.

  Example:
    >>> words("LayerNorm_0"), words("ln_f"), words("normal_dense")
    (['Layer', 'Norm', '0'], ['ln', 'f'], ['normal', 'dense'])
  """
  return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)


def align_columns(
  rows: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
  """Return the rows of a table as lines with aligned columns.

  Args:
    rows: the cells, one row of strings per line; all rows of one length.
    right: indices of the columns that are aligned to the right.

  Returns:
    One line per row, two spaces between columns, no spaces at the end.

  Example:
    >>> align_columns([("leaf", "size"), ("w", "12")], right=[1])
    ['leaf  size', 'w       12']
  """
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  ".join(
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  ]


def is_number(value: Any) -> bool:
  """Return whether a value is an int or a float; a bool is none.

  Args:
    value: anything.

  Returns:
    Whether it is a number.

  Example:
    >>> is_number(0.5), is_number(True), is_number("0.5")
    (True, False, False)
  """
  return isinstance(value, int | float) and not isinstance(value, bool)


def check_int(owner: str, argument: str, value: Any, least: int = 1) -> None:
  """Raise if a value is no integer of at least `least`; a bool is none.

  Args:
    owner: the class or function whose argument it is.
    argument: the argument's name.
    value: what was passed.
    least: the smallest value allowed.

  Raises:
    ValueError: names the owner, the argument, the value and the rule.

  Example:
    >>> check_int("NByM", "m", 4)
    >>> check_int("NByM", "m", True)
    Traceback (most recent call last):
    ValueError: NByM: m=True must be an integer of at least 1
  """
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise ValueError(
      f"{owner}: {argument}={value!r} must be an integer of at least {least}"
    )


def path_hash(path: str) -> int:
  """Return a number for a leaf's path, to seed random draws of that leaf.

  A number from the path, not from the position: the order of leaves never
  matters.

  Args:
    path: the leaf's name, such as `"encoder/kernel"`.

  Returns:
    The CRC-32 of the name, below 2**32.

  Example:
    >>> path_hash("kernel")
    1574083243
  """
  return zlib.crc32(path.encode())
