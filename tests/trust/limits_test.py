"""Each limit of the readers, at it and beyond it, in bounded time."""

import json
import pathlib
import re
import struct
import time

import numpy as np
import pytest

from jaxpruner.datasets.archives import DataError
from jaxpruner.post_training.models import gguf
from jaxpruner.sparse import _layouts, _safetensors, files

EIGHT = b"\0" * 8


def raw(header, data=b""):
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


def entry(shape, end, dtype="F32", begin=0):
  return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def load(tmp_path, content):
  path = tmp_path / "x.safetensors"
  path.write_bytes(content)
  return files.load(path)


def refused(tmp_path, content, match="x.safetensors"):
  start = time.process_time()
  with pytest.raises(files.FileFormatError, match=match):
    load(tmp_path, content)
  return time.process_time() - start


def test_rank_64_is_read_and_65_is_refused(tmp_path):
  shape = [1] * 63 + [2]
  w = load(tmp_path, raw({"w": entry(shape, 8)}, EIGHT))[0]["w"]
  assert w.ndim == _safetensors.MAX_RANK
  refused(tmp_path, raw({"w": entry([1, *shape], 8)}, EIGHT), "at most 64")


def test_huge_dimensions_cost_no_time(tmp_path):
  shape = [2**61] * 60_000
  content = raw({"w": entry(shape, 8)}, EIGHT)
  assert len(content) > 1_200_000
  assert refused(tmp_path, content, "at most 64") < 2


def test_products_below_2_to_the_62_are_read_and_others_refused(tmp_path):
  for side, dtype in ((2**59, "F32"), (2**61, "U8"), (2**58, "F64")):
    w = load(tmp_path, raw({"w": entry([side, 0], 0, dtype)}))[0]["w"]
    assert w.shape == (side, 0)
    refused(tmp_path, raw({"w": entry([side, 2, 0], 0, dtype)}), "2.62")
    refused(tmp_path, raw({"w": entry([side, 2], 8, dtype)}, EIGHT), "2.62")


def test_more_tensors_than_the_limit_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(_safetensors, "MAX_TENSORS", 3)
  many = lambda n: {f"t{i}": entry([0], 0) for i in range(n)}
  assert len(load(tmp_path, raw(many(3)))[0]) == 3
  refused(tmp_path, raw(many(4)), "4 tensors, at most 3")
  with pytest.raises(ValueError, match="more than 3 tensors"):
    files.save(tmp_path / "y", {f"t{i}": np.ones(1) for i in range(4)})
  assert not (tmp_path / "y").exists()


def test_a_header_beyond_the_limit_is_refused(tmp_path, monkeypatch):
  content = raw({"w": entry([2], 8)}, EIGHT)
  size = struct.unpack("<Q", content[:8])[0]
  monkeypatch.setattr(_safetensors, "MAX_HEADER", size)
  assert load(tmp_path, content)[0]["w"].size == 2
  monkeypatch.setattr(_safetensors, "MAX_HEADER", size - 1)
  refused(tmp_path, content, "header claims")


def test_the_documented_limits_are_the_limits():
  page = pathlib.Path(__file__).parents[2] / "docs" / "trust.md"
  rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page.read_text(), re.M))
  number = lambda row: int(re.sub(r"\D", "", rows[row]))
  assert number("header of a safetensors file") == _safetensors.MAX_HEADER
  assert number("tensors of a file") == _safetensors.MAX_TENSORS
  assert number("axes of a tensor") == _safetensors.MAX_RANK
  nesting = "keys on the way to a leaf, levels of metadata"
  assert number(nesting) == _safetensors.MAX_NESTING
  assert _safetensors.MAX_BYTES == 2**62
  assert "2⁶²" in rows["bytes of a tensor, empty axes counted as one"]


@pytest.mark.parametrize("size", range(24))
def test_a_cut_header_is_called_truncated(tmp_path, size):
  content = raw({"w": entry([2], 8)}, EIGHT)[:size]
  refused(tmp_path, content, "header claims .* truncated")


def test_a_file_cut_while_it_is_open_is_refused(tmp_path):
  path = tmp_path / "x.safetensors"
  # Longer than what the open file has read ahead.
  path.write_bytes(raw({"w": entry([2**18], 2**20)}, bytes(2**20)))
  with _safetensors.Reader(path) as reader:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(files.FileFormatError, match="shortened"):
      reader.read("w")


def test_a_digest_does_not_depend_on_the_order_of_the_header():
  make = _safetensors.Entry
  a, b = (make(np.dtype(np.float32), (2,), 8 * i, 8 * i + 8) for i in (0, 1))
  digest = _safetensors.header_digest
  assert digest({"a": a, "b": b}, {}) == digest({"b": b, "a": a}, {})
  assert digest({"a": a, "b": b}, {}) != digest({"a": b, "b": a}, {})


