"""Drop whole layers of a decoder that change their input least."""

import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training.models import decoder, reduced
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.post_training.models.hub import HubModel
from jaxpruner.post_training.models.reduced import Reduced


def drop_blocks(
  model: HubModel, batches: Iterable[Any], *, drop: int
) -> Reduced:
  """Remove the layers whose output is most similar to their input.

  A layer's influence is 1 - cos(input, output), the mean over all tokens (Men
  et al., "ShortGPT", 2024). The `drop` layers of least influence go at once;
  the others keep their order and weights.

  Args:
    model: a decoder that `models.load_folder` loaded.
    batches: token ids (rows, time), to calibrate on.
    drop: how many layers to remove, fewer than there are.

  Returns:
    The smaller model; `save_folder` writes it, `prune` and `distill` take its
    `model.apply_fn` and `model.params`.

  Raises:
    ValueError: the model is no decoder, or has too few layers.

  Example:
    >>> from jaxpruner.post_training import models
    >>> drop_blocks(models.HubModel(len, {}, {}, None, "folder"), [], drop=1)
    Traceback (most recent call last):
    ValueError: folder: no decoder; layers and experts are removed from \
decoders such as Llama or Mixtral
  """
  parsed, config = reduced.of(model)
  if not 0 < drop < parsed.layers:
    raise ValueError(
      f"drop={drop!r} must be from 1 to {parsed.layers - 1}: the model has "
      f"{parsed.layers} layers"
    )
  scores = block_influence(model, batches)
  kept = sorted(np.argsort(scores, kind="stable")[drop:].tolist())
  new = shortened(parsed, config, kept)

  def name_of(name: str) -> str:
    move = lambda m: f"layers.{kept[int(m[1])]}."
    return re.sub(r"layers\.(\d+)\.", move, name, count=1)

  return reduced.reduced(model, new, name_of, {}, kept, scores.tolist())


def shortened(
  parsed: Decoder, config: dict[str, Any], kept: list[int]
) -> dict[str, Any]:
  """Return the `config.json` of a decoder with these of its layers.

  What a configuration says by a rule over the index of a layer is spelled out
  per layer: the rule would say something else of the layers that are left.
  """
  new = config | {"num_hidden_layers": len(kept)}
  if any(parsed.windows) or "layer_types" in config:
    words = ("full_attention", "sliding_attention")
    new["layer_types"] = [words[parsed.windows[i] > 0] for i in kept]
  if any(e is not None for e in parsed.experts) and parsed.kind != "mixtral":
    new["decoder_sparse_step"] = 1
    new["mlp_only_layers"] = [
      at for at, i in enumerate(kept) if parsed.experts[i] is None
    ]
  return new


def block_influence(model: HubModel, batches: Iterable[Any]) -> np.ndarray:
  """Return 1 - cos(input, output) of every layer, the mean over tokens.

  Args:
    model: a decoder.
    batches: token ids (rows, time).

  Returns:
    (layers,) float64.
  """
  step = jax.jit(functools.partial(_cosines, model.config))
  found = [
    np.asarray(step(model.params, jnp.asarray(batch)), np.float64)
    for batch in batches
  ]
  if not found:
    raise ValueError("batches is empty; give at least one batch")
  return 1 - np.concatenate(found, axis=1).mean(axis=1)


def _cosines(config: Decoder, params: Any, tokens: jax.Array) -> jax.Array:
  """Return cos(input, output) by layer and token."""
  positions = jnp.arange(tokens.shape[1])
  x = decoder.embed(config, params, tokens, positions)
  rows = []
  for i in range(config.layers):
    before = x.astype(jnp.float32)
    x, h, _ = decoder.attend(config, params, i, x, None, positions)
    x = decoder.feed_forward(config, params, i, x, h)
    after = x.astype(jnp.float32)
    size = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
    dot = jnp.sum(before * after, axis=-1)
    rows.append((dot / jnp.maximum(size, 1e-30)).reshape(-1))
  return jnp.stack(rows)
