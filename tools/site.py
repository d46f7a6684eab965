"""Write the pages of the site that come from the library, and build it.

    python tools/site.py FOLDER

Pages are made before the generator runs, not by hooks inside it, so that the
generator needs to know Markdown and mkdocstrings only. FOLDER/docs gets the
pages of docs/ with their markers replaced, the gallery and the notebooks;
FOLDER/mkdocs.yml the configuration; FOLDER/src the source whose docstrings are
read; FOLDER/site the site. Any warning fails.
"""

import argparse
import importlib
import inspect
import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Both read the same configuration; CONTRIBUTING.md says which is used, and why.
COMMANDS = {
  "mkdocs": ("mkdocs", "build", "--strict", "--quiet"),
  "zensical": ("zensical", "build", "--strict"),
}
GENERATOR = "zensical"


def algorithms_table() -> str:
  """Return the table of registered algorithms and their categories."""
  import jaxpruner

  lines = [
    "| name | when | from | masks | needs | cost | paper |",
    "|---|---|---|---|---|---|---|",
  ]
  for name in jaxpruner.all_algorithm_names():
    c = jaxpruner.algorithm_class(name).category
    lines.append(
      f"| [`{name}`](gallery/{name}.md) | {c.when} | {c.start} | "
      f"{'dynamic' if c.dynamic else 'static'} | "
      f"{', '.join(sorted(c.needs)) or '—'} | {c.cost or '—'} | "
      f"{c.paper or '—'} |"
    )
  return "\n".join(lines)


EXAMPLE = """
```python
import jax, jax.numpy as jnp, optax, jaxpruner

x = jax.random.normal(jax.random.key(1), (64, 32))
y = x[:, :16]
params = {{"kernel": jax.random.normal(jax.random.key(0), (32, 16))}}


def apply(params, x):
  return x @ params["kernel"]


def loss(params, batch):
  inputs, labels = batch
  return jnp.mean((apply(params, inputs) - labels) ** 2)


pruner = jaxpruner.create_updater_from_config(
  {config})
{bind}tx = pruner.wrap_optax(optax.sgd(0.1, momentum=0.9))
opt_state = tx.init(params)
params = pruner.post_gradient_update(params, opt_state)


def gradient(params):
  return jax.grad(
    lambda p: loss(pruner.pre_forward_update(p, opt_state), (x, y))
  )(params)


for _ in range(20):
  updates, opt_state = tx.update(
    gradient(params), opt_state, params{extra}
  )
  params = optax.apply_updates(params, updates)
print(jaxpruner.sparsity_table(params, opt_state=opt_state))
```
"""
# It looks at the loss once, before training.
BIND = "pruner = pruner.bind(loss, (x, y), apply, x)\n"
# It asks for the gradient at a second point.
SECOND = ", grad_fn=gradient"


def gallery_page(name: str) -> str:
  """Return the page of one algorithm: what its class says of itself."""
  import jaxpruner

  cls = jaxpruner.algorithm_class(name)
  c = cls.category
  text = inspect.getdoc(cls) or ""
  # Sections of a docstring (Attributes, Example, …) are for the API page.
  text = re.split(r"\n(?:Attributes|Args|Example|Returns):", text)[0].strip()
  head, _, body = text.partition("\n\n")
  head = " ".join(head.split())
  config = {"algorithm": name}
  if c.start != "dense":
    config |= {"sparsity": 0.75, "total_steps": 20}
  needs = cls().needs
  example = EXAMPLE.format(
    config=json.dumps(config),
    bind=BIND if "loss" in needs else "",
    extra=SECOND if c.gradients_per_step > 1 else "",
  )
  facts = [
    ("name in a configuration", f"`{name}`"),
    ("class", f"`{cls.__module__}.{cls.__name__}`"),
    ("removes weights", f"{c.when} training"),
    ("starts", c.start),
    ("removed weights", "may return" if c.dynamic else "stay removed"),
    ("needs", ", ".join(sorted(c.needs)) or "the weights alone"),
    ("adds", c.cost or "—"),
    ("paper", c.paper or "—"),
  ]
  rows = "\n".join(f"| {key} | {value} |" for key, value in facts)
  return (
    f"# {cls.__name__}\n\n**{head}**\n\n{body.strip()}\n\n| | |\n|---|---|\n"
    f"{rows}\n\n## In a loop\n{example}"
  )


def gallery() -> dict[str, str]:
  """Return path -> text of the pages of all algorithms, and their list."""
  import jaxpruner

  pages, groups = {}, {}
  for name in jaxpruner.all_algorithm_names():
    pages[f"gallery/{name}.md"] = gallery_page(name)
    cls = jaxpruner.algorithm_class(name)
    first = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    groups.setdefault(cls.category.start, []).append(
      f"- [`{name}`]({name}.md): {first}"
    )
  lists = "\n\n".join(
    f"## {start.capitalize()}\n\n" + "\n".join(lines)
    for start, lines in groups.items()
  )
  pages["gallery/index.md"] = (
    "# Gallery\n\nEvery registered algorithm, from what its class says of "
    "itself. How to choose: [a guide](../choosing.md).\n\n" + lists + "\n"
  )
  return pages


