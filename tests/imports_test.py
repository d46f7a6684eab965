"""Imports: their direction, their cost, and the names they promise."""

import ast
import importlib
import pathlib
import statistics
import subprocess
import sys

import pytest

import jaxpruner

ROOT = pathlib.Path(jaxpruner.__file__).parent

# Know nothing of pruning: everyone may use them.
TOOLS = {"_tools"}
# Each layer may import those before it, and itself.
CORE = [
  TOOLS | {"_leaves", "_legacy", "program"},
  {"engine"},
  {"_counts", "mask_calculator"},
  {"sparsity_types"},
  {"sparsity_distributions", "sparsity_schedules", "activations"},
  {"updater"},
  {"base_updater"},
  {"algorithms"},
  {"structures"},
  {"config"},
  {"api"},
]
# Inside a package: each module may import those before it. A package stands
# here once its modules have an order.
ROOMS = {
  "engine": [
    "order", "expression", "leaves", "warm_start", "search", "counting",
    "dispatch", "selection", "__init__",
  ],
  "kept": [
    "places", "blocks", "bitmaps", "layouts", "block_products", "_kernel",
    "_panels_kernel",
    "products", "capture", "choosing", "growth", "block_rewiring",
    "_rewire_scores", "_rewire_search", "_rewire_lists", "_rewire_kernel",
    "rewiring", "folding", "tensors", "conversion", "creation", "views",
    "rules", "joining", "lifting", "checking", "states", "making",
    "differentiation", "stepping", "updaters", "files", "report", "_fresh",
    "measuring", "__init__",
  ],
  "program": [
    "primitives", "jaxprs", "tracing", "running", "errors", "owners",
    "windows", "__init__",
  ],
  "updater": [
    "conditional", "state", "prunable", "masks", "ranking", "moments", "hidden",
    "draw", "seeds", "checks", "selecting", "start", "at_once", "transform",
    "hooks", "__init__",
  ],
}  # fmt: skip
# Packages that import nothing of this library but themselves.
ALONE = ("program",)
BOTTOM = set().union(*CORE[:4])
# Stand beside the core: they know trees, masks and types, not algorithms.
BESIDE = ("inspect", "utils", "sparse")
# Live on public names alone.
OUTSIDE = (
  "__main__",
  "cli",
  "compare",
  "integrations",
  "scaling",
  "tickets",
)


def files(name):
  path = ROOT / name
  if path.is_dir():
    return sorted(path.rglob("*.py"))
  assert path.with_suffix(".py").exists(), f"{name} is no module"
  return [path.with_suffix(".py")]


def imports(path, within_functions=True, whole=False):
  """What a file imports of `jaxpruner`: the first names, or whole paths."""
  tree = ast.parse(path.read_text())
  nodes = ast.walk(tree) if within_functions else tree.body
  found = set()
  for node in nodes:
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
      continue
    for name in names:
      parts = name.split(".")
      if parts[0] == "jaxpruner":
        found.add(".".join(parts[1:]) if whole else "".join(parts[1:2]))
  return found


