"""What `config.json` says of a folder in the layout of compressed-tensors."""

from typing import Any

_KEY = "quantization_config"  # where transformers and vLLM look for it
FORMAT = "sparse-bitmask"


def described(config: dict[str, Any], layout: str, sparsity: float) -> Any:
  """Return a configuration that says how the weights are stored.

  Args:
    config: the content of `config.json`.
    layout: that of the shards; a layout of others than `sparse-bitmask` takes
      the description away.
    sparsity: the fraction of zeros in all weights.

  Returns:
    The new content; what it says of quantised weights stays.
  """
  old = config.get(_KEY)
  old = dict(old) if isinstance(old, dict) else {}
  sparse = old.pop("sparsity_config", None)
  if layout == FORMAT:
    about = {
      "format": FORMAT,
      "global_sparsity": sparsity,
      "sparsity_structure": "unstructured",
      "targets": ["Linear"],
      "ignore": [],
    }
    # Any further entry would be read as the description of a quantisation.
    base = {"quant_method": "compressed-tensors"}
    return config | {_KEY: base | old | {"sparsity_config": about}}
  if sparse is None:
    return config
  rest = {k: v for k, v in config.items() if k != _KEY}
  # Nothing but the sparsity was described: the weights are plain ones now.
  return rest if "config_groups" not in old else rest | {_KEY: old}
