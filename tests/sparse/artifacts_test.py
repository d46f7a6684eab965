"""Models as files: the same bits in a fresh process, or a refusal in words."""

import copy
import json
import os
import pickle
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxpruner import sparse
from jaxpruner.sparse import _panels, _safetensors, artifacts, kernels

RNG = np.random.default_rng(0)


def pruned(*shape):
  w = RNG.standard_normal(shape).astype(np.float32)
  return np.where(RNG.random(shape) < 0.9, 0, w)


PARAMS = {
  "up": pruned(96, 128),
  "stack": pruned(2, 128, 128),
  "bias": np.ones(128, np.float32),
}
X = {n: RNG.standard_normal((n, 96)).astype(np.float32) for n in (1, 5)}


def model(params, x):
  x = jnp.tanh(x @ params["up"] + params["bias"])
  x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["stack"])
  return {"y": x, "best": x.argmax(-1)}


def timer(thunks):
  prefer = ("sell", "sparse")
  return {name: 1.0 if name in prefer else 2.0 for name in thunks}


def accelerated(x):
  return sparse.accelerate(model, PARAMS, x, cache=None, timer=timer)[0]


@pytest.fixture(scope="module")
def both():
  return accelerated(X[1]), accelerated(X[5])


@pytest.fixture(scope="module")
def file(both, tmp_path_factory):
  path = tmp_path_factory.mktemp("models") / "m.jaxpruner"
  both[0].save(path, both[1], metadata={"labels": ["a", "é"]})
  return path


def has_kernels():
  return bool(kernels.register_kernels())


FRESH = """
import json, sys
import numpy as np
from jaxpruner import sparse
model = sparse.load_model(sys.argv[1])
assert "sparse_model_code" not in sys.modules
with np.load(sys.argv[2]) as inputs:
  outs = {n: np.asarray(model(inputs[n])["y"]) for n in inputs}
np.savez(sys.argv[3], **outs)
print(json.dumps([model.fast, model.metadata]))
"""


