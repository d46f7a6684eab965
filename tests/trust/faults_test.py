"""Every I/O call of every writer fails in turn: old or new, nothing between."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from faults import ERRORS, Faults, count_calls, places

from jaxpruner import cli, sparse
from jaxpruner.sparse import _layouts, files

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)


def command(*args):
  """Run a command; one that fails says so in one line, without a traceback."""
  if cli.main([str(a) for a in args]):
    raise OSError("the command failed")


def make_source(folder):
  safetensors.numpy.save_file(
    {"a.weight": W, "b.weight": W[:8]}, folder / "source"
  )
  return folder / "source"


def save(layout):
  return lambda _source, out: files.save(
    out, {"a": W, "b": W[:8] > 0}, layout=layout, metadata={"step": 3}
  )


def by_command(*args):
  return lambda source, out: command(args[0], source, "-o", out, *args[1:])


MODEL = sparse.Accelerated(lambda w, x: x @ w, W, (W[:1],))
WRITERS = {
  "save model": lambda _source, out: MODEL.save(out),
  **{f"save {layout}": save(layout) for layout in _layouts.LAYOUTS},
  "prune": by_command("prune", "--sparsity", "0.5"),
  "pack": by_command("pack"),
  "pack bitmask": by_command("pack", "--layout", "sparse-bitmask"),
  "unpack": by_command("unpack"),
  "picture": lambda source, out: command("inspect", source, "--plot", out),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", WRITERS)
def test_every_failing_call_leaves_old_or_new(tmp_path, capsys, name, error):
  if name == "picture":
    pytest.importorskip("matplotlib")
  write = WRITERS[name]
  source = make_source(tmp_path)
  (tmp_path / "out").mkdir()
  out = tmp_path / "out" / "x.png"
  write(source, out)
  whole = out.read_bytes()
  calls = count_calls(lambda: write(source, out))
  assert {"open", "write", "fsync", "close", "replace"} <= set(calls)
  for at in places(calls):
    for short in (None, 3) if calls[at] == "write" else (None,):
      out.write_bytes(b"old")
      with Faults(at, error, short).installed() as faults:
        with pytest.raises(OSError):
          write(source, out)
      renamed = "replace" in faults.calls[:at]
      assert out.read_bytes() == (whole if renamed else b"old"), calls[at]
      assert list(out.parent.iterdir()) == [out]
  capsys.readouterr()
  write(source, out)
  assert out.read_bytes() == whole


@pytest.mark.parametrize("error", ERRORS)
def test_a_failing_cache_costs_a_measurement_and_stays_whole(tmp_path, error):
  path = tmp_path / "t.json"
  timer = lambda thunks: {n: 1.0 if n == "dense" else 0.1 for n in thunks}
  w = np.zeros((128, 128), np.float32)
  w[::16] = 1
  run = lambda: sparse.accelerate(
    lambda p, x: x @ p["w"], {"w": jnp.asarray(w)}, jnp.ones((1, 128)),
    cache=path, timer=timer,
  )  # fmt: skip
  calls = count_calls(run)
  for at in range(len(calls)):
    path.write_text('{"old": {"dense": 1.0}}')
    with Faults(at, error).installed():
      run()
    table = json.loads(path.read_bytes())
    assert table.keys() >= {"old"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
def test_every_truncation_of_a_file_is_refused(tmp_path, layout):
  path = tmp_path / "x"
  files.save(path, {"a": W, "b": W[:8] > 0}, layout=layout)
  whole = path.read_bytes()
  for size in {*range(0, len(whole), 37), *range(64), len(whole) - 1}:
    path.write_bytes(whole[:size])
    with pytest.raises(files.FileFormatError):
      files.load(path)


def test_a_read_only_folder_is_told_in_words(tmp_path, capsys, monkeypatch):
  # Root may write anywhere, so the refusal comes from the open itself.
  source = make_source(tmp_path)
  with Faults(0, 30).installed():
    assert cli.main(["pack", str(source), "-o", str(tmp_path / "o")]) == 1
  assert "Read-only file system" in capsys.readouterr().err
