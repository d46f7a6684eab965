"""DQN on Atari's Ms. Pac-Man with the Nature network.

Data: PyPI package `ale-py` (emulator and ROMs), 4 environments per seed, 84 x
84 grey frames in stacks of 4.
Model: Mnih et al. (2015): convolutions 8 x 8 / 4, 4 x 4 / 2, 3 x 3 / 1 with 32,
64, 64 channels, then 3136 - 512 - 9; 1.68 M weights; ERK.
Command: `jaxpruner compare --task dqn-mspacman --sparsity 0.98 --seeds 5`.
The paper trains for 40 M frames; the default here is 5,000 updates, enough to
see that training works, not to play well: pass --steps.
Number: mean return 219 dense, 169 by magnitude at 98 % (one seed) after 200
updates, too few to mean much; two minutes a cell on a busy core.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpruner import datasets
from jaxpruner.compare import layers
from jaxpruner.compare.tasks import dqn_minatar
from jaxpruner.compare.tasks.dqn_minatar import EnvState, Replay

ACTIONS = 9
FRAME = (84, 84, 4)
# Emulators of this process, by seed: they cannot live inside a JAX program.
_EMULATORS: dict[int, Any] = {}


@dataclasses.dataclass(frozen=True)
class DqnMsPacman(dqn_minatar.DqnMinatar):
  """DQN on Atari's Ms. Pac-Man."""

  width: int = 32
  steps: int = 5000
  batch_size: int = 32
  learning_rate: float = 2.5e-4
  environments: int = 4
  memory: int = 8000
  name: ClassVar[str] = "dqn-mspacman"
  batching: ClassVar[str] = "map"
  resumable: ClassVar[bool] = False

  def load(self, folder: str | None = None) -> dict[str, jax.Array]:
    datasets.SOURCES["atari"].find(folder)
    return {"frame": jnp.zeros(FRAME)}

  def init(self, key: jax.Array) -> Any:
    keys = jax.random.split(key, 5)
    w = self.width
    return {
      "conv_0": layers.conv_init(keys[0], 8, 4, w),
      "conv_1": layers.conv_init(keys[1], 4, w, 2 * w),
      "conv_2": layers.conv_init(keys[2], 3, 2 * w, 2 * w),
      "dense": layers.dense_init(keys[3], 49 * 2 * w, 16 * w),
      "values": layers.dense_init(keys[4], 16 * w, ACTIONS),
    }

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    x = inputs / 255.0
    for i, stride in enumerate((4, 2, 1)):
      x = jax.nn.relu(layers.conv(params[f"conv_{i}"], x, stride, pad=0))
    x = jax.nn.relu(layers.dense(params["dense"], x.reshape(len(x), -1)))
    return layers.dense(params["values"], x)

  def example(self, data: Any) -> jax.Array:
    return jnp.broadcast_to(data["frame"], (self.batch_size, *FRAME))

  def start(self, params: Any, data: Any, key: jax.Array) -> EnvState:
    n = self.environments
    # The emulator's number is drawn from the seed's key, so it is the same
    # for every algorithm.
    number = jax.random.randint(key, (), 0, 2**30)
    seen = _reset(number, n)
    rows = self.memory // n
    frames = jnp.zeros((rows, n, *FRAME), jnp.uint8)
    flags = jnp.zeros((rows, n))
    replay = Replay(frames, flags.astype(jnp.int32), flags, flags, frames)
    del data
    return EnvState(number, seen, replay, params)

  def move(self, state: Any, action: jax.Array, key: jax.Array) -> tuple:
    del key
    seen, reward, done = _step(state, action)
    return seen, state, jnp.sign(reward), done, done, seen

  def evaluate(self, params: Any, data: Any) -> dict[str, jax.Array]:
    """Return the mean score of 8 games, each cut after 1,000 moves."""
    del data
    n = 8
    number = jnp.int32(2**30)
    seen = _reset(number, n)
    key = jax.random.key(1)

    def move(carry, t):
      seen, alive, total = carry
      action = self.act(params, seen, jax.random.fold_in(key, t), 0.01)
      seen, reward, done = _step(number, action)
      total = total + reward * alive
      return (seen, alive * (1 - done), total), None

    carry = (seen, jnp.ones(n), jnp.zeros(n))
    (_, _, total), _ = jax.lax.scan(move, carry, jnp.arange(1000))
    return {"return": total.mean()}


def _reset(number: jax.Array, n: int) -> jax.Array:
  def host(number):
    from ale_py.vector_env import (  # pyright: ignore[reportMissingImports]
      AtariVectorEnv,
    )

    # An episode is a game of several lives. Training clips rewards itself;
    # judged are the points of the game.
    env = AtariVectorEnv(game="ms_pacman", num_envs=n, reward_clipping=False)
    _EMULATORS[int(number)] = env
    seen, _ = env.reset(seed=int(number) % 2**20)
    return _frames(seen)

  shape = jax.ShapeDtypeStruct((n, *FRAME), jnp.uint8)
  return io_callback(host, shape, number).astype(jnp.float32)


def _step(number: jax.Array, action: jax.Array):
  def host(number, action):
    env = _EMULATORS[int(number)]
    seen, reward, over, cut, _ = env.step(np.asarray(action))
    done = np.logical_or(over, cut).astype(np.float32)
    return _frames(seen), np.asarray(reward, np.float32), done

  n = action.shape[0]
  shapes = (
    jax.ShapeDtypeStruct((n, *FRAME), jnp.uint8),
    jax.ShapeDtypeStruct((n,), jnp.float32),
    jax.ShapeDtypeStruct((n,), jnp.float32),
  )
  seen, reward, done = io_callback(host, shapes, number, action)
  return seen.astype(jnp.float32), reward, done


def _frames(seen: Any) -> np.ndarray:
  return np.ascontiguousarray(np.moveaxis(np.asarray(seen), 1, -1))
