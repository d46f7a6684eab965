"""Test every integration against the real package, in its own environment.

    python tools/integrations.py [GROUP …] [--fresh] [--source NAME=DIR …]
                                 [--folder DIR] [--table FILE]

makes one environment per dependency group of pyproject.toml (with uv if it is
there, else venv and pip), runs the group's tests in it, and writes the table
of results. Groups that were not named keep their line. `--fresh` makes the
environments from nothing.

Frameworks that are on no registry run from their source: `--source
scenic=DIR` names the folder of a clone, which the tests then import from. The
groups of frameworks without a source are left out, and said.
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
  """What a test file is about; the checkpoint is the one it goes through.

  A framework that is on no registry has no package but sources.
  """

  title: str
  package: str
  group: str
  checkpoint: str
  sources: tuple[str, ...] = ()


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
  "flax_boxes": Framework(
    "Flax Linen, annotated parameters", "flax", "core", "Orbax"
  ),
  "nnx_sharding": Framework(
    "Flax NNX, explicit sharding", "flax", "core", "Orbax"
  ),
  "pmap": Framework("jax.pmap", "jax", "core", "msgpack"),
  "optax": Framework(
    "Optax, tree_map_params and MultiSteps", "optax", "core", "msgpack"
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
  "compressed_tensors": Framework(
    "compressed-tensors",
    "compressed-tensors",
    "compressed_tensors",
    "the folder, sparse-bitmask",
  ),
  "onnx": Framework("ONNX", "jax2onnx", "onnx", "the exported file"),
  "litert": Framework(
    "LiteRT", "ai-edge-litert", "litert", "the exported file"
  ),
  "kauldron": Framework("Kauldron", "kauldron", "kauldron", "its own"),
  "maxtext": Framework("MaxText", "maxtext", "maxtext", "its own"),
  "scenic": Framework("Scenic", "", "scenic", "its own", ("scenic",)),
  "t5x": Framework(
    "t5x", "", "t5x", "its own, Orbax", ("t5x", "airio", "jestimator")
  ),
  "big_vision": Framework(
    "big_vision", "", "big_vision", "its own", ("big_vision",)
  ),
  "nanodo": Framework("nanodo", "", "nanodo", "Orbax", ("nanodo",)),
  "purejaxrl": Framework("PureJaxRL", "", "purejaxrl", "Orbax", ("purejaxrl",)),
  "easydel": Framework("EasyDeL", "easydel", "easydel", "its own"),
  "levanter": Framework("Levanter", "levanter", "levanter", "its own"),
  "loaders": Framework(
    "torch, tf.data and grain loaders", "grain", "loaders", "—"
  ),
  "libtpu": Framework("TPU, compiled by libtpu", "libtpu", "libtpu", "—"),
}
# What could not be run, and why.
ABSENT = [
  (
    "praxis and PaxML",
    "their releases do not install here, and their source asks for lingvo and "
    "more; what they call on a state, `optax.tree_map_params`, is in "
    "`optax_test.py`.",
  )
]
# What a group needs besides its packages: a Python, packages without theirs.
PYTHONS = {"maxtext": "3.12"}
# Pins of dependencies that a group overrides; uv only.
OVERRIDES = {"easydel": ["jax>=0.10", "jaxlib>=0.10"]}
# tensorflow-probability, which Dopamine asks for, and tfp-nightly, which works
# with this JAX, write the same folder: the latter must be written last.
ALONE = {"dopamine": ["baselines", "tfp-nightly"]}


def build(group: str, folder: pathlib.Path, fresh: bool) -> pathlib.Path:
  """Make or refresh a group's environment; return its Python."""
  python = folder / "bin" / "python"
  if fresh and folder.exists():
    shutil.rmtree(folder)
  base = find_python(PYTHONS.get(group, "3.11"))
  wanted = ["pytest", "hypothesis", "--group", group, "-e", "."]
  alone = ALONE.get(group, [])
  if shutil.which("uv"):
    if not python.exists():
      call("uv", "venv", "--python", base, str(folder))
    install = ["uv", "pip", "install", "-q", "--python", str(python)]
    if group in OVERRIDES:
      pins = folder / "overrides.txt"
      pins.write_text("\n".join(OVERRIDES[group]))
      wanted += ["--override", str(pins)]
  else:
    if not python.exists():
      call(base, "-m", "venv", str(folder))
    install = [str(python), "-m", "pip", "install", "-q"]
    call(*install, "-U", "pip>=25.1")
  call(*install, *wanted)
  if alone:
    again = "--reinstall" if shutil.which("uv") else "--force-reinstall"
    call(*install, "--no-deps", again, *alone)
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


