"""Recent methods after training, kept apart so that the core stays small.

reconstruction   prune block by block, and train each on its dense output
distillation     train on the dense model's predictions, masks fixed
"""

from jaxpruner._tools import on_use

# name -> the module below jaxpruner.post_training.contrib that defines it
_MODULES = {
  "distill": "distillation",
  "prune_blocks": "reconstruction",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = on_use.names_of(__name__, _MODULES)


def __dir__() -> list[str]:
  return __all__
