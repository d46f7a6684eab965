"""The choice of a format for a weight: candidates by structure, then timing.

Structure decides what is worth trying; the time of the very product the model
runs, on this machine, at the traced batch, decides what is kept. Timings are
cached, so identical layers and later runs measure nothing.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner._tools import atomic, fingerprint
from jaxpruner.sparse import _planes, formats
from jaxpruner.sparse._parts import Stacked

Timer = Callable[[Mapping[str, Callable[[], Any]]], dict[str, float]]

# Below this many weights a product is not worth replacing.
MIN_SIZE = 4096
# How much faster than dense a format must be: beyond timing noise, and for
# what takes microseconds beyond the noise of calling it.
MARGIN = 1.1
CALL = 5e-6
# Spells of equally many turns into which a measurement is cut.
SPELLS = 8
# How `measure` takes times: another number where that changes, so that times
# taken the old way are not read from a cache.
_WAY = 2
# Seconds that a measurement takes at least, if its budget has them.
LEAST = 0.05
# Runs of a turn, and seconds after which it begins no other.
BURST, LONG = 4, 2e-3
_MAX_CACHE = 1 << 26  # bytes of a file of timings that are read
# Bytes of the last cache where nothing is known of it, and at most; copies of
# a weight that are timed.
_LIKELY_CACHE, _MOST_CACHE, _MAX_COPIES = 1 << 23, 1 << 26, 64


def measure(
  thunks: Mapping[str, Callable[[], Any]], budget: float = 0.2
) -> dict[str, float]:
  """Return the seconds that each thunk takes without disturbance.

  The thunks take turns, so that a short slowdown of the machine affects all of
  them. In its turn a thunk runs a few times and the best run counts: the first
  one finds the caches of another and threads that sleep. Where the choice is a
  close one, they run three times as long.
  """
  for thunk in thunks.values():
    jax.block_until_ready(thunk())
  runs: dict[str, list[float]] = {name: [] for name in thunks}
  start = time.perf_counter()
  turns = 0
  while True:
    spent = time.perf_counter() - start
    # Thunks of microseconds are repeated for longer than a disturbance lasts.
    if turns >= 5 and (spent >= budget or (turns > 100 and spent >= LEAST)):
      times = summarize(runs)
      if spent >= 3 * budget or not _is_close(times):
        return times
    turns += 1
    for name, thunk in thunks.items():
      runs[name].append(_turn(thunk))


def _turn(thunk: Callable[[], Any]) -> float:
  """Return the seconds of the best run of a turn."""
  taken = [_seconds(thunk)]
  while len(taken) < BURST and sum(taken) < LONG:
    taken.append(_seconds(thunk))
  return min(taken)


def _seconds(thunk: Callable[[], Any]) -> float:
  """Time one run; on one processor, waiting for others does not count.

  A run that takes longer than its threads worked has waited. On several
  processors the process's clock cannot tell: Linux adds the work of threads
  that still run only at ticks of the kernel, milliseconds apart.
  """
  begin, worked = time.perf_counter(), time.process_time()
  jax.block_until_ready(thunk())
  worked = time.process_time() - worked
  spent = time.perf_counter() - begin
  return min(spent, worked) if worked > 0 and _cores() == 1 else spent


def summarize(runs: Mapping[str, list[float]]) -> dict[str, float]:
  """Return a time for each thunk that a choice can be based on.

  The fastest tenth of each thunk's runs counts, because a late thread can make
  a run several times as long, sometimes for most of a measurement. Beside
  that, a format must be as much faster than dense in three of four spells: in
  each the best runs are compared, so that a machine with other work, which
  delays any run, favours none.
  """
  times = {name: float(np.quantile(t, 0.1)) for name, t in runs.items()}
  dense = runs.get("dense")
  if dense is None:
    return times
  spells = np.array_split(np.arange(len(dense)), min(SPELLS, len(dense)))
  best = {
    name: np.array([np.asarray(taken)[spell].min() for spell in spells])
    for name, taken in runs.items()
  }
  for name, taken in best.items():
    if name != "dense":
      ratios = best["dense"] / np.maximum(taken, 1e-12)
      usual = max(float(np.quantile(ratios, 0.25)), 1e-12)
      times[name] = max(times[name], times["dense"] / usual)
  return times


def _is_close(times: Mapping[str, float]) -> bool:
  """Tell whether dense and the best format are hard to tell apart."""
  if "dense" not in times or len(times) < 2:
    return False
  best = min(t for name, t in times.items() if name != "dense")
  return 0.9 < times["dense"] / (MARGIN * best + CALL) < 1.15


def candidates(
  kept: np.ndarray, batch: int, stacked: bool = False, taken: bool = False
) -> dict[str, dict[str, Any]]:
  """Return the formats, with their options, that may beat dense.

  Args:
    kept: the boolean (contracted, kept) mask of one weight.
    batch: how many rows it multiplies.
    stacked: whether the weight is one of a stack of layers.
    taken: whether columns are also looked up.
  """
  seen = formats.Kept(kept, batch)
  found: dict[str, dict[str, Any]] = {}
  for name, kind in formats.FORMATS.items():
    if stacked and not kind.stackable:
      continue  # its arrays have shapes of their own in every layer
    if taken and kind.take is formats.SparseMatrix.take:
      continue  # it would decode the whole table for a few columns
    options = kind.fits(seen)
    if options is not None and kind.runs_here():
      found[name] = options
  return found


def pack(
  leaf: np.ndarray,
  kept: np.ndarray,
  format: str,
  contract: tuple[int, ...],
  stacked: bool,
  options: Mapping[str, Any],
) -> formats.Sparse:
  """Pack a weight, or a stack of them padded to equal length."""
  if not stacked:
    return formats.pack(leaf, kept, format=format, contract=contract, **options)
  layers = [
    formats.pack(w, k, format=format, contract=contract, **options)
    for w, k in zip(leaf, kept, strict=True)
  ]
  lengths = [[a.shape for a in jax.tree.leaves(layer)] for layer in layers]
  target = [tuple(np.max(s, axis=0)) for s in zip(*lengths, strict=True)]

  def grown(layer):
    arrays, treedef = jax.tree.flatten(layer)
    padded = [
      jnp.pad(a, [(0, n - m) for m, n in zip(a.shape, t, strict=True)])
      for a, t in zip(arrays, target, strict=True)
    ]
    return treedef.unflatten(padded)

  stack = jax.tree.map(lambda *a: jnp.stack(a), *map(grown, layers))
  return Stacked(stack, len(layers))


def key(
  leaf: Any, kept: np.ndarray, use: Any, tried: Mapping[str, Any], cold: bool
) -> str:
  """Return the cache key of a measurement: all that its result depends on."""
  parts = (
    _machine(), cold, use.operation, use.contract, use.x.shape,
    str(use.x.dtype), leaf.shape, str(leaf.dtype), use.stacked,
    round(float(kept.mean()), 2), use.features,
    sorted((name, str(options)) for name, options in tried.items()),
  )  # fmt: skip
  return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


@functools.cache
def _machine() -> tuple[str, ...]:
  cpu = platform.processor() or platform.machine()
  info = pathlib.Path("/proc/cpuinfo")
  if info.exists():
    lines = info.read_text().splitlines()
    cpu = next((l for l in lines if l.startswith("model name")), cpu)
  versions = fingerprint.versions("jax", "jaxpruner", "numba")
  return cpu, str(_cores()), repr(versions), jax.default_backend(), str(_WAY)


def _cores() -> int:
  """Return how many processors this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Timings:
  """Measured seconds by key, in memory and in one JSON file.

  A cache may only ever cost a new measurement: a file that cannot be read, or
  an entry of another form, counts as missing; one that cannot be written is
  left as it is.
  """

  def __init__(self, path: pathlib.Path | None):
    self.path = path
    self.table: dict[str, dict[str, float]] = {}
    if path is None:
      return
    with contextlib.suppress(OSError, ValueError, RecursionError):
      if path.is_file() and path.stat().st_size <= _MAX_CACHE:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
          self.table = {k: v for k, v in found.items() if _are_times(v)}

  def get(self, key: str, names: Iterable[str]) -> dict[str, float] | None:
    """Return a measurement of exactly these formats, or None."""
    times = self.table.get(key)
    return times if times is not None and set(times) == set(names) else None

  def save(self) -> None:
    """Write the file atomically."""
    if self.path is None:
      return
    with contextlib.suppress(OSError):
      self.path.parent.mkdir(parents=True, exist_ok=True)
      atomic.write_bytes(self.path, json.dumps(self.table).encode())


