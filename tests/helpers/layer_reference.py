"""The papers' equations in float64 NumPy, slow and obvious."""

import jax.numpy as jnp
import numpy as np


def layer(seed, inputs=192, outputs=48, tokens=700):
  """A random layer whose inputs are correlated and of unequal size."""
  rng = np.random.default_rng(seed)
  mix = rng.normal(size=(inputs, inputs)) / np.sqrt(inputs) + np.eye(inputs)
  x = rng.normal(size=(tokens, inputs)) @ mix
  x *= np.exp(rng.normal(size=inputs))
  w = rng.normal(size=(inputs, outputs)).astype(np.float32)
  return w, (x.T @ x / tokens).astype(np.float32)


def error(w, new, gram):
  d = np.float64(w) - np.float64(new)
  return np.einsum("io,ij,jo->", d, np.float64(gram), d)


def sparsegpt(w, gram, sparsity, n=0, m=0, damping=0.01, block=128):
  """Algorithm 1 of SparseGPT (2023); rows of `w` are outputs, as there."""
  w = np.array(w, np.float64).T
  outputs, inputs = w.shape
  h = np.array(gram, np.float64)
  dead = np.diag(h) == 0
  h[dead, dead] = 1
  w[:, dead] = 0
  h = h + damping * np.mean(np.diag(h)) * np.eye(inputs)
  u = np.linalg.cholesky(np.linalg.inv(h)).T
  mask = np.ones(w.shape, bool)
  total = w.size - round(w.size * sparsity)
  for start in range(0, inputs, block):
    end = min(start + block, inputs)
    errors = np.zeros((outputs, end - start))
    if not m:
      # So many of this block that all blocks up to here keep their share.
      share = lambda e: (total * e * outputs + w.size // 2) // w.size
      keep = share(end) - share(start)
      score = w[:, start:end] ** 2 / np.diag(u)[start:end] ** 2
      # Inputs first, the order in which our ties are broken.
      order = np.argsort(-score.T.ravel(), kind="stable")
      chosen = np.zeros(score.size, bool)
      chosen[order[:keep]] = True
      mask[:, start:end] = chosen.reshape(score.T.shape).T
    for j in range(start, end):
      if m and (j - start) % m == 0:
        score = w[:, j : j + m] ** 2 / np.diag(u)[j : j + m] ** 2
        rank = np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1)
        mask[:, j : j + m] = rank < n
      kept = mask[:, j]
      error = np.where(kept, 0, w[:, j] / u[j, j])
      w[:, j:end] -= np.outer(error, u[j, j:end])
      w[~kept, j] = 0
      errors[:, j - start] = error
    w[:, end:] -= errors @ u[start:end, end:]
  return w.T, mask.T


