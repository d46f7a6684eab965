"""Remove whole groups of attention heads that share their keys and values."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training.models import decoder, reduced
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.post_training.models.hub import HubModel
from jaxpruner.post_training.models.reduced import Reduced


def prune_heads(
  model: HubModel, batches: Iterable[Any], *, keep: int
) -> Reduced:
  """Keep the most useful key-value heads of every layer, with their queries.

  A head adds `W_o v` to the stream, where `v` is what it found in the values.
  Its score is the mean of ‖W_o v‖ over all tokens, and that of a key-value head
  the sum over the query heads that read it (grouped-query attention: Ainslie et
  al., 2023), which stay or go together. Every layer keeps the same number.

  Args:
    model: a decoder that `models.load_folder` loaded; not OPT, whose
      configuration has no size of a head.
    batches: token ids (rows, time), to calibrate on.
    keep: key-value heads per layer that stay.

  Returns:
    The smaller model; `save_folder` writes it with the new counts, `prune` and
    `distill` take its `model.apply_fn` and `model.params`. `kept` and `scores`
    are per layer, by key-value head.

  Raises:
    ValueError: the model is no such decoder, or has not so many heads.

  Example:
    >>> from jaxpruner.post_training import models
    >>> prune_heads(models.HubModel(len, {}, {}, None, "folder"), [], keep=1)
    Traceback (most recent call last):
    ValueError: folder: no decoder; layers and experts are removed from \
decoders such as Llama or Mixtral
  """
  parsed, config = reduced.of(model)
  if parsed.kind == "opt":
    raise ValueError(
      f"{model.folder}: OPT's config.json has no head_dim, so that fewer heads "
      "would be wider ones; remove layers instead"
    )
  if not 1 <= keep <= parsed.kv_heads:
    raise ValueError(
      f"keep={keep!r} must be from 1 to {parsed.kv_heads}, the key-value heads "
      "that there are"
    )
  scores = head_scores(model, batches)
  kept = [sorted(np.argsort(-s, kind="stable")[:keep].tolist()) for s in scores]
  share = parsed.heads // parsed.kv_heads
  config["num_attention_heads"] = keep * share
  config["num_key_value_heads"] = keep
  config["head_dim"] = parsed.head_dim
  rows: dict[str, Any] = {}
  columns: dict[str, Any] = {}
  for i, groups in enumerate(kept):
    base = f"{parsed.root}layers.{i}."
    queries = [g * share + r for g in groups for r in range(share)]
    at = lambda heads: [
      h * parsed.head_dim + d for h in heads for d in range(parsed.head_dim)
    ]
    for name, heads in (("q", queries), ("k", groups), ("v", groups)):
      for part in ("weight", "bias"):
        rows[f"{base}{parsed.names[name]}.{part}"] = at(heads)
    columns[f"{base}{parsed.names['o']}.weight"] = at(queries)
  return reduced.reduced(
    model, config, lambda name: name, rows, kept, scores, columns
  )


def head_scores(model: HubModel, batches: Iterable[Any]) -> list[np.ndarray]:
  """Return the score of every key-value head, per layer.

  Args:
    model: a decoder.
    batches: token ids (rows, time).

  Returns:
    Per layer (key-value heads,) float64.
  """
  config: Decoder = model.config
  step = jax.jit(functools.partial(_sums, config))
  total, tokens = None, 0
  for batch in batches:
    found = np.asarray(step(model.params, jnp.asarray(batch)), np.float64)
    total = found if total is None else total + found
    tokens += np.size(batch)
  if total is None:
    raise ValueError("batches is empty; give at least one batch")
  return list(total / tokens)


def _sums(config: Decoder, params: Any, tokens: jax.Array) -> jax.Array:
  """Return the sums of ‖W_o v‖ over tokens, (layers, key-value heads)."""
  positions = jnp.arange(tokens.shape[1])
  x = decoder.embed(config, params, tokens, positions)
  shape = (config.kv_heads, config.heads // config.kv_heads, config.head_dim)
  found = []
  for i in range(config.layers):
    mixed = decoder.heads(config, params, i, x, positions)
    name = f"{config.root}layers.{i}.{config.names['o']}.weight"
    out = params[name].astype(jnp.float32).reshape(config.dim, *shape)
    # ‖W v‖² = vᵀ(WᵀW)v: the products of dim outputs are not held.
    gram = jnp.einsum("ogrd,ogre->grde", out, out)
    v = mixed.astype(jnp.float32).reshape(*tokens.shape, *shape)
    square = jnp.einsum("btgrd,grde,btgre->btgr", v, gram, v)
    found.append(jnp.sqrt(jnp.maximum(square, 0)).sum((0, 1, 3)))
    x, h, _ = decoder.attend(config, params, i, x, None, positions)
    x = decoder.feed_forward(config, params, i, x, h)
  return jnp.stack(found)
