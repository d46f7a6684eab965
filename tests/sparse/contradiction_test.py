"""Masks that contradict the parameters are counted and warned about."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse

PARAMS = {"up": {"kernel": jnp.ones((4, 6))}, "down": {"kernel": jnp.eye(6, 2)}}
MASKS = {"up": {"kernel": np.zeros((4, 6), np.uint8)}, "down": {"kernel": None}}
MASKS["up"]["kernel"][:, :4] = 1


def apply(params, x):
  return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


def fixed(thunks):
  return dict.fromkeys(thunks, 1.0)


def users(tmp_path):
  return {
    "save": lambda p: sparse.save(tmp_path / "w.safetensors", p, MASKS),
    "shrink": lambda p: sparse.shrink(apply, p, jnp.ones((1, 4)), masks=MASKS),
    "accelerate": lambda p: sparse.accelerate(
      apply, p, jnp.ones((1, 4)), masks=MASKS, cache=None, timer=fixed
    ),
  }


@pytest.mark.parametrize("name", ["save", "shrink", "accelerate"])
def test_weights_under_a_mask_are_counted_and_warned_about(name, tmp_path):
  use = users(tmp_path)[name]
  with pytest.warns(UserWarning, match=rf"{name}: .* 8 weights .*up/kernel"):
    use(PARAMS)
  kept = jnp.where(MASKS["up"]["kernel"], PARAMS["up"]["kernel"], 0)
  use({**PARAMS, "up": {"kernel": kept}})  # any warning here is an error
