"""Plain tables and sizes for the commands."""

from collections.abc import Sequence

from jaxpruner import _tools


def size(count: float) -> str:
  """Spell a number of bytes.

  >>> size(999), size(1234567)
  ('999 B', '1.23 MB')
  """
  units = ["B", "kB", "MB", "GB", "TB"]
  while count >= 999.5 and len(units) > 1:
    count /= 1000
    units.pop(0)
  return f"{count:.3g} {units[0]}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Align columns: text to the left, numbers (units and all) to the right."""
  right = [
    i
    for i in range(len(head))
    if rows and all(row[i][:1].isdigit() for row in rows)
  ]
  return "\n".join(_tools.align_columns([head, *rows], right))
