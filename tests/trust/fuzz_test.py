"""Damaged inputs of every reader: refused in our words, or read as they are.

A few hundred inputs per reader here, ten thousand in the slow test. An input
that once broke a reader is kept in `corpus/` and tried at every run; a failing
one is written to the test's folder, from where it can be added.
"""

import gzip
import hashlib
import io
import json
import pathlib
import random
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib

import compare_helpers
import flax.serialization
import fuzz
import hub_models
import jax
import numpy as np
import pytest

from jaxpruner import datasets, kept, sparse
from jaxpruner.compare import files as compare_files
from jaxpruner.compare import record_files, records, run_folder, settings, table
from jaxpruner.datasets import archives
from jaxpruner.post_training.models import gguf, hub
from jaxpruner.sparse import (
  _choose,
  _layouts,
  _safetensors,
  _staging,
  artifacts,
  checkpoints,
  files,
  structure,
)

CORPUS = pathlib.Path(__file__).parent / "corpus"
FEW, MANY = 300, 10_000
RNG = np.random.default_rng(0)
TREE = {
  "a": {"w": RNG.normal(size=(6, 8)).astype(np.float32)},
  "é": np.arange(3),
  "flag": np.array([True, False]),
}
TREE["a"]["w"][:, ::2] = 0
MASKS = {
  "a": {"w": (TREE["a"]["w"] != 0).astype("u1")}, "é": None, "flag": None,
}  # fmt: skip


def saved(layout):
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "x"
    masks = None if layout == "dense" else MASKS
    files.save(path, TREE, masks, layout=layout, metadata={"n": [1, "x"]})
    return path.read_bytes()


def split(content):
  length = int.from_bytes(content[:8], "little")
  return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header, data):
  text = json.dumps(header).encode()
  return struct.pack("<Q", len(text)) + text + data


def resealed(header, data):
  """Repair the digest of a packed header, as an attacker can."""
  try:
    about = header["__metadata__"]
    about.pop("jaxpruner_sha256", None)
    entries = {
      k: _safetensors.Entry(
        _safetensors.DTYPES[v["dtype"]], tuple(v["shape"]), *v["data_offsets"]
      )
      for k, v in header.items()
      if k != "__metadata__"
    }
    about["jaxpruner_sha256"] = _safetensors.header_digest(entries, about)
  except Exception:  # damaged beyond sealing: tried as it is
    pass
  return joined(header, data)


def damage_file(rng, content):
  """Damage a safetensors file by bytes, header or manifest."""
  kind = rng.randrange(3)
  if kind == 0:
    return fuzz.damage_bytes(rng, content)
  header, data = split(content)
  if kind == 1:
    return joined(fuzz.damage_tree(rng, header), data)
  about = header["__metadata__"]
  for key in {"jaxpruner", artifacts.KEY} & about.keys():
    manifest = fuzz.damage_tree(rng, json.loads(about[key]))
    about[key] = json.dumps(manifest)
    return resealed(header, data)
  if "jaxpruner_names" in about:
    about["jaxpruner_names"] = json.dumps(fuzz.odd(rng))
  return resealed(header, data)


def read_file(path):
  params, masks = files.load(path)
  files.read_metadata(path)
  with _layouts.SparseFile(path) as file:
    for name in file.tensors:
      array, mask = file.read(name)
      structure.describe(array != 0)
      assert mask is None or mask.shape == array.shape
      list(file.chunks(name))
  # What could be read can be written and read again.
  again = path.with_name("again")
  files.save(again, params, masks, metadata=files.read_metadata(path))
  files.load(again)


def make_model():
  """A saved model: the smallest that has packed weights and two programs."""
  pytest.importorskip("flatbuffers")
  weights = {"w": sparse.pack(np.eye(16, dtype=np.float32))}
  one, two = (
    sparse.Accelerated(
      lambda p, x: x @ p["w"], weights, (np.ones((n, 16), np.float32),)
    )
    for n in (1, 2)
  )
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "x"
    one.save(path, two, metadata={"n": [1, "x"]})
    return path.read_bytes()


def make_kept():
  """Weights at kept size: single ones, columns alike, and blocks."""
  w = TREE["a"]["w"]
  blocks = np.kron(np.eye(2, dtype=np.float32), np.ones((2, 2), np.float32))
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "x"
    kept.save(path, {
      "w": kept.from_dense(w),
      "b": kept.from_dense(blocks, block=(2, 2)),
      "dense": np.arange(3.0),
    })  # fmt: skip
    return path.read_bytes()