def test(
  name: str,
  python: pathlib.Path,
  folder: pathlib.Path,
  sources: dict[str, pathlib.Path],
) -> str:
  """Run a framework's tests; return its line of the table."""
  framework = FRAMEWORKS[name]
  path = TESTS / f"{name}_test.py"
  report = folder / f"{name}.xml"
  # Warnings are the frameworks' own affair: only failures count.
  command = [python, "-m", "pytest", "-q", "-W", "default", path]
  found = [str(sources[source]) for source in framework.sources]
  environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
  command.append(f"--junitxml={report}")
  subprocess.run(command, cwd=ROOT, env=environment)
  suite = next(ElementTree.parse(report).iter("testsuite")).attrib
  count = {k: int(suite[k]) for k in ("tests", "failures", "errors", "skipped")}
  bad = count["failures"] + count["errors"]
  result = f"{count['tests'] - bad - count['skipped']} passed"
  for key in ("failures", "errors", "skipped"):
    result += f", {count[key]} {key}" if count[key] else ""
  if framework.sources:
    version = revision(sources[framework.sources[0]])
  else:
    version = version_of(python, framework.package)
  lines = len(re.findall(r"# added", path.read_text()))
  today = datetime.date.today().isoformat()
  return (
    f"| {framework.title} | {version} | {version_of(python, 'jax')} "
    f"| {lines or '—'} | {framework.checkpoint} | `{path.name}` | {today} "
    f"| {result} |"
  )


def version_of(python: pathlib.Path, package: str) -> str:
  """Return the version of a package in an environment."""
  ask = f"from importlib.metadata import version; print(version({package!r}))"
  out = subprocess.run([python, "-c", ask], capture_output=True, text=True)
  return out.stdout.strip()


def revision(source: pathlib.Path) -> str:
  """Return the date and commit of a clone, "source" of any other folder."""
  ask = ["git", "-C", str(source), "log", "-1", "--format=%cs %h"]
  out = subprocess.run(ask, capture_output=True, text=True)
  return out.stdout.strip() or "source"


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
      "Each against the real package, in an environment that",
      "`tools/integrations.py` makes from nothing. After 50 steps the",
      "realised sparsity is the target exactly, and training goes on from a",
      "*checkpoint* with the same masks: the framework's own where it has",
      "one, else the one that its users take; models that are exported keep",
      "their zeros in the file. Frameworks that train are given a pruner of",
      "each kind (gradual, straight-through, weights that regrow). nanodo",
      "and Brax are driven step by step, by their own steps: the loops around",
      "these read a dataset from the network, or make the optimizer inside.",
      "*Lines added* are those a user adds, marked in the test, which is in",
      "`tests/integrations/`; imports apart. A *version* with a commit is",
      "that of a clone, given by `--source`.",
      "",
      *HEAD,
      *rows,
      "",
      *(f"- **{title}** is not in the table: {why}" for title, why in ABSENT),
      "",
    ]
  )
  temporary = table.with_suffix(".tmp")
  temporary.write_text(text)
  os.replace(temporary, table)


def parse_source(text: str) -> tuple[str, pathlib.Path]:
  """Return the name and the folder of `NAME=DIR`."""
  name, _, folder = text.partition("=")
  known = sorted({x for f in FRAMEWORKS.values() for x in f.sources})
  if name not in known:
    raise argparse.ArgumentTypeError(f"unknown {name!r}; choose from {known}")
  path = pathlib.Path(folder).expanduser().resolve()
  if not path.is_dir():
    raise argparse.ArgumentTypeError(f"{text}: {path} is not a folder")
  return name, path


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  groups = list(dict.fromkeys(f.group for f in FRAMEWORKS.values()))
  parser.add_argument("groups", nargs="*", metavar="GROUP", default=groups)
  parser.add_argument("--folder", default=str(ROOT / ".cache" / "integrations"))
  parser.add_argument(
    "--table", default=str(ROOT / "docs" / "results" / "integrations.md")
  )
  parser.add_argument("--fresh", action="store_true")
  parser.add_argument(
    "--source", action="append", default=[], type=parse_source, metavar="N=DIR"
  )
  args = parser.parse_args()
  unknown = set(args.groups) - set(groups)
  if unknown:
    parser.error(f"unknown {sorted(unknown)}; choose from {groups}")
  sources = dict(args.source)
  lines = {}
  for group in args.groups:
    names = [name for name, f in FRAMEWORKS.items() if f.group == group]
    missing = {x for n in names for x in FRAMEWORKS[n].sources} - set(sources)
    if missing:
      print(f"{group}: left out; give --source {sorted(missing)[0]}=DIR")
      continue
    folder = pathlib.Path(args.folder) / group
    python = build(group, folder, args.fresh)
    for name in names:
      lines[name] = test(name, python, folder, sources)
      write(pathlib.Path(args.table), lines)
  print("\n".join(lines.values()))
  return int(any("failures" in x or "errors" in x for x in lines.values()))


if __name__ == "__main__":
  sys.exit(main())
