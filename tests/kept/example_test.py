"""The example that trains what would not fit in memory."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples/larger_than_memory.py"


def run(*arguments, limit=None):
  command = f"ulimit -v {limit}; " if limit else ""
  command += " ".join([sys.executable, str(EXAMPLE), *arguments])
  out = subprocess.run(
    ["bash", "-c", command], capture_output=True, text=True, check=True
  ).stdout
  losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", out)]
  return losses, float(re.findall(r", ([0-9.]+)x", out)[-1])


@pytest.mark.slow
def test_a_network_of_17_gigabytes_trains_under_9():
  losses, ratio = run(limit=9_000_000)
  assert losses[-1] < losses[0]
  assert ratio < 0.025


def test_a_small_one_does_the_same():
  losses, ratio = run("512", "256", "3")
  assert losses[-1] < losses[0]
  assert ratio < 0.05
