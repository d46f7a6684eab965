"""Checkpoints of every kind: told apart, pruned, written back as they came."""

import functools
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import time
import zipfile

import flax.serialization
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from jaxpruner import cli, sparse
from jaxpruner.sparse import _layouts, _shards, checkpoints, prune_command

RNG = np.random.default_rng(0)
DTYPES = [
  np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn,
  ml_dtypes.float8_e5m2,
]  # fmt: skip


def run(*args):
  assert cli.main([str(a) for a in args]) == 0


def refused(capsys, *args):
  capsys.readouterr()
  assert cli.main([str(a) for a in args]) == 1
  return capsys.readouterr().err


def normal(*shape, dtype=np.float32):
  return RNG.normal(size=shape).astype(dtype)


def hub_folder(folder, dtype=np.float32, shards=3):
  """A folder as `save_pretrained` writes it; returns its tensors."""
  folder.mkdir()
  where, tensors = {}, {}
  for i in range(shards):
    name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
    part = {f"model.layers.{i}.mlp.up_proj.weight": normal(8, 16, dtype=dtype)}
    if not i:
      part["model.embed_tokens.weight"] = normal(10, 8, dtype=dtype)
    part[f"model.layers.{i}.norm.weight"] = normal(8, dtype=dtype)
    sparse.save(folder / name, part, layout="dense", metadata={"format": "pt"})
    where |= dict.fromkeys(part, name)
    tensors |= part
  index = {"metadata": {"total_size": 1}, "weight_map": where}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  (folder / "config.json").write_text('{"model_type": "llama"}')
  (folder / "tokenizer.json").write_text("{}")
  (folder / "pytorch_model.bin").write_bytes(b"dense")
  (folder / "1_Pooling").mkdir()
  (folder / "1_Pooling" / "config.json").write_text("{}")
  return tensors


