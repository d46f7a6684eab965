"""The benchmarks run: on little, to the pages they write."""

import contextlib
import functools
import importlib
import io
import json
import pathlib
import shutil
import types

import numpy as np
import pytest
from scipy import stats

from jaxpruner.compare import record_files

SCRIPTS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
  """Imports a benchmark."""
  monkeypatch.syspath_prepend(str(SCRIPTS))
  return importlib.import_module


@pytest.fixture
def run(monkeypatch, tmp_path):
  """Runs a benchmark with arguments; returns the page it writes."""
  pytest.importorskip("matplotlib")
  monkeypatch.syspath_prepend(str(SCRIPTS))
  page = importlib.import_module("page")
  monkeypatch.setattr(page, "RESULTS", tmp_path)

  def run(name: str, *arguments: str, **replaced) -> str:
    script = importlib.import_module(name)
    for key, value in replaced.items():
      monkeypatch.setattr(script, key, value)
    monkeypatch.setattr("sys.argv", [name, *arguments])
    script.main()
    assert (tmp_path / f"{name}.png").exists()
    assert json.loads((tmp_path / f"{name}.json").read_text())
    return (tmp_path / f"{name}.md").read_text()

  return run


def test_engine(run):
  text = run("engine", "--most", "3000", peak=lambda _case: 0.0)
  assert "| float32 | 3e+03 |" in text
  assert "| bfloat16 | 3e+03 |" in text


def test_step(run, script, monkeypatch, tmp_path):
  step = script("step")
  mlp = functools.partial(step.mlp, width=64)

  def in_process(command, **_):
    """What a fresh process prints, without starting one."""
    monkeypatch.setattr("sys.argv", command[1:])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
      step.main()
    return types.SimpleNamespace(stdout=printed.getvalue())

  text = run(
    "step",
    *("--only", "mlp", "compile", "memory", "--algorithms", "magnitude"),
    *("--layers", "1", "--repeats", "1"),
    RECORD=tmp_path / "step.json",
    MODELS={"mlp": (mlp, 8)},
    mlp=mlp,
    kernel_cost=functools.partial(step.kernel_cost, 1, 2, 1),
    subprocess=types.SimpleNamespace(run=in_process),
  )
  assert "| mlp | 8 | magnitude |" in text
  assert "| 12 | magnitude |" in text


def test_sparse_ops(run, tmp_path):
  pytest.importorskip("numba")
  # What takes long, or says nothing of a small case.
  cell = {"dense_ms": 2.0, "sparse_ms": 1.0, "rest_ms": 0.5, "ratio": 2.0}
  place = {"shape": [64, 64], "sparsity": 0.9, "format": "sell"}
  left_out = {
    "bounds": {"fma": 2.0, "fma_with_load": 1.0},
    "models": [cell | {"tokens": n, "bytes": 0.1} for n in range(4)],
    "spread": [cell | place],
  }
  sections = importlib.import_module("sparse_ops").SECTIONS
  text = run(
    "sparse_ops",
    *("--output", str(tmp_path), "--budget", "0"),
    SHAPES=[(64, 128), (128, 64), (128, 128)],
    SPARSITIES=[0.5],
    BATCHES=[8, 512],
    SPREAD_BATCHES=[1],
    SECTIONS=sections
    | {name: lambda *_, x=x: x for name, x in left_out.items()},
  )
  assert "| 64×128 | 50% | bitmask, sell |" in text
  assert "| 128×128 | 90% | block |" in text


def test_before_after(monkeypatch, tmp_path):
  monkeypatch.syspath_prepend(str(SCRIPTS))
  page = importlib.import_module("page")
  script = importlib.import_module("before_after")
  monkeypatch.setattr(page, "RESULTS", tmp_path)
  monkeypatch.setattr(script, "MODELS", {"4-4": [4, 4]})
  monkeypatch.setattr(script, "REST", [4, 4])
  monkeypatch.setattr(script, "SIZES", (3000,))
  monkeypatch.setattr(script, "TURNS", 1)
  monkeypatch.setattr(script, "ALGORITHMS", ("rigl",))
  measured = functools.cache(lambda: script.measure())
  monkeypatch.setattr(script, "_in_process", lambda _source: measured())
  monkeypatch.setattr("sys.argv", ["before_after", str(tmp_path)])
  script.main()
  text = (tmp_path / "before_after.md").read_text()
  assert "| compile ÷ dense, 4-4, rigl |" in text
  assert "| step at rest ÷ dense, 12 × 512², magnitude_ste |" in text


@pytest.fixture
def published(script, monkeypatch, tmp_path):
  """The published records, with the pages in another folder."""
  pytest.importorskip("matplotlib")
  page = script("page")
  shutil.copytree(page.RESULTS / "records", tmp_path / "records")
  monkeypatch.setattr(page, "RESULTS", tmp_path)
  return tmp_path


def test_ranks_and_their_correlation_are_scipys(script):
  table1 = script("table1")
  rng = np.random.default_rng(0)
  for _ in range(50):
    a, b = rng.integers(0, 5, (2, 9)).astype(float)
    if np.ptp(a) and np.ptp(b):
      expected = stats.spearmanr(a, b).statistic
      np.testing.assert_allclose(table1.spearman(a, b), expected, atol=1e-12)
  assert table1.ranks(np.array([3.0, 1.0, 3.0])).tolist() == [1.5, 0.0, 1.5]


