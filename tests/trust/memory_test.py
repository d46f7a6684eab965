"""The peak memory of a command counts all its processes."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HOLD = "data = bytearray(b'x' * (64 << 20)); "
CHILD = f"import time; {HOLD}time.sleep(1.5)"
PARENT = (
  f"import subprocess, sys; {HOLD}"
  "subprocess.run([sys.executable, '-c', sys.argv[1]]); sys.exit(3)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_a_command_is_that_of_all_its_processes():
  run = subprocess.run(
    [sys.executable, str(ROOT / "tools" / "memory.py"), "--limit=0.01"]
    + [sys.executable, "-c", PARENT, CHILD],
    capture_output=True,
    text=True,
  )
  assert run.returncode == 3  # the command's own
  peak, _, rest = run.stderr.removeprefix("peak ").partition(" GiB, in ")
  assert 0.125 <= float(peak) < 0.5
  assert rest.startswith("2 processes") and "above the limit" in rest
