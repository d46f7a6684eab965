"""Write text with a decoder: prefill, a cache of keys and values, sampling."""

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparse
from jaxpruner.post_training import _step
from jaxpruner.post_training.models import decoder
from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.post_training.models.hub import HubModel, is_router
from jaxpruner.sparse import _choose, _rewrite, reports

VALUES = ("int8", "bfloat16")  # what matrices can be rounded to


class Token(NamedTuple):
  """A drawn token, and how long it took.

  Attributes:
    id: the token.
    seconds: since the token before; for the first, the prefill.

  Example:
    >>> Token(5, 0.01).id
    5
  """

  id: int
  seconds: float


def _rounded(length: int) -> int:
  """Round up to a power of two: prompts of near lengths share a program."""
  return 1 << max(4, (length - 1).bit_length())


def _draw(
  logits: np.ndarray, rng: np.random.Generator, temperature: float, top_k: int
) -> int:
  """Return the most likely token, or a random one of the likely."""
  if not temperature:
    return int(np.argmax(logits))
  scores = logits.astype(np.float64)
  # The largest becomes 0; what a small temperature overflows is never drawn.
  with np.errstate(over="ignore"):
    scores = (scores - scores.max()) / temperature
  if 0 < top_k < scores.size:
    scores[scores < np.partition(scores, -top_k)[-top_k]] = -np.inf
  chances = np.exp(scores)
  return int(rng.choice(scores.size, p=chances / chances.sum()))


def check_drawing(
  tokens: int, temperature: float, top_k: int, seed: int
) -> None:
  """Raise if no text can be drawn so; see `Writer.write`."""
  if not 0 <= temperature < float("inf"):
    raise ValueError(
      f"temperature={temperature} must be finite and not negative"
    )
  if tokens < 1 or top_k < 0 or seed < 0:
    raise ValueError(
      f"tokens={tokens} must be at least 1, top_k={top_k} and seed={seed} "
      "must not be negative"
    )


