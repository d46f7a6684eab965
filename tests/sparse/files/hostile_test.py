"""Damaged and hostile files are refused with our error, never half-read."""

import json
import struct

import hypothesis
import hypothesis.strategies as hst
import numpy as np
import pytest

from jaxpruner.sparse import _safetensors, files

# The parameters here are not masked: what masks alone decide is the point.
pytestmark = pytest.mark.filterwarnings("ignore:.*the masks remove")


def raw(header, data=b"", length=None):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  size = len(text) if length is None else length
  return struct.pack("<Q", size) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **extra):
  return {
    "dtype": dtype, "shape": shape, "data_offsets": offsets, **extra
  }  # fmt: skip


def bitmask(**changes):
  """A valid sparse-bitmask file of [[5, 0, 6]], with parts replaced."""
  parts = {
    "w.shape": np.array([1, 3], np.int64),
    "w.compressed": np.array([5, 6], np.float32),
    "w.bitmask": np.array([[0b101]], np.uint8),
    "w.row_offsets": np.array([0], np.int64),
  } | {"w." + k: v for k, v in changes.items()}
  header, data = {}, b""
  for name, array in parts.items():
    end = len(data) + array.nbytes
    header[name] = entry(
      _safetensors.DTYPE_NAMES[array.dtype], array.shape, (len(data), end)
    )
    data += array.tobytes()
  return raw(header, data)


