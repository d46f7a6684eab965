"""Whole runs: killed, in several processes, on a cluster: one table."""

import json
import os
import random
import signal
import subprocess
import time

import compare_helpers as helpers
import pytest

from jaxpruner.compare import executors, folder, plan


def finished(path) -> int:
  return len(folder.read_lines(path / "results.jsonl"))


def kill_at(path, seconds: float, *extra: str) -> None:
  """Start the command and kill it, workers included, after some seconds."""
  process = subprocess.Popen(
    helpers.command(path, *extra),
    env=helpers.environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  )
  try:
    process.wait(timeout=seconds)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("kills, jobs", [(50, 1), (6, 2)])
def test_a_run_killed_at_random_gives_the_same_table(tmp_path, kills, jobs):
  began = time.perf_counter()
  result = helpers.run(tmp_path / "whole", "--jobs=1")
  duration = time.perf_counter() - began
  assert result.returncode == 0, result.stderr
  expected = helpers.untimed(tmp_path / "whole")
  rng = random.Random(0)
  for i in range(kills):
    path = tmp_path / f"killed-{i}"
    kill_at(path, rng.uniform(0, duration), f"--jobs={jobs}")
    before = finished(path)
    result = helpers.run(path, f"--jobs={jobs}")
    assert result.returncode == 0, result.stderr
    assert helpers.untimed(path) == expected
    # What was finished before the kill was not computed again.
    cells = [r["cell"] for r in folder.read_lines(path / "results.jsonl")]
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

  def __call__(self, cell, settings, on_stretch, load, save):
    del load, save
    self.calls.append(cell.id)
    on_stretch({"cell": cell.id, "start": 0, "count": 1})
    if cell.id in self.fail:
      raise MemoryError("too big\nsecond line")
    from jaxpruner.compare.cell import Outcome

    return Outcome({"cell": cell.id, "problem": ""}, {})


def test_a_cell_that_raises_is_recorded_and_the_others_run(
  tmp_path, monkeypatch
):
  cheap = Cheap(fail=["magnitude@0.8"])
  monkeypatch.setattr(executors.cells, "run_cell", cheap)
  settings = helpers.settings()
  events = []
  executors.serial(plan.cells(settings), settings, tmp_path, events.append)
  done = {
    e["record"]["cell"]: e["record"] for e in events if e["event"] == "done"
  }
  assert set(done) == {cell.id for cell in plan.cells(settings)}
  assert done["magnitude@0.8"]["problem"] == "MemoryError: too big"
  assert done["magnitude@0.8"]["raised"]
  assert json.dumps(done)


def test_a_full_disk_stops_the_run_instead_of_failing_the_cell(
  tmp_path, monkeypatch
):
  def full(*_):
    raise folder.FolderError("no space")

  monkeypatch.setattr(executors.cells, "run_cell", Cheap())
  monkeypatch.setattr(folder, "write_atomic", full)
  with pytest.raises(folder.FolderError, match="no space"):
    executors.compute(
      plan.Cell("dense", 0.0), helpers.settings(), tmp_path, lambda _: None
    )


def test_a_worker_without_a_parent_exits(tmp_path):
  """Its stdin closes when the parent dies, however it dies."""
  worker = subprocess.Popen(
    [
      helpers.command(tmp_path)[0],
      "-m",
      "jaxpruner.compare.worker",
      str(tmp_path),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    env=helpers.environment(),
    text=True,
  )
  slow = helpers.settings(options={"steps": 10**7})
  worker.stdin.write(json.dumps(plan.as_dict(slow)) + "\n")
  worker.stdin.write(json.dumps(plan.Cell("dense", 0.0)) + "\n")
  worker.stdin.close()
  assert worker.wait(timeout=120) in (0, 1)
  worker.stdout.close()
