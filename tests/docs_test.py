"""Every example in the documentation and in docstrings runs."""

import doctest
import importlib
import pathlib
import re
import runpy
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
MODULES = [
  "jaxpruner.algorithms.pruners",
  "jaxpruner.api",
  "jaxpruner.doctor",
  "jaxpruner.utils",
]


def blocks(page: pathlib.Path) -> list[str]:
  return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
  "page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name
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
  from jaxpruner import api

  monkeypatch.setattr(api, "_REGISTRY", dict(api._REGISTRY))
  runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
  assert "prunable" in capsys.readouterr().out


def test_readme_shows_the_main_job_and_the_tests():
  text = (ROOT / "README.md").read_text()
  assert (
    len(re.findall(r"^python3 -m venv .*jaxpruner compare$", text, re.M)) == 1
  )
  assert len(re.findall(r"^python3 -m venv .*pytest", text, re.M)) == 1


def test_links_between_pages_lead_somewhere():
  for page in PAGES:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
      if not target.startswith("http"):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