def outside(path):
  tree = ast.parse(path.read_text())
  found = set()
  for node in tree.body:
    if isinstance(node, ast.Import):
      found |= {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      found.add(node.module.split(".")[0])
  return found - {"jaxpruner"} - set(sys.stdlib_module_names)


@pytest.mark.quick
@pytest.mark.parametrize("layer", range(len(CORE)))
def test_core_layers_import_only_what_lies_below(layer):
  below = set().union(*CORE[: layer + 1])
  for name in sorted(CORE[layer]):
    for path in files(name):
      # Old names import what they stand for when they are used.
      found = imports(path, within_functions=name != "_legacy")
      assert found <= below, path.name


def modules(path, room):
  """The modules of a package that one of its files imports."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and node.module:
      parts = node.module.split(".")
      if parts[:2] == ["jaxpruner", room]:
        names = {alias.name for alias in node.names}
        found |= {parts[2]} if len(parts) > 2 else names
  return found


@pytest.mark.quick
@pytest.mark.parametrize("room", ROOMS)
def test_inside_a_room_imports_go_one_way(room):
  order = ROOMS[room]
  assert {path.stem for path in files(room)} == set(order)
  for path in files(room):
    below = order[: order.index(path.stem)]
    assert modules(path, room) <= set(below), path.name


@pytest.mark.parametrize("room", ALONE)
def test_a_room_on_its_own_knows_no_other(room):
  for path in files(room):
    assert imports(path) <= {room}, path.name


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_the_core_knows_its_bottom_only(name):
  allowed = BOTTOM | set(BESIDE) | {"updater", "base_updater", ""}
  for path in files(name):
    if not path.stem.endswith("command"):
      assert imports(path) <= allowed, path
      assert modules(path, "updater") <= {"state", "prunable"}, path


def test_pruning_after_training_knows_the_core_and_the_sparse_files():
  allowed = set().union(*CORE) | {"sparse", "post_training"}
  for path in files("post_training"):
    assert imports(path) <= allowed | {"datasets"}, path
    # Its commands bring data sets along; its models are read from archives.
    if not path.stem.endswith("command"):
      assert modules(path, "datasets") <= {"archives"}, path


def test_training_at_kept_size_knows_the_core_and_the_sparse_kernels():
  allowed = set().union(*CORE) | {"sparse", "kept"}
  for path in files("kept"):
    assert imports(path) <= allowed, path


def test_data_and_archives_know_nothing_of_pruning():
  for path in files("datasets"):
    assert imports(path) <= {"datasets"}, path
    assert outside(path) <= {"numpy"}, path


@pytest.mark.quick
def test_the_core_algorithms_do_not_need_those_of_single_papers():
  for path in files("algorithms"):
    if path.parent.name != "contrib" and path.stem != "__init__":
      assert "contrib" not in modules(path, "algorithms"), path


@pytest.mark.quick
@pytest.mark.parametrize("old", jaxpruner._MOVED)
def test_a_module_that_moved_is_found_under_both_paths(old):
  new = importlib.import_module(f"jaxpruner.{jaxpruner._MOVED[old]}")
  assert importlib.import_module(f"jaxpruner.{old}") is new
  parent, _, name = f"jaxpruner.{old}".rpartition(".")
  assert getattr(importlib.import_module(parent), name) is new
  assert new.__spec__.name == f"jaxpruner.{jaxpruner._MOVED[old]}"


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_stands_outside_uses_public_names_only(name):
  for path in files(name):
    private = {n for n in imports(path, whole=True) if "._" in f".{n}"}
    own = f"{name}._"
    private = {n for n in private if not n.startswith((own, "_tools"))}
    assert private <= {"__version__"}, (path, private)


def test_nothing_imports_what_stands_outside():
  for path in ROOT.rglob("*.py"):
    name = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if name not in OUTSIDE:
      assert not imports(path) & set(OUTSIDE), path


def test_the_core_depends_on_jax_optax_numpy_and_jaxtyping_only():
  for name in sorted(set().union(*CORE) | {"__init__", "utils"}):
    for path in files(name):
      if path.exists():
        assert outside(path) <= {"jax", "optax", "numpy", "jaxtyping"}, path


@pytest.mark.quick
def test_public_names_exist_and_are_sorted():
  names = jaxpruner.__all__
  # Constants, classes, functions: as ruff sorts them.
  order = lambda n: (not n.isupper(), not n[0].isupper(), n)
  assert names == sorted(set(names), key=order)
  for name in names:
    assert getattr(jaxpruner, name) is not None, name
  with pytest.raises(AttributeError, match="'no_such_name'"):
    jaxpruner.no_such_name  # noqa: B018


def python(code):
  return subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  ).stdout


def test_importing_starts_no_backend():
  out = python(
    "import jaxpruner\n"
    "from jax._src import xla_bridge\n"
    "print(xla_bridge.backends_are_initialized())"
  )
  assert out.strip() == "False"


@pytest.mark.slow
def test_importing_costs_little_more_than_jax_and_optax():
  timed = (
    "import time; start = time.process_time(); import {}; "
    "print(time.process_time() - start)"
  )
  ours, theirs = [], []
  for _ in range(7):
    theirs.append(float(python(timed.format("jax, optax"))))
    ours.append(float(python(timed.format("jax, optax, jaxpruner"))))
  assert statistics.median(ours) <= 1.1 * statistics.median(theirs)
