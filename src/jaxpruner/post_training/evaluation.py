"""The quality of a model: perplexity on text, accuracy on images."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def windows(tokens: Iterable[int], length: int) -> np.ndarray:
  """Divide tokens into rows of equal length; a shorter last row is dropped."""
  ids = np.asarray(list(tokens), np.int32)
  rows = len(ids) // length
  if not rows:
    raise ValueError(
      f"{len(ids)} tokens do not fill one window of {length}; give more text"
    )
  return ids[: rows * length].reshape(rows, length)


@functools.partial(jax.jit, static_argnums=0)
def _losses(apply_fn: Callable[..., Any], params: Any, rows: Any) -> jax.Array:
  logits = apply_fn(params, rows)[:, :-1].astype(jnp.float32)
  chosen = jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1)[..., 0]
  return jax.nn.logsumexp(logits, axis=-1) - chosen


def perplexity(
  apply_fn: Callable[[Any, Any], Any], params: Any, rows: np.ndarray
) -> float:
  """Return exp of the mean loss of each token given those before it.

  Args:
    apply_fn: `apply_fn(params, tokens) -> logits`.
    params: its parameters.
    rows: (windows, length) token ids; windows are judged one by one.
  """
  total = sum(
    float(np.asarray(_losses(apply_fn, params, row[None]), np.float64).sum())
    for row in rows
  )
  return math.exp(total / (rows.shape[0] * (rows.shape[1] - 1)))


@functools.partial(jax.jit, static_argnums=0)
def _classes(apply_fn: Callable[..., Any], params: Any, x: Any) -> jax.Array:
  return jnp.argmax(apply_fn(params, x), axis=-1)


def classes(
  apply_fn: Callable[[Any, Any], Any], params: Any, x: np.ndarray, batch: int
) -> np.ndarray:
  """Return the most likely class of each picture."""
  pieces = []
  for start in range(0, len(x), batch):
    piece = x[start : start + batch]
    # The last batch is filled up: one compilation serves all.
    fill = np.concatenate([piece, np.repeat(piece[:1], batch - len(piece), 0)])
    pieces.append(np.asarray(_classes(apply_fn, params, fill))[: len(piece)])
  return np.concatenate(pieces)
