"""Bad files and arguments end in one line of words and exit code 1 or 2."""

import json
import os
import stat
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxpruner import cli, sparse
from jaxpruner.sparse import _choose, files, structure


def command(*args):
  try:
    return cli.main([str(a) for a in args])
  except SystemExit as end:
    return end.code


def said(capsys):
  found = capsys.readouterr().err.strip()
  assert found and "Traceback" not in found
  return found


@pytest.fixture
def model(tmp_path):
  path = tmp_path / "m.safetensors"
  w = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
  safetensors.numpy.save_file({"w": w}, path)
  return path


@pytest.mark.parametrize(
  "axes", [(3, 3, 1, 8), (1, 4), (4, 1), (1, 1, 8), (8,)]
)
def test_axes_of_length_one_are_described(axes):
  mask = np.ones(axes)
  mask.reshape(-1)[::3] = 0
  assert isinstance(structure.describe(mask), str)


def test_a_depthwise_kernel_is_inspected(tmp_path, capsys):
  w = np.ones((3, 3, 1, 8), np.float32)
  w[..., ::2] = 0
  files.save(tmp_path / "m", {"w": w})
  assert command("inspect", tmp_path / "m") == 0
  assert "50.00 %" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["prune", "pack", "unpack"])
def test_an_output_that_is_no_file_is_refused(model, tmp_path, capsys, name):
  more = ["--sparsity", 0.5] if name == "prune" else []
  os.mkfifo(tmp_path / "pipe")
  for out in ("", ".", tmp_path, tmp_path / "no" / "x", tmp_path / "pipe",
              "/dev/null"):  # fmt: skip
    assert command(name, model, "-o", out, *more) == 1
    assert said(capsys)
  assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
  assert sorted(p.name for p in tmp_path.iterdir()) == [model.name, "pipe"]


@pytest.mark.parametrize("option", ["--include", "--exclude"])
@pytest.mark.parametrize("pattern", ["(", "[", "*", "(?P<", ""])
def test_a_pattern_that_is_none_is_refused(
  model, tmp_path, capsys, option, pattern
):
  out = tmp_path / "o"
  assert command(
    "prune", model, "-o", out, "--sparsity", 0.5, option, pattern
  ) == 2  # fmt: skip
  word = "not a regular expression" if pattern else "is empty"
  assert word in said(capsys)
  assert not out.exists()


@pytest.mark.parametrize(
  "layout, name",
  [
    ("dense", "o.safetensors"),
    ("dense", "o.msgpack"),
    ("packed", "o.npz"),
    ("int8", "o.npz"),
  ],
)
def test_no_file_is_named_after_another_format(tmp_path, capsys, layout, name):
  np.savez(tmp_path / "m.npz", w=np.eye(8, dtype=np.float32))
  out = tmp_path / name
  words = ["--sparsity", 0.5, "--layout", layout, "-o", out]
  assert command("prune", tmp_path / "m.npz", *words) == 1
  assert "not what its name ends in" in said(capsys)
  assert not out.exists()


def test_a_picture_that_cannot_be_drawn_is_refused_first(
  model, tmp_path, capsys
):
  pytest.importorskip("matplotlib")
  for picture in (
    "x.xyz",
    "",
    tmp_path,
    tmp_path / "no" / "x.png",
    "/dev/null",
  ):
    assert command("inspect", model, "--plot", picture) == 1
    out = capsys.readouterr()
    assert not out.out and out.err and "Traceback" not in out.err
  for picture in ("x.png", "x", "x.SVG"):
    assert command("inspect", model, "--plot", tmp_path / picture) == 0
    assert (tmp_path / picture).stat().st_size > 1000


@pytest.mark.parametrize("name", ["inspect", "prune", "pack", "unpack"])
def test_an_empty_path_is_not_the_current_folder(
  model, tmp_path, capsys, monkeypatch, name
):
  monkeypatch.chdir(model.parent)
  out = [] if name == "inspect" else ["-o", tmp_path / "o"]
  more = ["--sparsity", 0.5] if name == "prune" else []
  assert command(name, "", *out, *more) == 1
  assert "path of the checkpoint is empty" in said(capsys)
  assert not (tmp_path / "o").exists()


def test_a_negative_seed_is_named(model, tmp_path, capsys):
  args = ["prune", model, "-o", tmp_path / "o", "--sparsity", 0.5]
  assert command(*args, "--seed", -1) == 1
  assert "--seed -1 must not be negative" in said(capsys)


SURROGATE = b'{"__metadata__": {"note": "\\ud800"}}'


