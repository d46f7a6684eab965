"""What a compiled training step holds, read off its program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner

WIDTH = 104
SQUARE = rf"\[{WIDTH},{WIDTH}\]"


@functools.cache
def program(name, **options) -> str:
  """The program of a donated step over two square layers."""
  config = dict(
    algorithm=name,
    dist_type="uniform",
    sparsity=0.9,
    update_freq=10,
    update_start_step=0,
    update_end_step=1000,
  )
  pruner = jaxpruner.create_updater_from_config(config | options)
  tx = pruner.wrap_optax(optax.adam(1e-3))
  rng = np.random.default_rng(0)
  params = [
    jnp.asarray(rng.standard_normal((WIDTH, WIDTH)), jnp.float32)
    for _ in range(2)
  ]

  def loss(params, x):
    return jnp.sum((jax.nn.relu(x @ params[0]) @ params[1]) ** 2)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, x):
    grads = jax.grad(loss)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  x = jnp.ones((4, WIDTH))
  return step.lower(params, tx.init(params), x).compile().as_text()


def entry(text: str) -> list[str]:
  """The operations that run at every step."""
  lines = text[text.index("\nENTRY") :].splitlines()
  return [line for line in lines if " = " in line]


@pytest.mark.quick
@pytest.mark.parametrize("name", ["magnitude", "set", "rigl"])
def test_masks_and_moments_that_stay_are_not_copied(name):
  lines = entry(program(name))
  copied = [x for x in lines if re.search(rf"(u8|f32){SQUARE}\S* copy\(", x)]
  # XLA copies a parameter that the backward pass still reads, pruned or not.
  copied = [x for x in copied if not re.search(r"copy\(%params", x)]
  assert not copied


@pytest.mark.quick
def test_packed_masks_are_unpacked_inside_the_pass_that_applies_them():
  lines = entry(program("magnitude", use_packed_masks=True))
  size = WIDTH * WIDTH
  stored = [
    x
    for x in lines
    for kind, shape in re.findall(r" = (u8|s8|pred|s32)\[([\d,]+)\]", x)
    if np.prod([int(n) for n in shape.split(",")]) >= size
  ]
  assert not stored
