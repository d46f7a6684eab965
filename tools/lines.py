"""Count lines of code per room: without docstrings, comments and blank lines.

python tools/lines.py [SRC]      (SRC: src/jaxpruner of this checkout)
"""

import ast
import io
import pathlib
import sys
import tokenize

# Rooms that one need not know to change a training step.
APART = (
  "engine", "program", "compare", "sparse", "post_training", "integrations",
  "kept", "scaling",
)  # fmt: skip
BESIDE = ("algorithms/contrib", "inspect", "datasets", "_tools")
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BLANK = {
  tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT,
  tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def count(source: str) -> int:
  """Return the number of lines with code: every line of a statement counts."""
  docstrings: set[int] = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
      first = node.body[0]
      docstrings |= {*range(first.lineno, (first.end_lineno or 0) + 1)}
  lines: set[int] = set()
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type not in _BLANK:
      lines |= {*range(token.start[0], token.end[0] + 1)}
  return len(lines - docstrings)


def rooms(root: pathlib.Path) -> dict[str, int]:
  """Return folder -> lines; files beside the folders are the room "top"."""
  found: dict[str, int] = {}
  for path in sorted(root.rglob("*.py")):
    room = path.parent.relative_to(root).as_posix().replace(".", "top", 1)
    found[room] = found.get(room, 0) + count(path.read_text())
  return found


def main() -> None:
  default = pathlib.Path(__file__).parents[1] / "src" / "jaxpruner"
  root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
  found = rooms(root)
  for room, lines in found.items():
    print(f"{room:32} {lines:6,}")
  core = {r: n for r, n in found.items() if r.split("/")[0] not in APART}
  print(f"{'core: without ' + ', '.join(APART)}: {sum(core.values()):,}")
  inner = sum(n for room, n in core.items() if room not in BESIDE)
  print(f"{'of these without ' + ', '.join(BESIDE)}: {inner:,}")


if __name__ == "__main__":
  main()
