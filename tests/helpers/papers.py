"""Every algorithm, trained for a few steps in NumPy as its paper says.

Float64, plain loops over leaves, and rankings by sorting. A reference is a
generator: it yields the masks and the parameters that the loss sees, first at
the start and then after each step. The loss is `Σ C/2 · (w − T)²` with targets
`T` that differ from step to step, so the gradient is `C · (w − T)` and the
Hessian is `diag(C)`. Optimizers are SGD with momentum 0.5, plain SGD for
straight-through methods, Adam for `fisher`. What an algorithm draws at random
is given to its reference: papers say how numbers are used, not what they are.
"""

import math

import numpy as np
import reference

STEPS, RATE, SPARSITY = 6, 0.25, 0.5
SHAPES = {"in": (4, 6), "out": (6, 4)}
_RNG = np.random.default_rng(7)
WEIGHTS = {k: _RNG.normal(size=s).astype("f4") for k, s in SHAPES.items()}
CURVES = {k: _RNG.uniform(0.5, 2, s).astype("f4") for k, s in SHAPES.items()}
TARGETS = [
  {k: _RNG.normal(size=s).astype("f4") for k, s in SHAPES.items()}
  for _ in range(STEPS)
]

RAMP = {"update_freq": 1, "update_start_step": 0, "update_end_step": 4}
PERIODIC = {"update_freq": 2, "update_start_step": 0, "update_end_step": 8}


def gradient(step, seen):
  return {k: CURVES[k] * (seen[k] - TARGETS[step][k]) for k in SHAPES}


def start():
  return {k: w.astype(np.float64) for k, w in WEIGHTS.items()}


def ones():
  return {k: np.ones(s, np.uint8) for k, s in SHAPES.items()}


def zeros():
  return {k: np.zeros(s) for k, s in SHAPES.items()}


def masked(mask, tree):
  return {k: np.where(mask[k] == 1, tree[k], 0.0) for k in SHAPES}


def ramp(step, target=SPARSITY):
  return float(reference.zhu_gupta(target, step, 0, 4))


def each(scores, sparsity):
  """Keep the best of each leaf."""
  return {k: reference.unstructured(scores[k], sparsity) for k in SHAPES}


def together(scores, sparsity):
  """Keep the best of all leaves."""
  found = reference.together([scores[k] for k in SHAPES], sparsity)
  return dict(zip(SHAPES, found, strict=True))


class Sgd:
  """`v ← μv + g`, `w ← w − ηv`."""

  def __init__(self, momentum=0.5, rate=RATE):
    self.momentum, self.rate, self.v = momentum, rate, zeros()

  def step(self, w, g):
    self.v = {k: self.momentum * self.v[k] + g[k] for k in SHAPES}
    return {k: w[k] - self.rate * self.v[k] for k in SHAPES}

  def forget(self, mask):
    """Fresh moments outside the mask."""
    self.v = masked(mask, self.v)


class Adam:
  def __init__(self, rate):
    self.rate, self.t, self.mu, self.nu = rate, 0, zeros(), zeros()

  def step(self, w, g):
    self.t += 1
    new = {}
    for k in SHAPES:
      self.mu[k] = 0.9 * self.mu[k] + 0.1 * g[k]
      self.nu[k] = 0.999 * self.nu[k] + 0.001 * g[k] ** 2
      mean = self.mu[k] / (1 - 0.9**self.t)
      square = self.nu[k] / (1 - 0.999**self.t)
      new[k] = w[k] - self.rate * mean / (np.sqrt(square) + 1e-8)
    return new


# --- dense to sparse ---------------------------------------------------------


def no_prune(draws):
  w, sgd = start(), Sgd()
  yield {}, w
  for t in range(STEPS):
    w = sgd.step(w, gradient(t, w))
    yield {}, w


def gradual(score, choose=each):
  """Zhu & Gupta: at each update the best by a score stay, at sparsity s(t)."""

  def run(draws):
    w, mask, sgd = start(), ones(), Sgd()
    yield mask, w
    for t in range(STEPS):
      g = gradient(t, w)
      if t <= 4:
        mask = choose(score(w, g, draws), ramp(t))
      w = masked(mask, sgd.step(w, g))
      yield mask, w

  return run


def by_magnitude(w, g, draws):
  return {k: np.abs(w[k]) for k in SHAPES}


def by_saliency(w, g, draws):
  return {k: np.abs(w[k] * g[k]) for k in SHAPES}