def test_a_fresh_process_without_the_models_code_gives_the_same_bits(
  both, file, tmp_path
):
  np.savez(tmp_path / "in.npz", one=X[1], five=X[5])
  paths = [str(p) for p in (file, tmp_path / "in.npz", tmp_path / "out.npz")]
  done = subprocess.run(
    [sys.executable, "-c", FRESH, *paths],
    capture_output=True, text=True, timeout=300, cwd=tmp_path,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  fast, metadata = json.loads(done.stdout)
  assert fast and metadata == {"labels": ["a", "é"]}
  with np.load(tmp_path / "out.npz") as outs:
    np.testing.assert_array_equal(outs["one"], both[0](X[1])["y"])
    np.testing.assert_array_equal(outs["five"], both[1](X[5])["y"])


def test_shapes_choose_the_program_and_shared_arrays_are_stored_once(
  both, file
):
  loaded = sparse.load_model(file)
  assert [i[0].shape for i in loaded.inputs] == [(1, 96), (5, 96)]
  for fast, x in zip(both, X.values(), strict=True):
    for name, want in fast(x).items():
      np.testing.assert_array_equal(loaded(x)[name], want)
  weights = sum(a.nbytes for a in jax.tree.leaves(both[0].params))
  assert file.stat().st_size < weights + 60_000
  with pytest.raises(ValueError, match=r"32\[2,96\].*32\[1,96\] \| float32\[5"):
    loaded(np.ones((2, 96), np.float32))


def test_without_the_kernel_the_dense_twin_answers(both, file, monkeypatch):
  if not has_kernels():
    pytest.skip("no kernels")
  want = both[1](X[5])["y"]
  by_choice = sparse.load_model(file, dense=True)
  monkeypatch.setattr(kernels, "register_kernels", dict)
  for loaded in (by_choice, sparse.load_model(file)):
    assert not loaded.fast
    np.testing.assert_allclose(loaded(X[5])["y"], want, atol=1e-5)


def test_another_version_of_a_kernel_is_not_called(file, monkeypatch):
  if not has_kernels():
    pytest.skip("no kernels")
  assert sparse.load_model(file).fast
  monkeypatch.setitem(kernels.KERNELS, "sell", 2)
  loaded = sparse.load_model(file)
  assert not loaded.fast and "dense fallback" in repr(loaded)


def test_a_program_holds_no_path_of_the_machine_that_made_it(file):
  content = file.read_bytes()
  for word in (__file__, "artifacts_test", os.path.expanduser("~/")):
    assert word.encode() not in content


def test_a_shrunk_model_whose_code_changed_is_saved(tmp_path):
  up, down = (RNG.normal(size=s).astype("f4") for s in ((8, 16), (16, 4)))
  up[:, 3] = 0

  def declared(p, x):
    return (jnp.tanh(x @ p["up"]).reshape(-1, 16) @ p["down"]).sum(-1)

  x = X[5][:, :8]
  small = sparse.shrink(declared, {"up": up, "down": down}, x)
  assert not small.same_code and small.params["up"].shape == (8, 15)
  path = tmp_path / "m"
  small.save(path, (x[:1],))
  loaded = sparse.load_model(path)
  want = jax.jit(small.fn)(small.params, x)
  np.testing.assert_array_equal(loaded(x), want)
  np.testing.assert_allclose(
    loaded(x[:1]), declared({"up": up, "down": down}, x[:1]), atol=1e-5
  )


def test_what_cannot_be_pickled_says_what_to_use(both):
  small = sparse.shrink(lambda p, x: x @ p, np.ones((3, 2)), np.ones((1, 3)))
  for made in (both[0], small):
    with pytest.raises(TypeError, match="load_model"):
      pickle.dumps(made)
    assert copy.deepcopy(made) is made and copy.copy(made) is made
  packed = pickle.loads(pickle.dumps(sparse.pack(PARAMS["up"])))
  np.testing.assert_array_equal(packed.todense(), PARAMS["up"])


def test_a_loaded_model_pickles_as_its_path(file):
  again = pickle.loads(pickle.dumps(sparse.load_model(file)))
  np.testing.assert_array_equal(
    again(X[1])["y"], sparse.load_model(file)(X[1])["y"]
  )


def test_an_accelerated_function_is_exported_with_its_weights_as_arguments(
  both,
):
  checks = [
    export.DisabledSafetyCheck.custom_call(n) for n in sparse.register_kernels()
  ]
  fast = both[0]
  made = export.export(jax.jit(fast.apply), disabled_checks=checks)
  again = export.deserialize(made(fast.params, X[1]).serialize())
  np.testing.assert_array_equal(
    again.call(fast.params, X[1])["y"], fast(X[1])["y"]
  )


def test_leaves_that_are_no_arrays_become_constants(tmp_path):
  params = {"w": jnp.asarray(pruned(4, 4)), "act": jnp.tanh, "scale": 2.0}
  function = lambda p, x: p["act"](x @ p["w"]) * p["scale"]
  x = jnp.ones((1, 4))
  fast = sparse.Accelerated(function, params, (x,))
  fast.save(tmp_path / "m")
  np.testing.assert_array_equal(sparse.load_model(tmp_path / "m")(x), fast(x))


# What is refused -------------------------------------------------------------


def refused(path, content, match):
  damaged = path.with_name("damaged")
  damaged.write_bytes(content)
  with pytest.raises(sparse.FileFormatError, match=match) as caught:
    sparse.load_model(damaged)
  assert str(damaged) in str(caught.value)


def test_a_flipped_bit_anywhere_is_refused(file):
  content = file.read_bytes()
  length = 8 + int.from_bytes(content[:8], "little")
  padding = content[:length].rstrip(b" ")
  places = [*range(8, len(padding), 97), *range(length, len(content), 5003)]
  for at in [*places, len(content) - 1]:
    damaged = bytearray(content)
    damaged[at] ^= 1
    refused(file, damaged, "damaged")


def test_a_truncated_file_is_refused(file):
  content = file.read_bytes()
  for size in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
    refused(file, content[:size], "truncated|JSON|header")


def rewritten(content, change, seal=True):
  """Change the manifest of a file, and seal it again as an attacker can."""
  length = int.from_bytes(content[:8], "little")
  header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
  about = header["__metadata__"]
  manifest = json.loads(about[artifacts.KEY])
  change(manifest)
  about[artifacts.KEY] = json.dumps(manifest)
  about.pop("jaxpruner_sha256")
  entries = {
    k: _safetensors.Entry(
      _safetensors.DTYPES[v["dtype"]], tuple(v["shape"]), *v["data_offsets"]
    )
    for k, v in header.items()
    if k != "__metadata__"
  }
  if seal:
    about["jaxpruner_sha256"] = _safetensors.header_digest(entries, about)
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


def change_program(**fields):
  return lambda m: m["programs"][0].update(fields)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    (lambda m: m.update(version=2), "version 2.*upgrade"),
    (lambda m: m.update(programs=[]), "programs"),
    (lambda m: m.update(programs=m["programs"] * 200), "1 to 256"),
    (lambda m: m.update(sha256={}), "sha256"),
    (lambda m: m.update(metadata=[]), "metadata"),
    (change_program(code="weights/up/matrix/values"), "bytes of a program"),
    (change_program(code="nowhere"), "bytes of a program"),
    (change_program(weights=["nowhere"]), "names of stored tensors"),
    (change_program(weights=[]), "does not take the weights"),
    (change_program(calls={"x": -1}), "calls"),
    (lambda m: m["sha256"].update({"weights/bias": "0" * 64}), "SHA-256"),
  ],
)
def test_hostile_manifests_are_refused(file, change, match):
  if not has_kernels():
    pytest.skip("the names are those of packed weights")
  refused(file, rewritten(file.read_bytes(), change), match)


