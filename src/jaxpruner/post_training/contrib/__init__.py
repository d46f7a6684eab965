"""Recent methods after training, kept apart so that the core stays small.

reconstruction   prune block by block, and train each on its dense output
dsnot            exchange weights of a mask by the mean output
alpha            levels by the tails of spectra
distillation     train on the dense model's predictions, masks fixed
experts          remove whole experts of a mixture
depth            drop whole layers
heads            remove heads, with all that share their keys and values
levels           search the sparsity of each layer by evolution
skipping         thresholds below which inputs of a product are skipped
learned_masks    learn N:M masks on the loss, weights frozen
"""

from jaxpruner._tools import on_use

# name -> the module below jaxpruner.post_training.contrib that defines it
_MODULES = {
  "distill": "distillation",
  "drop_blocks": "depth",
  "input_thresholds": "skipping",
  "learn_masks": "learned_masks",
  "prune_blocks": "reconstruction",
  "prune_experts": "experts",
  "prune_heads": "heads",
  "search_levels": "levels",
}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = on_use.names_of(__name__, _MODULES)


def __dir__() -> list[str]:
  return __all__