EIGHT = b"\0" * 8
I64 = np.int64
BAD = {
  "empty file": b"",
  "seven bytes": b"\0" * 7,
  "no header": struct.pack("<Q", 0),
  "header beyond the file": raw({}, length=10),
  "header of 2^63 bytes": raw({}, length=2**63),
  "header of 2^64-1 bytes": raw({}, length=2**64 - 1),
  "not json": raw(b"not json"),
  "not utf-8": raw(b'{"\xff": 1}'),
  "header is a list": raw([1]),
  "header is a number": raw(b"7"),
  "text after the header": raw(b"{} x"),
  "deeply nested": raw(b"[" * 100_000),
  "deep object": raw(b'{"a":' * 50_000),
  "huge integer": raw(b'{"w": ' + b"9" * 5000 + b"}"),
  "duplicate key": raw(
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"w":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}', EIGHT
  ),
  "duplicate field": raw(
    b'{"w":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
    EIGHT,
  ),
  "entry is null": raw({"w": None}),
  "entry is a list": raw({"w": ["F32", [2], [0, 8]]}, EIGHT),
  "missing offsets": raw({"w": {"dtype": "F32", "shape": [2]}}, EIGHT),
  "extra field": raw({"w": entry(code="x")}, EIGHT),
  "unknown dtype": raw({"w": entry("F33")}, EIGHT),
  "dtype is a number": raw({"w": entry(32)}, EIGHT),
  "dtype is a list": raw({"w": entry(["F32"])}, EIGHT),
  "dtype too narrow": raw({"w": entry("F16")}, EIGHT),
  "dtype too wide": raw({"w": entry("F64")}, EIGHT),
  "negative shape": raw({"w": entry(shape=(-2,))}, EIGHT),
  "two negative shapes": raw({"w": entry(shape=(-1, -2))}, EIGHT),
  "fractional shape": raw({"w": entry(shape=(2.0,))}, EIGHT),
  "boolean shape": raw({"w": entry(shape=(True, 2))}, EIGHT),
  "shape is a number": raw({"w": entry(shape=2)}, EIGHT),
  "shape overflows": raw({"w": entry(shape=(2**61, 8))}, EIGHT),
  "shape beyond 2^62": raw({"w": entry(shape=(2**62, 0))}, EIGHT),
  "NaN shape": raw(b'{"w":{"dtype":"F32","shape":[NaN],'
                   b'"data_offsets":[0,8]}}', EIGHT),
  "offsets reversed": raw({"w": entry(offsets=(8, 0))}, EIGHT),
  "offsets negative": raw({"w": entry(offsets=(-8, 0))}, EIGHT),
  "three offsets": raw({"w": entry(offsets=(0, 8, 8))}, EIGHT),
  "no offsets": raw({"w": entry(offsets=())}, EIGHT),
  "offset is a string": raw({"w": entry(offsets=("0", 8))}, EIGHT),
  "offsets beyond the file": raw({"w": entry(offsets=(8, 16))}, EIGHT),
  "truncated data": raw({"w": entry()}, b"\0" * 7),
  "bytes after the data": raw({"w": entry()}, b"\0" * 9),
  "bytes without tensors": raw({}, EIGHT),
  "overlapping": raw(
    {"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12
  ),
  "same bytes twice": raw({"a": entry(), "b": entry()}, EIGHT),
  "a hole": raw({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20),
  "starts late": raw({"a": entry(offsets=(8, 16))}, b"\0" * 16),
  "parent directory": raw({"../../etc/passwd": entry()}, EIGHT),
  "parent directory inside": raw({"a/../b": entry()}, EIGHT),
  "absolute": raw({"/etc/passwd": entry()}, EIGHT),
  "windows parent": raw({"..\\x": entry()}, EIGHT),
  "dot": raw({"./x": entry()}, EIGHT),
  "empty part": raw({"a//b": entry()}, EIGHT),
  "empty name": raw({"": entry()}, EIGHT),
  "NUL in name": raw({"a\0b": entry()}, EIGHT),
  "terminal escape": raw({"a\x1b[2J": entry()}, EIGHT),
  "lone surrogate": raw(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}",
                        EIGHT),
  "metadata is a list": raw({"__metadata__": []}),
  "metadata of numbers": raw({"__metadata__": {"a": 1}}),
  "bool of two": raw({"w": entry("BOOL", (1,), (0, 1))}, b"\2"),
  "leaf and branch": raw(
    {"a": entry(), "a/b": entry(offsets=(8, 16))}, EIGHT * 2
  ),
  "names are a number": raw({"__metadata__": {"jaxpruner_names": "3"}}),
  "manifest is text": raw({"__metadata__": {"jaxpruner": "x"}}),
  "manifest is a list": raw({"__metadata__": {"jaxpruner": "[]"}}),
  "future version": raw({"__metadata__": {"jaxpruner": '{"version": 2}'}}),
  "no header digest": raw({"__metadata__": {"jaxpruner": '{"version": 1}'}}),
  "bitmask too many bits": bitmask(bitmask=np.array([[0b111]], np.uint8)),
  "bitmask too few bits": bitmask(bitmask=np.array([[0b100]], np.uint8)),
  "bitmask of a wrong width": bitmask(bitmask=np.zeros((1, 2), np.uint8)),
  "bitmask of a wrong dtype": bitmask(bitmask=np.array([[5]], np.int8)),
  "bitmask shape is huge": bitmask(shape=np.array([2**40, 2**40], I64)),
  "bitmask shape is negative": bitmask(shape=np.array([1, -3], I64)),
  "bitmask shape of I32": bitmask(shape=np.array([1, 3], np.int32)),
  "bitmask shape is empty": bitmask(shape=np.array([], I64)),
  "bitmask offsets lie": bitmask(row_offsets=np.array([1], I64)),
  "bitmask offsets of a wrong shape": bitmask(row_offsets=np.zeros(2, I64)),
  "bitmask values of a wrong rank": bitmask(
    compressed=np.zeros((1, 2), np.float32)
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_hostile_file_is_refused(tmp_path, name):
  path = tmp_path / "bad.safetensors"
  path.write_bytes(BAD[name])
  with pytest.raises(files.FileFormatError, match="bad.safetensors"):
    files.load(path)


def test_the_corpus_mutates_files_that_are_read(tmp_path):
  path = tmp_path / "good.safetensors"
  path.write_bytes(bitmask())
  assert files.load(path)[0]["w.weight"].tolist() == [[5, 0, 6]]
  path.write_bytes(raw({"w": entry()}, EIGHT))
  assert files.load(path)[0]["w"].tolist() == [0, 0]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
  path = tmp_path_factory.mktemp("packed") / "m.safetensors"
  rng = np.random.default_rng(0)
  w = rng.standard_normal((5, 7)).astype(np.float32)
  mask = (rng.random((5, 7)) < 0.3).astype(np.uint8)
  files.save(path, {"a": {"w": w}, "é": np.arange(3)}, {"a": {"w": mask},
             "é": None}, metadata={"step": 1})  # fmt: skip
  return path.read_bytes()


@hypothesis.given(hst.data())
def test_every_flipped_bit_is_noticed(tmp_path_factory, packed, data):
  path = tmp_path_factory.getbasetemp() / "bad.safetensors"
  where = data.draw(hst.integers(0, len(packed) * 8 - 1))
  flipped = bytearray(packed)
  flipped[where // 8] ^= 1 << where % 8
  path.write_bytes(flipped)
  with pytest.raises(files.FileFormatError):
    files.load(path)


@hypothesis.given(hst.data())
def test_every_truncation_is_noticed(tmp_path_factory, packed, data):
  path = tmp_path_factory.getbasetemp() / "bad.safetensors"
  path.write_bytes(packed[: data.draw(hst.integers(0, len(packed) - 1))])
  with pytest.raises(files.FileFormatError):
    files.load(path)


def reseal(packed, change):
  """Alter the manifest and repair the header's digest, as an attacker can."""
  length = int.from_bytes(packed[:8], "little")
  header, data = json.loads(packed[8 : 8 + length]), packed[8 + length :]
  manifest = json.loads(header["__metadata__"]["jaxpruner"])
  change(manifest)
  header["__metadata__"] = {"jaxpruner": json.dumps(manifest)}
  entries = {
    k: _safetensors.Entry(
      _safetensors.DTYPES[v["dtype"]], tuple(v["shape"]), *v["data_offsets"]
    )
    for k, v in header.items()
    if k != "__metadata__"
  }
  header["__metadata__"]["jaxpruner_sha256"] = _safetensors.header_digest(
    entries, header["__metadata__"]
  )
  return raw(header, data)


MANIFEST = {
  "other shape": {"shape": [5, 80]},
  "huge shape": {"shape": [2**40, 2**40]},
  "negative shape": {"shape": [-5, -7]},
  "shape of text": {"shape": "57"},
  "other dtype": {"dtype": "I32"},
  "unknown dtype": {"dtype": "F33"},
  "other encoding": {"encoding": "dense"},
  "unknown encoding": {"encoding": "zip"},
  "no hash": {"sha256": ""},
  "other hash": {"sha256": "0" * 64},
  "hash of a number": {"sha256": 7},
  "mask of text": {"masked": "yes"},
  "path of lists": {"path": [["a"]]},
  "path is a number": {"path": 3},
}


@pytest.mark.parametrize("name", MANIFEST)
def test_a_resealed_manifest_is_refused(tmp_path, packed, name):
  path = tmp_path / "bad.safetensors"
  path.write_bytes(
    reseal(packed, lambda m: m["tensors"]["a/w"].update(MANIFEST[name]))
  )
  with pytest.raises(files.FileFormatError, match="bad.safetensors"):
    files.load(path)


@pytest.mark.parametrize(
  "change",
  [
    lambda m: m["tensors"].pop("a/w"),
    lambda m: m["tensors"].update({"../x": m["tensors"]["a/w"]}),
    lambda m: m.pop("tensors"),
    lambda m: m.update(tensors=[]),
    lambda m: m.update(metadata=3),
    lambda m: m["tensors"].update({"a/w": None}),
  ],
)
def test_a_resealed_table_is_refused(tmp_path, packed, change):
  path = tmp_path / "bad.safetensors"
  path.write_bytes(reseal(packed, change))
  with pytest.raises(files.FileFormatError):
    files.load(path)


def test_resealing_alone_is_harmless(tmp_path, packed):
  path = tmp_path / "good.safetensors"
  path.write_bytes(reseal(packed, lambda _m: None))
  assert set(files.load(path)[0]) == {"a", "é"}
