"""Real pretrained models: compact forward passes and strict loaders."""

from jaxpruner.post_training.models.hub import HubModel, load_folder
from jaxpruner.post_training.models.zoo import MODELS, Model, load

__all__ = ["MODELS", "HubModel", "Model", "load", "load_folder"]
