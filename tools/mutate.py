"""Change the code in small ways, and see whether a room's own tests notice.

    python tools/mutate.py safetensors --seconds 120
    python tools/mutate.py safetensors --survivors
    python tools/mutate.py --list

A mutation is one edit of the syntax tree: a comparison, an operator, a
constant, a condition or a statement. It is killed if the room's tests fail,
survives if they pass. The room's files are copied with `src` into a temporary
folder, so that the checkout never changes; mutations are drawn in an order
that the seed decides, until the budget is spent. Scores are kept in
`tools/mutation_scores.json`, survivors with file, line and edit, after every
mutation; with `--survivors` only these are tried again, after a test was
written for them, and with `--more` the mutations that come next in the order.
Where a room's tests compile much, try its quick ones first (`--only`), and
those that survive with all of them.
"""

import argparse
import ast
import copy
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# Most programs of the tests are those of the last mutation: keep every one.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Imported for the forks, which inherit them.
import jax
import jax.numpy
import optax  # noqa: F401
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCORES = ROOT / "tools" / "mutation_scores.json"

# Room -> (files below src/jaxpruner, its own tests).
ROOMS = {
  "safetensors": (
    ["sparse/_safetensors.py"],
    ["tests/sparse/files", "tests/trust/limits_test.py"],
  ),
  "layouts": (
    ["sparse/_layouts.py", "sparse/files.py"],
    ["tests/sparse/files", "tests/trust/limits_test.py"],
  ),
  "structure": (["sparse/structure.py"], ["tests/sparse/files"]),
  "atomic": (["_tools/atomic.py"], ["tests/trust/atomic_test.py"]),
  "fingerprint": (
    ["_tools/fingerprint.py"],
    ["tests/trust/fingerprint_test.py"],
  ),
  "orbax": (
    ["integrations/orbax.py"],
    ["tests/integrations/orbax_test.py", "tests/trust/orbax_test.py"],
  ),
  "schedules": (
    ["sparsity_schedules.py"],
    ["tests/sparsity_schedules_test.py"],
  ),
  "distributions": (
    ["sparsity_distributions"],
    ["tests/sparsity_distributions"],
  ),
  "types": (["sparsity_types"], ["tests/sparsity_types"]),
  "masks": (["mask_calculator.py"], ["tests/mask_calculator_test.py"]),
  "engine": (["engine"], ["tests/engine", "tests/mask_calculator_test.py"]),
  "updater": (
    ["base_updater.py", "updater"],
    ["tests/updater", "tests/bad_input_test.py"],
  ),
  "trainers": (
    ["algorithms/sparse_trainers.py"],
    ["tests/algorithms/dynamic_test.py", "tests/algorithms/trainers_test.py"],
  ),
}

_COMPARISONS = {
  ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
  ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
  ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
  ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv,
  ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
  ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
  ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd, ast.Pow: ast.Mult,
}  # fmt: skip


class Mutation(NamedTuple):
  """One edit: which node of which file, and how."""

  path: pathlib.Path
  node: int
  kind: str
  line: int
  before: str


def _skipped(tree: ast.AST) -> set[int]:
  """Return nodes whose change is no change: annotations and docstrings."""
  skipped: set[int] = set()
  for node in ast.walk(tree):
    for name in ("annotation", "returns"):
      if getattr(node, name, None) is not None:
        skipped |= {id(n) for n in ast.walk(getattr(node, name))}
    body = getattr(node, "body", None)
    if isinstance(body, list):
      for statement in body:
        # A text alone documents; messages of errors are for readers.
        if isinstance(statement, ast.Expr) and isinstance(
          statement.value, ast.Constant
        ):
          skipped |= {id(n) for n in ast.walk(statement)}
    if isinstance(node, ast.JoinedStr):
      skipped |= {id(n) for n in ast.walk(node)}
    if isinstance(node, ast.Raise) and node.exc is not None:
      skipped |= {id(n) for n in ast.walk(node.exc)}
  return skipped


def kinds(node: ast.AST) -> list[str]:
  """Return the edits that apply to a node."""
  if isinstance(node, ast.Compare):
    return ["comparison"]
  if isinstance(node, ast.BinOp | ast.AugAssign):
    return ["operator"] if type(node.op) in _OPERATORS else []
  if isinstance(node, ast.BoolOp):
    return ["and-or", "drop-operand"]
  if isinstance(node, ast.UnaryOp):
    return ["unary"]
  if isinstance(node, ast.If | ast.IfExp | ast.While):
    return ["condition"]
  if isinstance(node, ast.Constant) and isinstance(
    node.value, bool | int | float
  ):
    return ["constant"]
  if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise):
    return ["remove"]
  if isinstance(node, ast.Return) and node.value is not None:
    nothing = isinstance(node.value, ast.Constant) and not node.value.value
    return [] if nothing else ["return-none"]
  return []


