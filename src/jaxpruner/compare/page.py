"""report.html: the table, the pictures and the protocol in one file."""

import html
import json
import pathlib
import re
from collections.abc import Sequence

from jaxpruner.compare import columns, files, pictures, run_folder, table
from jaxpruner.compare.questions import asking
from jaxpruner.compare.run_folder import RunInfo
from jaxpruner.compare.table import TableRow
from jaxpruner.inspect import plot

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; margin: 2rem auto;
  max-width: 1360px; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { margin-top: 2.2rem; }
.meta { color: #555; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums;
  font-size: 13px; margin: .6rem 0 1.2rem; }
th, td { padding: .28rem .45rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: #fff; }
thead th { border-bottom: 2px solid #1b1b1b; border-top: 2px solid #1b1b1b; }
tr.group td { font-style: italic; text-align: left; padding-top: .7rem;
  border-bottom: 1px solid #ccc; }
tbody tr:last-child td { border-bottom: 2px solid #1b1b1b; }
td.failed, td.open { color: #a40000; text-align: left; white-space: normal; }
td.open { color: #555; }
figure { margin: 1.2rem 0; overflow-x: auto; }
figcaption { color: #555; max-width: 70ch; }
figure svg { max-width: 100%; height: auto; }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto;
  font-size: 12.5px; }
/* A shadow at the right edge says that the table goes on there. */
.scroll { overflow-x: auto; background:
  linear-gradient(to left, #fff 30%, #fff0) right / 40px 100% no-repeat local,
  linear-gradient(to left, #0003, #0000) right / 14px 100% no-repeat scroll; }
@media (max-width: 700px) {
  body { margin: 1rem auto; }
  figure svg { max-width: max(100%, 560px); }
}
.verdict { max-width: 80ch; } .verdict li { margin: .4rem 0; }
"""

_CAPTIONS = {
  "metric": "The metric against sparsity, a panel per category: algorithms in "
  "different panels had different budgets. The band is the dense network's "
  "95 % interval; the dashed line a dense network with as many weights as the "
  "sparse ones.",
  "layers": "Where the weights were removed.",
  "masks": "Churn: weights that entered the mask since the previous snapshot, "
  "relative to those kept. Exploration: weights that were active in at least "
  "one snapshot.",
  "loss": "Training loss, averaged over each twentieth of training and over "
  "seeds.",
}

_PROTOCOL = """
For one seed every algorithm starts from the same weights and sees the same
batches in the same order, with the same optimizer, learning-rate schedule and
number of steps; only the pruner differs. Intervals are Student's t at 95 %;
differences to dense are paired by seed. A cell whose realised sparsity differs
from the request fails. FLOPs are counted on the traced network, weighted by
the masks; a training step counts the forward pass and both gradients. Bytes
store a bit per prunable weight and the kept values. Latency and time are
measured; everything else is the same when the command runs again.
"""


def write_report(paths: Sequence[str], out: str) -> list[TableRow]:
  """Write report.html and the pictures.

  Args:
    paths: run folders; several are shown one after another.
    out: an existing or new folder.

  Returns:
    the rows of all runs.
  """
  everything: list[TableRow] = []
  sections = []
  target = pathlib.Path(out)
  for i, path in enumerate(paths):
    info = run_folder.read_run(path)
    rows = table.rows(path)
    if not rows:
      raise files.RunFolderError(
        f"{path}: its run.json lists no cell, so there is nothing to report"
      )
    everything += rows
    # Numbered: two runs may be of one task.
    safe = re.sub(r"[^\w.-]", ".", rows[0].task)
    prefix = "" if len(paths) == 1 else f"{i + 1}-{safe}-"
    figures = pictures.draw_all(rows, run_folder.read_steps(path))
    answer = asking.answer_of(path)
    own = answer.figures() if answer else {}
    figures |= own
    inline = {}
    for name, figure in figures.items():
      salt = f"{path}/{name}"
      for kind in ("png", "svg"):
        content = plot.render(figure, kind, salt)
        files.write_atomic(target / f"{prefix}{name}.{kind}", content)
        inline[name] = content.decode() if kind == "svg" else ""
      pictures.plt.close(figure)
    shown = ""
    if answer is not None:
      captions = answer.question.captions
      drawn = {k: _figure(captions.get(k, ""), inline.pop(k)) for k in own}
      shown = asking.as_html(answer, drawn)
    sections.append(_section(info, rows, inline, shown))
  page = (
    "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
    "<meta name='viewport' content='width=device-width'>"
    f"<title>jaxpruner compare</title><style>{_CSS}</style></head><body>"
    + "".join(sections)
    + f"<h2>Protocol</h2><p style='max-width:75ch'>{html.escape(_PROTOCOL)}</p>"
    "</body></html>\n"
  )
  files.write_atomic(target / "report.html", page.encode())
  return everything


def _section(
  info: RunInfo,
  rows: Sequence[TableRow],
  inline: dict[str, str],
  answer: str,
) -> str:
  escape = lambda value: html.escape(str(value))
  versions = info.versions
  parts = [
    f"<h1>{escape(rows[0].task)}: sparse training compared</h1>",
    f"<p class='meta'>{escape(info.settings.get('seeds', ''))} seeds; "
    f"{escape(info.device)}; jaxpruner "
    f"{escape(versions.get('jaxpruner', ''))}, jax "
    f"{escape(versions.get('jax', ''))}; started {escape(info.started)}<br>"
    f"<code>{escape(info.command)}</code></p>",
  ]
  parts += [f"<p class='meta'>{escape(note)}</p>" for note in info.notes]
  parts.append(answer)
  order = ("metric", "layers", "masks", "loss")
  figures = {
    name: _figure(_CAPTIONS[name], inline[name])
    for name in order
    if name in inline
  }
  parts.append(figures.pop("metric", ""))
  shown = columns.used(rows)
  for block in columns.blocks(rows):
    parts.append(f"<h2>{escape(block.title)}</h2>")
    parts.append(_html_table(block, shown))
    parts.append(_notes(block.rows))
  parts += figures.values()
  everything = json.dumps(info.to_json(), indent=2)
  parts.append(f"<h2>Settings</h2><pre>{escape(everything)}</pre>")
  return "".join(parts)


def _notes(rows: Sequence[TableRow]) -> str:
  """Say which leaves stayed dense, once for all structures that share it."""
  found: dict[str, dict[str, None]] = {}
  for row in rows:
    if row.notes:
      name = " ".join(filter(None, (row.structure, row.options)))
      found.setdefault(row.notes, {})[name] = None
  return "".join(
    f"<p class='meta'>{html.escape(', '.join(names))}: {html.escape(notes)}."
    "</p>"
    for notes, names in found.items()
  )


def _figure(caption: str, svg: str) -> str:
  # An inlined drawing must not bring its XML prologue along.
  body = svg[svg.index("<svg") :]
  text = html.escape(caption)
  return f"<figure>{body}<figcaption>{text}</figcaption></figure>"


def _html_table(block: columns.Block, shown: Sequence[columns.Column]) -> str:
  head = "".join(f"<th>{html.escape(name)}</th>" for name in block.names(shown))
  lines = [f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>"]
  for group, rows in block.groups():
    lines.append(
      f"<tr class='group'><td colspan='{len(shown)}'>"
      f"{html.escape(group)}</td></tr>"
    )
    for row in rows:
      texts = [html.escape(text) for text in columns.cells_as_text(row, shown)]
      cells = "".join(f"<td>{text}</td>" for text in texts)
      if row.metric is None:
        kind = "open" if row.problem == table.NOT_FINISHED else "failed"
        cells = (
          f"<td>{texts[0]}</td><td class='{kind}' "
          f"colspan='{len(shown) - 1}'>{texts[1]}</td>"
        )
      lines.append(f"<tr>{cells}</tr>")
  lines.append("</tbody></table></div>")
  return "".join(lines)
