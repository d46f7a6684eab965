"""Progress over tensors: a bar with rich, a line without, silence in pipes."""

import sys
from collections.abc import Iterable, Iterator

from jaxpruner.sparse._layouts import Tensor


def track(tensors: Iterable[Tensor], label: str) -> Iterator[Tensor]:
  """Yield the tensors and show, by bytes, how far along they are."""
  tensors = list(tensors)
  weights = [t.size * t.dtype.itemsize for t in tensors]
  if not sys.stderr.isatty():
    yield from tensors
    return
  try:
    from rich import console, progress
  except ImportError:
    yield from _plain(tensors, weights, label)
    return
  with progress.Progress(console=console.Console(stderr=True)) as bar:
    task = bar.add_task(label, total=sum(weights))
    for tensor, weight in zip(tensors, weights, strict=True):
      yield tensor
      bar.advance(task, weight)


def _plain(
  tensors: list[Tensor], weights: list[int], label: str
) -> Iterator[Tensor]:
  total, done = max(sum(weights), 1), 0
  for tensor, weight in zip(tensors, weights, strict=True):
    yield tensor
    done += weight
    bar = "#" * (40 * done // total)
    sys.stderr.write(f"\r{label} [{bar:<40}] {100 * done // total:3d} %")
  sys.stderr.write("\n")
