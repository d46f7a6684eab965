"""Remove whole experts of a mixture, by what they add to their tokens."""

import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner.post_training.models import decoder, mixture, reduced
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.post_training.models.functions import ACTIVATIONS
from jaxpruner.post_training.models.hub import HubModel
from jaxpruner.post_training.models.reduced import Reduced


def prune_experts(
  model: HubModel, batches: Iterable[Any], *, keep: int
) -> Reduced:
  """Keep the most useful experts of every layer; remove the others whole.

  An expert counts as much as it adds where the router sends tokens: the mean
  over its tokens of gate × ‖output‖ (REAP: Lasby et al., "REAP the Experts",
  2025). The rows of the router that chose removed experts go too, so that the
  router spreads its choice over the rest. Every layer keeps the same number.

  Args:
    model: a mixture of experts that `models.load_folder` loaded: Mixtral,
      Qwen2-MoE or Qwen3-MoE.
    batches: token ids (rows, time), to calibrate on.
    keep: experts per layer that stay; at least as many as a token uses.

  Returns:
    The smaller model; `save_folder` writes it, `prune` and `distill` take its
    `model.apply_fn` and `model.params`. `kept` and `scores` are per layer, None
    where a layer has no experts.

  Raises:
    ValueError: the model has no experts, or not so many.

  Example:
    >>> from jaxpruner.post_training import models
    >>> prune_experts(models.HubModel(len, {}, {}, None, "folder"), [], keep=1)
    Traceback (most recent call last):
    ValueError: folder: no decoder; layers and experts are removed from \
decoders such as Llama or Mixtral
  """
  parsed, config = reduced.of(model)
  mixtures = [e for e in parsed.experts if e is not None]
  if not mixtures:
    raise ValueError(f"{model.folder}: {parsed.kind} has no experts")
  one = mixtures[0]
  if not one.used <= keep <= one.count:
    raise ValueError(
      f"keep={keep!r} must be from {one.used}, the experts that a token uses, "
      f"to {one.count}, those that there are"
    )
  scores = expert_scores(model, batches)
  kept: list[list[int] | None] = [
    None if s is None else sorted(np.argsort(-s, kind="stable")[:keep].tolist())
    for s in scores
  ]
  config[mixture.count_name(config)] = keep
  rows = {
    f"{parsed.root}layers.{i}.{one.prefix}.gate.weight": at
    for i, at in enumerate(kept)
    if at is not None
  }
  name_of = functools.partial(_whole_name, kept)
  return reduced.reduced(model, config, name_of, rows, kept, scores)


def _whole_name(kept: list[list[int] | None], name: str) -> str:
  """Return the name that a tensor had when all experts were there."""
  found = re.fullmatch(r"(.*layers\.(\d+)\..*\.experts\.)(\d+)(\..*)", name)
  if found is None:
    return name
  before, layer, expert, after = found.groups()
  at = kept[int(layer)]
  return name if at is None else f"{before}{at[int(expert)]}{after}"


def expert_scores(
  model: HubModel, batches: Iterable[Any]
) -> list[np.ndarray | None]:
  """Return REAP's score of every expert, per layer.

  Args:
    model: a mixture of experts.
    batches: token ids (rows, time).

  Returns:
    Per layer (experts,) float64, 0 for an expert that got no token; None where
    a layer has no experts.
  """
  config: Decoder = model.config
  totals: list[Any] = [None] * config.layers
  step = jax.jit(functools.partial(_sums, config))
  for batch in batches:
    for i, found in enumerate(step(model.params, jnp.asarray(batch))):
      if found is not None:
        new = np.asarray(found, np.float64)
        totals[i] = new if totals[i] is None else totals[i] + new
  if all(t is None for t in totals):
    raise ValueError("batches is empty; give at least one batch")
  return [None if t is None else t[0] / np.maximum(t[1], 1) for t in totals]


def _sums(config: Decoder, params: Any, tokens: jax.Array) -> list[Any]:
  """Return per layer the sums of gate × ‖output‖ and the tokens, by expert."""
  positions = jnp.arange(tokens.shape[1])
  x = decoder.embed(config, params, tokens, positions)
  act = ACTIVATIONS[config.activation]
  found: list[Any] = []
  for i in range(config.layers):
    x, h, _ = decoder.attend(config, params, i, x, None, positions)
    experts, sums = config.experts[i], None
    if experts is not None:
      base = f"{config.root}layers.{i}.{experts.prefix}"
      gates = mixture.routed(experts, params, base, h)
      outputs = [
        mixture.expert(experts, params, base, act, j, h)
        for j in range(experts.count)
      ]
      norms = jnp.stack([jnp.linalg.norm(y, axis=-1) for y in outputs], -1)
      pair = jnp.stack([gates * norms, gates > 0]).astype(jnp.float32)
      sums = pair.reshape(2, -1, experts.count).sum(1)
    found.append(sums)
    x = decoder.feed_forward(config, params, i, x, h)
  return found
