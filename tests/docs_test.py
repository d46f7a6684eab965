"""Every example in the documentation and in docstrings runs."""

import doctest
import importlib
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
  ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
  for path in SOURCE.rglob("*.py")
  if ">>>" in path.read_text() and path.name != "__init__.py"
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


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_give_what_they_say(module):
  result = doctest.testmod(importlib.import_module(module))
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


def hooks():
  return runpy.run_path(str(ROOT / "docs" / "hooks.py"))


@pytest.mark.parametrize("name", jaxpruner.all_algorithm_names())
@pytest.mark.filterwarnings("ignore:.*will never")
def test_the_example_of_a_gallery_page_runs(name, capsys):
  page = hooks()["gallery_page"](name)
  (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
  exec(compile(block, name, "exec"), {})
  assert "prunable" in capsys.readouterr().out


def test_every_algorithm_has_a_page_with_its_formula_and_paper():
  pages = hooks()["gallery"]()
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
  made = {str(ROOT / "docs" / path) for path in hooks()["gallery"]()}
  for page in PAGES:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
      if not target.startswith("http"):
        path = (page.parent / target).resolve()
        assert path.exists() or str(path) in made, f"{page.name}: {target}"