def _are_times(value: Any) -> bool:
  return isinstance(value, dict) and all(
    type(t) in (float, int) and 0 <= t < math.inf for t in value.values()
  )


def default_cache() -> pathlib.Path:
  """Return the file of timings, in $JAXPRUNER_CACHE_DIR or ~/.cache."""
  base = os.environ.get("JAXPRUNER_CACHE_DIR")
  if base is None:
    home = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    base = os.path.join(os.path.expanduser(home), "jaxpruner")
  return pathlib.Path(base) / "sparse_timings.json"


def time_formats(
  leaf: np.ndarray,
  kept: np.ndarray,
  use: Any,
  tried: Mapping[str, Mapping[str, Any]],
  timer: Timer,
  cold: bool = False,
) -> dict[str, float]:
  """Time the product with the dense weight and with every candidate.

  Args:
    leaf: the weight, or a stack of them.
    kept: its mask.
    use: the product.
    tried: the candidates and their options.
    timer: the measurement.
    cold: whether the model is larger than the cache: then each run reads
      another copy of the weight, since the model itself finds it in memory.
  """
  layer, mask = (leaf[0], kept[0]) if use.stacked else (leaf, kept)
  x = jax.random.normal(jax.random.key(0), use.x.shape).astype(use.x.dtype)
  weights: dict[str, Any] = {"dense": jnp.asarray(layer)}
  for name, options in tried.items():
    weights[name] = formats.pack(
      layer, mask, format=name, contract=use.contract, **options
    )

  def repeated(name, w):
    copies = itertools.cycle(_copies(w) if cold else [w])
    product, image = jax.jit(use.run), x
    if use.features is not None and name == _planes.FORMAT:
      product, image = _by_planes(use, x)
    return lambda: product(image, next(copies))

  return timer({name: repeated(name, w) for name, w in weights.items()})


