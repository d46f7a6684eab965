"""Sparse training at the size of what is kept: weights, gradients, moments."""

from jaxpruner import _on_use

_MODULES = {
  "KeptTensor": "tensors",
  "KeptState": "updaters",
  "KeptUpdater": "updaters",
  "Layout": "layouts",
  "create": "tensors",
  "from_dense": "tensors",
  "join": "tensors",
  "lift": "lifting",
  "split": "tensors",
  "todense": "tensors",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = _on_use.names_of(__name__, _MODULES)


def __dir__() -> list[str]:
  return __all__
