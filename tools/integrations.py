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

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "integrations"
HEAD = (
  "| framework | version | JAX | lines added | test | date | result |",
  "|---|---|---|---|---|---|---|",
)

# Test file -> title, distribution, group.
FRAMEWORKS = {
  "flax_linen": ("Flax Linen, TrainState", "flax", "core"),
  "flax_nnx": ("Flax NNX", "flax", "core"),
  "equinox": ("Equinox", "equinox", "core"),
  "haiku": ("Haiku", "dm-haiku", "core"),
  "orbax": ("Orbax", "orbax-checkpoint", "core"),
  "jax_export": ("jax.export", "jax", "core"),
  "keras": ("Keras 3", "keras", "keras"),
  "flower": ("Flower", "flwr", "flower"),
  "qwix": ("Qwix", "qwix", "qwix"),
  "rl": ("rejax, Brax", "rejax", "rl"),
  "tunix": ("Tunix", "google-tunix", "tunix"),
  "fedjax": ("FedJAX", "fedjax", "fedjax"),
  "dopamine": ("Dopamine", "dopamine-rl", "dopamine"),
  "onnx": ("ONNX", "jax2onnx", "onnx"),
  "litert": ("LiteRT", "ai-edge-litert", "litert"),
  "kauldron": ("Kauldron", "kauldron", "kauldron"),
  "maxtext": ("MaxText", "maxtext", "maxtext"),
}
# What a group needs besides its packages: a Python, packages without theirs.
PYTHONS = {"maxtext": "3.12"}
ALONE = {"dopamine": ["baselines"]}


def build(group: str, folder: pathlib.Path) -> pathlib.Path:
  """Make or refresh a group's environment; return its Python."""
  python = folder / "bin" / "python"
  version = PYTHONS.get(group, "3.11")
  wanted = ["pytest", "hypothesis", "--group", group, "-e", "."]
  alone = ALONE.get(group, [])
  if shutil.which("uv"):
    if not python.exists():
      call("uv", "venv", "--python", version, str(folder))
    call("uv", "pip", "install", "-q", "--python", str(python), *wanted)
    install = ["uv", "pip", "install", "-q", "--python", str(python)]
  else:
    if not python.exists():
      call(f"python{version}", "-m", "venv", str(folder))
    install = [str(python), "-m", "pip", "install", "-q"]
    call(*install, "-U", "pip>=25.1")
    call(*install, *wanted)
  if alone:
    call(*install, "--no-deps", *alone)
  return python


def call(*command: str) -> None:
  subprocess.run(command, cwd=ROOT, check=True)


def test(name: str, python: pathlib.Path, folder: pathlib.Path) -> str:
  """Run a framework's tests; return its line of the table."""
  title, package, _ = FRAMEWORKS[name]
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
  link = f"`tests/integrations/{path.name}`"
  today = datetime.date.today().isoformat()
  return (
    f"| {title} | {found} | {jax} | {lines or '—'} | {link} | {today} "
    f"| {result} |"
  )


def write(table: pathlib.Path, lines: dict[str, str]) -> None:
  """Replace the lines of a table; keep those of other frameworks."""
  old = {}
  if table.exists():
    for line in table.read_text().splitlines():
      title = line.split("|")[1].strip() if line.startswith("| ") else ""
      old[title] = line
  rows = []
  for name, (title, _, _) in FRAMEWORKS.items():
    line = lines.get(name) or old.get(title)
    if line:
      rows.append(line)
  text = "\n".join(
    [
      "# Integrations tested",
      "",
      "Each against the real package, in an environment of its own, by",
      "`python tools/integrations.py`. After 50 steps the realised sparsity is",
      "the target exactly, and masks survive the framework's own checkpoint.",
      "*Lines added* are those a user adds, marked in the test; imports apart.",
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
  groups = list(dict.fromkeys(group for *_, group in FRAMEWORKS.values()))
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
    for name, (*_, owner) in FRAMEWORKS.items():
      if owner == group:
        lines[name] = test(name, python, folder)
        write(pathlib.Path(args.table), lines)
  print("\n".join(lines.values()))
  return int(any("failures" in x or "errors" in x for x in lines.values()))


if __name__ == "__main__":
  sys.exit(main())
