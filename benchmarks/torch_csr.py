"""A training step of torch, dense and with CSR weights, for training.py.

  python benchmarks/torch_csr.py 2048 4 64 0.95

Needs torch alone; prints the median seconds of a step (SGD) as JSON.
"""

import json
import statistics
import sys
import time

import torch


def step_of(weights, x, y):
  """Return a function that takes one step."""

  def run():
    h = x
    for w in weights:
      h = torch.relu(w @ h)
    ((h - y) ** 2).mean().backward()
    with torch.no_grad():
      for w in weights:
        held, grad = w, w.grad
        if w.layout == torch.sparse_csr:
          held, grad = w.values(), kept_entries(w, grad)
        held.add_(grad, alpha=-1e-4)
        w.grad = None

  return run


def kept_entries(w, grad):
  """Return the gradient of the kept weights; torch may make it dense."""
  if grad.layout == torch.sparse_csr:
    return grad.values()
  starts, columns = w.crow_indices(), w.col_indices()
  rows = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
  return grad[rows, columns]


def main(width: int, layers: int, batch: int, sparsity: float) -> None:
  torch.manual_seed(0)
  dense = [torch.randn(width, width) * 0.02 for _ in range(layers)]
  csr = []
  for w in dense:
    kept = w * (torch.rand_like(w) >= sparsity)
    csr.append(kept.to_sparse_csr().requires_grad_())
  dense = [w.requires_grad_() for w in dense]
  x, y = torch.randn(width, batch), torch.randn(width, batch)
  steps = {"dense": step_of(dense, x, y), "csr": step_of(csr, x, y)}
  seen: dict[str, list[float]] = {name: [] for name in steps}
  for _ in range(10):
    for name, step in steps.items():
      start = time.perf_counter()
      step()
      seen[name].append(time.perf_counter() - start)
  print(json.dumps({n: statistics.median(s[1:]) for n, s in seen.items()}))


if __name__ == "__main__":
  main(*map(int, sys.argv[1:4]), float(sys.argv[4]))
