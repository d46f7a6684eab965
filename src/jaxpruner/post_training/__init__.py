"""Prune a trained model in minutes: calibration, Wanda, SparseGPT.

Names are imported on first use: `import jaxpruner` stays light.
"""

import importlib
from typing import Any

# name -> the module below jaxpruner.post_training that defines it
_MODULES = {
  "Layer": "pruning",
  "Report": "pruning",
  "Statistics": "calibration",
  "add_lora": "lora",
  "apply_lora": "lora",
  "calibrate": "calibration",
  "hold_masks": "holding",
  "merge_lora": "lora",
  "prune": "pruning",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(
      f"module {__name__!r} has no attribute {name!r}; it has "
      f"{', '.join(__all__)}"
    )
  module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
  globals()[name] = getattr(module, name)
  return globals()[name]


def __dir__() -> list[str]:
  return __all__
