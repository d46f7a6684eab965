"""One file is replaced by another, or nothing happens."""

import errno
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest
from faults import ERRORS, Faults, count_calls

from jaxpruner import cli
from jaxpruner._tools import atomic

pytestmark = pytest.mark.skipif(
  atomic.fcntl is None, reason="locks need a POSIX system"
)


def replace(path):
  with atomic.replacing(path) as file:
    file.write(b"new")
    file.write(b"er")


CALLS = 9


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", range(CALLS))
def test_every_failing_call_leaves_old_or_new(tmp_path, at, error):
  path = tmp_path / "x"
  path.write_bytes(b"old")
  assert len(count_calls(lambda: replace(tmp_path / "y"))) == CALLS
  (tmp_path / "y").unlink()
  with Faults(at, error).installed() as faults, pytest.raises(OSError):
    replace(path)
  after_rename = "replace" in faults.calls[:at]
  assert path.read_bytes() == (b"newer" if after_rename else b"old")
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_named(tmp_path, call, monkeypatch, capsys):
  path = tmp_path / "x"
  at = count_calls(lambda: replace(path)).index(call)
  with Faults(at, errno.ENOSPC).installed():
    with pytest.raises(OSError, match="No space left.*'.*/x'"):
      replace(path)

    def run(_):
      replace(path)

    monkeypatch.setattr("jaxpruner.sparse.inspect_command.run", run)
  with Faults(at, errno.ENOSPC).installed():
    assert cli.main(["inspect", "y"]) == 1
  said = capsys.readouterr().err
  assert f"{path}: No space left on device; free some space" in said


def test_an_error_in_the_block_leaves_the_old_file(tmp_path):
  path = tmp_path / "x"
  path.write_bytes(b"old")
  with pytest.raises(KeyboardInterrupt), atomic.replacing(path) as file:
    file.write(b"half")
    raise KeyboardInterrupt
  assert path.read_bytes() == b"old"
  assert list(tmp_path.iterdir()) == [path]


def test_the_folder_is_forced_to_disk_after_the_rename(tmp_path):
  calls = count_calls(lambda: replace(tmp_path / "x"))
  assert calls[-2:] == ["replace", "fsync"]
  assert calls.count("fsync") == 2


KILLED = """
import sys, time
from jaxpruner._tools import atomic
with atomic.replacing(sys.argv[1]) as file:
  file.write(b"half")
  file.flush()
  print("writing", flush=True)
  time.sleep(60)
"""


def writer(path):
  process = subprocess.Popen(
    [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE
  )
  assert process.stdout is not None and process.stdout.readline()
  return process


def test_what_a_killed_writer_left_is_swept_and_a_living_one_is_not(tmp_path):
  path = tmp_path / "x"
  process = writer(path)
  try:
    assert atomic.sweep(tmp_path) == []
    replace(path)
    assert len(list(tmp_path.iterdir())) == 2
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
  # Another file of the folder: a dead writer's target may never come back.
  replace(tmp_path / "y")
  assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("jump", [-4e8, -90_000.0, 90_000.0, 4e8])
def test_a_jump_of_the_clock_removes_nothing_that_lives(
  tmp_path, monkeypatch, jump
):
  process = writer(tmp_path / "x")
  now = time.time()
  monkeypatch.setattr(atomic.time, "time", lambda: now + jump)
  try:
    replace(tmp_path / "y")
    assert atomic.sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2
  finally:
    process.kill()
    process.wait()
    process.stdout.close()
  assert len(atomic.sweep(tmp_path)) == 1
  assert [p.name for p in tmp_path.iterdir()] == ["y"]


def test_another_hosts_temporary_file_stays_for_a_day(tmp_path, monkeypatch):
  left = tmp_path / ".x.00000000-00000000.jaxpruner.tmp"
  left.write_bytes(b"")
  os.utime(left, (1000, 1000))
  for age in (0.0, 86_400.0):
    monkeypatch.setattr(atomic.time, "time", lambda age=age: 1000 + age)
    assert atomic.sweep(tmp_path) == []
  monkeypatch.setattr(atomic.time, "time", lambda: 1000 + 86_400.5)
  assert atomic.sweep(tmp_path) == [left]


def own_temporary(folder):
  return folder / f".x.{atomic._host()}-00000000.jaxpruner.tmp"


def test_no_file_stays_open(tmp_path):
  own_temporary(tmp_path).write_bytes(b"")
  before = os.listdir("/proc/self/fd")
  replace(tmp_path / "x")
  assert [p.name for p in tmp_path.iterdir()] == ["x"]
  with pytest.raises(KeyError), atomic.replacing(tmp_path / "x"):
    raise KeyError
  assert os.listdir("/proc/self/fd") == before


def test_a_temporary_file_swept_before_it_is_locked_is_made_again(
  tmp_path, monkeypatch
):
  locks = []

  def flock(descriptor, how):
    locks.append(how)
    if len(locks) == 1:
      (left,) = tmp_path.iterdir()
      left.unlink()

  monkeypatch.setattr(atomic.fcntl, "flock", flock)
  before = os.listdir("/proc/self/fd")
  replace(tmp_path / "x")
  assert (tmp_path / "x").read_bytes() == b"newer"
  assert len(locks) == 2
  assert os.listdir("/proc/self/fd") == before


def test_without_locks_files_are_replaced_and_nothing_is_swept(
  tmp_path, monkeypatch
):
  def flock(*_):
    raise OSError(errno.ENOLCK, "no locks")

  own_temporary(tmp_path).write_bytes(b"")
  monkeypatch.setattr(atomic.fcntl, "flock", flock)
  replace(tmp_path / "x")
  monkeypatch.setattr(atomic, "fcntl", None)
  replace(tmp_path / "y")
  assert atomic.sweep(tmp_path) == []
  assert (tmp_path / "x").read_bytes() == b"newer"
  assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_folder_that_cannot_be_synced_is_no_error_and_others_are(
  tmp_path, monkeypatch, call
):
  for code in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM):
    with monkeypatch.context() as patch:

      def fail(*_, code=code):
        raise OSError(code, "refused")

      patch.setattr(atomic.os, call, fail)
      atomic.sync_folder(tmp_path)
  with monkeypatch.context() as patch:

    def broken(*_):
      raise OSError(errno.EIO, "broken")

    patch.setattr(atomic.os, call, broken)
    with pytest.raises(OSError, match="broken"):
      atomic.sync_folder(tmp_path)