def by_draw(w, g, draws):
  return draws(0)


def by_lamp(w, g, draws):
  """`w² / Σ u²` over the weights u of the leaf with |u| ≥ |w|."""
  scores = {}
  for k in SHAPES:
    square = w[k].ravel() ** 2
    scores[k] = np.array(
      [s / square[square >= s].sum() if s > 0 else 0.0 for s in square]
    ).reshape(SHAPES[k])
  return scores


def fisher(draws):
  w, mask, adam = start(), ones(), Adam(0.05)
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    if t <= 4:
      information = adam.nu if t else {k: g[k] ** 2 for k in SHAPES}
      mask = each({k: w[k] ** 2 * information[k] for k in SHAPES}, ramp(t))
    w = masked(mask, adam.step(w, g))
    yield mask, w


def wood_fisher(draws):
  w, mask, sgd = start(), ones(), Sgd()
  window = {k: np.zeros((3, *s)) for k, s in SHAPES.items()}
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    scores = {}
    for k in SHAPES:
      window[k][t % 3] = g[k]
      rows = np.where(mask[k] == 1, window[k], 0.0).reshape(3, -1)
      damping = 0.1 * np.mean(rows**2)
      score = np.zeros(w[k].size)
      for first in range(0, w[k].size, 7):  # blocks of seven weights
        part = slice(first, first + 7)
        block = damping * np.eye(rows[:, part].shape[1])
        for row in rows[:, part]:
          block += np.outer(row, row) / 3
        score[part] = w[k].ravel()[part] ** 2 / np.diag(np.linalg.inv(block))
      scores[k] = score.reshape(SHAPES[k])
    if t <= 4:
      mask = each(scores, ramp(t))
    w = masked(mask, sgd.step(w, g))
    yield mask, w


def cram(draws):
  w, mask, sgd = start(), ones(), Sgd()
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    if t <= 4:
      mask = each(by_magnitude(w, g, draws), ramp(t))
    up = {k: w[k] + 0.2 * g[k] for k in SHAPES}
    pruned = masked(each(by_magnitude(up, g, draws), SPARSITY), up)
    second = gradient(t, pruned)
    w = masked(mask, sgd.step(w, {k: g[k] + second[k] for k in SHAPES}))
    yield mask, w


def powerpropagation(draws):
  """The optimizer trains θ, `w = θ·|θ|`."""
  w, mask, sgd = start(), ones(), Sgd(rate=0.05)
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    if t <= 4:
      mask = each(by_magnitude(w, g, draws), ramp(t))
    theta = {k: np.sign(w[k]) * np.sqrt(np.abs(w[k])) for k in SHAPES}
    slope = {k: g[k] * 2 * np.abs(theta[k]) for k in SHAPES}
    theta = sgd.step(theta, slope)
    w = masked(mask, {k: theta[k] * np.abs(theta[k]) for k in SHAPES})
    yield mask, w


def decaying_mask(draws):
  """What the target removes is multiplied by β, which falls to 0."""
  w, mask, faint, sgd = start(), ones(), ones(), Sgd()
  fade = lambda tree, step: {
    k: np.where(faint[k] == 1, tree[k], (1 - ramp(step, 1.0)) * tree[k])
    for k in SHAPES
  }
  yield mask, w
  for t in range(STEPS):
    g = fade(gradient(t, fade(w, t)), t)
    if t <= 4:
      faint = each(by_magnitude(w, g, draws), SPARSITY)
      mask = faint if t == 4 else ones()
    w = masked(mask, sgd.step(w, g))
    yield mask, fade(w, t + 1)


def admm(draws):
  """Boyd et al., section 9.1: a step, a projection, the sum of what is left."""
  w, mask, sgd = start(), ones(), Sgd()
  z, u = start(), zeros()
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    if t <= 4:
      found = each({k: np.abs(w[k] + u[k]) for k in SHAPES}, SPARSITY)
      z = masked(found, {k: w[k] + u[k] for k in SHAPES})
      u = {k: u[k] + w[k] - z[k] for k in SHAPES}
      mask = found if t == 4 else ones()
    if t < 4:
      g = {k: g[k] + 0.3 * (w[k] - z[k] + u[k]) for k in SHAPES}
    w = masked(mask, sgd.step(w, g))
    yield mask, w