def test_an_unsealed_header_is_refused(file):
  content = rewritten(file.read_bytes(), dict, seal=False)
  refused(file, content, "does not match its SHA-256")


def test_a_program_that_calls_python_is_not_saved(tmp_path):
  def function(w, x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: x, shape, x) * w

  fast = sparse.Accelerated(function, jnp.ones(3), (jnp.ones(3),))
  with pytest.raises((ValueError, NotImplementedError)):
    fast.save(tmp_path / "m")
  assert not list(tmp_path.iterdir())


def test_a_call_off_the_list_is_refused_on_loading(file, monkeypatch):
  if not has_kernels():
    pytest.skip("no kernels")
  from jaxpruner.sparse import _stablehlo

  monkeypatch.setattr(_stablehlo, "_is_allowed", lambda _: False)
  with pytest.raises(sparse.FileFormatError, match="jaxpruner_sell"):
    sparse.load_model(file)


def test_without_flatbuffers_the_extra_is_named(file, tmp_path, monkeypatch):
  def wrapped(*_):
    try:
      raise ModuleNotFoundError("No module named 'flatbuffers'")
    except ModuleNotFoundError as e:
      raise ImportError("Please install 'flatbuffers'") from e

  monkeypatch.setattr(export, "deserialize", wrapped)
  with pytest.raises(ImportError, match="flatbuffers.*pip install.*serve"):
    sparse.load_model(file)
  monkeypatch.setattr(export.Exported, "serialize", wrapped)
  fast = sparse.Accelerated(lambda w, x: x * w, np.ones(3), (np.ones(3),))
  with pytest.raises(ImportError, match="pip install.*serve"):
    fast.save(tmp_path / "m")


def test_files_of_tensors_and_models_name_each_others_reader(file, tmp_path):
  with pytest.raises(sparse.FileFormatError, match="load_model"):
    sparse.load(file)
  sparse.save(tmp_path / "w", {"w": np.ones(3)})
  with pytest.raises(sparse.FileFormatError, match="sparse.load"):
    sparse.load_model(tmp_path / "w")


def test_two_functions_of_the_same_inputs_are_refused(both, tmp_path):
  with pytest.raises(ValueError, match="two files"):
    both[0].save(tmp_path / "m", both[0])
  assert not list(tmp_path.iterdir())


def test_an_unknown_example_is_told(tmp_path):
  with pytest.raises(ValueError, match="example_inputs"):
    sparse.Accelerated(lambda w, x: x @ w, np.eye(2)).save(tmp_path / "m")


def test_room_for_the_packed_batch_suffices_on_every_processor():
  # Panels of 16-, 8- and 4-wide vectors: small, medium, large batches.
  for small, medium, large in ((8, 16, 32), (8, 16, 16), (8, 8, 8)):
    for batch in range(2, 200):
      width = small if batch <= small else medium if batch <= medium else large
      assert -(-batch // width) * width <= _panels.packed_rows(batch)
  for batch in range(2, 200):
    width = _panels.batch_width(batch)
    assert -(-batch // width) * width <= _panels.packed_rows(batch)