def test_bytes_are_written(tmp_path):
  atomic.write_bytes(tmp_path / "x", b"all of it")
  assert (tmp_path / "x").read_bytes() == b"all of it"


def test_foreign_files_and_links_are_never_swept(tmp_path):
  victim = tmp_path / "victim"
  victim.write_bytes(b"kept")
  name = f".x.{atomic._host()}-00000000.jaxpruner.tmp"
  (tmp_path / name).symlink_to(victim)
  (tmp_path / ".x.tmp").write_bytes(b"")
  os.mkfifo(tmp_path / name.replace("00000000.j", "00000001.j"))
  assert atomic.sweep(tmp_path) == []
  assert len(list(tmp_path.iterdir())) == 4
  # Nor if a link or a pipe takes the place of a file that was just seen.
  with pytest.raises(OSError):
    atomic._remove_if_dead(str(tmp_path / name))
  assert victim.read_bytes() == b"kept"


def test_a_pipe_is_refused_and_stays_a_pipe(tmp_path):
  os.mkfifo(tmp_path / "pipe")
  (tmp_path / "link").symlink_to(tmp_path / "pipe")
  for name in ("pipe", "link"):
    with pytest.raises(atomic.PathError, match="is a pipe"):
      replace(tmp_path / name)
  assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout"])
def test_a_device_is_refused(path):
  # Where standard output is a file, a link to it in /dev is a file too.
  if pathlib.Path(path).is_file():
    pytest.skip("is a file here")
  with pytest.raises(atomic.PathError):
    replace(path)


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_path_that_names_no_file_is_refused(path):
  with pytest.raises(atomic.PathError, match="names no file"):
    replace(path)


def test_a_path_with_nul_is_refused():
  with pytest.raises(atomic.PathError, match="holds NUL"):
    replace("a\0b")


def test_a_missing_folder_and_a_folder_are_named(tmp_path):
  with pytest.raises(atomic.PathError, match="does not exist"):
    replace(tmp_path / "no" / "x")
  with pytest.raises(atomic.PathError, match="is a folder"):
    replace(tmp_path)


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path):
  (tmp_path / "target").write_bytes(b"old")
  (tmp_path / "link").symlink_to("target")
  replace(tmp_path / "link")
  assert (tmp_path / "target").read_bytes() == b"old"
  assert not (tmp_path / "link").is_symlink()


def test_a_long_name_is_written(tmp_path):
  replace(tmp_path / ("n" * 250))
  assert (tmp_path / ("n" * 250)).read_bytes() == b"newer"