@pytest.mark.quick
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hub_folder_comes_back_with_its_names_and_files(
  tmp_path, capsys, dtype
):
  old, new = tmp_path / "old", tmp_path / "new"
  tensors = hub_folder(old, dtype)
  run("prune", old, "--sparsity", 0.75, "-o", new)
  out = capsys.readouterr().out
  assert "Hugging Face folder, 3 shards" in out and "sparsity 75.00 %" in out
  assert "left alone: model.embed_tokens.weight" in out
  assert "--layout packed would take" in out
  assert "not copied: pytorch_model.bin" in out
  names = {str(p.relative_to(old)) for p in old.rglob("*") if p.is_file()}
  found = {str(p.relative_to(new)) for p in new.rglob("*") if p.is_file()}
  assert found == names - {"pytorch_model.bin"}
  assert not list(tmp_path.glob("*.parts"))
  index = "model.safetensors.index.json"
  assert (new / index).read_bytes() == (old / index).read_bytes()
  params, _ = sparse.load(new)
  assert params.keys() == tensors.keys()
  for name, array in tensors.items():
    assert params[name].dtype == dtype
    if name.endswith("up_proj.weight"):
      flat = np.abs(array.astype(np.float32)).ravel()
      kept = np.zeros(flat.size, bool)
      kept[np.argsort(-flat, kind="stable")[: flat.size // 4]] = True
      array = np.where(kept.reshape(array.shape), array, 0)
    np.testing.assert_array_equal(
      params[name].astype(np.float32), array.astype(np.float32)
    )
  for path in new.glob("*.safetensors"):
    with safetensors.safe_open(path, "numpy") as file:
      assert file.metadata()["format"] == "pt"


def test_a_folder_is_packed_and_unpacked_again(tmp_path, capsys):
  old, pruned = tmp_path / "old", tmp_path / "pruned"
  hub_folder(old)
  run("prune", old, "--type", "2:4", "-o", pruned)
  run("pack", pruned, "-o", tmp_path / "packed")
  run("inspect", tmp_path / "packed")
  out = capsys.readouterr().out
  assert "3 shards, packed" in out
  assert out.count("exactly 2:4 along axis 1") == 3
  run("unpack", tmp_path / "packed", "-o", tmp_path / "dense")
  for path in pruned.glob("*.safetensors"):
    one = safetensors.numpy.load_file(path)
    other = safetensors.numpy.load_file(tmp_path / "dense" / path.name)
    assert one.keys() == other.keys()
    for name in one:
      np.testing.assert_array_equal(one[name], other[name])


def test_heads_and_embeddings_are_pruned_only_if_named(tmp_path):
  old, new = tmp_path / "old", tmp_path / "new"
  tensors = hub_folder(old)
  run("prune", old, "--sparsity", 0.5, "--include", "embed", "-o", new)
  params, _ = sparse.load(new)
  assert np.count_nonzero(params["model.embed_tokens.weight"]) == 40
  name = "model.layers.1.mlp.up_proj.weight"
  np.testing.assert_array_equal(params[name], tensors[name])


def test_an_interrupted_folder_goes_on_from_its_shards(
  tmp_path, capsys, monkeypatch
):
  old, new = tmp_path / "old", tmp_path / "new"
  hub_folder(old)
  seen, true = [], prune_command.Plan.content

  def dies(self, name):
    seen.append(name)
    if "layers.1.mlp" in name and len(seen) < 6:
      raise KeyboardInterrupt
    return true(self, name)

  monkeypatch.setattr(prune_command.Plan, "content", dies)
  with pytest.raises(KeyboardInterrupt):
    run("prune", old, "--sparsity", 0.5, "-o", new)
  assert not new.exists() and (tmp_path / "new.parts").is_dir()
  text = refused(capsys, "prune", old, "--sparsity", 0.25, "-o", new)
  assert "settings.sparsity is 0.5 there, 0.25 here" in text
  seen.clear()
  seen += ["x"] * 6
  run("prune", old, "--sparsity", 0.5, "-o", new)
  assert "1 shards were there" in capsys.readouterr().out
  assert not any("layers.0" in name for name in seen)
  run("prune", old, "--sparsity", 0.5, "-o", tmp_path / "whole")
  for path in new.glob("*.safetensors"):
    assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


def test_a_changed_checkpoint_does_not_go_on_from_old_shards(tmp_path, capsys):
  old, parts = tmp_path / "old", tmp_path / "new.parts"
  hub_folder(old)
  with (
    checkpoints.open_checkpoint(old) as file,
    pytest.raises(ZeroDivisionError),
  ):
    file.rewrite(
      tmp_path / "new", lambda _: 1 // 0, metadata={}, facts={}
    )  # fmt: skip
  assert parts.is_dir()
  shard = next(old.glob("*.safetensors"))
  os.utime(shard, ns=(1, 1))
  with checkpoints.open_checkpoint(old) as file:
    with pytest.raises(ValueError, match="input.shards"):
      file.rewrite(tmp_path / "new", file.content, metadata={}, facts={})


def test_outputs_are_not_overwritten_unless_asked(tmp_path, capsys):
  old, new = tmp_path / "old", tmp_path / "new"
  hub_folder(old)
  new.mkdir()
  text = refused(capsys, "pack", old, "-o", new)
  assert "exists" in text and "--overwrite" in text
  assert "itself" in refused(capsys, "pack", old, "-o", old)
  run("prune", old, "--sparsity", 0.5, "-o", old, "--overwrite")
  params, _ = sparse.load(old)
  assert np.count_nonzero(params["model.layers.0.mlp.up_proj.weight"]) == 64
  assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "old"]
  file = tmp_path / "x.safetensors"
  sparse.save(file, {"w": normal(4, 4)}, layout="dense")
  assert "itself" in refused(
    capsys, "prune", file, "--sparsity", 0.5, "-o", file
  )
  run("prune", file, "--sparsity", 0.5, "-o", file, "--overwrite")
  assert np.count_nonzero(sparse.load(file)[0]["w"]) == 8


def test_two_writers_do_not_share_a_folder(tmp_path, capsys):
  old = tmp_path / "old"
  hub_folder(old)
  with checkpoints.open_checkpoint(old) as file:

    def content(name):
      if name.endswith("up_proj.weight"):
        with checkpoints.open_checkpoint(old) as again:
          with pytest.raises(ValueError, match="another process"):
            again.rewrite(tmp_path / "new", again.content, metadata={})
      return file.content(name)

    file.rewrite(tmp_path / "new", content, metadata={})


TREE = {
  "params": {
    "dense": {"kernel": normal(16, 8), "bias": normal(8)},
    "list": {"0": normal(4, 4, dtype=ml_dtypes.bfloat16)},
    "empty": np.zeros((0, 3), np.float32),
  },
  "step": np.int32(3),
  "name": "x",
  "none": None,
}


def write_msgpack(path, tree=TREE):
  path.write_bytes(flax.serialization.to_bytes(tree))


def write_npz(path):
  np.savez_compressed(
    path,
    **{
      "dense/kernel": TREE["params"]["dense"]["kernel"],
      "fortran": np.asfortranarray(normal(6, 4)),
      "scalar": np.array(3),
      "odd": TREE["params"]["list"]["0"],
    },
  )


def write_orbax(path):
  tree = {k: TREE[k] for k in ("params", "step")}
  tree["params"] = {k: v for k, v in tree["params"].items() if k != "empty"}
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, tree)
  return tree


