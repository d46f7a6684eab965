"""Sparse training at the size of what is kept: weights, gradients, moments."""

from jaxpruner._tools import on_use

# name -> the module below jaxpruner.kept that defines it
_MODULES = {
  "BlockLayout": "blocks",
  "KeptState": "states",
  "KeptTensor": "tensors",
  "KeptUpdater": "updaters",
  "LayerBytes": "report",
  "LayerTime": "measuring",
  "Layout": "layouts",
  "TrainingBytes": "report",
  "TrainingReport": "measuring",
  "create": "creation",
  "find_kept_state": "states",
  "from_dense": "conversion",
  "join": "tensors",
  "lift": "lifting",
  "load": "files",
  "save": "files",
  "split": "tensors",
  "todense": "tensors",
  "training_bytes": "report",
  "training_report": "measuring",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = on_use.names_of(__name__, _MODULES)


def __dir__() -> list[str]:
  return __all__