class Writer:
  """A decoder that is ready to write.

  The prompt runs once through the model with a cache of keys and values; then
  each token is one step. With `accelerate=True` the weights of the step are
  packed if that was measured to be faster. With `values="int8"` every matrix is
  rounded to one byte per kept weight, for prompt and step, and decoded in
  registers: a model that is half zeros takes a sixth of its bytes in float32;
  with "bfloat16", two bytes, a quarter and an eighth.

  Packed steps of Llama, Mistral, Qwen and Gemma are one call of machine code on
  processors with AVX-512; with "int8" it also rounds what enters a product, to
  a byte with a scale for 64 neighbours. Elsewhere, and with mixtures of
  experts and OPT, XLA runs the step and calls a kernel for each product.

  Args:
    model: a decoder that `models.load_folder` loaded.
    length: tokens of prompt and text together, at most.
    accelerate: pack sparse weights for the step.
    values: "int8" (see `sparse.Int8`) or "bfloat16" rounds matrices; None
      leaves them as they are.
    cache: where timings are remembered, as in `sparse.accelerate`.
    thresholds: name of a matrix -> inputs of a step up to this size count as
      zeros, and their weights are not read (`contrib.input_thresholds`); the
      prompt is computed in full. The packed step is taken without timing it.

  Raises:
    ValueError: the model is no decoder, its positions end before `length`, or
      the options exclude each other.

  Example:
    >>> Writer(HubModel(len, {}, {}, None, "folder"))
    Traceback (most recent call last):
    ValueError: folder: no decoder; text is written by decoders such as Llama
  """

  def __init__(
    self,
    model: HubModel,
    length: int = 512,
    *,
    accelerate: bool = False,
    values: str | None = None,
    cache: Any = None,
    thresholds: Mapping[str, float] | None = None,
  ):
    config = model.config
    if not isinstance(config, Decoder):
      raise ValueError(
        f"{model.folder}: no decoder; text is written by decoders such as Llama"
      )
    if 0 < config.positions < length:
      raise ValueError(
        f"length={length}: the model has {config.positions} positions"
      )
    if values not in (None, *VALUES) or (values and accelerate):
      raise ValueError(
        f"values={values!r} must be None or one of {VALUES}, and None with "
        "accelerate=True: nothing is timed where all matrices are rounded"
      )
    if thresholds is not None:
      _check_thresholds(model, thresholds, accelerate, values)
    self._config, self._length = config, length
    self._dtype = next(iter(model.params.values())).dtype
    self._check_memory()
    self.report = None
    prefill = functools.partial(decoder.forward, config)
    params = model.params
    if values:
      params = rounded(model, values)
      prefill = _sparsely(prefill)
    self._prefill = functools.partial(jax.jit(prefill), params)
    fused = None
    packs = accelerate or values or thresholds is not None
    if packs and self._dtype == jnp.float32:
      fused = self._fused(model, values or "float32", thresholds)
    if fused is None:
      levels = {_level_of(name): t for name, t in (thresholds or {}).items()}
      params = params | levels
      self._step = self._traced(model, params, accelerate, values, cache)
    elif accelerate:
      self._step = self._faster(model, fused)
    else:
      self._step = fused

  def _fused(
    self, model: HubModel, values: str, thresholds: Mapping[str, float] | None
  ) -> _step.Step | None:
    """Return the step as one call of machine code, if it can be one."""
    if _step.kernel(self._config, values) is None:
      return None
    return _step.Step(
      self._config, model.params, _masks(model), self._length, values,
      thresholds=thresholds,
    )  # fmt: skip

  def _traced(
    self,
    model: HubModel,
    params: Any,
    accelerate: bool,
    values: Any,
    cache=None,
  ) -> "_Traced":
    """Return the step as XLA runs it."""
    step = functools.partial(decoder.forward, self._config)
    if accelerate:
      example = jnp.zeros((1, 1), jnp.int32), self._empty(), jnp.int32(0)
      fast, self.report = sparse.accelerate(
        step, params, *example, masks=_masks(model), cache=cache
      )
      params, step = fast.params, fast.apply
    elif values:
      step = _sparsely(step)
    return _Traced(step, params)

  def _faster(self, model: HubModel, fused: _step.Step) -> Any:
    """Return the packed step, or the dense one if that is faster."""
    dense = self._traced(model, model.params, False, None)
    times = _choose.measure({
      "dense": _repeated(dense, self._empty()),
      "strips": _repeated(fused, self._empty()),
    })  # fmt: skip
    best = _choose.fastest(times)
    self.report = _report(fused, times, best)
    return dense if best == "dense" else fused

  def _check_memory(self) -> None:
    """Raise if the keys and values of a text are larger than this machine.

    The system grants more memory than it has, and kills who then uses it.
    """
    if not hasattr(os, "sysconf"):  # Windows
      return
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    arrays = jax.tree.leaves(jax.eval_shape(self._empty))
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    if size > whole:
      raise ValueError(
        f"length={self._length}: keys and values of so many tokens take "
        f"{size / 1e9:.0f} GB, more than memory holds; fewer tokens will do"
      )

  def _empty(self) -> decoder.Cache:
    return decoder.empty_cache(self._config, 1, self._length, self._dtype)

  def write(
    self,
    prompt: Sequence[int],
    tokens: int = 100,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Sequence[int] = (),
  ) -> Iterator[Token]:
    """Draw tokens after a prompt, one by one.

    Args:
      prompt: token ids, at least one.
      tokens: how many to draw at most.
      temperature: 0 for the most likely token each time.
      top_k: draw among the so many most likely; 0 for all.
      seed: of the drawing.
      stop: tokens that end the text.

    Yields:
      Each token as soon as it is known.
    """
    prompt = list(prompt)
    if not prompt or not all(0 <= i < self._config.vocab for i in prompt):
      raise ValueError(
        f"prompt must hold token ids from 0 to {self._config.vocab - 1}"
      )
    check_drawing(tokens, temperature, top_k, seed)
    if len(prompt) + tokens > self._length:
      raise ValueError(
        f"{len(prompt)} tokens of prompt and {tokens} of text are more than "
        f"length={self._length}; give the Writer a larger length"
      )
    return self._write(prompt, tokens, temperature, top_k, seed, stop)

  def _write(self, prompt, tokens, temperature, top_k, seed, stop):
    rng = np.random.default_rng(seed)
    start = time.perf_counter()
    width = min(_rounded(len(prompt)), self._length)
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(prompt)] = prompt
    # What stands behind the prompt is overwritten before anyone looks at it.
    logits, kept = self._prefill(padded, self._empty(), 0, len(prompt) - 1)
    logits = np.asarray(logits)[0, -1]
    kept = self._step.start(kept, len(prompt))
    for i in range(len(prompt), len(prompt) + tokens):
      drawn = _draw(logits, rng, temperature, top_k)
      now = time.perf_counter()
      yield Token(drawn, now - start)
      start = now
      if drawn in stop or i + 1 == len(prompt) + tokens:
        return
      logits, kept = self._step(drawn, kept, i)