def soft_ste(draws):
  """S-STE in pairs along the inputs: the smaller is removed, and subtracted."""
  w = start()

  def shrink(x):
    mask, seen = np.zeros(x.shape, np.uint8), np.zeros(x.shape)
    for i in range(0, x.shape[0], 2):
      for j in range(x.shape[1]):
        small, large = np.sort(np.abs(x[i : i + 2, j]))
        best = i + int(np.argmax(np.abs(x[i : i + 2, j])))
        mask[best, j] = 1
        seen[best, j] = np.sign(x[best, j]) * (large - small)
    return mask, seen

  first = {k: shrink(w[k])[1] for k in SHAPES}
  scale = {k: (w[k] * s).sum() / (s * s).sum() for k, s in first.items()}
  for t in range(STEPS + 1):
    masks = {k: shrink(w[k])[0] for k in SHAPES}
    seen = {k: scale[k] * shrink(w[k])[1] for k in SHAPES}
    if t == 0:  # params as given, masked: nothing has been updated yet
      seen = masked(masks, w)
    yield masks, seen
    if t < STEPS:
      g = gradient(t, seen)
      w = {k: w[k] - RATE * g[k] for k in SHAPES}


def acdc(draws):
  """Dense at step 0, sparse in [1, 3), dense in [3, 5), sparse from 5 on."""
  w, mask, sgd = start(), ones(), Sgd()
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    if t in (1, 5):
      mask = each(by_magnitude(w, g, draws), SPARSITY)
    if t == 3:
      mask = ones()
    w = sgd.step(w, masked(mask, g))
    w = masked(mask, w)
    sgd.forget(mask)
    yield mask, w


def imp(draws):
  """Rounds at steps 1, 3 and 5: prune a fifth of all, rewind to the start."""
  w, mask, sgd = start(), ones(), Sgd()
  yield mask, w
  for t in range(STEPS):
    if t in (1, 3, 5):
      sparsity = {1: 0.2, 3: 1 - 0.8**2, 5: SPARSITY}[t]
      mask = together(by_magnitude(w, None, draws), np.float32(sparsity))
      w, sgd = masked(mask, start()), Sgd()
    else:
      w = masked(mask, sgd.step(w, gradient(t, w)))
    yield mask, w


# --- straight-through --------------------------------------------------------


def straight_through(score, choose=each, first=True, decay=0.0):
  """Dense weights `w`; the loss sees `m·w`; its gradient goes to all of `w`."""

  def run(draws):
    w, sgd = start(), Sgd(0)
    mask = choose(score(w, None, draws), ramp(0)) if first else ones()
    yield mask, masked(mask, w)
    for t in range(STEPS):
      g = gradient(t, masked(mask, w))
      pull = {k: decay * np.where(mask[k] == 1, 0, w[k]) for k in SHAPES}
      w = sgd.step(w, {k: g[k] + pull[k] for k in SHAPES})
      mask = choose(score(w, g, draws), ramp(t + 1))
      yield mask, masked(mask, w)

  return run


def movement(choose, descend):
  """Scores follow `−w · ∂L/∂w`; masked weights get no gradient."""

  def run(draws):
    w, mask, sgd, score = start(), ones(), Sgd(0), zeros()
    yield mask, w
    for t in range(STEPS):
      g = gradient(t, masked(mask, w))
      score = {k: descend(score[k], w[k] * g[k]) for k in SHAPES}
      w = sgd.step(w, masked(mask, g))
      mask = choose(score, ramp(t + 1))
      yield mask, masked(mask, w)

  return run


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _soft(score, slope):
  gate = _sigmoid(score)
  return score - 0.7 * (slope + 0.3 * gate * (1 - gate))


def soft_threshold(draws):
  """STR: thresholds `sigmoid(s)` per leaf, shifted to the exact sparsity."""
  w, mask, sgd = start(), ones(), Sgd(0)
  s = dict.fromkeys(SHAPES, -3.0)

  def forward():
    shrunk = {}
    for k in SHAPES:
      cut = np.max(np.where(mask[k] == 1, 0, np.abs(w[k])))
      size = np.maximum(np.abs(w[k]) - cut, 0)
      shrunk[k] = np.where(mask[k] == 1, np.sign(w[k]) * size, 0.0)
    return shrunk

  yield mask, forward()
  for t in range(STEPS):
    g = gradient(t, forward())
    for k in SHAPES:
      slope = _sigmoid(s[k]) * (1 - _sigmoid(s[k]))
      pull = -slope * np.sum(mask[k] * g[k] * np.sign(w[k]))
      s[k] = s[k] - 0.5 * (pull + 0.1 * s[k])
    w = sgd.step(w, masked(mask, g))
    scores = {k: np.abs(w[k]) - _sigmoid(s[k]) for k in SHAPES}
    mask = together(scores, ramp(t + 1))
    yield mask, forward()