def test_paths_nest_to_the_limit_and_not_beyond(tmp_path):
  limit = _safetensors.MAX_NESTING
  name = lambda n: "/".join(["a"] * n)
  load(tmp_path, raw({name(limit): entry([2], 8)}, EIGHT))
  refused(tmp_path, raw({name(limit + 1): entry([2], 8)}, EIGHT), "at most 256")
  deep = np.ones(2)
  for _ in range(limit + 1):
    deep = {"a": deep}
  with pytest.raises(ValueError, match="at most 256"):
    files.save(tmp_path / "y", deep)
  files.save(tmp_path / "y", deep["a"])
  assert files.load(tmp_path / "y")[0].keys() == {"a"}


def nested(depth):
  value = 1
  for _ in range(depth):
    value = [value]
  return value


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_text_that_utf_8_cannot_hold_is_no_metadata(tmp_path, text):
  for metadata in ({"a": text}, {text: 1}, {"a": [{"b": text}]}):
    with pytest.raises(files.FileFormatError, match="not Unicode text"):
      files.save(tmp_path / "x", {"w": np.ones(2)}, metadata=metadata)
  assert not (tmp_path / "x").exists()


def test_a_writer_that_cannot_keep_its_word_leaves_no_file(tmp_path):
  two = np.dtype(np.float32), (2,)
  pieces = [np.ones(1, np.float32)]
  with pytest.raises(RuntimeError, match="pieces do not fill the shape"):
    with _safetensors.Writer(tmp_path / "x", {"w": two}, {}) as writer:
      writer.add("w", *two, pieces)
  with pytest.raises(RuntimeError, match="outgrew"):
    with _safetensors.Writer(tmp_path / "x", {"w": two}, {}) as writer:
      writer.add("w", *two, pieces * 2)
      writer.metadata["late"] = "x" * 99
  assert not [*tmp_path.iterdir()]
  with _safetensors.Writer(tmp_path / "x", {"w": two}, {}) as writer:
    writer.add("w", *two, pieces * 2)
  assert files.load(tmp_path / "x")[0]["w"].tolist() == [1, 1]


def test_a_shape_is_bounded_by_its_bytes():
  assert _safetensors.is_shape([1 << 61])
  assert _safetensors.is_shape([1 << 60], 2)
  assert not _safetensors.is_shape([1 << 61], 2)
  assert not _safetensors.is_shape([1 << 31, 1 << 31])
  assert not _safetensors.is_shape([1 << 61, 0, 4])


@pytest.mark.parametrize("layout", _layouts.LAYOUTS)
def test_metadata_nests_to_the_limit_and_not_beyond(tmp_path, layout):
  path = tmp_path / "x"
  limit = _safetensors.MAX_NESTING - 1  # the mapping itself is one level
  save = lambda depth: files.save(
    path, {"w": np.ones(2)}, layout=layout, metadata={"k": nested(depth)}
  )
  save(limit)
  files.read_metadata(path)
  with pytest.raises(ValueError, match="256 levels"):
    save(limit + 1)


@pytest.mark.parametrize("depth", [100, 900, 2_000, 50_000])
@pytest.mark.parametrize("field", ["", "dtype", "shape", "data_offsets"])
def test_deep_values_in_a_header_are_refused(tmp_path, depth, field):
  deep = b"[" * depth + b"]" * depth
  spec = json.dumps(entry([2], 8)).encode()
  if field:
    value = json.dumps(json.loads(spec)[field]).encode()
    deep = spec.replace(value, deep, 1)
  refused(tmp_path, raw(b'{"w": ' + deep + b"}", EIGHT))


def test_a_pipe_is_not_waited_for(tmp_path):
  import os

  os.mkfifo(tmp_path / "pipe")
  with pytest.raises(files.FileFormatError, match="neither a regular file"):
    files.load(tmp_path / "pipe")
  with pytest.raises(files.FileFormatError, match="without a checkpoint"):
    files.load(tmp_path)


def gguf_file(tensors=0, fields=0, dims=(1,), name=b"t"):
  head = b"GGUF" + struct.pack("<IQQ", 3, tensors, fields)
  body = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
  body += b"".join(struct.pack("<Q", d) for d in dims)
  return head + body + struct.pack("<IQ", 0, 0) + b"\0" * 64


@pytest.mark.parametrize(
  "content",
  [
    gguf_file(tensors=2**20 + 1),
    gguf_file(tensors=2**63),
    gguf_file(fields=2**20 + 1),
    gguf_file(1, dims=(2**63,) * 4),
    gguf_file(1, dims=(1,) * 5),
    gguf_file(1, dims=()),
    gguf_file(1, dims=(2**40 + 1,)),
  ],
)
def test_gguf_counts_are_bounded(content):
  start = time.process_time()
  with pytest.raises(DataError, match="GGUF"):
    gguf.parse(content)
  assert time.process_time() - start < 1


def test_gguf_at_the_limits_is_read():
  assert gguf.parse(gguf_file(1, dims=(1, 1, 1, 1))).entries["t"].shape == (
    1, 1, 1, 1,
  )  # fmt: skip