def test_the_page_beside_the_paper_is_that_of_the_records(script):
  table1 = script("table1")
  text = (table1.RESULTS / "table1.md").read_text()
  made = table1.page(table1.all_tasks())
  assert made in text, "run python benchmarks/table1.py"
  rows = [len(row) for row in table1.PAPER.values()]
  assert set(rows) == {len(table1.COLUMNS)}


def test_paired_intervals_without_records_are_those_of_the_pages(script):
  table1 = script("table1")
  for (task, better, other), numbers in table1.PAIRED.items():
    page = (table1.RESULTS / f"{task}.md").read_text()
    # A line may break within an interval; losses have the other sign.
    page = " ".join(page.replace("−", "-").replace("**", "").split())
    digits = max(len(str(abs(x)).partition(".")[2]) for x in numbers)
    signs = [numbers, [-numbers[0], -numbers[2], -numbers[1]]]
    texts = [
      "{:+.{d}f} [{:+.{d}f}, {:+.{d}f}]".format(*n, d=digits) for n in signs
    ]
    assert any(text in page for text in texts), (task, better, other)


def test_further_seeds_are_draws_of_the_same_comparison(script, published):
  further = script("further_seeds")
  records = published / "records"
  file, more = (
    records / "digits-80-adam.jsonl",
    records / "digits-80-adam-9.jsonl",
  )
  for old in further.files_of(file)[1:]:
    old.unlink()
  lines = file.read_text().splitlines()
  found, values = further.joined(file)

  def write(change):
    content = json.loads(lines[0])
    change(content["run"])
    more.write_text("\n".join([json.dumps(content), *lines[1:]]) + "\n")

  write(lambda run: run["jax"].update(jax_random_seed_offset="9"))
  assert further.is_further(more) and not further.is_further(file)
  both, twice = further.joined(file)
  assert [further.seeds_of(x) for x in both] == [range(5), range(9, 14)]
  assert twice == {cell: 2 * seeds for cell, seeds in values.items()}
  write(lambda run: run.update(notes=[]))
  with pytest.raises(ValueError, match="are in two files"):
    further.joined(file)
  write(lambda run: run["task"].update(width=8))
  with pytest.raises(ValueError, match="task is not that of"):
    further.joined(file)


def test_every_page_of_results_says_where_it_comes_from(script):
  cited = script("cited")
  found = cited.sources()
  index = (cited.page.RESULTS / "index.md").read_text()
  assert [s.name for s in found if f"]({s.name}.md)" not in index] == []
  made = cited.records(cited.page.RESULTS / "records")
  assert made in index, "run python benchmarks/cited.py"


def test_the_table_of_sources_reads_machine_and_time(script, tmp_path):
  cited = script("cited")
  page = tmp_path / "a.md"
  head = "# A\n\n`python benchmarks/a.py` on 2026-01-31, 1.5 minutes; {}, jax"
  page.write_text(head.format("Python 3.11") + " 0.10.2; AMD EPYC, 2 cores.\n")
  found = cited.source(page)
  assert (found.machine, found.minutes) == ("AMD EPYC, 2 cores", "1.5")
  page.write_text(
    "# A\n\n| command | `jaxpruner compare` |\n| date | 2026-01-31 |\n"
    "| device | CPU, 4 cores, x86_64 |\n| time taken | 21 minutes |\n"
  )
  found = cited.source(page)
  assert (found.machine, found.minutes) == ("CPU, 4 cores", "21")
  page.write_text("# A\n\n`jaxpruner compare` on 2026-01-31\n")
  assert cited.source(page)[-4:-2] == ("", "")


def test_a_page_of_records_states_where_they_were_trained(script, published):
  page = script("page")
  files = ("speeches-law", "digits-98-adam")
  infos = [
    record_files.read(str(published / "records" / f"{name}.jsonl")).info
    for name in files
  ]
  page.write("a", "A", ["text"], 90, infos)
  text = (published / "a.md").read_text()
  assert "1.5 minutes; trained 2026-11-18 with Python 3.11.7" in text
  assert "jax 0.10.2" in text and "cpu, 2 cores, x86_64." in text


def test_the_page_of_rewiring_is_made_of_the_records(
  script, published, monkeypatch
):
  monkeypatch.setattr("sys.argv", ["rewiring"])
  rewiring = script("rewiring")
  rewiring.main()
  text = (published / "rewiring.md").read_text()
  (run, *_) = rewiring.published(published / "records")
  d = rewiring.statistics.paired_difference(
    run.values["set"], run.values["static_sparse"]
  )
  assert f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]" in text
  assert (published / "rewiring.png").exists()


def test_the_law_on_speeches_is_fitted_to_the_records(
  script, published, monkeypatch
):
  arguments = ["scaling_law", "--records", "--resamples", "0"]
  monkeypatch.setattr("sys.argv", arguments)
  script("scaling_law").main()
  text = (published / "scaling_law.md").read_text()
  assert "fitted to 36 trainings" in text
  assert "That is beyond the 3 %" in text
  assert (published / "scaling_law.png").exists()
