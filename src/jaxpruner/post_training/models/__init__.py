"""Real pretrained models: compact forward passes and strict loaders."""

from jaxpruner.post_training.models.gguf_writer import save_gguf
from jaxpruner.post_training.models.hub import HubModel, load_folder
from jaxpruner.post_training.models.reduced import Reduced, save_folder
from jaxpruner.post_training.models.zoo import MODELS, Model, load

__all__ = [
  "MODELS",
  "HubModel",
  "Model",
  "Reduced",
  "load",
  "load_folder",
  "save_folder",
  "save_gguf",
]
