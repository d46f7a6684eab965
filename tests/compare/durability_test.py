"""Whole runs: killed, in several processes, on a cluster: one table."""

import json
import os
import random
import subprocess
import time

import compare_helpers as helpers
import numpy as np
import pytest

from jaxpruner.compare import executors, files, plan, workers
from jaxpruner.compare.cells import Cell
from jaxpruner.compare.files import RunFolderError, read_lines
from jaxpruner.compare.outcomes import Outcome
from jaxpruner.compare.records import Failure, event_to_json


def finished(path) -> int:
  return len(read_lines(path / "results.jsonl"))


AXES = (
  "--task=mine:my_task",
  "--algorithms=magnitude,rigl{drop_fraction=0.1}",
  "--type=unstructured,2:4",
  "--sparsity=0.5",
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "words, kills, jobs",
  [((), 50, 1), ((), 6, 2), (AXES, 20, 1), (AXES, 6, 2)],
  ids=["plain", "plain-2", "own-task-and-axes", "own-task-and-axes-2"],
)
def test_a_run_killed_at_random_gives_the_same_table(
  tmp_path, words, kills, jobs
):
  (tmp_path / "mine.py").write_text(helpers.OWN_TASK)
  here = {"folder": tmp_path}
  began = time.perf_counter()
  result = helpers.run(tmp_path / "whole", "--jobs=1", *words, **here)
  duration = time.perf_counter() - began
  assert result.returncode == 0, result.stderr
  expected = helpers.untimed(tmp_path / "whole")
  rng = random.Random(0)
  for i in range(kills):
    path = tmp_path / f"killed-{i}"
    when = rng.uniform(0, duration)
    helpers.kill_at(path, when, f"--jobs={jobs}", *words, **here)
    before = finished(path)
    result = helpers.run(path, f"--jobs={jobs}", *words, **here)
    assert result.returncode == 0, result.stderr
    assert helpers.untimed(path) == expected
    # What was finished before the kill was not computed again.
    cells = [r.value["cell"] for r in read_lines(path / "results.jsonl")]
    assert len(cells) == len(set(cells)) >= before


@pytest.mark.slow
def test_processes_give_the_bits_of_one_process(tmp_path):
  for name, jobs in (("one", 1), ("two", 2)):
    result = helpers.run(tmp_path / name, f"--jobs={jobs}")
    assert result.returncode == 0, result.stderr
  assert helpers.untimed(tmp_path / "one") == helpers.untimed(tmp_path / "two")
  weights = sorted((tmp_path / "one" / "weights").iterdir())
  assert len(weights) == 4
  for file in weights:
    assert (
      file.read_bytes()
      == (tmp_path / "two" / "weights" / file.name).read_bytes()
    )


@pytest.mark.slow
def test_a_ray_cluster_of_two_nodes_gives_the_same_table(tmp_path):
  pytest.importorskip("ray.cluster_utils")
  assert helpers.run(tmp_path / "local", "--jobs=1").returncode == 0
  code = (
    "import sys\n"
    "from ray.cluster_utils import Cluster\n"
    "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 0})\n"
    "for _ in range(2):\n"
    "  cluster.add_node(num_cpus=1)\n"
    "cluster.wait_for_nodes()\n"
    "from jaxpruner import cli\n"
    "arguments = sys.argv[1:] + ['--ray-address', cluster.address]\n"
    "code = cli.main(arguments)\n"
    "import ray\n"
    "nodes = sum(n['Alive'] for n in ray.nodes())\n"
    "assert nodes == 3, nodes\n"
    "ray.shutdown()\n"
    "cluster.shutdown()\n"
    "sys.exit(code)\n"
  )
  words = helpers.command(tmp_path / "ray", "--executor=ray")
  result = subprocess.run(
    [words[0], "-c", code, *words[3:]],
    env=helpers.environment() | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    capture_output=True,
    text=True,
    timeout=900,
  )
  assert result.returncode == 0, result.stderr
  assert helpers.untimed(tmp_path / "ray") == helpers.untimed(
    tmp_path / "local"
  )


class Cheap:
  """Stands in for training: instant, deterministic, may fail."""

  def __init__(self, fail=()):
    self.fail, self.calls = set(fail), []

  def __call__(self, cell, settings, emit, checkpoint, trained):
    del settings, checkpoint, trained
    self.calls.append(cell.id)
    emit(helpers.chunk(cell.id))
    if cell.id in self.fail:
      raise MemoryError("too big\nsecond line")
    return Outcome(helpers.record(cell.id, [1.0, 1.0]), {})


def test_a_cell_that_raises_is_recorded_and_the_others_run(
  tmp_path, monkeypatch
):
  cheap = Cheap(fail=["magnitude@0.8"])
  monkeypatch.setattr(executors.cell_run, "run_cell", cheap)
  settings = helpers.settings()
  events = []
  executors.serial(plan.cells_of(settings), settings, tmp_path, events.append)
  done = {e.cell: e for e in events if e.event == "done"}
  assert set(done) == {cell.id for cell in plan.cells_of(settings)}
  assert done["magnitude@0.8"].problem == "MemoryError: too big"
  assert isinstance(done["magnitude@0.8"], Failure)
  assert json.dumps([event_to_json(event) for event in events])


