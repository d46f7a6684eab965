"""ResNet-50 and ViT-B/16 on ImageNet in Scenic: a configuration and a main.

    python examples/recipes/imagenet_scenic.py --workdir FOLDER \\
      --config examples/recipes/imagenet_scenic.py:resnet50,rigl

`--config FILE:ROW,ALGORITHM` takes the rows `resnet50`, `vit_b16` and
`vit_b16_long` of the paper's Table 1. Needs Scenic on PYTHONPATH and ImageNet
prepared by `tensorflow-datasets`.
"""

import pathlib
import sys
from typing import Any

import ml_collections

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import paper

# The leaves that stay dense: the first convolution; what ViT adds to patches.
DENSE = {
  "resnet50": ("stem_conv/kernel",),
  "vit_b16": ("cls", "Transformer/posembed_input/pos_embedding"),
}
DENSE["vit_b16_long"] = DENSE["vit_b16"]


def get_config(choice: str = "resnet50,magnitude") -> ml_collections.ConfigDict:
  """Return Scenic's configuration of a cell: "ROW,ALGORITHM"."""
  row, _, algorithm = choice.partition(",")
  settings = paper.ROWS[row]
  config = ml_collections.ConfigDict()
  config.experiment_name = f"{row}-{algorithm}"
  config.pruner = paper.pruner_config(row, algorithm, dense=DENSE[row])
  config.dataset_name = "imagenet"
  config.data_dtype_str = "float32"
  config.model_dtype_str = "float32"
  config.dataset_configs = ml_collections.ConfigDict()
  config.batch_size = 4096
  config.num_training_epochs = settings.steps // (1_281_167 // 4096)
  config.rng_seed = 0
  config.init_head_bias = -10.0
  config.label_smoothing = None
  config.checkpoint = True
  config.checkpoint_steps = 3000
  config.log_eval_steps = 1000
  config.write_summary = True
  config.xprof = False
  config.debug_train = config.debug_eval = False
  config.update(_resnet() if row == "resnet50" else _vit())
  rate = {
    "learning_rate_schedule": "compound",
    "factors": "constant * cosine_decay * linear_warmup",
    "steps_per_cycle": settings.steps,
    "total_steps": settings.steps,
  }
  if row == "resnet50":
    rate |= {"base_learning_rate": 1.6, "warmup_steps": settings.steps // 20}
  else:
    rate |= {"base_learning_rate": 3e-3, "warmup_steps": 10_000}
    rate |= {"end_learning_rate": 1e-5}
  config.lr_configs = rate
  return config


def _resnet() -> dict[str, Any]:
  return {
    "model_name": "resnet_classification",
    "num_filters": 64,
    "num_layers": 50,
    "optimizer": "momentum",
    "optimizer_configs": {"momentum": 0.9},
    "l2_decay_factor": 1e-4,
    "max_grad_norm": None,
  }


def _vit() -> dict[str, Any]:
  return {
    "model_name": "vit_multilabel_classification",
    "model": {
      "hidden_size": 768,
      "patches": {"size": [16, 16]},
      "num_heads": 12,
      "mlp_dim": 3072,
      "num_layers": 12,
      "representation_size": 768,
      "classifier": "token",
      "attention_dropout_rate": 0.0,
      "dropout_rate": 0.1,
    },
    "optimizer": "adam",
    "optimizer_configs": {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.3},
    "explicit_weight_decay": None,
    "l2_decay_factor": None,
    "max_grad_norm": 1.0,
  }


def train(
  rng: Any, config: Any, dataset: Any, workdir: str, writer: Any
) -> Any:
  """Run Scenic's trainer with the pruner of the configuration."""
  from scenic.model_lib import models
  from scenic.train_lib import classification_trainer

  import jaxpruner
  from jaxpruner.integrations import scenic

  pruner = jaxpruner.create_updater_from_config(config.pruner.to_dict())
  with scenic.pruned(pruner):
    return classification_trainer.train(
      rng=rng,
      config=config,
      model_cls=models.get_model_cls(config.model_name),
      dataset=dataset,
      workdir=workdir,
      writer=writer,
    )


def main(rng: Any, config: Any, workdir: str, writer: Any) -> None:
  """Load ImageNet and train; called by Scenic's `app.run`."""
  import jax
  from scenic.train_lib import train_utils

  data_key, key = jax.random.split(rng)
  dataset = train_utils.get_dataset(config, data_key)
  train(key, config, dataset, workdir, writer)


if __name__ == "__main__":
  from scenic import app

  app.run(main)