def top_kast(draws):
  """Forward the largest half; backward all; L2 stronger by 1/D beyond it."""
  w, sgd = start(), Sgd(0)
  mask = each(by_magnitude(w, None, draws), SPARSITY)
  yield mask, masked(mask, w)
  for t in range(STEPS):
    g = gradient(t, masked(mask, w))
    if t % 2 == 0:
      mask = each(by_magnitude(w, None, draws), SPARSITY)
    rate = {k: np.where(mask[k] == 1, 0.1, 0.1 / SPARSITY) for k in SHAPES}
    w = sgd.step(w, {k: g[k] + rate[k] * w[k] for k in SHAPES})
    yield mask, masked(mask, w)


# --- sparse to sparse --------------------------------------------------------


def fixed(choose_mask):
  """One mask before training; gradients of removed weights are zero."""

  def run(draws):
    mask, sgd = choose_mask(draws), Sgd()
    w = masked(mask, start())
    yield mask, w
    for t in range(STEPS):
      w = masked(mask, sgd.step(w, masked(mask, gradient(t, w))))
      yield mask, w

  return run


def random_mask(draws):
  return each(draws(0), SPARSITY)


def snip(draws):
  return together(by_saliency(start(), gradient(0, start()), draws), SPARSITY)


def grasp(draws):
  w = start()
  flow = {k: CURVES[k] * gradient(0, w)[k] for k in SHAPES}  # H g
  return together({k: w[k] * flow[k] for k in SHAPES}, SPARSITY)


def synflow(draws):
  """R = 1ᵀ|a||b|1, in five rounds."""
  mask = ones()
  for k in range(5):
    live = masked(mask, {n: np.abs(w) for n, w in start().items()})
    scores = {
      "in": live["in"] * live["out"].sum(1)[None, :],
      "out": live["out"] * live["in"].sum(0)[:, None],
    }
    scores = {n: np.where(mask[n] == 1, scores[n], -1.0) for n in SHAPES}
    mask = together(scores, 1 - (1 - SPARSITY) ** ((k + 1) / 5))
  return mask


def cosine(alpha):
  return lambda step: alpha / 2 * (1 + math.cos(math.pi * step / 8))


def rewire(mask, drop, grow, kept, goal):
  """Keep the best of a mask by one score, fill up by another."""
  active = set(np.flatnonzero(mask.ravel()))
  stay = [i for i in reference.ranking(drop) if i in active][:kept]
  rest = [i for i in reference.ranking(grow) if i not in set(stay)]
  new = np.zeros(mask.size, np.uint8)
  new[stay + rest[: goal - kept]] = 1
  return new.reshape(mask.shape)


def dynamic(new_mask, first=random_mask, due=lambda t: t % 2 == 0, rest=True):
  """Masks by `new_mask(t, mask, w, g, draws)`; no optimizer step meanwhile.

  Grown weights start at zero, with fresh moments.
  """

  def run(draws):
    mask, sgd = first(draws), Sgd()
    w = masked(mask, start())
    yield mask, w
    for t in range(STEPS):
      g = gradient(t, w)
      if due(t) and t:
        mask = new_mask(t, mask, w, g, draws)
      if not (rest and due(t)):
        w = sgd.step(w, masked(mask, g))
      w = masked(mask, w)
      sgd.forget(mask)
      yield mask, w

  return run


def replace(drop, grow, fraction):
  """Replace a fraction of each leaf's kept weights."""

  def new_mask(t, mask, w, g, draws):
    new = {}
    for k in SHAPES:
      count = int(mask[k].sum())
      kept = count - math.floor(fraction(t) * count + 1e-9)
      new[k] = rewire(mask[k], drop(w, g)[k], grow(t, g, draws)[k], kept, count)
    return new

  return new_mask


def small(w, g):
  return by_magnitude(w, g, None)


def small_and_slow(w, g):
  return {k: np.abs(w[k]) + np.abs(g[k]) for k in SHAPES}


def at_random(t, g, draws):
  return draws(t + 1)


