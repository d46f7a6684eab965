"""Sparse training at the size of what is kept: weights, gradients, moments."""

from jaxpruner._tools import on_use

# name -> the module below jaxpruner.kept that defines it
_MODULES = {
  "KeptState": "updaters",
  "KeptTensor": "tensors",
  "KeptUpdater": "updaters",
  "LayerBytes": "report",
  "Layout": "layouts",
  "TrainingBytes": "report",
  "create": "tensors",
  "find_kept_state": "updaters",
  "from_dense": "tensors",
  "join": "tensors",
  "lift": "lifting",
  "load": "files",
  "save": "files",
  "split": "tensors",
  "todense": "tensors",
  "training_bytes": "report",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = on_use.names_of(__name__, _MODULES)


def __dir__() -> list[str]:
  return __all__
