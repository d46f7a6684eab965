"""Fill the pages' tables from the library itself when the site is built."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def algorithms_table() -> str:
  """Return the table of registered algorithms and their categories."""
  import jaxpruner

  lines = [
    "| name | class | when | from | masks | needs | cost | paper |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for name in jaxpruner.all_algorithm_names():
    cls = jaxpruner.algorithm_class(name)
    c = cls.category
    lines.append(
      f"| `{name}` | `{cls.__name__}` | {c.when} | {c.start} | "
      f"{'dynamic' if c.dynamic else 'static'} | "
      f"{', '.join(sorted(c.needs)) or '—'} | {c.cost or '—'} | "
      f"{c.paper or '—'} |"
    )
  return "\n".join(lines)


def on_page_markdown(markdown: str, **_) -> str:
  """Replace the markers of a page."""
  if "<!-- algorithms -->" in markdown:
    markdown = markdown.replace("<!-- algorithms -->", algorithms_table())
  if "<!-- readme -->" in markdown:
    text = (ROOT / "README.md").read_text()
    # The README lives one folder up: its links to docs/ are this folder's.
    text = text.replace("](docs/", "](")
    text = re.sub(
      r"\[([^\]]+)\]\((?:examples/|CONTRIBUTING\.md|CHANGELOG\.md)\)",
      r"\1",
      text,
    )
    markdown = markdown.replace("<!-- readme -->", text)
  return markdown
