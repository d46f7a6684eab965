"""Every example in the documentation and in docstrings runs."""

import ast
import doctest
import importlib
import inspect
import pathlib
import re
import runpy
import sys

import pytest

import jaxpruner

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
SOURCE = pathlib.Path(jaxpruner.__file__).parent
MODULES = sorted(
  ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(
    ".__init__"
  )
  for path in SOURCE.rglob("*.py")
  if ">>>" in path.read_text()
)


def blocks(page: pathlib.Path) -> list[str]:
  return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
  "page",
  [p for p in PAGES if blocks(p)],
  ids=lambda p: str(p.relative_to(ROOT)),
)
def test_every_block_of_a_page_runs(page, monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)
  namespace: dict = {"__name__": "page"}
  for block in blocks(page):
    exec(compile(block, str(page), "exec"), namespace)


def import_or_skip(module):
  """Import a module; skip bridges whose framework is not installed here."""
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    framework = (error.name or "jaxpruner").split(".")[0]
    if ".integrations." not in module or framework == "jaxpruner":
      raise
    pytest.skip(f"{framework} is not installed")


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_give_what_they_say(module):
  result = doctest.testmod(import_or_skip(module))
  assert result.attempted and not result.failed


@pytest.mark.parametrize("name", ["plain_optax", "one_shot", "new_algorithm"])
def test_every_example_runs(name, monkeypatch, capsys):
  folder = ROOT / "examples"
  monkeypatch.syspath_prepend(folder)
  monkeypatch.setattr(sys, "argv", [name])
  runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
  assert "prunable" in capsys.readouterr().out


def test_readme_shows_the_main_job_and_the_tests():
  text = (ROOT / "README.md").read_text()
  assert (
    len(re.findall(r"^python3 -m venv .*jaxpruner compare$", text, re.M)) == 1
  )
  assert len(re.findall(r"^python3 -m venv .*pytest", text, re.M)) == 1


def site():
  return runpy.run_path(str(ROOT / "tools" / "site.py"))


