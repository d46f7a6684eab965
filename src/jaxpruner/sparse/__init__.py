"""Sparse models with smaller storage and faster products.

Names are imported on first use: `import jaxpruner` stays light, and a missing
extra (numba) matters only to the names that need it.
"""

from jaxpruner._tools import on_use

# name -> the module below jaxpruner.sparse that defines it
_MODULES = {
  "Accelerated": "acceleration",
  "Bitmask": "format_bitmask",
  "Block": "format_block",
  "Checkpoint": "checkpoints",
  "Compact": "format_compact",
  "Diagonals": "format_diagonals",
  "FileFormatError": "files",
  "Group": "budgets",
  "Int8": "format_int8",
  "Kept": "formats",
  "LayerKind": "reports",
  "LayerReport": "reports",
  "LoadedModel": "artifacts",
  "NM": "format_nm",
  "Panel": "format_panel",
  "PrunedTo": "budgets",
  "Report": "reports",
  "Sell": "format_sell",
  "Shrunk": "shrinking",
  "Sizes": "interchange",
  "SparseMatrix": "formats",
  "SparseTensor": "formats",
  "StridedNM": "format_strided_nm",
  "accelerate": "acceleration",
  "bytes_report": "interchange",
  "conv_contract": "ops",
  "conv_general_dilated": "ops",
  "dot_general": "ops",
  "einsum": "ops",
  "from_bcoo": "interchange",
  "group_lasso": "group_training",
  "kept_entries": "formats",
  "load": "files",
  "load_model": "artifacts",
  "matmul": "ops",
  "open_checkpoint": "checkpoints",
  "pack": "formats",
  "prune_to": "budgets",
  "read_metadata": "files",
  "register_format": "formats",
  "register_kernels": "kernels",
  "remove_small_groups": "group_training",
  "save": "files",
  "shrink": "shrinking",
  "static": "formats",
  "to_bcoo": "interchange",
  "to_bcsr": "interchange",
  "to_semi_structured": "semi_structured",
  "what_is": "checkpoints",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = on_use.names_of(__name__, _MODULES)


def __dir__() -> list[str]:
  return __all__