def damage_kept(rng, content):
  """Damage a file of kept weights; half the time what says how they lie."""
  if rng.randrange(2):
    return damage_file(rng, content)
  header, data = split(content)
  about = header["__metadata__"]
  manifest = json.loads(about["jaxpruner"])
  forms = manifest["metadata"]["jaxpruner.kept"]
  manifest["metadata"]["jaxpruner.kept"] = fuzz.damage_tree(rng, forms)
  about["jaxpruner"] = json.dumps(manifest)
  return resealed(header, data)


def read_kept(path):
  is_kept = lambda leaf: isinstance(leaf, kept.KeptTensor)
  for leaf in jax.tree.leaves(kept.load(path), is_leaf=is_kept):
    # A sparse file may stand for more than memory holds.
    if is_kept(leaf) and leaf.size < 1e6:
      leaf.todense()


def make_gguf():
  text = lambda s: struct.pack("<Q", len(s)) + s
  head = b"GGUF" + struct.pack("<IQQ", 3, 3, 3)
  head += text(b"general.alignment") + struct.pack("<II", 4, 32)
  head += text(b"names") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") * 2
  head += text(b"eps") + struct.pack("<If", 6, 0.5)
  for name, kind, shape, at in (
    (b"x", 0, (4, 2), 0), (b"q", 8, (32,), 32), (b"p", 3, (32, 1), 96),
  ):  # fmt: skip
    head += text(name) + struct.pack("<I", len(shape))
    head += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack(
      "<IQ", kind, at
    )
  return head + b"\0" * (-len(head) % 32) + bytes(range(128)) + b"\0" * 32


def read_gguf(path):
  found = gguf.parse(path.read_bytes())
  for name, entry in found.entries.items():
    assert found.read(name, entry.shape).dtype == np.float32


def make_tar(mode="w:gz"):
  raw = io.BytesIO()
  with tarfile.open(fileobj=raw, mode=mode) as tar:
    for name, content in (("p/x", b"x" * 600), ("p/y", b"y")):
      about = tarfile.TarInfo(name)
      about.size = len(content)
      tar.addfile(about, io.BytesIO(content))
  return raw.getvalue()


def make_wheel():
  raw = io.BytesIO()
  with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as wheel:
    wheel.writestr("p/x", b"x" * 600)
    wheel.writestr("p/y", b"y")
  return raw.getvalue()


def package_reader(suffix):
  def read(path):
    target = path.with_name("package" + suffix)
    content = path.read_bytes()
    target.write_bytes(content)
    # Its own sum: what is tried is the reader behind it.
    sha256 = hashlib.sha256(content).hexdigest()
    package = archives.Package(target.name, sha256, "fetch")
    package.read(("p/x", 1000), ("p/y", 10), folder=str(path.parent))

  return read


def idx_file():
  return b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 4) + bytes(24)


def read_idx(suffix):
  def read(path):
    target = path.with_name("idx" + suffix)
    target.write_bytes(path.read_bytes())
    datasets.read_idx(target)

  return read


def enwik8_reader(name):
  def read(path):
    folder = path.with_name("enwik8-folder")
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(path.read_bytes())
    datasets.load_enwik8(str(folder))

  return read


def read_cache(path):
  timings = _choose.Timings(path)
  for key in timings.table:
    times = timings.get(key, timings.table[key])
    assert times is None or all(t >= 0 for t in times.values())
  timings.save()


def make_npz():
  raw = io.BytesIO()
  np.savez_compressed(raw, w=np.ones((6, 8), np.float32), n=np.arange(3))
  return raw.getvalue()


def make_msgpack():
  return flax.serialization.to_bytes({"a": TREE["a"], "n": 3, "t": "x"})


def make_index():
  names = {"a/w": "1.safetensors", "é": "2.safetensors"}
  return json.dumps({"metadata": {}, "weight_map": names}).encode()


def read_checkpoint(name):
  """Read and write again what is damaged, whatever it is taken for."""

  def read(path):
    folder = path.with_name("checkpoint")
    folder.mkdir(exist_ok=True)
    if name.endswith(".json"):
      files.save(folder / "1.safetensors", {"a": TREE["a"]}, layout="dense")
      files.save(folder / "2.safetensors", {"é": TREE["é"]}, layout="dense")
    (folder / name).write_bytes(path.read_bytes())
    again = path.with_name("again")
    with checkpoints.open_checkpoint(folder / name) as file:
      for tensor in file.tensors:
        assert file.read(tensor)[0].shape == file.tensors[tensor].shape
      if again.is_dir():
        shutil.rmtree(again)
      file.rewrite(again, file.content, metadata={})

  return read