def steepest(t, g, draws):
  return {k: np.abs(g[k]) for k in SHAPES}


def shared_out(total, shares):
  """Largest remainder."""
  quotas = [total * s / sum(shares) for s in shares]
  given = [math.floor(q) for q in quotas]
  order = sorted(range(len(quotas)), key=lambda i: (given[i] - quotas[i], i))
  for i in order[: total - sum(given)]:
    given[i] += 1
  return given


def signal_rigl(draws):
  """RigL that grows by |mean g| / rms g of two steps."""
  mask, sgd = random_mask(draws), Sgd()
  w, recent = masked(mask, start()), []
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    recent.append(g)
    if t % 3 == 2:
      ratio = {}
      for k in SHAPES:
        column = np.stack([g[k] for g in recent[-2:]])
        rms = np.sqrt(np.mean(column**2, 0))
        ratio[k] = np.abs(column.mean(0)) / rms
      rule = replace(small, lambda *_: ratio, cosine(0.3))  # noqa: B023
      mask = rule(t, mask, w, g, draws)
    else:
      w = sgd.step(w, masked(mask, g))
    w = masked(mask, w)
    sgd.forget(mask)
    yield mask, w


def snfs(draws):
  """Grow by momentum; leaves share by its mean before dropping."""
  mask, sgd, mean = random_mask(draws), Sgd(), zeros()
  w = masked(mask, start())
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    mean = {k: 0.9 * mean[k] + 0.1 * g[k] for k in SHAPES}
    if t % 2 == 0 and t:
      counts = [int(mask[k].sum()) for k in SHAPES]
      kept = [n - math.floor(cosine(0.5)(t) * n + 1e-9) for n in counts]
      shares = [np.abs(mean[k])[mask[k] == 1].mean() for k in SHAPES]
      grown = shared_out(sum(counts) - sum(kept), shares)
      mask = {
        k: rewire(mask[k], np.abs(w[k]), np.abs(mean[k]), n, n + more)
        for k, n, more in zip(SHAPES, kept, grown, strict=True)
      }
    elif t:
      w = sgd.step(w, masked(mask, g))
    w = masked(mask, w)
    sgd.forget(mask)
    yield mask, w


def dsr(draws):
  """Drop |w| below one threshold, which doubles or halves."""
  mask, sgd, limit = random_mask(draws), Sgd(), 0.4
  w = masked(mask, start())
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    if t % 2 == 0 and t:
      alive = {k: (mask[k] == 1) & (np.abs(w[k]) >= limit) for k in SHAPES}
      kept = [max(1, int(alive[k].sum())) for k in SHAPES]
      total = sum(int(mask[k].sum()) for k in SHAPES)
      dropped = total - sum(int(alive[k].sum()) for k in SHAPES)
      grown = shared_out(total - sum(kept), kept)
      new = draws(t + 1)
      mask = {
        k: rewire(mask[k], np.abs(w[k]), new[k], n, n + more)
        for k, n, more in zip(SHAPES, kept, grown, strict=True)
      }
      aim = cosine(0.3)(t) * total
      if dropped < 0.9 * aim:
        limit *= 2
      elif dropped > 1.1 * aim:
        limit /= 2
    elif t:
      w = sgd.step(w, masked(mask, g))
    w = masked(mask, w)
    sgd.forget(mask)
    yield mask, w


def deep_r(draws):
  """`w = sign·θ`; θ below zero is dormant, and another weight wakes."""
  sign = {k: np.where(w >= 0, 1.0, -1.0) for k, w in start().items()}
  mask, sgd = random_mask(draws), Sgd()
  w = masked(mask, start())
  yield mask, w
  for t in range(STEPS):
    g = gradient(t, w)
    if t:
      new = draws(t + 1)
      for k in SHAPES:
        theta = sign[k] * w[k]
        kept = int(((mask[k] == 1) & (theta > 0)).sum())
        mask[k] = rewire(mask[k], theta, new[k], kept, int(mask[k].sum()))
    moved = sgd.step(w, masked(mask, g))
    theta = {k: sign[k] * moved[k] - 0.01 for k in SHAPES}
    w = masked(mask, {k: sign[k] * np.maximum(theta[k], 0) for k in SHAPES})
    sgd.forget(mask)
    yield dict(mask), w


