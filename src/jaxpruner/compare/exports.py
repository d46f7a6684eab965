"""The table as JSON, CSV, LaTeX and Markdown."""

import csv
import html
import io
import json
import re
from collections.abc import Sequence

from jaxpruner.compare import columns, files
from jaxpruner.compare.table import TableRow, flat

HEADER: Sequence[str] = (
  "task sparsity group algorithm structure distribution options metric mean "
  "std low high difference difference_low difference_high realised "
  "training_flops inference_flops bytes weights noise_accuracy ece latency "
  "seconds step_time training_memory collapsed notes problem"
).split()


def to_json(table: Sequence[TableRow]) -> str:
  """Return the table as a JSON list of objects."""
  return json.dumps([flat(row) for row in table], indent=2) + "\n"


def to_csv(table: Sequence[TableRow]) -> str:
  """Return the table as CSV, with formulas in text made harmless."""
  buffer = io.StringIO()
  writer = csv.DictWriter(buffer, HEADER, lineterminator="\n")
  writer.writeheader()
  for row in table:
    values = flat(row)
    for key, value in values.items():
      if isinstance(value, str):
        values[key] = neutral(value)
    writer.writerow(values)
  return buffer.getvalue()


def neutral(text: str) -> str:
  """Return text that a spreadsheet does not read as a formula.

  A spreadsheet may split a line at semicolons, tabs or quotes. Every place
  where a cell could then start with a formula gets a quote.

  Args:
    text: any text.

  Returns:
    The text, with quotes inserted.

  Example:
    >>> neutral("=1+1"), neutral("lost; =cmd")
    ("'=1+1", "lost; '=cmd")
  """
  text = files.printable(text)
  return re.sub(r"""(^|[,;|"'])(\s*)(?=[=+\-@＝＋－＠])""", r"\1\2'", text)


def to_latex(table: Sequence[TableRow]) -> str:
  """Return booktabs tables, one per task and sparsity."""
  lines = []
  shown = columns.used(table)
  span = len(shown)
  for block in columns.blocks(table):
    lines += [
      f"% {_tex(block.title)}",
      r"\begin{tabular}{l" + "r" * (span - 1) + "}",
      r"\toprule",
      " & ".join(_tex(name) for name in block.names(shown)) + r" \\",
    ]
    for group, rows in block.groups():
      lines.append(r"\midrule")
      lines.append(rf"\multicolumn{{{span}}}{{l}}{{\emph{{{_tex(group)}}}}} \\")
      for row in rows:
        texts = [_tex(text) for text in columns.cells_as_text(row, shown)]
        if row.metric is None:
          cell = rf"\multicolumn{{{span - 1}}}{{l}}{{{texts[1]}}}"
          texts = [texts[0], cell]
        lines.append(" & ".join(texts) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", ""]
  return "\n".join(lines)


_TEX = {
  "\\": r"\textbackslash{}",
  "&": r"\&",
  "%": r"\%",
  "$": r"\$",
  "#": r"\#",
  "_": r"\_",
  "{": r"\{",
  "}": r"\}",
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
  "±": r"$\pm$",
  "×": r"$\times$",
  "–": "--",
}


def _tex(text: str) -> str:
  return "".join(_TEX.get(character, character) for character in text)


def to_markdown(table: Sequence[TableRow]) -> str:
  """Return one Markdown table per task and sparsity."""
  lines = []
  shown = columns.used(table)
  line = lambda texts: "| " + " | ".join(texts) + " |"
  for block in columns.blocks(table):
    lines += [f"**{_markdown(block.title)}**", ""]
    lines.append(line(map(_markdown, block.names(shown))))
    lines.append("|---" + "|---:" * (len(shown) - 1) + "|")
    for group, rows in block.groups():
      lines.append(f"| *{_markdown(group)}* |" + " |" * (len(shown) - 1))
      lines += [
        line(map(_markdown, columns.cells_as_text(row, shown))) for row in rows
      ]
    lines.append("")
  return "\n".join(lines)


def _markdown(text: str) -> str:
  """Return text with the special characters of Markdown and HTML escaped."""
  marked = re.sub(r"([\\`*\[\]|~])", r"\\\1", text)
  marked = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", marked)
  return html.escape(marked, quote=False)
