"""Test every integration against the real package, in its own environment.

    python tools/integrations.py [GROUP …] [--folder DIR] [--table FILE]

makes one environment per dependency group of pyproject.toml (with uv if it is
there, else venv and pip), runs the group's tests in it, and writes the table
of results. Groups that were not named keep their line.
"""

import argparse
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "integrations"
HEAD = (
  "| framework | version | JAX | lines added | checkpoint | test | date "
  "| result |",
  "|---|---|---|---|---|---|---|---|",
)


class Framework(NamedTuple):
  """What a test file is about; the checkpoint is the one it goes through."""

  title: str
  package: str
  group: str
  checkpoint: str


# By the name of the test file.
FRAMEWORKS = {
  "flax_linen": Framework(
    "Flax Linen, TrainState", "flax", "core", "msgpack, Flax's own, Orbax"
  ),
  "flax_nnx": Framework("Flax NNX", "flax", "core", "Orbax"),
  "equinox": Framework("Equinox", "equinox", "core", "its own"),
  "haiku": Framework("Haiku", "dm-haiku", "core", "Orbax"),
  "orbax": Framework(
    "Orbax", "orbax-checkpoint", "core", "its own, 1 and 2 processes"
  ),
  "jax_export": Framework("jax.export", "jax", "core", "the exported file"),
  "keras": Framework("Keras 3", "keras", "keras", "`model.save`"),
  "flower": Framework("Flower", "flwr", "flower", "Orbax, by the strategy"),
  "qwix": Framework("Qwix", "qwix", "qwix", "msgpack, Orbax"),
  "rejax": Framework("rejax", "rejax", "rl", "Orbax"),
  "brax": Framework("Brax", "brax", "rl", "its own"),
  "tunix": Framework("Tunix", "google-tunix", "tunix", "its own"),
  "fedjax": Framework("FedJAX", "fedjax", "fedjax", "its own"),
  "dopamine": Framework("Dopamine", "dopamine-rl", "dopamine", "its own"),
  "transformers": Framework(
    "Hugging Face transformers",
    "transformers",
    "transformers",
    "the folder, pruned",
  ),
  "onnx": Framework("ONNX", "jax2onnx", "onnx", "the exported file"),
  "litert": Framework(
    "LiteRT", "ai-edge-litert", "litert", "the exported file"
  ),
  "kauldron": Framework("Kauldron", "kauldron", "kauldron", "its own"),
  "maxtext": Framework("MaxText", "maxtext", "maxtext", "its own"),
}
# What a group needs besides its packages: a Python, packages without theirs.
PYTHONS = {"maxtext": "3.12"}
ALONE = {"dopamine": ["baselines"]}


def build(group: str, folder: pathlib.Path) -> pathlib.Path:
  """Make or refresh a group's environment; return its Python."""
  python = folder / "bin" / "python"
  base = find_python(PYTHONS.get(group, "3.11"))
  wanted = ["pytest", "hypothesis", "--group", group, "-e", "."]
  alone = ALONE.get(group, [])
  if shutil.which("uv"):
    if not python.exists():
      call("uv", "venv", "--python", base, str(folder))
    install = ["uv", "pip", "install", "-q", "--python", str(python)]
  else:
    if not python.exists():
      call(base, "-m", "venv", str(folder))
    install = [str(python), "-m", "pip", "install", "-q"]
    call(*install, "-U", "pip>=25.1")
  call(*install, *wanted)
  if alone:
    call(*install, "--no-deps", *alone)
  return python


def find_python(version: str) -> str:
  """Return a Python of this version: here, on the path, or in pyenv.

  Without one, its name: uv fetches that.
  """
  pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
  name = f"python{version}"
  ask = "import sys; print('%d.%d' % sys.version_info[:2])"
  here = [sys.executable, shutil.which(name)]
  here += map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))
  for found in filter(None, here):
    # A shim on the path may have nothing behind it.
    answer = subprocess.run([found, "-c", ask], capture_output=True, text=True)
    if answer.stdout.strip() == version:
      return found
  return name


def call(*command: str) -> None:
  subprocess.run(command, cwd=ROOT, check=True)


def test(name: str, python: pathlib.Path, folder: pathlib.Path) -> str:
  """Run a framework's tests; return its line of the table."""
  title, package, _, checkpoint = FRAMEWORKS[name]
  path = TESTS / f"{name}_test.py"
  report = folder / f"{name}.xml"
  # Warnings are the frameworks' own affair: only failures count.
  command = [python, "-m", "pytest", "-q", "-W", "default", path]
  subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT)
  suite = next(ElementTree.parse(report).iter("testsuite")).attrib
  count = {k: int(suite[k]) for k in ("tests", "failures", "errors", "skipped")}
  bad = count["failures"] + count["errors"]
  result = f"{count['tests'] - bad - count['skipped']} passed"
  for key in ("failures", "errors", "skipped"):
    result += f", {count[key]} {key}" if count[key] else ""
  ask = (
    "from importlib.metadata import version; "
    f"print(version({package!r}), version('jax'))"
  )
  out = subprocess.run([python, "-c", ask], capture_output=True, text=True)
  found, jax = out.stdout.split()
  lines = len(re.findall(r"# added", path.read_text()))
  today = datetime.date.today().isoformat()
  return (
    f"| {title} | {found} | {jax} | {lines or '—'} | {checkpoint} "
    f"| `{path.name}` | {today} | {result} |"
  )


def write(table: pathlib.Path, lines: dict[str, str]) -> None:
  """Replace the lines of a table; keep those of other frameworks."""
  old = {}
  if table.exists():
    for line in table.read_text().splitlines():
      title = line.split("|")[1].strip() if line.startswith("| ") else ""
      old[title] = line
  rows = []
  for name, framework in FRAMEWORKS.items():
    line = lines.get(name) or old.get(framework.title)
    if line:
      rows.append(line)
  text = "\n".join(
    [
      "# Integrations tested",
      "",
      "Each against the real package, in an environment of its own, by",
      "`python tools/integrations.py`. After 50 steps the realised sparsity is",
      "the target exactly, and training goes on from a *checkpoint* with the",
      "same masks: the framework's own where it has one, else the one that its",
      "users take; models that are exported keep their zeros in the file.",
      "*Lines added* are those a user adds, marked in the test, which is in",
      "`tests/integrations/`; imports apart.",
      "",
      *HEAD,
      *rows,
      "",
      "Scenic and t5x are on no registry: their tests run where they are",
      "installed, and skip with the reason elsewhere.",
      "",
    ]
  )
  temporary = table.with_suffix(".tmp")
  temporary.write_text(text)
  os.replace(temporary, table)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  groups = list(dict.fromkeys(f.group for f in FRAMEWORKS.values()))
  parser.add_argument("groups", nargs="*", metavar="GROUP", default=groups)
  parser.add_argument("--folder", default=str(ROOT / ".cache" / "integrations"))
  parser.add_argument(
    "--table", default=str(ROOT / "docs" / "results" / "integrations.md")
  )
  args = parser.parse_args()
  unknown = set(args.groups) - set(groups)
  if unknown:
    parser.error(f"unknown {sorted(unknown)}; choose from {groups}")
  lines = {}
  for group in args.groups:
    folder = pathlib.Path(args.folder) / group
    python = build(group, folder)
    for name, framework in FRAMEWORKS.items():
      if framework.group == group:
        lines[name] = test(name, python, folder)
        write(pathlib.Path(args.table), lines)
  print("\n".join(lines.values()))
  return int(any("failures" in x or "errors" in x for x in lines.values()))


if __name__ == "__main__":
  sys.exit(main())
