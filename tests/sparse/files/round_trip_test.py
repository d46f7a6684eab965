"""What is saved comes back bit for bit, in every layout and tree."""

import collections
import dataclasses

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as hst
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxpruner.sparse import _layouts, files

# The parameters here are not masked: what masks alone decide is the point.
pytestmark = pytest.mark.filterwarnings("ignore:.*the masks remove")

DTYPES = [
  np.float32, np.float64, np.float16, ml_dtypes.bfloat16,
  ml_dtypes.float8_e4m3fn, np.int8, np.int32, np.int64, np.uint8, np.uint16,
  np.bool_,
]  # fmt: skip


def bits(array):
  return (array.dtype, array.shape, np.asarray(array, order="C").tobytes())


@hst.composite
def arrays(draw):
  dtype = np.dtype(draw(hst.sampled_from(DTYPES)))
  shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9))
  size = int(np.prod(shape))
  raw = draw(hst.binary(min_size=size * 8, max_size=size * 8))
  words = np.frombuffer(raw, np.uint64).astype(f"u{dtype.itemsize}")
  if dtype == np.bool_:
    words = words % 2
  zeros = draw(hst.sampled_from([0.0, 0.5, 0.9, 1.0]))
  seed = draw(hst.integers(0, 99))
  words[np.random.default_rng(seed).random(size) < zeros] = 0
  return words.view(dtype).reshape(shape)


@hypothesis.given(hst.lists(arrays(), max_size=4), hst.integers(0, 99))
def test_packed_round_trip_is_exact(tmp_path_factory, leaves, seed):
  path = tmp_path_factory.getbasetemp() / "round.safetensors"
  rng = np.random.default_rng(seed)
  params = {f"layer{i}": {"w": x} for i, x in enumerate(leaves)}
  masks = {
    k: {"w": None if rng.random() < 0.4
        else (rng.random(v["w"].shape) < 0.4).astype(np.uint8)}
    for k, v in params.items()
  }  # fmt: skip
  files.save(path, params, masks, metadata={"seed": seed})
  loaded, loaded_masks = files.load(path)
  assert loaded.keys() == params.keys()
  for k, v in params.items():
    mask, array = masks[k]["w"], v["w"]
    if mask is None:
      assert loaded_masks[k]["w"] is None
      assert bits(loaded[k]["w"]) == bits(array)
    else:
      assert bits(loaded_masks[k]["w"]) == bits(mask)
      masked = np.where(mask, array, np.zeros((), array.dtype))
      assert bits(loaded[k]["w"]) == bits(masked)
  assert files.read_metadata(path) == {"seed": seed}


@hypothesis.given(arrays(), hst.sampled_from(["dense", "sparse-bitmask"]))
def test_foreign_layouts_round_trip_values(tmp_path_factory, array, layout):
  path = tmp_path_factory.getbasetemp() / "foreign.safetensors"
  mask = (np.arange(array.size) % 3 == 0).reshape(array.shape)
  files.save(path, {"a": array, "b": array}, {"a": mask, "b": None},
             layout=layout)  # fmt: skip
  params, masks = files.load(path)
  expected = np.where(mask, array, np.zeros((), array.dtype))
  assert bits(params["a"]) == bits(expected)
  assert bits(params["b"]) == bits(array)
  if layout == "sparse-bitmask" and array.ndim:
    np.testing.assert_array_equal(masks["a"], mask)


@pytest.mark.quick
@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
def test_the_safetensors_package_reads_every_layout(tmp_path, layout):
  path = tmp_path / "x.safetensors"
  w = np.where(np.arange(60).reshape(5, 12) % 5, 0, 1).astype(np.float32)
  files.save(path, {"w": w, "b": np.ones(3, np.float64)}, layout=layout)
  stored = safetensors.numpy.load_file(path)
  np.testing.assert_array_equal(stored["b"], np.ones(3))
  if layout == "dense":
    np.testing.assert_array_equal(stored["w"], w)
  elif layout == "packed":
    kept = np.unpackbits(stored["w.bits"], count=60, bitorder="little")
    np.testing.assert_array_equal(kept.reshape(5, 12), w)
  else:
    assert stored["w.shape"].tolist() == [5, 12]
    assert stored["w.bitmask"].shape == (5, 2)
    assert stored["w.compressed"].tolist() == [1.0] * 12
    counts = (w != 0).sum(1)
    np.testing.assert_array_equal(
      stored["w.row_offsets"], np.cumsum(counts) - counts
    )


def test_bitmask_parts_are_named_after_the_module(tmp_path):
  path = tmp_path / "x.safetensors"
  files.save(path, {"mlp.up.weight": np.eye(16)}, layout="sparse-bitmask")
  stored = safetensors.numpy.load_file(path)
  assert set(stored) == {
    "mlp.up" + part for part in (".shape", ".compressed", ".bitmask",
                                 ".row_offsets")
  }  # fmt: skip
  assert set(files.load(path)[0]) == {"mlp.up.weight"}
  # The layout's first version, and a foreign file of the present one.
  first = {k.replace("up", "up.weight"): v for k, v in stored.items()}
  for tensors in (first, stored):
    safetensors.numpy.save_file(tensors, path)
    params, masks = files.load(path)
    np.testing.assert_array_equal(params["mlp.up.weight"], np.eye(16))
    np.testing.assert_array_equal(masks["mlp.up.weight"], np.eye(16))