@pytest.mark.parametrize("name", ["inspect", "prune", "pack", "unpack"])
def test_lone_surrogates_in_metadata_are_refused(tmp_path, capsys, name):
  path = tmp_path / "m"
  path.write_bytes(struct.pack("<Q", len(SURROGATE)) + SURROGATE)
  out = [] if name == "inspect" else ["-o", tmp_path / "o"]
  assert command(name, path, *out) == 1
  assert "not Unicode" in said(capsys)


@pytest.mark.parametrize("layout", ["packed", "dense", "sparse-bitmask"])
@pytest.mark.parametrize("metadata", [{"a": "\ud800"}, {"\udfff": 1}])
def test_lone_surrogates_are_not_written(tmp_path, layout, metadata):
  with pytest.raises(ValueError, match="not Unicode"):
    files.save(tmp_path / "m", {"w": np.ones(2)}, layout=layout,
               metadata=metadata)  # fmt: skip
  assert not list(tmp_path.iterdir())


def test_a_tensor_beside_one_named_like_its_part_is_refused_in_words(
  tmp_path, capsys
):
  path = tmp_path / "m"
  sparse_w = np.zeros((8, 8), np.float32)
  safetensors.numpy.save_file({"w": sparse_w, "w.values": np.ones(3)}, path)
  assert command("inspect", path) == 0
  capsys.readouterr()
  assert command("pack", path, "-o", tmp_path / "o") == 1
  assert "rename one" in said(capsys)
  assert [p.name for p in tmp_path.iterdir()] == ["m"]
  assert command("unpack", path, "-o", tmp_path / "o") == 0


# --- the timing cache: it may only ever cost a new measurement ---------------

W = np.zeros((128, 128), np.float32)
W[::16] = 1


def accelerate(cache):
  asked = []

  def timer(thunks):
    asked.append(set(thunks))
    return {name: 1.0 if name == "dense" else 0.1 for name in thunks}

  fast, _ = sparse.accelerate(
    lambda p, x: x @ p["w"], {"w": jnp.asarray(W)}, jnp.ones((1, 128)),
    cache=cache, timer=timer,
  )  # fmt: skip
  np.testing.assert_allclose(fast(jnp.ones((1, 128))), np.ones((1, 128)) @ W)
  return len(asked)


def misshapen(table):
  (key,) = table
  good = table[key]
  yield from ([], None, 3, "x", {key: None}, {key: []}, {key: {}}, {key: 3})
  yield {key: dict.fromkeys(good, "fast")}
  yield {key: dict.fromkeys(good, -1)}
  yield {key: dict.fromkeys(good, None)}
  yield {key: {"dense": 1.0}}
  yield {key: good | {"other": 0.001}}
  yield {key: dict.fromkeys(good, True)}


def test_a_misshapen_cache_costs_a_measurement(tmp_path):
  path = tmp_path / "t.json"
  assert accelerate(path) == 2
  assert accelerate(path) == 1
  texts = [json.dumps(t) for t in misshapen(json.loads(path.read_text()))]
  (key,) = json.loads(path.read_text())
  texts += ["", "{", "[" * 10**5, "NaN", f'{{"{key}": {{"dense": NaN}}}}']
  for text in [*(t.encode() for t in texts), b"\xff\xfe", b"\0" * 100]:
    path.write_bytes(text)
    assert accelerate(path) == 2, text[:100]
    assert accelerate(path) == 1


def test_a_cache_that_cannot_be_written_costs_a_measurement(tmp_path):
  (tmp_path / "file").write_bytes(b"")
  (tmp_path / "folder").mkdir()
  os.mkfifo(tmp_path / "pipe")
  for path in (tmp_path / "file" / "t", tmp_path / "folder", tmp_path / "pipe",
               "/proc/none/t", "/dev/null"):  # fmt: skip
    assert accelerate(path) == 2


def test_timings_of_another_version_are_measured_anew(monkeypatch, tmp_path):
  path = tmp_path / "t.json"
  assert accelerate(path) == 2
  monkeypatch.setattr(_choose, "_machine", lambda: ("another",))
  assert accelerate(path) == 2


def test_a_closed_output_is_no_error():
  words = [sys.executable, "-m", "jaxpruner", "data"]
  command = [*("sh", "-c", 'exec "$@" >&-', "sh"), *words]
  done = subprocess.run(command, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_an_output_on_a_full_disk_is_told_in_words():
  words = [sys.executable, "-m", "jaxpruner", "data"]
  with open("/dev/full", "w") as full:
    done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
  assert done.returncode == 1
  assert "No space left" in done.stderr and "Traceback" not in done.stderr