def half(array):
  flat = np.abs(array.astype(np.float32)).ravel()
  kept = np.zeros(flat.size, bool)
  kept[np.argsort(-flat, kind="stable")[: flat.size // 2]] = True
  return np.where(kept.reshape(array.shape), array, array.dtype.type(0))


@pytest.mark.parametrize("chunk", [1 << 30, 40])
def test_flax_restores_the_msgpack_file_it_wrote(
  tmp_path, capsys, monkeypatch, chunk
):
  old, new = tmp_path / "old.msgpack", tmp_path / "new.msgpack"
  monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", chunk)
  write_msgpack(old)
  run("prune", old, "--sparsity", 0.5, "-o", new)
  assert "Flax msgpack file" in capsys.readouterr().out
  found = flax.serialization.msgpack_restore(new.read_bytes())
  expected = jax.tree.map(lambda x: x, TREE)
  dense = expected["params"]["dense"]
  dense["kernel"] = half(dense["kernel"])
  expected["params"]["list"]["0"] = half(expected["params"]["list"]["0"])
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_numpy_loads_the_archive_it_wrote(tmp_path, capsys):
  old, new = tmp_path / "old.npz", tmp_path / "new.npz"
  write_npz(old)
  run("prune", old, "--sparsity", 0.5, "-o", new)
  assert "NumPy archive" in capsys.readouterr().out
  before, after = np.load(old), np.load(new)
  assert before.files == after.files
  for name in before.files:
    pruned = name in ("dense/kernel", "fortran")
    expected = half(before[name]) if pruned else before[name]
    assert after[name].dtype == before[name].dtype
    np.testing.assert_array_equal(after[name], expected)
  assert new.stat().st_size < old.stat().st_size + 200


def test_orbax_restores_the_checkpoint_it_wrote(tmp_path, capsys):
  old, new = tmp_path / "old", tmp_path / "new"
  tree = write_orbax(old)
  run("prune", old, "--sparsity", 0.5, "-o", new)
  assert "Orbax checkpoint" in capsys.readouterr().out
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(new, jax.tree.map(np.asarray, tree))
  np.testing.assert_array_equal(
    found["params"]["dense"]["kernel"],
    half(tree["params"]["dense"]["kernel"]),
  )
  assert int(found["step"]) == 3
  run("pack", new, "-o", tmp_path / "packed.safetensors")
  params, _ = sparse.load(tmp_path / "packed.safetensors")
  np.testing.assert_array_equal(
    params["params"]["dense"]["kernel"], found["params"]["dense"]["kernel"]
  )


def torch_zip(path):
  with zipfile.ZipFile(path, "w") as file:
    file.writestr("model/data.pkl", b"x")


def other_zip(path):
  with zipfile.ZipFile(path, "w") as file:
    file.writestr("readme.txt", b"x")


OTHERS = {
  "gguf": lambda path: path.write_bytes(b"GGUF\3\0\0\0"),
  "torch": torch_zip,
  "pickle": lambda path: path.write_bytes(pickle.dumps({"w": 1})),
  "hdf5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"),
  "npy": lambda path: path.write_bytes(b"\x93NUMPY\1\0"),
  "zip": other_zip,
  "folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_cannot_be_read_is_named_with_the_way(tmp_path, capsys, kind):
  path = tmp_path / "x"
  OTHERS[kind](path)
  assert sparse.what_is(path) == kind
  text = refused(capsys, "inspect", path)
  what, way = checkpoints._OTHERS[kind]
  assert what in text and way in text


def test_what_can_be_read_is_told_by_its_content(tmp_path):
  hub_folder(tmp_path / "a")
  write_orbax(tmp_path / "b")
  write_msgpack(tmp_path / "c")
  write_npz(tmp_path / "d.npz")
  sparse.save(tmp_path / "e", {"w": np.ones(2)})
  kinds = [sparse.what_is(p) for p in sorted(tmp_path.iterdir())]
  assert kinds == ["shards", "orbax", "msgpack", "npz", "safetensors"]
  index = tmp_path / "a" / "model.safetensors.index.json"
  assert sparse.what_is(index) == "index"
  with sparse.open_checkpoint(index) as file:
    assert len(file.tensors) == 7


def edit_index(change):
  def edit(folder):
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))

  return edit