def mutate(node: ast.AST, kind: str) -> ast.AST:
  """Return the node after the edit; a copy."""
  new = copy.deepcopy(node)
  if kind == "comparison" and isinstance(new, ast.Compare):
    new.ops[0] = _COMPARISONS[type(new.ops[0])]()
  elif kind == "operator" and isinstance(new, ast.BinOp | ast.AugAssign):
    new.op = _OPERATORS[type(new.op)]()
  elif kind == "and-or" and isinstance(new, ast.BoolOp):
    new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
  elif kind == "drop-operand" and isinstance(new, ast.BoolOp):
    new.values = new.values[:-1]
  elif kind == "unary" and isinstance(new, ast.UnaryOp):
    return new.operand
  elif kind == "condition" and isinstance(new, ast.If | ast.IfExp | ast.While):
    new.test = ast.UnaryOp(ast.Not(), new.test)
  elif kind == "constant" and isinstance(new, ast.Constant):
    value = new.value
    new.value = not value if isinstance(value, bool) else value + 1  # pyright: ignore
  elif kind == "remove":
    return ast.Pass()
  elif kind == "return-none" and isinstance(new, ast.Return):
    new.value = ast.Constant(None)
  return new


def find(path: pathlib.Path) -> Iterator[Mutation]:
  """Yield every mutation of a file."""
  tree = ast.parse(path.read_text())
  skipped = _skipped(tree)
  for number, node in enumerate(ast.walk(tree)):
    if id(node) in skipped:
      continue
    for kind in kinds(node):
      line = getattr(node, "lineno", 0)
      before = ast.unparse(node).splitlines()[0][:70]
      yield Mutation(path, number, kind, line, before)


def apply(mutation: Mutation) -> str:
  """Return the source of the file with the mutation made."""
  tree = ast.parse(mutation.path.read_text())
  target = list(ast.walk(tree))[mutation.node]

  class Replace(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> ast.AST:
      if node is target:
        return mutate(node, mutation.kind)
      return self.generic_visit(node)

  return ast.unparse(ast.fix_missing_locations(Replace().visit(tree)))


class QuickestFirst:
  """A plugin of pytest: run tests in the order of their last durations.

  Most mutations are killed by a short test, and the first failure is enough.
  A test that takes far longer than it did ends the process: a loop that does
  not end is noticed, too.
  """

  def __init__(self, file: pathlib.Path) -> None:
    self.file = file
    self.took = json.loads(file.read_text()) if file.exists() else {}

  def pytest_collection_modifyitems(self, items: list[Any]) -> None:
    items.sort(key=lambda item: self.took.get(item.nodeid, 0.0))

  def pytest_runtest_logstart(self, nodeid: str) -> None:
    # Of the processor's time: the machine may do other things.
    seconds = 60 + 10 * self.took.get(nodeid, 60)
    signal.setitimer(signal.ITIMER_PROF, seconds)

  def pytest_runtest_logreport(self, report: Any) -> None:
    self.took[report.nodeid] = max(
      self.took.get(report.nodeid, 0.0), report.duration
    )

  def pytest_sessionfinish(self, exitstatus: int) -> None:
    if not exitstatus:
      self.file.write_text(json.dumps(self.took))


def run_tests(
  source: pathlib.Path,
  tests: list[str],
  timeout: float,
  only: str = "",
  cached: bool = True,
) -> str:
  """Return "passed", "failed" or "timeout".

  The tests run in a fork of this process, which has imported JAX and pytest
  and nothing of ours: that halves the time of a mutation.

  Args:
    source: the folder that holds the package.
    tests: files and folders of tests.
    timeout: in seconds, of all of them.
    only: an expression of `pytest -k`; other tests are not run.
    cached: whether compiled programs are taken from JAX's cache.
  """
  with warnings.catch_warnings():
    # JAX warns of forks; no backend has started here.
    warnings.simplefilter("ignore")
    child = os.fork()
  if not child:
    _run_in_child(source, tests, only, cached)
  end = time.monotonic() + timeout
  while time.monotonic() < end:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
      if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return "timeout"
      return "failed" if status else "passed"
    time.sleep(0.05)
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
  return "timeout"


def _run_in_child(
  source: pathlib.Path, tests: list[str], only: str, cached: bool
) -> NoReturn:
  code = 1
  try:
    os.environ["PYTHONPATH"] = str(source)  # of processes that tests start
    os.environ["HYPOTHESIS_PROFILE"] = "quick"
    jax.config.update("jax_enable_compilation_cache", cached)
    os.chdir(ROOT)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(source))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    options = ["-x", "-q", "-n", "0", "-m", "not slow", "-k", only, "-p"]
    order = QuickestFirst(source.parent / "durations.json")
    words = [*options, "no:cacheprovider", *tests]
    code = int(pytest.main(words, plugins=[order]))
  finally:
    os._exit(code)