def notebook_page(path: pathlib.Path) -> str:
  """Return a notebook as markdown: its text, code and kept outputs."""
  parts = []
  for cell in json.loads(path.read_text())["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
      parts.append(source)
      continue
    parts.append(f"```python\n{source}\n```")
    for output in cell["outputs"]:
      data = output.get("data", {})
      if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        parts.append(f"![output](data:image/png;base64,{picture})")
      elif output.get("name") == "stdout":
        parts.append(f"```text\n{''.join(output['text'])}```")
  link = f"Run it yourself: `docs/notebooks/{path.name}`."
  return "\n\n".join([*parts, link]) + "\n"


def fill_markers(markdown: str) -> str:
  """Return a page with its markers replaced by what they stand for."""
  if "<!-- algorithms -->" in markdown:
    markdown = markdown.replace("<!-- algorithms -->", algorithms_table())
  if "<!-- readme -->" in markdown:
    text = (ROOT / "README.md").read_text()
    # The README lives one folder up: its links to docs/ are this folder's.
    text = text.replace("](docs/", "](")
    text = re.sub(r'(src|href)="docs/', r'\1="', text)
    text = text.replace("](notebooks/)", "](notebooks/quickstart.md)")
    # What is in the repository alone is no page here.
    text = re.sub(
      r"^- \[(Examples|Contributing)\].*\n(  .*\n)*", "", text, flags=re.M
    )
    markdown = markdown.replace("<!-- readme -->", text)
  return re.sub(r"^::: (\S+)$", _directive, markdown, flags=re.M)


def resolve(path: str) -> tuple[str, Any]:
  """Return where a public name is defined, and the object itself.

  Packages that import on use are invisible to a reader of source code, such as
  mkdocstrings, and files move: pages name what the user imports.
  """
  parts = path.split(".")
  found, rest = importlib.import_module(parts[0]), parts[1:]
  for i, part in enumerate(rest):
    try:
      found = getattr(found, part)
    except AttributeError:
      found = importlib.import_module(".".join(parts[: i + 2]))
  if inspect.ismodule(found):
    return found.__name__, found
  home = getattr(found, "__module__", None)
  name = getattr(found, "__qualname__", None)
  is_ours = isinstance(name, str) and str(home).split(".")[0] == parts[0]
  return (f"{home}.{name}" if is_ours else path), found


def _directive(match: re.Match[str]) -> str:
  path = match[1]
  home, _ = resolve_text(path)
  return f"::: {home}\n    options:\n      heading: {path}"


def resolve_text(path: str) -> tuple[str, Any]:
  """Return `resolve(path)`; a module that cannot be imported stays as it is."""
  try:
    return resolve(path)
  except ImportError:
    # A bridge to a framework that is not installed: its file is read, not run.
    return path, None


def configuration() -> str:
  """Return mkdocs.yml with the pages of the gallery, for FOLDER."""
  import jaxpruner

  text = (ROOT / "mkdocs.yml").read_text()
  line = "  - Gallery: gallery/index.md\n"
  if line not in text:
    raise ValueError(f"mkdocs.yml has no line {line!r} to put the gallery at")
  names = jaxpruner.all_algorithm_names()
  pages = "".join(f"      - {n}: gallery/{n}.md\n" for n in names)
  nav = f"  - Gallery:\n      - gallery/index.md\n{pages}"
  return text.replace(line, nav)


def write_pages(folder: pathlib.Path) -> None:
  """Write all pages and the configuration of the site into a folder."""
  docs = folder / "docs"
  shutil.copytree(ROOT / "docs", docs, dirs_exist_ok=True)
  for path in docs.rglob("*.md"):
    text = path.read_text()
    filled = fill_markers(text)
    if filled != text:
      path.write_text(filled)
  pages = gallery()
  for path in sorted((docs / "notebooks").glob("*.ipynb")):
    pages[f"notebooks/{path.stem}.md"] = notebook_page(path)
    path.unlink()
  for name, text in pages.items():
    (docs / name).parent.mkdir(parents=True, exist_ok=True)
    (docs / name).write_text(text)
  (folder / "mkdocs.yml").write_text(configuration())
  shutil.copytree(ROOT / "src", folder / "src", dirs_exist_ok=True)
  for path in (folder / "src").rglob("*.py"):
    # One example is an "Example:"; mkdocstrings knows "Examples:" only, and
    # would read the other as prose, prompts as quotations.
    text = path.read_text()
    path.write_text(re.sub(r"^( +)Example:$", r"\1Examples:", text, flags=re.M))


def main() -> int:
  """Write the pages and build the site; return the generator's exit code."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--generator", default=GENERATOR, choices=COMMANDS)
  args = parser.parse_args()
  write_pages(args.folder)
  command = [sys.executable, "-m", *COMMANDS[args.generator]]
  return subprocess.run(command, cwd=args.folder, check=False).returncode


if __name__ == "__main__":
  raise SystemExit(main())