def _level_of(name: str) -> str:
  """Return where `functions.linear` looks for a threshold."""
  return f"{name.removesuffix('.weight')}.threshold"


def _check_thresholds(
  model: HubModel,
  thresholds: Mapping[str, float],
  accelerate: bool,
  values: str | None,
) -> None:
  if accelerate or values == "int8":
    raise ValueError(
      f"thresholds with accelerate={accelerate} and values={values!r}: leave "
      "out accelerate, and use float32 or bfloat16; products of int8 take four "
      "inputs at once"
    )
  for name, level in thresholds.items():
    if name not in model.params or not 0 <= level < np.inf:
      raise ValueError(
        f"thresholds: {name!r}: {level!r}; give the name of a matrix and a "
        "finite number from 0 on"
      )


class _Traced:
  """A step that XLA runs; see `_step.Step` for its methods."""

  def __init__(self, step: Callable[..., Any], params: Any):
    # The cache is given away: a step writes into it, and copies nothing.
    self._run = functools.partial(jax.jit(step, donate_argnums=2), params)

  def start(self, kept: Any, count: int) -> Any:
    del count
    return kept

  def __call__(self, token: int, kept: Any, at: int) -> tuple[Any, Any]:
    token_ = jnp.array([[token]], jnp.int32)
    logits, kept = self._run(token_, kept, jnp.int32(at))
    return np.asarray(logits)[0, -1], kept


def _repeated(step: Any, kept: Any) -> Callable[[], Any]:
  """Return a function that runs the same step again and again."""
  state = [step.start(kept, 0)]

  def run():
    logits, state[0] = step(0, state[0], 0)
    return logits

  return run


def _report(
  step: _step.Step, times: dict[str, float], best: str
) -> reports.Report:
  """Return which matrices are packed, and what that brings."""
  layers = []
  for name, shape, kept, size in step.matrices:
    dense = 4 * int(np.prod(shape))
    layers.append(
      reports.LayerReport(
        name,
        shape,
        1 - kept,
        best,
        "the whole step was timed",
        dense,
        dense if best == "dense" else size,
        {},
      )  # fmt: skip
    )
  rule = "one call of machine code per step"
  if best == "dense":
    rule = "the packed step was not faster: dense kept"
  return reports.Report(tuple(layers), times["dense"], times[best], rule)


def _sparsely(function: Callable[..., Any]) -> Callable[..., Any]:
  """Return the function of parameters that may be packed."""
  return lambda params, *inputs: _rewrite.run(function, params, inputs)


def rounded(model: HubModel, values: str) -> dict[str, Any]:
  """Return the parameters with every matrix rounded, zeros packed.

  Args:
    model: a decoder; its weights are (outputs, inputs).
    values: one of `VALUES`.

  Returns:
    name -> array or sparse weight. Routers of experts stay as they are.
  """
  found = dict(model.params)
  for name, mask in _masks(model).items():
    array = np.asarray(model.params[name])
    if array.ndim == 2 and not is_router(name):
      mask = np.ones(array.shape, np.uint8) if mask is None else mask
      format = "int8" if values == "int8" else "bitmask"
      array = array if values == "int8" else array.astype(jnp.bfloat16)
      found[name] = sparse.pack(array, mask, format=format, contract=(1,))
  return found


def _masks(model: HubModel) -> dict[str, Any]:
  """Return the saved masks; where there are none, those of the zeros."""
  found = {}
  for name, array in model.params.items():
    mask = model.masks[name]
    if mask is None and array.ndim == 2:
      zeros = np.asarray(array) == 0
      mask = (~zeros).astype(np.uint8) if zeros.any() else None
    found[name] = mask
  return found
