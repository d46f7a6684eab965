"""Fill the pages' tables from the library itself when the site is built."""

import inspect
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


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


def on_config(config):
  """List the pages of the gallery beside its first."""
  import jaxpruner

  pages = [{n: f"gallery/{n}.md"} for n in jaxpruner.all_algorithm_names()]
  for entry in config["nav"]:
    if isinstance(entry, dict) and "Gallery" in entry:
      entry["Gallery"] = ["gallery/index.md", *pages]
  return config


def on_files(files, config):
  """Add pages that exist nowhere on disk: the gallery, and the notebooks."""
  from mkdocs.structure.files import File

  pages = gallery()
  for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
    old = files.get_file_from_path(f"notebooks/{path.name}")
    if old is not None:
      files.remove(old)
    pages[f"notebooks/{path.stem}.md"] = notebook_page(path)
  for name, text in pages.items():
    files.append(File.generated(config, name, content=text))
  return files


def on_page_markdown(markdown: str, **_) -> str:
  """Replace the markers of a page."""
  if "<!-- algorithms -->" in markdown:
    markdown = markdown.replace("<!-- algorithms -->", algorithms_table())
  if "<!-- readme -->" in markdown:
    text = (ROOT / "README.md").read_text()
    # The README lives one folder up: its links to docs/ are this folder's.
    text = text.replace("](docs/", "](")
    text = re.sub(r'(src|href)="docs/', r'\1="', text)
    text = text.replace("](notebooks/)", "](notebooks/quickstart.md)")
    # What is in the repository alone is no page here.
    text = re.sub(r"^- \[(Examples|Contributing)\].*\n", "", text, flags=re.M)
    markdown = markdown.replace("<!-- readme -->", text)
  return markdown