def _by_planes(use: Any, x: jax.Array) -> tuple[Any, jax.Array]:
  """Return a convolution of an image stored channel by channel, and the image.

  From one compiled convolution to the next XLA keeps them stored so. Where it
  does not, the time of the whole function tells.
  """
  of_image, of_result = use.features

  def product(x, w):
    y = use.run(jnp.moveaxis(x, 0, of_image), w)
    return jnp.moveaxis(y, of_result, 0)

  return jax.jit(product), jnp.moveaxis(x, of_image, 0)


def _copies(weight: Any) -> list[Any]:
  """Return copies that do not fit into the cache together."""
  count = min(_MAX_COPIES, 1 + 2 * cache_size() // max(weight.nbytes, 1))
  return [jax.tree.map(jnp.copy, weight) for _ in range(count)]


@functools.cache
def cache_size() -> int:
  """Return the bytes of the processor's last cache, as far as it is known."""
  sizes = [_LIKELY_CACHE]
  for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size"):
    with contextlib.suppress(OSError, ValueError):
      sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
  return min(max(sizes), _MOST_CACHE)


def concrete(x: Any) -> Any:
  """Return zeros for an example that is only a shape."""
  if isinstance(x, jax.ShapeDtypeStruct):
    return jnp.zeros(x.shape, x.dtype)
  return x


def fastest(times: Mapping[str, float]) -> str:
  """Return the quickest format, or "dense" unless it wins by the margin."""
  best = min(times, key=lambda name: times[name])
  wins = times["dense"] >= MARGIN * times[best] + CALL
  return best if wins else "dense"
