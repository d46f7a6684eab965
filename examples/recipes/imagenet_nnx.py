"""ResNet-50 and ViT-B/16 on ImageNet in a plain Flax NNX loop.

    python examples/recipes/imagenet_nnx.py --row resnet50 --algorithm rigl \\
      --data TFDS_FOLDER

The rows `resnet50`, `vit_b16` and `vit_b16_long` of the paper's Table 1, with
batches of 4,096 on all devices. Paper, 80 % sparse: ResNet-50 dense 76.67,
RigL 74.75; ViT-B/16 dense 74.04, straight-through 74.21. Needs Flax, and
`tensorflow-datasets` with ImageNet prepared.
"""

import argparse
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import imagenet_models
import jax
import jax.numpy as jnp
import numpy as np
import optax
import paper
from flax import nnx

import jaxpruner

BATCH = 4096


def is_matrix(params: Any) -> Any:
  """Return which leaves decay: those of two or more dimensions."""
  return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def optimizer(row: str, steps: int) -> optax.GradientTransformation:
  """Return the dense optimizer of a row: Scenic's settings."""
  cosine = optax.warmup_cosine_decay_schedule
  if row == "resnet50":
    rate = cosine(0.0, 0.1 * BATCH / 256, max(1, steps // 20), steps)
    return optax.chain(
      optax.add_decayed_weights(1e-4, is_matrix),
      optax.sgd(rate, momentum=0.9),
    )
  total = paper.ROWS[row].steps
  rate = cosine(0.0, 3e-3, max(1, 10_000 * steps // total), steps, 1e-5)
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(rate, weight_decay=0.3, mask=is_matrix),
  )


def loss_of(row: str, logits: jax.Array, labels: jax.Array) -> jax.Array:
  """Return the loss: softmax for ResNet, a sigmoid per class for ViT."""
  if row == "resnet50":
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return each.mean()
  wanted = jax.nn.one_hot(labels, logits.shape[-1])
  return optax.sigmoid_binary_cross_entropy(logits, wanted).sum(-1).mean()


class Trained(NamedTuple):
  """The result of a training."""

  model: Any
  opt_state: Any
  losses: np.ndarray


def train(
  row: str,
  algorithm: str,
  model: Any,
  batches: Iterable[dict[str, Any]],
  steps: int | None = None,
) -> Trained:
  """Train one cell of the table.

  Args:
    row: "resnet50", "vit_b16" or "vit_b16_long".
    algorithm: a registered name.
    model: a `ResNet` or `ViT`; it is trained in place.
    batches: {"image": (n, h, w, 3) floats, "label": (n,) integers}.
    steps: by default the row's; the schedules are scaled with it.

  Returns:
    The model, the optimizer's state with the masks, and the losses.
  """
  steps = steps or paper.ROWS[row].steps
  config = paper.pruner_config(row, algorithm, steps, type(model).dense)
  pruner = jaxpruner.create_updater_from_config(config)
  tx = pruner.wrap_optax(optimizer(row, steps))
  state = nnx.Optimizer(model, tx, wrt=nnx.Param)
  # Sparse trainers are sparse from the first forward pass on.
  params = nnx.state(model, nnx.Param)
  nnx.update(model, pruner.post_gradient_update(params, state.opt_state))

  @nnx.jit
  def step(model, state, batch):
    def loss(model):
      return loss_of(row, model(batch["image"]), batch["label"])

    value, grads = nnx.value_and_grad(loss)(model)
    state.update(model, grads)
    return value

  model.train()
  place = _placed()
  losses = [
    step(model, state, place(batch))
    for batch in itertools.islice(batches, steps)
  ]
  model.eval()
  return Trained(model, state.opt_state, np.asarray(losses))


@functools.cache
def _placed():
  """Return a function that divides a batch among all devices."""
  mesh = jax.make_mesh(
    (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  layout = jax.NamedSharding(mesh, jax.P("data"))
  return lambda batch: jax.device_put(batch, layout)


def accuracy(model: Any, batches: Iterable[dict[str, Any]]) -> float:
  """Return the accuracy on batches, in percent."""
  predict = nnx.jit(lambda model, images: model(images).argmax(-1))
  right = count = 0
  for batch in batches:
    found = predict(model, jnp.asarray(batch["image"]))
    right += int((found == batch["label"]).sum())
    count += len(batch["label"])
  return 100 * right / count


def imagenet(
  split: str, batch: int, folder: str | None, training: bool
) -> Iterator[dict[str, np.ndarray]]:
  """Yield batches of ImageNet: random crops and flips, or the middle."""
  import tensorflow as tf
  import tensorflow_datasets as tfds

  def prepare(example):
    image, label = example["image"], example["label"]
    if training:
      begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image), tf.zeros([0, 0, 4]), area_range=(0.08, 1.0)
      )
      image = tf.image.random_flip_left_right(tf.slice(image, begin, size))
    else:
      image = tf.image.central_crop(image, 0.875)
    image = tf.image.resize(image, (224, 224), "bicubic")
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return {"image": (image / 255 - mean) / deviation, "label": label}

  data = tfds.load(
    "imagenet2012", split=split, data_dir=folder, shuffle_files=training
  )
  if training:
    data = data.repeat().shuffle(16 * batch)
  data = data.map(prepare, tf.data.AUTOTUNE)
  yield from data.batch(batch, training).prefetch(2).as_numpy_iterator()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  rows = ("resnet50", "vit_b16", "vit_b16_long")
  parser.add_argument("--row", choices=rows, default="resnet50")
  parser.add_argument("--algorithm", default="magnitude")
  parser.add_argument("--data", help="folder of tensorflow-datasets")
  parser.add_argument("--steps", type=int)
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  kind = (
    imagenet_models.ResNet if args.row == "resnet50" else imagenet_models.ViT
  )
  done = train(
    args.row,
    args.algorithm,
    kind(nnx.Rngs(args.seed)),
    imagenet("train", BATCH, args.data, True),
    args.steps,
  )
  found = accuracy(done.model, imagenet("validation", 1000, args.data, False))
  state = jaxpruner.find_state(done.opt_state)
  print(f"{args.row} {args.algorithm}: {found:.2f} %")
  print(jaxpruner.state_metrics(state))


if __name__ == "__main__":
  main()
