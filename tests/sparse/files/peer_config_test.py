"""What `config.json` says of folders in the layout of compressed-tensors."""

import json

import hub_models

from jaxpruner import cli
from jaxpruner.post_training import models


def config(folder):
  return json.loads((folder / "config.json").read_text())


def test_folders_tell_others_how_they_are_stored(tmp_path):
  plain, small, again = (tmp_path / n for n in ("plain", "small", "again"))
  hub_models.write_folder(plain, "llama2")
  args = ["prune", plain, "--sparsity", "0.5", "--layout", "sparse-bitmask"]
  assert cli.main([str(a) for a in [*args, "-o", small]]) == 0
  about = config(small)["quantization_config"]
  assert about["quant_method"] == "compressed-tensors"
  assert about.keys() == {"quant_method", "sparsity_config"}
  assert about["sparsity_config"]["format"] == "sparse-bitmask"
  index = "model.safetensors.index.json"
  where = json.loads((small / index).read_text())["weight_map"]
  name = "model.layers.0.mlp.up_proj."
  assert where[name + "compressed"] == where[name + "bitmask"]
  assert name + "weight" not in where
  params = models.load_folder(small).params.values()
  zeros = sum(int((p == 0).sum()) for p in params)
  found = about["sparsity_config"]["global_sparsity"]
  assert abs(found - zeros / sum(p.size for p in params)) < 1e-9
  assert cli.main(["unpack", str(small), "-o", str(again)]) == 0
  assert config(again) == config(plain)
  for file in (index, "config.json"):
    old, new = (json.loads((f / file).read_text()) for f in (plain, again))
    assert old == new


def test_quantised_weights_stay_described(tmp_path):
  plain, small, again = (tmp_path / n for n in ("plain", "small", "again"))
  hub_models.write_folder(plain, "llama2")
  groups = {"quantization_config": {"config_groups": {"a": 1}, "format": "x"}}
  text = json.dumps(config(plain) | groups)
  (plain / "config.json").write_text(text)
  args = ["pack", plain, "--layout", "sparse-bitmask", "-o", small]
  assert cli.main([str(a) for a in args]) == 0
  about = config(small)["quantization_config"]
  assert about["format"] == "x" and "sparsity_config" in about
  assert cli.main(["unpack", str(small), "-o", str(again)]) == 0
  found = config(again)["quantization_config"]
  assert found["config_groups"] == {"a": 1} and "sparsity_config" not in found