def test_files_of_the_safetensors_package_are_read(tmp_path):
  path = tmp_path / "x.safetensors"
  tensors = {
    "model.layer.0.weight": np.eye(3, dtype=np.float16),
    "flax/kernel": np.arange(4, dtype=np.int64),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(2.5),
  }
  safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
  params, masks = files.load(path)
  assert files.read_metadata(path) == {"format": "pt"}
  assert bits(params["flax"]["kernel"]) == bits(tensors["flax/kernel"])
  for name in ("model.layer.0.weight", "empty", "scalar"):
    assert bits(params[name]) == bits(tensors[name])
    assert masks[name] is None


def test_packed_files_are_aligned_to_their_element_width(tmp_path):
  path = tmp_path / "x.safetensors"
  rng = np.random.default_rng(0)
  params = {
    f"{i}{np.dtype(d)}": rng.integers(0, 2, 7 + i).astype(d)
    for i in range(3)
    for d in DTYPES
  }
  files.save(path, params)
  with _layouts.SparseFile(path) as file:
    assert file.reader.start % 64 == 0
    for entry in file.reader.entries.values():
      assert entry.begin % entry.dtype.itemsize == 0


Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
  kernel: jax.Array
  scale: jax.Array | None


def test_any_pytree_comes_back_through_like(tmp_path):
  path = tmp_path / "x.safetensors"
  tree = {
    "list": [jnp.ones((2, 2)), (jnp.zeros(3, jnp.bfloat16),)],
    "point": Point(jnp.arange(3), None),
    "layer": Layer(jnp.eye(4), None),
    "mlp/~/linear_0": {"w": jnp.full((2,), 3.0)},
  }
  masks = jax.tree.map(lambda x: jnp.ones_like(x, jnp.uint8), tree)
  files.save(path, tree, masks)
  params, back = files.load(path, like=tree)
  assert jax.tree.structure(params) == jax.tree.structure(tree)
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  for a, b in zip(*map(jax.tree.leaves, (params, tree)), strict=True):
    assert bits(a) == bits(np.asarray(b))


def test_nested_dicts_keep_keys_with_slashes_and_integers(tmp_path):
  path = tmp_path / "x.safetensors"
  files.save(path, {"mlp/~/linear": {"w": np.ones(2)}, "n": [np.ones(1)]})
  params, _ = files.load(path)
  assert set(params) == {"mlp/~/linear", "n"} and set(params["n"]) == {0}


def test_a_bare_array_is_a_tree(tmp_path):
  path = tmp_path / "x.safetensors"
  files.save(path, jnp.eye(3), np.eye(3, dtype=np.uint8))
  params, masks = files.load(path)
  assert params.tolist() == masks.tolist() == np.eye(3).tolist()


def test_masked_weights_are_dropped_even_if_nan(tmp_path):
  path = tmp_path / "x.safetensors"
  files.save(path, {"w": np.array([np.nan, -0.0, 3.0])},
             {"w": np.array([0, 1, 1], np.uint8)})  # fmt: skip
  params, _ = files.load(path)
  assert bits(params["w"]) == bits(np.array([0.0, -0.0, 3.0]))


def test_sizes_meet_the_bit_count():
  rng = np.random.default_rng(0)
  for sparsity, bound in ((0.8, 0.24), (0.9, 0.14)):
    w = rng.standard_normal((256, 512)).astype(np.float32)
    mask = np.zeros(w.size, np.uint8)
    mask[: round(w.size * (1 - sparsity))] = 1
    tensor = _layouts.Tensor("w", ("w",), w.dtype, w.shape)
    assert _layouts.packed_bytes(tensor, int(mask.sum())) < bound * w.nbytes


@pytest.mark.parametrize(
  "params, masks, message",
  [
    ({"w": jnp.sin}, None, "params\\['w'\\] is"),
    ({"w": jax.random.key(0)}, None, "key_data"),
    ({"w": np.array(["a"])}, None, "dtype <U1"),
    ({"a/b": np.ones(1), "a": {"b": np.ones(1)}}, None, "named 'a/b'"),
    ({"..": np.ones(1)}, None, "not allowed"),
    ({"w": np.ones(4)}, {"w": np.ones(3, np.uint8)}, "masks\\['w'\\]"),
    ({"w": np.ones(4)}, {"w": np.ones(4)}, "masks\\['w'\\]"),
    (
      {"w": np.zeros(64), "w.bits": np.ones(1)},
      None,
      "of a tensor and of a part",
    ),
  ],
)
def test_what_cannot_be_saved_is_named(tmp_path, params, masks, message):
  path = tmp_path / "x.safetensors"
  with pytest.raises(ValueError, match=message):
    files.save(path, params, masks)
  assert list(tmp_path.iterdir()) == []


def test_a_like_of_other_names_is_refused(tmp_path):
  path = tmp_path / "x.safetensors"
  files.save(path, {"w": np.ones(4)})
  with pytest.raises(ValueError, match="missing in the file \\['v'\\]"):
    files.load(path, like={"v": np.ones(4)})