FIRST = "model.embed_tokens.weight"
SHARD = "model-00001-of-00003.safetensors"


def at(value):
  return edit_index(lambda c: c["weight_map"].update({FIRST: value}))


def link(name, target):
  def edit(folder):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)

  return edit


def outside_link(folder):
  shutil.copy(folder / SHARD, folder.parent / "outside.safetensors")
  link(SHARD, folder.parent / "outside.safetensors")(folder)


def second_copy(folder):
  (folder / "model.safetensors.index.json").unlink()
  shutil.copy(folder / SHARD, folder / "again.safetensors")


def odd_dtype(folder):
  raw = (folder / SHARD).read_bytes()
  (folder / SHARD).write_bytes(raw.replace(b'"F32"', b'"F33"'))


def pipe(folder):
  os.mkfifo(folder / "pipe.json")


HOSTILE = {
  "index points outside": (at("../outside.safetensors"), "same folder"),
  "index points to the root": (at("/etc/x.safetensors"), "same folder"),
  "index points by windows": (at("..\\x.safetensors"), "same folder"),
  "index names a hidden file": (at(".x.safetensors"), "same folder"),
  "index names no shard": (at("config.json"), "same folder"),
  "index holds a number": (at(3), "same folder"),
  "shard is another": (at("model-00002-of-00003.safetensors"), "it is in"),
  "missing shard": (lambda f: (f / SHARD).unlink(), "missing"),
  "unknown tensor": (
    edit_index(lambda c: c["weight_map"].update(x=SHARD)), "no shard"
  ),
  "unnamed tensor": (
    edit_index(lambda c: c["weight_map"].pop(FIRST)), "does not name"
  ),
  "no weight_map": (edit_index(lambda c: c.pop("weight_map")), "weight_map"),
  "empty weight_map": (edit_index(lambda c: c["weight_map"].clear()), "empty"),
  "index is a list": (
    lambda f: (f / "model.safetensors.index.json").write_text("[]"),
    "weight_map",
  ),
  "index is no JSON": (
    lambda f: (f / "model.safetensors.index.json").write_text("{"), "JSON"
  ),
  "two indexes": (
    lambda f: (f / "b.safetensors.index.json").write_text("{}"), "several"
  ),
  "duplicate tensor": (second_copy, "remove one"),
  "a shard is a link outside": (outside_link, "outside the folder"),
  "a file is a link outside": (
    link("config.json", "/etc/passwd"), "outside the folder"
  ),
  "unknown dtype": (odd_dtype, "unknown dtype"),
  "a pipe beside": (pipe, "neither a file"),
  "config is no JSON": (
    lambda f: (f / "config.json").write_text("{"), "config.json"
  ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_folders_are_refused_in_words(tmp_path, capsys, case):
  folder, new = tmp_path / "old", tmp_path / "new"
  hub_folder(folder)
  damage, message = HOSTILE[case]
  damage(folder)
  text = refused(capsys, "prune", folder, "--sparsity", 0.5, "-o", new)
  assert message in text and "old" in text
  assert not list(tmp_path.glob("new*"))  # nor what was written so far


def test_links_of_the_hub_cache_are_followed(tmp_path):
  hub_folder(tmp_path / "plain")
  blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
  blobs.mkdir()
  snapshot.mkdir(parents=True)
  for path in (tmp_path / "plain").glob("*.*"):
    path.rename(blobs / path.name)
    (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
  run("prune", snapshot, "--sparsity", 0.5, "-o", tmp_path / "new")
  assert not any(p.is_symlink() for p in (tmp_path / "new").iterdir())
  assert (tmp_path / "new" / "config.json").read_text()


def test_odd_dtypes_do_not_refuse_a_file(tmp_path):
  old, new = tmp_path / "old", tmp_path / "new"
  tensors = {
    "w": normal(8, 8),
    "w.scale": np.ones((4, 4), ml_dtypes.float8_e8m0fnu),
    "fft": normal(4, 4).astype(np.complex64),
    "w.weight_scale_inv": normal(4, 4),
  }
  sparse.save(old, tensors, layout="dense")
  run("prune", old, "--sparsity", 0.5, "-o", new)
  params, _ = sparse.load(new)
  assert np.count_nonzero(params["w"]) == 32
  for name in tensors.keys() - {"w"}:
    np.testing.assert_array_equal(params[name], tensors[name])


def chunks(size, reader, name):
  flat = reader.read(name).reshape(-1)
  return (flat[i : i + size] for i in range(0, flat.size, size))


@pytest.mark.parametrize("how", ["--sparsity=0.5", "--type=2:4"])
@pytest.mark.parametrize("algorithm", ["magnitude", "random"])
def test_pieces_choose_what_the_whole_would(
  tmp_path, monkeypatch, how, algorithm
):
  old = tmp_path / "old"
  ties = RNG.integers(-3, 4, (40, 64)).astype(np.float32)
  sparse.save(old, {"a.weight": ties}, layout="dense")
  found = []
  for held, piece in ((1 << 30, 1 << 20), (0, 64)):
    monkeypatch.setattr(prune_command, "_HELD", held)
    monkeypatch.setattr(_layouts, "PIECE", piece)
    # What a reader of a large file does, at a smaller size.
    read = functools.partial(chunks, piece)
    monkeypatch.setattr(_layouts.st.Reader, "chunks", lambda *a, r=read: r(*a))
    for layout in _layouts.LAYOUTS:
      new = tmp_path / f"{held}-{layout}"
      run("prune", old, how, "--algorithm", algorithm, "--layout", layout,
          "-o", new)  # fmt: skip
      found.append(sparse.load(new)[0]["a.weight"])
  for array in found[1:]:
    np.testing.assert_array_equal(array, found[0])


@pytest.mark.slow
def test_a_killed_prune_goes_on_and_stays_small(tmp_path):
  """1.2 GB of shards, the largest tensor 0.27 GB, SIGKILL in between."""
  old, new = tmp_path / "old", tmp_path / "new"
  old.mkdir()
  block = normal(1 << 20)
  for i in range(9):
    w = np.resize(block, (8192, 8192 if i == 4 else 4096)).astype(np.float32)
    sparse.save(old / f"{i}.safetensors", {f"l{i}.weight": w}, layout="dense")
  largest = 8192 * 8192 * 4
  peak = (
    "import sys\nfrom jaxpruner import cli\n"
    "code = cli.main(sys.argv[1:])\n"
    "lines = open('/proc/self/status').read().splitlines()\n"
    "print(*[line.split()[1] for line in lines if 'VmHWM' in line])\n"
    "sys.exit(code)"
  )
  command = [sys.executable, "-c", peak, "prune", str(old), "--sparsity",
             "0.5", "-o", str(new)]  # fmt: skip
  first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  parts = pathlib.Path(f"{new}.parts")
  while not list(parts.glob("*.safetensors")) and first.poll() is None:
    time.sleep(0.02)
  first.kill()
  first.wait()
  assert not new.exists()
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert "from an interrupted run" in done.stdout
  assert 1024 * int(done.stdout.split()[-1]) < 1.5 * largest + 500e6
  assert len(list(new.iterdir())) == 9


def test_more_shards_than_allowed_are_refused(tmp_path, monkeypatch, capsys):
  hub_folder(tmp_path / "old")
  monkeypatch.setattr(_shards, "MAX_SHARDS", 2)
  assert "more than 2" in refused(capsys, "inspect", tmp_path / "old")
  monkeypatch.undo()
  monkeypatch.setattr(_shards, "MAX_JSON", 10)
  assert "bytes of JSON" in refused(capsys, "inspect", tmp_path / "old")