def read_job(path):
  folder = path.with_name("job")
  folder.mkdir(exist_ok=True)
  (folder / "job.json").write_bytes(path.read_bytes())
  _staging.claim(folder, JOB)


def make_run():
  """The parts of a run folder, as one JSON object."""
  cells = ("dense", "magnitude@0.8", "static_sparse@0.8")
  spell = lambda event: event.to_json()
  return json.dumps(
    {
      "run.json": compare_helpers.run_info().to_json(),
      "results.jsonl": [spell(compare_helpers.record(c, [9.5])) for c in cells],
      "steps.jsonl": [spell(compare_helpers.chunk(c)) for c in cells],
      "latency.jsonl": [spell(records.Latency(c, 1.5, "dense")) for c in cells],
    }
  ).encode()


def damage_run(rng, content):
  tree = fuzz.damage_tree(rng, json.loads(content))
  return json.dumps(tree).encode()


def read_run(path):
  """Read a run folder whose lines carry right sums, as an attacker's do."""
  parts = json.loads(path.read_bytes())
  folder = path.with_name("run")
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  for name, part in parts.items() if isinstance(parts, dict) else ():
    if name == "run.json":
      (folder / name).write_text(json.dumps(part))
    elif name in RUN_FILES and isinstance(part, list):
      lines = [json.dumps(line).encode() for line in part]
      sums = [b"%08x " % zlib.crc32(line) for line in lines]
      pairs = zip(sums, lines, strict=True)
      content = b"".join(a + b + b"\n" for a, b in pairs)
      (folder / name).write_bytes(content)
  table.rows(str(folder))
  run_folder.read_steps(folder)


def damage_hub(rng, content):
  """Return the name of a family, and a damaged config.json of it."""
  del content
  family = rng.choice([*hub_models.CONFIGS])
  return make_hub(family, lambda text: fuzz.damage_json(rng, text))


def make_hub(family="llama3", damage=bytes):
  config = json.dumps(hub_models.CONFIGS[family]).encode()
  return family.encode() + b"\n" + damage(config)


def read_hub(path):
  family, _, config = path.read_bytes().partition(b"\n")
  folder = path.with_name(family.decode())
  if not folder.exists():
    hub_models.write_folder(folder, family.decode(), shards=1)
  (folder / "config.json").write_bytes(config)
  hub.load_folder(folder)


RUN_FILES = ("results.jsonl", "steps.jsonl", "latency.jsonl")
TOML = b"""task = "digits"
algorithms = ["magnitude", "rigl{drop_fraction=0.1}"]
sparsity = [0.8, 0.9]
type = ["unstructured", "8x8"]
seeds = 3

[options]
steps = 24
"""


def damage_toml(rng, content):
  """Put an odd value in the place of one, or damage the bytes."""
  lines = content.decode().splitlines()
  at = rng.randrange(len(lines))
  if " = " not in lines[at] or rng.random() < 0.3:
    return fuzz.damage_bytes(rng, content)
  lines[at] = f"{lines[at].split(' = ')[0]} = {json.dumps(fuzz.odd(rng))}"
  return "\n".join(lines).encode(errors="surrogatepass")


def make_records():
  info = run_folder.RunInfo({"task": "digits"}, {"jax": "1"}, format=3)
  cell = compare_helpers.record("rigl@0.8", [1.0, 2.5])
  curve = record_files.Training("rigl@0.8", 4, [0, 2], [[1.0], [None]], "ab")
  time = records.Latency("rigl@0.8", 1.5, "dense")
  found = record_files.Records(
    info, {cell.cell: cell}, {cell.cell: curve}, {cell.cell: time}
  )
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "x.jsonl"
    record_files.save(found, str(path))
    return path.read_bytes()


def damage_records(rng, content):
  """Damage one line as JSON, or the whole as bytes."""
  if rng.random() < 0.3:
    return fuzz.damage_bytes(rng, content)
  lines = content.splitlines()
  at = rng.randrange(len(lines))
  lines[at] = fuzz.damage_json(rng, lines[at])
  return b"\n".join(lines)