@pytest.mark.parametrize("name", jaxpruner.all_algorithm_names())
@pytest.mark.filterwarnings("ignore:.*will never")
def test_the_example_of_a_gallery_page_runs(name, capsys):
  page = site()["gallery_page"](name)
  (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
  exec(compile(block, name, "exec"), {})
  assert "prunable" in capsys.readouterr().out


def test_every_algorithm_has_a_page_with_its_formula_and_paper():
  pages = site()["gallery"]()
  for name in jaxpruner.all_algorithm_names():
    page = pages[f"gallery/{name}.md"]
    assert f"[`{name}`]({name}.md)" in pages["gallery/index.md"]
    head = page.split("**")[1]
    assert head.endswith((".", ":")), f"{name}: {head!r}"
    says = page.split("| | |")[0]
    formula = re.search(r"\|[^|\n]+\||`[^`\n]*[·/=²∂(][^`\n]*`", says)
    exempt = name in ("no_prune", "random")
    assert exempt or formula, f"{name}: no formula in {says!r}"
    assert name == "no_prune" or "| paper | — |" not in page, name


def test_links_between_pages_lead_somewhere():
  made = {str(ROOT / "docs" / path) for path in site()["gallery"]()}
  for page in PAGES:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
      if not target.startswith("http"):
        path = (page.parent / target).resolve()
        assert path.exists() or str(path) in made, f"{page.name}: {target}"


# What a user imports from. A module without `__all__` exports what it defines.
EXPORTERS = [
  "jaxpruner",
  "jaxpruner.activations",
  "jaxpruner.algorithms",
  "jaxpruner.criteria",
  "jaxpruner.kept",
  "jaxpruner.mask_calculator",
  "jaxpruner.metrics",
  "jaxpruner.plot",
  "jaxpruner.post_training",
  "jaxpruner.post_training.models",
  "jaxpruner.redistribution",
  "jaxpruner.report",
  "jaxpruner.scaling",
  "jaxpruner.sparse",
  "jaxpruner.sparsity_distributions",
  "jaxpruner.sparsity_schedules",
  "jaxpruner.sparsity_types",
  "jaxpruner.structures",
  "jaxpruner.tickets",
  "jaxpruner.transforms",
]


def names_of(exporter):
  module = importlib.import_module(exporter)
  if hasattr(module, "__all__"):
    return list(module.__all__)
  return [
    name
    for name, value in vars(module).items()
    if not name.startswith("_")
    and getattr(value, "__module__", None) == module.__name__
    and (inspect.isfunction(value) or inspect.isclass(value))
  ]


def documented_objects():
  """The objects that the API pages show: named, or in a module named."""
  resolve = site()["resolve_text"]
  shown = []
  for page in (ROOT / "docs" / "api").glob("*.md"):
    for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
      found = resolve(path)[1]
      shown.append(found)
      if inspect.ismodule(found):
        members = vars(found).items()
        shown += [value for name, value in members if not name.startswith("_")]
  return shown


def test_every_exported_name_is_on_an_api_page():
  shown = {id(value) for value in documented_objects()}
  missing = [
    f"{exporter}.{name}"
    for exporter in EXPORTERS
    for name in names_of(exporter)
    for value in [getattr(importlib.import_module(exporter), name)]
    # A module is shown by the names in it, which have exporters of their own.
    if id(value) not in shown and not inspect.ismodule(value)
  ]
  assert not missing, f"no `::: name` on a page of docs/api/: {missing}"


def test_every_api_page_is_in_the_navigation_and_names_what_exists():
  nav = (ROOT / "mkdocs.yml").read_text()
  for page in (ROOT / "docs" / "api").glob("*.md"):
    assert f"api/{page.name}" in nav
    for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
      # Bridges to frameworks that are not installed cannot be imported.
      if ".integrations." not in path:
        site()["resolve"](path)


def lacks(value):
  """What the docstring of an exported function or class lacks."""
  text = inspect.getdoc(value) or ""
  lacking = [] if ">>>" in text else ["an example"]
  if inspect.isfunction(value):
    signature = inspect.signature(value)
    taken = [p for p in signature.parameters.values() if p.kind not in (2, 4)]
    if taken and not re.search(r"^Args:$", text, re.M):
      lacking.append("Args")
    returns = signature.return_annotation is not None
    if returns and not re.search(r"^(Returns|Yields):$", text, re.M):
      lacking.append("Returns")
  return lacking


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_exported_name_says_args_returns_and_an_example(exporter):
  module = importlib.import_module(exporter)
  home = exporter.split(".")[0]
  lacking = {}
  for name in names_of(exporter):
    value = getattr(module, name)
    is_code = inspect.isfunction(value) or inspect.isclass(value)
    if is_code and value.__module__.split(".")[0] == home and lacks(value):
      lacking[name] = lacks(value)
  assert not lacking, f"{exporter}: docstrings without {lacking}"


def test_every_method_of_the_base_class_says_args_returns_and_an_example():
  base = jaxpruner.BaseUpdater
  methods = {
    name: method
    for name, method in inspect.getmembers(base, inspect.isfunction)
    if not name.startswith("_")
  }
  lacking = {name: lacks(method) for name, method in methods.items()}
  assert not {name: what for name, what in lacking.items() if what}


BRIDGES = sorted((SOURCE / "integrations").glob("[!_]*.py"))


def definitions(tree):
  """Yield the public functions and classes of a module that is not imported."""
  for node in tree.body:
    kinds = ast.FunctionDef | ast.ClassDef
    if isinstance(node, kinds) and not node.name.startswith("_"):
      yield node


@pytest.mark.parametrize("path", BRIDGES, ids=lambda path: path.stem)
def test_every_bridge_says_args_returns_and_an_example(path):
  lacking = {}
  for node in definitions(ast.parse(path.read_text())):
    text = ast.get_docstring(node) or ""
    wanted = [">>> "]
    if isinstance(node, ast.FunctionDef):
      wanted += ["\nArgs:\n", "\nReturns:\n"]
    if missing := [words.strip() for words in wanted if words not in text]:
      lacking[node.name] = missing
  assert not lacking, f"{path.name}: docstrings without {lacking}"
