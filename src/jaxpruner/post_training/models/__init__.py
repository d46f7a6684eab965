"""Real pretrained models: compact forward passes and strict loaders."""

from jaxpruner.post_training.models.zoo import MODELS, Model, load

__all__ = ["MODELS", "Model", "load"]