def test_a_full_disk_stops_the_run_instead_of_failing_the_cell(
  tmp_path, monkeypatch
):
  def full(*_):
    raise RunFolderError("no space")

  monkeypatch.setattr(executors.cell_run, "run_cell", Cheap())
  monkeypatch.setattr(files, "write_atomic", full)
  with pytest.raises(RunFolderError, match="no space"):
    executors.compute(
      Cell("dense", 0.0), helpers.settings(), tmp_path, lambda _: None
    )


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_of_no_use_is_tried_once(
  tmp_path, monkeypatch, capsys, damaged
):
  """Unreadable, or readable and the cell raises: renamed, not retried."""

  def run_cell(cell, settings, emit, checkpoint, trained):
    del settings, emit, trained
    if checkpoint.load() is not None:
      raise ValueError("wrong checkpoint")
    return Outcome(helpers.record(cell.id, [1.0, 1.0]), {})

  monkeypatch.setattr(executors.cell_run, "run_cell", run_cell)
  cell, settings = Cell("magnitude", 0.8), helpers.settings()
  checkpoint = executors.CheckpointFile(tmp_path, cell)
  checkpoint.save({"leaf:0": np.zeros(3)})
  if damaged:
    checkpoint.path.write_bytes(b"PK nothing")
  events = []
  for _ in range(2):
    executors.compute(cell, settings, tmp_path, events.append)
  assert events[-1].problem == ""
  assert not checkpoint.path.exists()
  assert checkpoint.path.with_name("magnitude@0.8.npz.bad").exists()
  assert "set aside as magnitude@0.8.npz.bad" in capsys.readouterr().err


def test_what_a_node_returns_for_another_cell_is_not_stored(tmp_path):
  cell = Cell("magnitude", 0.8)
  for name in ("rigl@0.8", "../../planted"):
    events = [event_to_json(helpers.record(name, [1.0]))]
    with pytest.raises(RunFolderError, match="was given 'magnitude@0.8'"):
      executors.store_remote(cell, (events, b"x"), tmp_path, lambda _: None)
  with pytest.raises(RunFolderError, match="missing fields"):
    bad = [{"event": "done", "record": {"cell": cell.id}}]
    executors.store_remote(cell, (bad, b"x"), tmp_path, lambda _: None)
  assert not list(tmp_path.iterdir())
  good = [event_to_json(helpers.record(cell.id, [1.0]))]
  executors.store_remote(cell, (good, b"x"), tmp_path, lambda _: None)
  assert (tmp_path / "weights" / f"{cell.id}.npz").read_bytes() == b"x"


def fake_worker(monkeypatch, code):
  """Let workers run `code` instead of training."""
  popen = subprocess.Popen

  def start(words, **options):
    return popen([words[0], "-c", code, *words[3:]], **options)

  monkeypatch.setattr(workers.subprocess, "Popen", start)


@pytest.mark.parametrize(
  "code, reason",
  [
    ("print('hello', flush=True)", "sent 'hello"),
    ("print('[1]', flush=True)", "no event"),
    ('print(\'{"event": "done", "record": 3}\')', "no event"),
    ("import sys; sys.exit(3)", "ended with code 3"),
    ("pass", "ended with code 0"),
  ],
)
def test_a_worker_that_breaks_the_protocol_ends_the_run(
  tmp_path, monkeypatch, code, reason
):
  fake_worker(monkeypatch, code)
  with pytest.raises(RunFolderError, match=reason) as error:
    workers.processes(
      [Cell("dense", 0.0)], helpers.settings(), tmp_path, lambda _: None, 1
    )
  assert "worker-0.log" in str(error.value)


def test_what_a_worker_writes_to_descriptor_one_goes_to_its_log(
  tmp_path, monkeypatch
):
  (tmp_path / "noisy.py").write_text(
    "import os\nos.write(1, b'from below Python\\n')\nprint('from print')\n"
  )
  monkeypatch.setenv(
    "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
  )
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  events = []
  settings = helpers.settings(imports=("noisy",))
  out = tmp_path / "run"
  out.mkdir()
  workers.processes([Cell("dense", 0.0)], settings, out, events.append, 1)
  assert events[-1].problem == ""
  text = (out / "worker-0.log").read_text()
  assert "from below Python" in text and "from print" in text


def test_a_worker_without_a_parent_exits(tmp_path):
  """Its stdin closes when the parent dies, however it dies."""
  worker = subprocess.Popen(
    [
      helpers.command(tmp_path)[0],
      "-m",
      "jaxpruner.compare.workers",
      str(tmp_path),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=helpers.environment(),
    text=True,
  )
  slow = helpers.settings(options={"steps": 10**7})
  worker.stdin.write(json.dumps(slow.to_json()) + "\n")
  worker.stdin.write(json.dumps(Cell("dense", 0.0)) + "\n")
  worker.stdin.close()
  assert worker.wait(timeout=120) in (0, 1)
  worker.stdout.close()
