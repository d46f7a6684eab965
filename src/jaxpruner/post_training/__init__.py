"""Prune a trained model in minutes: calibration, Wanda, SparseGPT.

Names are imported on first use: `import jaxpruner` stays light.
"""

from jaxpruner._tools import on_use

# name -> the module below jaxpruner.post_training that defines it
_MODULES = {
  "Layer": "prune_report",
  "Pattern": "_pattern",
  "PruneReport": "prune_report",
  "Report": "prune_report",
  "Solver": "solvers.table",
  "Statistics": "calibration",
  "Token": "generation",
  "Writer": "generation",
  "add_lora": "lora",
  "apply_lora": "lora",
  "calibrate": "calibration",
  "hold_masks": "fixed_masks",
  "merge_lora": "lora",
  "prune": "pruning",
  "register_solver": "solvers.table",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = on_use.names_of(__name__, _MODULES)


def __dir__() -> list[str]:
  return __all__