def read_records(path):
  with record_files.as_folders([str(path)]) as (folder,):
    run_folder.read_results(folder)


JOB = {"settings": {"method": "wanda", "damping": 0.01}, "data": "ab" * 32,
       "targets": {"a/w": 0.5}, "refit": False}  # fmt: skip
CACHE = json.dumps({"k": {"dense": 1.0, "sell": 0.5}, "l": {"dense": 2}})
PLAIN = fuzz.damage_bytes
READERS = {
  **{
    layout: (lambda layout=layout: saved(layout), damage_file, read_file,
             files.FileFormatError)
    for layout in _layouts.ALL_LAYOUTS
  },
  "model": (make_model, damage_file, sparse.load_model,
            files.FileFormatError),
  "kept": (make_kept, damage_kept, read_kept, files.FileFormatError),
  "gguf": (make_gguf, PLAIN, read_gguf, archives.DataError),
  "tgz": (make_tar, PLAIN, package_reader(".tgz"), archives.DataError),
  "tar": (lambda: make_tar("w"), PLAIN, package_reader(".tgz"),
          archives.DataError),
  "wheel": (make_wheel, PLAIN, package_reader(".whl"), archives.DataError),
  "idx": (idx_file, PLAIN, read_idx(""), archives.DataError),
  "idx-gz": (lambda: gzip.compress(idx_file(), mtime=0), PLAIN,
             read_idx(".gz"), archives.DataError),
  "enwik8": (lambda: make_tar(), PLAIN,
             enwik8_reader("mingru_pytorch-0.2.1.tar.gz"), archives.DataError),
  "enwik8-gz": (lambda: gzip.compress(b"x" * 99, mtime=0), PLAIN,
                enwik8_reader("enwik8.gz"), archives.DataError),
  "npz": (make_npz, PLAIN, read_checkpoint("x.npz"), files.FileFormatError),
  "msgpack": (make_msgpack, PLAIN, read_checkpoint("x.msgpack"),
              files.FileFormatError),
  "index": (make_index, fuzz.damage_json,
            read_checkpoint("model.safetensors.index.json"),
            files.FileFormatError),
  "cache": (CACHE.encode, fuzz.damage_json, read_cache, ()),
  "run": (make_run, damage_run, read_run, compare_files.RunFolderError),
  "hub": (make_hub, damage_hub, read_hub, files.FileFormatError),
  "toml": (lambda: TOML, damage_toml, settings.read_config, ValueError),
  "records": (make_records, damage_records, read_records,
              run_folder.RunFolderError),
  "job": (lambda: json.dumps(JOB).encode(), fuzz.damage_json, read_job,
          ValueError),
}  # fmt: skip


def attempt(reader, content, folder):
  """Give one input to a reader; tell whether it was refused."""
  *_, read, refusal = READERS[reader]
  path = folder / "input"
  path.write_bytes(content)
  try:
    read(path)
  except refusal as error:
    # A message, and of ours: not a bare KeyError or an encoding's complaint.
    assert str(error)
    return True
  except BaseException:
    kept = folder / f"{reader}-{hashlib.sha256(content).hexdigest()[:12]}"
    kept.write_bytes(content)
    print(f"kept as {kept}")
    raise
  return False


def fuzz_many(reader, folder, count, seed):
  make, damage, *_ = READERS[reader]
  rng, content = random.Random(f"{reader} {seed}"), make()
  return sum(
    attempt(reader, damage(rng, content), folder) for _ in range(count)
  )


@pytest.mark.parametrize("reader", READERS)
def test_an_undamaged_input_is_read(reader, tmp_path):
  refused = attempt(reader, READERS[reader][0](), tmp_path)
  # Ours are too short to be the true set.
  assert refused == reader.startswith("enwik8")


@pytest.mark.parametrize("reader", READERS)
def test_damaged_inputs_are_refused_in_words(reader, tmp_path):
  fuzz_many(reader, tmp_path, FEW, 0)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_ten_thousand_damaged_inputs_are_refused_in_words(reader, tmp_path):
  fuzz_many(reader, tmp_path, MANY, 1)


KEPT = sorted(p for p in CORPUS.glob("*/*") if p.is_file())


@pytest.mark.parametrize(
  "path", KEPT, ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_what_once_broke_a_reader_is_refused(path, tmp_path):
  attempt(path.parent.name, path.read_bytes(), tmp_path)
