"""Plain tables and sizes for the commands."""

from collections.abc import Sequence


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
  lines = [head, *rows]
  widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
  right = [
    bool(rows) and all(row[i][:1].isdigit() for row in rows)
    for i in range(len(head))
  ]
  return "\n".join(
    "  ".join(
      cell.rjust(width) if numeric else cell.ljust(width)
      for cell, width, numeric in zip(line, widths, right, strict=True)
    ).rstrip()
    for line in lines
  )
