"""A decoder made ready for `_step_kernel`: one call writes one token."""

import concurrent.futures
import importlib
import os
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpruner.post_training.models.decoder_config import Decoder
from jaxpruner.sparse import _strips, kernels

# Fewer saturate the memory, and more wait longer for each other.
_MOST_THREADS = 16
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu", "relu")


def kernel(config: Decoder, values: str) -> Any:
  """Return the module of the compiled step, or None if there is none.

  There is one for decoders with rotated positions, RMS norms and gated MLPs
  (Llama, Mistral, Qwen, Gemma), on x86 processors with AVX-512.
  """
  plain = config.norm != "layer" and not any(config.experts)
  if not plain or None in config.ropes or not kernels._has_numba():
    return None
  simd = importlib.import_module("jaxpruner.sparse._strip_simd")
  if not (simd.BYTES if values == "int8" else simd._simd.AVX512):
    return None
  return importlib.import_module("jaxpruner.post_training._step_kernel")


def _processors() -> int:
  """Return how many processors this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Matrix(NamedTuple):
  """How a matrix is stored.

  Attributes:
    name: of the parameter.
    shape: (outputs, inputs).
    kept: the fraction of weights that are stored.
    bytes: of all its strips.
  """

  name: str
  shape: tuple[int, ...]
  kept: float
  bytes: int


class Step:
  """One step of a decoder, ready to be repeated.

  Weights are stored in the order in which they are read, matrices that read the
  same input as one. With "int8" also the inputs of products are rounded, to
  one byte with a scale for 64 neighbours.

  Args:
    config: a decoder that `kernel` knows.
    params: name -> float32 array.
    masks: name -> mask, or None where all weights are kept.
    length: tokens that the cache holds.
    values: "float32", "bfloat16" or "int8": how matrices are stored.
    threads: how many threads share a step; by default one
      for each processor, at most 16.
    thresholds: name of a matrix -> inputs up to this size are skipped; matrices
      with the same inputs have one threshold. Not with "int8", whose products
      take four inputs at once.
  """

  def __init__(
    self,
    config: Decoder,
    params: Any,
    masks: Any,
    length: int,
    values: str = "float32",
    threads: int | None = None,
    thresholds: Mapping[str, float] | None = None,
  ):
    self._kernel = kernel(config, values)
    self._config, self._length = config, length
    self._threads = threads or min(_MOST_THREADS, _processors())
    built = _Builder(config, params, masks, values, thresholds)
    self.matrices = built.matrices
    self._fill(built, length)
    self._rooms(length)
    workers = max(1, self._threads - 1)
    self._workers = concurrent.futures.ThreadPoolExecutor(workers)
    self._lock = threading.Lock()  # the rooms are for one step at a time

  def _fill(self, built: "_Builder", length: int) -> None:
    config, k = self._config, self._kernel
    rows = [built.layer(k, i) for i in range(config.layers)]
    head = "embed_tokens" if config.tied else "lm_head"
    root = "" if head == "lm_head" else config.root
    sizes = np.zeros(k.SIZE_FIELDS, np.int64)
    sizes[k.LAST_NORM] = built.norm(config.root + config.names["last"])
    sizes[k.HEAD_FIRST], sizes[k.HEAD_COUNT] = built.strips([root + head])
    sizes[k.EMBED_FIRST] = sizes[k.HEAD_FIRST]
    if not config.tied:
      name = f"{config.root}embed_tokens"
      sizes[k.EMBED_FIRST], _ = built.strips([name])
    sizes[k.DIM], sizes[k.HEADS] = config.dim, config.heads
    sizes[k.KV_HEADS], sizes[k.HEAD] = config.kv_heads, config.head_dim
    sizes[k.K_AT], sizes[k.V_AT] = _offsets(config)[1:3]
    sizes[k.HIDDEN] = config.hidden
    sizes[k.ACT] = _ACTIVATIONS.index(config.activation)
    sizes[k.BYTES] = built.values == "int8"
    reals = np.zeros(k.REAL_FIELDS, np.float32)
    reals[k.EPS], reals[k.CAP] = config.eps, config.attention_cap
    reals[k.SCALE] = config.query_scale or config.head_dim**-0.5
    reals[k.EMBED] = config.embed_scale
    ropes = np.stack([_angles(rope, length) for rope in built.ropes])
    self._fixed = sizes, reals, np.array(rows, np.int64)
    levels = np.array(built.levels, np.float32)
    self._weights = k.Weights(*built.arrays(), ropes, levels)

  def _rooms(self, length: int) -> None:
    config, k, threads = self._config, self._kernel, self._threads
    wide = max(config.dim, config.hidden, _offsets(config)[3])
    wide = -(-wide // _strips.GROUP) * _strips.GROUP + _strips.GROUP
    products = k.PRODUCTS * config.layers + 1
    counters = np.zeros((products, threads), np.int64)
    self._team = k.Team(threads, counters, np.zeros(1, np.int64))
    vocab = -(-config.vocab // _strips.LANES) * _strips.LANES
    self._logits = np.zeros(vocab, np.float32)
    self._room = k.Room(
      np.zeros((4, wide), np.float32),
      np.zeros((threads, 6, wide), np.float32),
      np.zeros((threads, wide), np.uint8),
      np.zeros((threads, wide // _strips.GROUP + 16), np.float32),
      np.zeros((threads, length), np.float32),
      np.zeros((threads, wide), np.int32),
      np.zeros((threads, _strips.TILE * _strips.LANES), np.float32),
    )

  @property
  def nbytes(self) -> int:
    """Bytes of all matrices as they are stored."""
    return sum(m.bytes for m in self.matrices)

  def start(self, kept: Any, count: int) -> np.ndarray:
    """Return a cache with the keys and values of a prompt of `count` tokens."""
    config = self._config
    shape = config.layers, 2, config.kv_heads, self._length, config.head_dim
    cache = np.zeros(shape, np.float32)
    for own, pair in zip(cache, kept, strict=True):
      for mine, given in zip(own, pair, strict=True):
        mine[:, :count] = np.asarray(given)[0, :count].swapaxes(0, 1)
    return cache

  def __call__(
    self, token: int, cache: np.ndarray, at: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits behind a token, and the cache, which it writes into.

    Args:
      token: what enters.
      cache: from `start`, or the last step.
      at: the position of the token.
    """
    # The kernel checks nothing: it would read memory that is not its own.
    if not (0 <= token < self._config.vocab and 0 <= at < self._length):
      raise ValueError(
        f"token={token} and at={at} must be within {self._config.vocab} tokens "
        f"and {self._length} positions"
      )
    with self._lock:
      logits = self._run(token, cache, at)
    if cap := self._config.logit_cap:
      logits = np.tanh(logits / cap) * cap
    return logits, cache

  def _run(self, token: int, cache: np.ndarray, at: int) -> np.ndarray:
    self._team.counters[:] = 0
    self._team.meeting[:] = 0
    run = lambda me: self._kernel.step(
      me, self._team, token, at, *self._fixed, self._weights, cache,
      self._room, self._logits,
    )  # fmt: skip
    others = [self._workers.submit(run, me) for me in range(1, self._threads)]
    run(0)
    for other in others:
      other.result()
    return self._logits[: self._config.vocab].copy()


