"""One small training run per algorithm, compiled once, for laws to share.

Values (parameters, gradients) are arguments of the compiled run; an algorithm
and its options are its configuration.
"""

import functools

import hypothesis.strategies as st
import jax
import numpy as np
import optax

import jaxpruner

STEPS = 5
SPARSITY = 0.7
SHAPES = {"a": {"kernel": (8, 6), "bias": (6,)}, "b": {"kernel": (6, 4)}}
KERNELS = ("a", "b")

REWIRING = ("set", "rigl")
GRADUAL = (
  "magnitude",
  "saliency",
  "random",
  "global_magnitude",
  "global_saliency",
)
STRAIGHT_THROUGH = ("magnitude_ste", "random_ste")
HOLDING_ZEROS = (*GRADUAL, "static_sparse", *REWIRING)

seeds = st.integers(0, 2**32 - 1)


@functools.cache
def updater(name, **options):
  """Return an updater whose masks change within `STEPS` steps."""
  config = {"algorithm": name, "sparsity": SPARSITY, **options}
  if name == "no_prune":
    config = {"algorithm": name}
  elif name in REWIRING:
    config |= {"update_freq": 2, "update_start_step": 0, "update_end_step": 4}
    config["schedule"] = "periodic"
  elif name != "static_sparse":
    config |= {"update_freq": 2, "update_start_step": 1, "update_end_step": 4}
  return jaxpruner.create_updater_from_config(config)


def optimizer(name):
  if name == "no_prune":
    return optax.adam(0.1)
  # Factors that are powers of two: every product is exact, so two programs
  # agree to the bit however the compiler fuses products and sums.
  return optax.sgd(0.125, momentum=0.5)


@functools.cache
def stepper(name, **options):
  """Return jitted `(init, step)`."""
  pruner = updater(name, **options)
  tx = pruner.wrap_optax(optimizer(name))

  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(tx.init), jax.jit(step)


@functools.cache
def runner(name, **options):
  """Return a compiled `(params, grads) -> (first, states, params)` by step."""
  pruner = updater(name, **options)
  tx = pruner.wrap_optax(optimizer(name))

  def run(params, grads):
    first = tx.init(params)
    params = pruner.post_gradient_update(params, first)

    def body(carry, grad):
      params, state = carry
      updates, state = tx.update(grad, state, params)
      params = optax.apply_updates(params, updates)
      return (params, state), (state, params)

    _, (states, after) = jax.lax.scan(body, (params, first), grads)
    return first, params, states, after

  return jax.jit(run)


class Run:
  """What happened in a run: masks and parameters before and after a step."""

  def __init__(self, name, params, grads, **options):
    compiled = runner(name, **options)
    out = jax.tree.map(np.asarray, compiled(params, grads))
    self.first, self.start, self.states, self.after = out
    self.given, self.grads = params, grads

  def state(self, step):
    """The state after `step` updates."""
    if step == 0:
      return self.first
    return jax.tree.map(lambda x: x[step - 1], self.states)

  def params(self, step):
    if step == 0:
      return self.start
    return jax.tree.map(lambda x: x[step - 1], self.after)

  def mask(self, leaf, step):
    return self.state(step).masks[leaf]["kernel"]


def _values(rng, shape, style):
  x = rng.normal(size=shape)
  if style == "ties":
    x = np.round(x * 2) / 2
  return x.astype(np.float32)


def _tree(rng, style, lead=()):
  return {
    layer: {
      name: _values(rng, (*lead, *shape), style)
      for name, shape in leaves.items()
    }
    for layer, leaves in SHAPES.items()
  }


def make_inputs(seed, style):
  """Parameters, and the gradients of every step."""
  rng = np.random.default_rng(seed)
  return _tree(rng, style), _tree(rng, style, (STEPS,))


def inputs():
  return st.builds(make_inputs, seeds, st.sampled_from(["normal", "ties"]))


def sparsity_at(pruner, leaf, step):
  """The sparsity of a kernel at a step, and whether it is the exact target."""
  targets = pruner.target_sparsities(
    jax.tree.map(
      lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
      SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
    )
  )
  target = targets[leaf]["kernel"]
  value = np.asarray(
    pruner.scheduler.get_sparsity_at_step(np.float32(target), step)
  )
  return target if value >= np.float32(target) else value