def sparsegpt_int8(w, gram, sparsity, n=0, m=0, damping=0.01, group=64):
  """SparseGPT with rounding (section 3.5), a scale for 64 inputs, by rows."""
  w = np.array(w, np.float64).T
  outputs, inputs = w.shape
  h = np.array(gram, np.float64)
  h = h + damping * np.mean(np.diag(h)) * np.eye(inputs)
  u = np.linalg.cholesky(np.linalg.inv(h)).T
  mask = np.ones(w.shape, bool)
  total = w.size - round(w.size * sparsity)
  for start in range(0, inputs, group):
    end = min(start + group, inputs)
    score = (w[:, start:end] / np.diag(u)[start:end]) ** 2
    if m:
      parts = score.reshape(outputs, -1, m)
      rank = np.argsort(np.argsort(-parts, axis=2, kind="stable"), axis=2)
      mask[:, start:end] = (rank < n).reshape(score.shape)
    else:
      share = lambda e: (total * e * outputs + w.size // 2) // w.size
      order = np.argsort(-score.T.ravel(), kind="stable")
      chosen = np.zeros(score.size, bool)
      chosen[order[: share(end) - share(start)]] = True
      mask[:, start:end] = chosen.reshape(score.T.shape).T
    for o in range(outputs):
      alone = w[o].copy()
      for j in range(start, end):
        if not mask[o, j]:
          alone[j:] -= alone[j] / u[j, j] * u[j, j:]
      alone = np.where(mask[o], alone, 0)[start:end]
      place = np.abs(alone).argmax()
      scale = np.float32(np.abs(alone[place])) / np.float32(127)
      scale = float(jnp.bfloat16(scale))
      for j in range(start, end):
        code = np.rint(w[o, j] / (scale or 1))
        if j == start + place:
          code = 127 * np.sign(alone[place])
        new = np.clip(code, -127, 127) * scale if mask[o, j] else 0.0
        w[o, j + 1 :] -= (w[o, j] - new) / u[j, j] * u[j, j + 1 :]
        w[o, j] = new
  return w.T, mask.T


def wanda(w, gram, sparsity, n=0, m=0):
  """|w| ‖x‖, compared within each output (Sun et al., 2023)."""
  score = np.abs(np.float64(w)) * np.sqrt(np.diag(np.float64(gram)))[:, None]
  inputs, outputs = score.shape
  mask = np.zeros(score.shape, bool)
  for o in range(outputs):
    if m:
      for i in range(0, inputs, m):
        best = np.argsort(-score[i : i + m, o], kind="stable")[:n]
        mask[i + best, o] = True
    else:
      keep = round(inputs * (1 - sparsity))
      mask[np.argsort(-score[:, o], kind="stable")[:keep], o] = True
  return np.where(mask, w, 0), mask


def obc(w, gram, sparsity, damping=0.01):
  """Removal by Optimal Brain Surgeon, the inverse recomputed every time."""
  w = np.array(w, np.float64)
  h = np.array(gram, np.float64)
  h = h + damping * np.mean(np.diag(h)) * np.eye(len(h))
  mask = np.ones(w.shape, bool)
  for o in range(w.shape[1]):
    for _ in range(len(w) - round(len(w) * (1 - sparsity))):
      left = np.flatnonzero(mask[:, o])
      inverse = np.linalg.inv(h[np.ix_(left, left)])
      p = np.argmin(w[left, o] ** 2 / np.diag(inverse))
      w[left, o] -= inverse[:, p] * w[left[p], o] / inverse[p, p]
      w[left[p], o], mask[left[p], o] = 0, False
  return w, mask


def best_on_support(w, mask, gram, damping=0.01):
  """The least-squares optimum over a mask, output by output."""
  h = np.array(gram, np.float64)
  h = h + damping * np.mean(np.diag(h)) * np.eye(len(h))
  result = np.zeros(w.shape)
  for o in range(w.shape[1]):
    s = np.flatnonzero(mask[:, o])
    result[s, o] = np.linalg.solve(h[np.ix_(s, s)], h[s] @ np.float64(w[:, o]))
  return result


def ria(w, gram, sparsity):
  """Relative importance times the root of the inputs' norms, in float64."""
  w = np.float64(w)
  size = np.abs(w)
  share = size / size.sum(0, keepdims=True) + size / size.sum(1, keepdims=True)
  scores = share * np.diag(np.float64(gram))[:, None] ** 0.25
  kept = np.zeros(w.size, bool)
  count = round(w.size * (1 - sparsity))
  kept[np.argsort(-scores.ravel(), kind="stable")[:count]] = True
  return kept.reshape(w.shape)


def dsnot(w, mean, square, mask, m=0, rounds=50, threshold=0.1):
  """Exchanges by the mean of each output, one after the other, in float64."""
  w, mean, square = map(np.float64, (w, mean, square))
  variance, norm, mask = square - mean**2, np.sqrt(square), mask.copy()
  for o in range(w.shape[1]):
    for _ in range(rounds):
      off = -sum(w[i, o] * mean[i] for i in np.flatnonzero(~mask[:, o]))
      if abs(off) < threshold:
        break
      way = -np.sign(off)
      removed, kept = np.flatnonzero(~mask[:, o]), np.flatnonzero(mask[:, o])
      kept = [i for i in kept if way * w[i, o] * mean[i] < 0]
      m = m or len(w)
      removed = [i for i in removed if any(i // m == k // m for k in kept)]
      if not removed:
        break
      into = max(removed, key=lambda i: way * w[i, o] * mean[i] / variance[i])
      kept = [k for k in kept if k // m == into // m]
      out = min(kept, key=lambda i: abs(w[i, o]) * norm[i])
      mask[into, o], mask[out, o] = True, False
  return mask


def sparseswaps(w, gram, mask, m=0, rounds=100):
  """The best swap of each output, tried pair by pair, in float64."""
  w, gram, mask = np.float64(w), np.float64(gram), mask.copy()
  loss = lambda r: r @ gram @ r
  for o in range(w.shape[1]):
    floor = 1e-6 * loss(w[:, o])
    for _ in range(rounds):
      removed = np.where(mask[:, o], 0, w[:, o])
      now, best, pair = loss(removed), -floor, None
      for i in np.flatnonzero(mask[:, o]):
        for j in np.flatnonzero(~mask[:, o]):
          if m and i // m != j // m:
            continue
          new = removed.copy()
          new[i], new[j] = w[i, o], 0
          if loss(new) - now < best:
            best, pair = loss(new) - now, (i, j)
      if pair is None:
        break
      mask[pair[0], o], mask[pair[1], o] = False, True
  return mask
