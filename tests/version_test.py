"""The version stands in one place, and the command runs as a module."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jaxpruner
from jaxpruner import cli

ROOT = pathlib.Path(__file__).parent.parent


def test_the_version_is_that_of_pyproject():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert jaxpruner.__version__ == project["version"], (
    "the installed package is older than pyproject.toml; install it again"
  )
  assert jaxpruner.__version__ == importlib.metadata.version("jaxpruner")


def test_the_version_is_written_nowhere_else():
  for path in (ROOT / "src").rglob("*.py"):
    assert not re.search(r"^__version__\s*=", path.read_text(), re.M), path
  assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()


def test_importing_reads_no_metadata_of_the_package():
  assert "__version__" not in vars(jaxpruner)


def test_a_released_version_has_a_dated_entry_in_the_changelog():
  text = (ROOT / "CHANGELOG.md").read_text()
  if "dev" in jaxpruner.__version__:
    assert "\n## Unreleased\n" in text
  else:
    version = re.escape(jaxpruner.__version__)
    assert re.search(rf"^## {version} - \d{{4}}-\d\d-\d\d$", text, re.M)


def test_the_package_runs_as_a_module():
  done = subprocess.run(
    [sys.executable, "-m", "jaxpruner", "--help"],
    capture_output=True,
    text=True,
    check=True,
  )
  assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize(
  "command", [["-m", "jaxpruner"], ["-m", "jaxpruner.cli"]]
)
def test_help_imports_no_jax(command):
  # -X importtime writes the name of every imported module to stderr.
  done = subprocess.run(
    [sys.executable, "-X", "importtime", *command, "--help"],
    capture_output=True,
    text=True,
    check=True,
  )
  modules = {
    line.rpartition("|")[2].strip() for line in done.stderr.split("\n")
  }
  assert "jaxpruner.cli" in modules or "-m jaxpruner.cli" in " ".join(command)
  assert not modules & {"jax", "numpy", "optax"}


def test_importing_the_package_imports_no_jax():
  code = "import jaxpruner, sys; print('jax' in sys.modules)"
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "False"