def _angles(rope: Any, length: int) -> np.ndarray:
  """Return cosines and sines by position, as `Rope.apply` computes them."""
  rates = np.asarray(rope.rates, np.float32)
  angles = np.arange(length, dtype=np.float32)[:, None] * rates
  both = np.concatenate([np.cos(angles), np.sin(angles)], 1)
  return both.astype(np.float32) * np.float32(rope.scale)


def _up(count: int) -> int:
  return -(-count // _strips.LANES) * _strips.LANES


def _offsets(config: Decoder) -> list[int]:
  """Return where queries, keys and values begin, and where they end."""
  q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
  return [0, _up(q), _up(q) + _up(kv), _up(q) + 2 * _up(kv)]


class _Builder:
  """Collects strips and vectors, and where each begins."""

  def __init__(
    self,
    config: Decoder,
    params: Any,
    masks: Any,
    values: str,
    thresholds: Mapping[str, float] | None = None,
  ):
    self.config, self.values, self.matrices = config, values, []
    self._thresholds, self.levels = thresholds, []
    self._params, self._masks = params, masks
    self.ropes = list(dict.fromkeys(config.ropes))
    self._data, self._starts, self._kinds = [], [], []
    self._vectors, self._bytes, self._end = [], 0, 0

  def arrays(self) -> tuple[np.ndarray, ...]:
    """Return the bytes, starts and kinds of all strips, and the vectors."""
    vectors = [*self._vectors, np.zeros(_strips.LANES, np.float32)]
    return (
      np.concatenate([*self._data, np.zeros(_strips.SLACK, np.uint8)]),
      np.concatenate(self._starts),
      np.concatenate(self._kinds),
      np.concatenate(vectors),
    )

  def _pack(self, name: str) -> _strips.Strips:
    array = np.asarray(self._params[f"{name}.weight"])
    kept = self._masks[f"{name}.weight"]
    kept = None if kept is None else np.asarray(kept)
    packed = _strips.pack(array, self.values, kept)
    data = packed.data[: -_strips.SLACK]
    fraction = 1.0 if kept is None else float(np.mean(kept))
    self.matrices.append(
      Matrix(f"{name}.weight", array.shape, fraction, data.nbytes)
    )
    return packed

  def strips(self, names: list[str], pairs: bool = False) -> tuple[int, int]:
    """Add matrices; return the first strip and the number of strips.

    With `pairs` the strips of two matrices alternate.
    """
    if (
      self._thresholds is not None and f"{names[0]}.weight" in self._thresholds
    ):
      return self._tiles(names, pairs)
    packed = [self._pack(name) for name in names]
    order = [(m, i) for m, p in enumerate(packed) for i in range(len(p.starts))]
    if pairs:
      order.sort(key=lambda pair: pair[1])
    first = sum(map(len, self._starts))
    starts, kinds = [], []
    for m, i in order:
      p = packed[m]
      ends = np.append(p.starts, p.data.size - _strips.SLACK)
      part = p.data[ends[i] : ends[i + 1]]
      starts.append(self._bytes)
      kinds.append(p.size + (_strips.MASKED if p.masked else 0))
      self._data.append(part)
      self._bytes += part.size
    self._starts.append(np.array(starts, np.int64))
    self._kinds.append(np.array(kinds, np.int64))
    return first, len(order)

  def _tiles(self, names: list[str], pairs: bool) -> tuple[int, int]:
    """Add matrices of the same inputs as tiles, as `strips` does."""
    blocks = []
    for name in names:
      array = np.asarray(self._params[f"{name}.weight"], np.float32)
      mask = self._masks[f"{name}.weight"]
      kept = np.ones(array.shape, bool) if mask is None else np.asarray(mask)
      both = np.stack([array, kept])
      rest = _up(len(array)) - len(array)
      both = np.pad(both, ((0, 0), (0, rest), (0, 0)))
      blocks.append(both.reshape(2, -1, _strips.LANES, array.shape[1]))
      share = float(kept.mean())
      size = int(_strips.SIZES[self.values] * kept.sum()) + array.size // 8
      self.matrices.append(Matrix(f"{name}.weight", array.shape, share, size))
    joined = np.stack(blocks, 2) if pairs else np.concatenate(blocks, 1)
    weights, kept = joined.reshape(2, -1, joined.shape[-1])
    found = _strips.tiles(weights, self.values, kept)
    first = sum(map(len, self._starts))
    sizes = np.array([tile.size for tile in found])
    self._starts.append(self._bytes + np.cumsum(sizes) - sizes)
    kind = _strips.SIZES[self.values] + _strips.SKIPS
    self._kinds.append(np.full(len(found), kind, np.int64))
    self._data += found
    self._bytes += int(sizes.sum())
    return first, len(found)

  def _level(self, names: list[str]) -> float:
    """Return the threshold of the inputs of some matrices."""
    thresholds = self._thresholds or {}
    found = {float(thresholds.get(f"{name}.weight", 0)) for name in names}
    if len(found) > 1:
      raise ValueError(
        f"thresholds differ for {names}, which read the same inputs: "
        f"{sorted(found)}; give them one"
      )
    return found.pop()

  def _vector(self, array: np.ndarray) -> int:
    start = self._end
    self._vectors.append(array.astype(np.float32))
    self._end += array.size
    return start

  def norm(self, name: str) -> int:
    """Add the scale of a norm; return where it begins."""
    scale = np.asarray(self._params[f"{name}.weight"], np.float32)
    return self._vector(1 + scale if self.config.norm == "rms1" else scale)

  def bias(self, names: list[str], pairs: bool = False) -> int:
    """Add biases in the order of the strips; -1 if there are none."""
    rows = []
    for name in names:
      bias = self._params.get(f"{name}.bias")
      if bias is None:
        return -1
      padded = np.zeros(_up(bias.size), np.float32)
      padded[: bias.size] = np.asarray(bias)
      rows.append(padded.reshape(-1, _strips.LANES))
    flat = np.stack(rows, 1) if pairs else np.concatenate(rows)
    return self._vector(flat.reshape(-1))

  def layer(self, k: Any, i: int) -> np.ndarray:
    """Add a layer; return its numbers."""
    config, row = self.config, np.full(k.LAYER_FIELDS, -1, np.int64)
    layer, at = f"{config.root}layers.{i}.", config.names
    qkv = [layer + at[n] for n in ("q", "k", "v")]
    mlp = [f"{layer}mlp.{n}_proj" for n in ("gate", "up", "down")]
    o = [layer + at["o"]]
    self.levels.append([self._level(n) for n in (qkv, o, mlp[:2], mlp[2:])])
    row[[k.QKV, k.QKV_COUNT]] = self.strips(qkv)
    row[[k.O, k.O_COUNT]] = self.strips(o)
    row[[k.GATED, k.GATED_COUNT]] = self.strips(mlp[:2], pairs=True)
    row[[k.DOWN, k.DOWN_COUNT]] = self.strips(mlp[2:])
    row[k.QKV_BIAS], row[k.O_BIAS] = self.bias(qkv), self.bias(o)
    row[k.GATED_BIAS] = self.bias(mlp[:2], pairs=True)
    row[k.DOWN_BIAS] = self.bias(mlp[2:])
    row[k.BEFORE] = self.norm(layer + at["before"])
    between = self.norm(layer + at["between"])
    row[k.FF_BEFORE] = between
    if config.sandwich:
      row[k.AFTER] = between
      row[k.FF_BEFORE] = self.norm(f"{layer}pre_feedforward_layernorm")
      row[k.FF_AFTER] = self.norm(f"{layer}post_feedforward_layernorm")
    if config.qk_norm:
      row[k.Q_NORM] = self.norm(f"{layer}self_attn.q_norm")
      row[k.K_NORM] = self.norm(f"{layer}self_attn.k_norm")
    row[k.ROPE] = self.ropes.index(config.ropes[i])
    row[k.WINDOW] = config.windows[i]
    return row