def constant_fan_in(draws):
  new = draws(0)
  return {
    k: reference.n_by_m(new[k], SHAPES[k][0] // 2, SHAPES[k][0], 0)
    for k in SHAPES
  }


def srigl(t, mask, w, g, draws):
  """Drop over the leaf; each neuron grows back to its number of inputs."""
  return {
    k: reference.drop_and_grow_n_by_m(
      mask[k],
      np.abs(w[k]),
      np.abs(g[k]),
      math.floor(cosine(0.3)(t) * mask[k].sum() + 1e-9),
      SHAPES[k][0],
      0,
    )
    for k in SHAPES
  }


def granet(t, mask, w, g, draws):
  """Prune to the ramp, then replace a fraction of what is left."""
  new = {}
  for k in SHAPES:
    goal = reference.num_ones(mask[k].size, ramp(t))
    share = 0.3 / 2 * (1 + math.cos(math.pi * t / 4))
    kept = goal - math.floor(share * goal + 1e-9)
    new[k] = rewire(mask[k], np.abs(w[k]), np.abs(g[k]), kept, goal)
  return new


def linear(t):
  return 0.3 * (1 - t / 8)


# Registered name -> (its reference, its configuration).
PAPERS = {
  "no_prune": (no_prune, {}),
  "magnitude": (gradual(by_magnitude), RAMP),
  "random": (gradual(by_draw), RAMP),
  "saliency": (gradual(by_saliency), RAMP),
  "magnitude_ste": (straight_through(by_magnitude), RAMP),
  "random_ste": (straight_through(by_draw), RAMP),
  "saliency_ste": (straight_through(by_saliency, first=False), RAMP),
  "sr_ste": (
    straight_through(by_magnitude, decay=0.3),
    RAMP | {"mask_decay": 0.3},
  ),
  "global_magnitude": (gradual(by_magnitude, together), RAMP),
  "global_saliency": (gradual(by_saliency, together), RAMP),
  "lamp": (gradual(by_lamp, together), RAMP),
  "fisher": (fisher, RAMP),
  "wood_fisher": (
    wood_fisher,
    RAMP | {"window": 3, "block_size": 7, "damping": 0.1},
  ),
  "cram": (cram, RAMP | {"rho": 0.2}),
  "powerpropagation": (powerpropagation, RAMP),
  "decaying_mask": (decaying_mask, RAMP),
  "admm": (admm, RAMP | {"penalty": 0.3}),
  "s_ste": (soft_ste, {"sparsity_type": "1:2"}),
  "acdc": (
    acdc,
    {"update_freq": 2, "update_start_step": 1, "update_end_step": 5},
  ),
  "imp": (
    imp,
    {"update_freq": 2, "update_start_step": 1, "update_end_step": 5},
  ),
  "movement": (movement(each, lambda score, slope: score - slope), RAMP),
  "soft_movement": (
    movement(together, _soft),
    RAMP | {"penalty": 0.3, "score_rate": 0.7},
  ),
  "str": (
    soft_threshold,
    RAMP | {"threshold_rate": 0.5, "threshold_decay": 0.1},
  ),
  "top_kast": (
    top_kast,
    PERIODIC | {"regularization": 0.1, "backward_factor": 2.0},
  ),
  "static_sparse": (fixed(random_mask), {}),
  "snip": (fixed(snip), {}),
  "grasp": (fixed(grasp), {}),
  "synflow": (fixed(synflow), {"rounds": 5}),
  "set": (dynamic(replace(small, at_random, cosine(0.3))), PERIODIC),
  "rigl": (dynamic(replace(small, steepest, cosine(0.3))), PERIODIC),
  "itop": (dynamic(replace(small, steepest, cosine(0.5))), PERIODIC),
  "mest": (dynamic(replace(small_and_slow, at_random, linear)), PERIODIC),
  "srigl": (dynamic(srigl, constant_fan_in), PERIODIC),
  "granet": (
    dynamic(granet, lambda _: ones(), lambda t: t <= 4, rest=False),
    RAMP,
  ),
  "snfs": (snfs, PERIODIC),
  "signal_rigl": (
    signal_rigl,
    PERIODIC
    | {"update_freq": 3, "update_start_step": 2}
    | {"grow": {"name": "signal_to_noise", "window": 2}},
  ),
  "dsr": (dsr, PERIODIC | {"threshold": 0.4}),
  "deep_r": (
    deep_r,
    PERIODIC | {"update_freq": 1, "penalty": 0.01, "noise": 0.0},
  ),
}