def score(
  room: str,
  seconds: float,
  count: int,
  seed: int,
  again: dict | None = None,
  only: str = "",
  more: dict | None = None,
  keep: Callable[[dict], None] | None = None,
) -> dict:
  """Try mutations of a room until the budget is spent; return its score.

  Args:
    room: a key of `ROOMS`.
    seconds: the time to spend.
    count: the number of mutations to try at most.
    seed: of their order.
    again: a kept score; only its survivors are tried, and it is updated.
    only: an expression of `pytest -k`; other tests are not run.
    more: a kept score; the mutations that come next are tried, and added.
    keep: called with the score after every mutation.

  Returns:
    The score.
  """
  names, tests = ROOMS[room]
  tried, survivors, before = 0, [], 0
  with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
    # Two copies: the checkout may be edited while mutations are tried.
    whole, source = (pathlib.Path(folder) / name for name in ("whole", "src"))
    for copy_ in (whole, source):
      shutil.copytree(
        ROOT / "src", copy_, ignore=shutil.ignore_patterns("__pycache__")
      )
    package = whole / "jaxpruner"
    mutations = [m for path in _files(package, names) for m in find(path)]
    possible = len(mutations)
    if again is None:
      random.Random(seed).shuffle(mutations)
    else:
      mutations = _survivors(mutations, package, again["survivors"])
    if more is not None:
      if (more["of"], more["seed"]) != (possible, seed):
        raise SystemExit(f"{room}: the code has changed; score the room anew")
      before, survivors = more["tried"], [*more["survivors"]]
      mutations = mutations[before:]

    def found() -> dict:
      # Survivors that were not reached are survivors still.
      left = [] if again is None else mutations[tried:]
      number = before + tried if again is None else again["tried"]
      all_ = sorted([*survivors, *(_text(m, package) for m in left)])
      return {
        "tried": number,
        "killed": number - len(all_),
        "of": possible,
        "seed": seed if again is None else again["seed"],
        "survivors": all_,
      }

    start = time.monotonic()
    # A mutation's programs are compiled: their tests come last.
    if run_tests(source, tests, 10 * seconds, only, cached=False) != "passed":
      raise SystemExit(f"{room}: the tests fail without a mutation")
    alone = time.monotonic() - start
    end = time.monotonic() + seconds
    for mutation in mutations[:count]:
      if time.monotonic() > end:
        break
      where = mutation.path.relative_to(whole)
      (source / where).write_text(apply(mutation))
      verdict = run_tests(source, tests, 60 + 5 * alone, only)
      shutil.copy(mutation.path, source / where)
      tried += 1
      text = _text(mutation, package)
      print(f"{verdict:8} {text}", flush=True)
      if verdict == "passed":
        survivors.append(text)
      if keep is not None:
        keep(found())
  return found()


def _text(mutation: Mutation, package: pathlib.Path) -> str:
  where = mutation.path.relative_to(package)
  return f"{where}:{mutation.line} {mutation.kind}: {mutation.before}"


def _survivors(
  mutations: list[Mutation], package: pathlib.Path, texts: list[str]
) -> list[Mutation]:
  """Return the mutations that survived; several may read alike."""
  found = [m for m in mutations if _text(m, package) in texts]
  lost = set(texts) - {_text(m, package) for m in found}
  if lost:
    raise SystemExit(
      f"{len(lost)} survivors are no longer in the code, such as "
      f"{min(lost)!r}; score the room anew"
    )
  return found


def _files(package: pathlib.Path, names: list[str]) -> list[pathlib.Path]:
  paths = []
  for name in names:
    path = package / name
    paths += sorted(path.rglob("*.py")) if path.is_dir() else [path]
  return paths


def _kept() -> dict:
  return json.loads(SCORES.read_text()) if SCORES.exists() else {}


def _keep(room: str, found: dict) -> None:
  kept = {**_kept(), room: found}  # another process may have added rooms
  SCORES.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("rooms", nargs="*", metavar="ROOM", help="; ".join(ROOMS))
  parser.add_argument("--seconds", type=float, default=600, help="per room")
  parser.add_argument("--count", type=int, default=1000, help="per room")
  parser.add_argument("--seed", type=int, default=0, help="of the order")
  parser.add_argument(
    "--survivors", action="store_true", help="try kept survivors again"
  )
  parser.add_argument(
    "--more", action="store_true", help="go on where the kept score ends"
  )
  parser.add_argument(
    "--only", default="", metavar="EXPRESSION", help="of tests: pytest -k"
  )
  parser.add_argument("--list", action="store_true", help="show kept scores")
  args = parser.parse_args()
  if not args.list:
    for room in args.rooms or ROOMS:
      score(
        room,
        args.seconds,
        args.count,
        args.seed,
        _kept()[room] if args.survivors else None,
        args.only,
        _kept()[room] if args.more else None,
        functools.partial(_keep, room),
      )
  kept = _kept()
  for room, found in sorted(kept.items()):
    rate = found["killed"] / max(found["tried"], 1)
    print(
      f"{room:14} {found['killed']:4d} of {found['tried']:4d} killed "
      f"({100 * rate:.0f} %), {found['of']} possible"
    )
    for text in found["survivors"]:
      print(f"  survived {text}")
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
