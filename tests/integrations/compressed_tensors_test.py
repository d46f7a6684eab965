"""compressed-tensors reads the folders that are written in its layout."""

import json

import pytest

pytest.importorskip("compressed_tensors")

import hub_models
import numpy as np

# Releases from 0.15 on have dropped the sparse compressors. That must fail, as
# must whatever else is missing: the package is there.
from compressed_tensors import config
from compressed_tensors.compressors import sparse_compressors as peer

from jaxpruner import cli
from jaxpruner.post_training import models


@pytest.mark.parametrize("kind", [["--sparsity", "0.5"], ["--type", "2:4"]])
def test_folders_decompress_to_the_same_weights(tmp_path, kind):
  old, new = tmp_path / "old", tmp_path / "new"
  hub_models.write_folder(old, "llama2")
  args = ["prune", old, *kind, "--layout", "sparse-bitmask", "-o", new]
  assert cli.main([str(a) for a in args]) == 0
  about = json.loads((new / "config.json").read_text())
  about = about["quantization_config"]["sparsity_config"]
  parsed = config.SparsityCompressionConfig.load_from_registry(
    about["format"], **about
  )
  reader = peer.BitmaskCompressor(config=parsed)
  found = {name: array.numpy() for name, array in reader.decompress(str(new))}
  ours = models.load_folder(new).params
  assert found.keys() == ours.keys()
  for name, array in ours.items():
    np.testing.assert_array_equal(found[name], array)


def test_the_loader_of_others_finds_its_way_by_the_configuration(tmp_path):
  """As llm-compressor does: config.json alone tells how to decompress."""
  transformers = pytest.importorskip("transformers")
  from compressed_tensors.compressors import ModelCompressor

  old, new = tmp_path / "old", tmp_path / "new"
  hub_models.write_folder(old, "llama2")
  args = ["prune", old, "--type", "2:4", "--layout", "sparse-bitmask"]
  assert cli.main([str(a) for a in [*args, "-o", new]]) == 0
  about = transformers.AutoConfig.from_pretrained(old)
  model = transformers.AutoModelForCausalLM.from_config(about)
  ModelCompressor.from_pretrained(str(new)).decompress(str(new), model)
  found = {name: array.numpy() for name, array in model.state_dict().items()}
  for name, array in models.load_folder(new).params.items():
    np.testing.assert_array_equal(found[name], array)
