"""Run a command and print the peak memory of all its processes together.

    python tools/memory.py .venv/bin/pytest -n 2 -m "not slow"
    python tools/memory.py --limit 8 .venv/bin/pytest -n 2 -m "not slow"

Twice a second the shares of memory (PSS: a page that n processes share counts
1/n for each) of the command and of all that it started are added up, which no
limit of a single process sees. The command's exit code is passed on; with
`--limit`, a peak above so many GiB makes it 1. Linux only.
"""

import argparse
import pathlib
import subprocess
import sys
import time

PROC = pathlib.Path("/proc")


def children(root: int) -> set[int]:
  """Return a process and all below it."""
  parents = {}
  for entry in PROC.glob("[0-9]*/stat"):
    try:
      # The name, in parentheses, may hold spaces.
      fields = entry.read_text().rpartition(")")[2].split()
    except OSError:
      continue  # it has ended
    parents[int(entry.parent.name)] = int(fields[1])
  found, new = {root}, {root}
  while new:
    new = {pid for pid, parent in parents.items() if parent in new} - found
    found |= new
  return found


def share(pid: int) -> int:
  """Return the bytes of a process, shared pages divided; 0 if it has ended."""
  try:
    text = (PROC / str(pid) / "smaps_rollup").read_text()
  except OSError:
    return 0
  sizes = [line.split()[1] for line in text.splitlines() if "Pss:" in line]
  return 1024 * int(sizes[0]) if sizes else 0


def watch(command: list[str], pause: float = 0.5) -> tuple[int, int, int]:
  """Run a command; return its exit code, the peak in bytes, and processes."""
  process = subprocess.Popen(command)
  peak = most = 0
  while process.poll() is None:
    shares = [share(pid) for pid in children(process.pid)]
    if sum(shares) > peak:
      peak, most = sum(shares), len(shares)
    time.sleep(pause)
  return process.returncode, peak, most


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--limit", type=float, help="GiB that may be used")
  parser.add_argument("command", nargs=argparse.REMAINDER)
  args = parser.parse_args()
  if not args.command:
    parser.error("name a command, such as pytest")
  code, peak, most = watch(args.command)
  size = peak / 2**30
  print(f"peak {size:.2f} GiB, in {most} processes", file=sys.stderr)
  if args.limit is not None and size > args.limit:
    print(f"above the limit of {args.limit:g} GiB", file=sys.stderr)
    return code or 1
  return code


if __name__ == "__main__":
  raise SystemExit(main())
