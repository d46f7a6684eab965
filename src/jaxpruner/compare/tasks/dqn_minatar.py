"""DQN on MinAtar Breakout, environment and agent in one JAX program.

Data: PyPI package `gymnax` (MinAtar in JAX), 16 environments side by side.
Model: 3 x 3 convolution with 16 channels, then 1600 - 128 - 3; 206 k weights;
Adam; replay of 20,000 transitions; target network every 200 updates. One step
is one transition in each environment and one update.
Command: `jaxpruner compare --task dqn-minatar --sparsity 0.8 --seeds 5`.
The metric is the mean return of greedy episodes. Algorithms share environment
seeds and initial weights; what they then see depends on how they play.
Number: dense 4.2 after 2,500 of the 10,000 steps (5 seeds); the twelve cells of
that table took 23 minutes on two busy cores.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpruner import datasets
from jaxpruner.compare import layers
from jaxpruner.compare.tasks import base


class Replay(NamedTuple):
  """Transitions in a ring: one row per time, one column per environment."""

  seen: jax.Array
  action: jax.Array
  reward: jax.Array
  done: jax.Array
  after: jax.Array


class EnvState(NamedTuple):
  """What surrounds the network: environments, replay, target network."""

  env: Any
  seen: jax.Array
  replay: Replay
  target: Any


@dataclasses.dataclass(frozen=True)
class DqnMinatar(base.Task):
  """DQN on MinAtar Breakout."""

  width: int = 16
  steps: int = 10_000
  batch_size: int = 64
  learning_rate: float = 5e-4
  environments: int = 16
  memory: int = 20_000
  name: ClassVar[str] = "dqn-minatar"
  metric: ClassVar[str] = "return"
  unit: ClassVar[str] = ""
  game: ClassVar[str] = "Breakout-MinAtar"
  discount: ClassVar[float] = 0.99
  refresh: ClassVar[int] = 200

  def load(self, folder: str | None = None) -> dict[str, jax.Array]:
    datasets.SOURCES["minatar"].find(
      folder
    )  # raises with the command if missing
    return {"frame": jnp.zeros((10, 10, 4))}

  def game_and_params(self) -> tuple[Any, Any]:
    """Return gymnax's environment and its parameters."""
    import gymnax  # pyright: ignore[reportMissingImports]

    return gymnax.make(self.game)

  def init(self, key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    w = self.width
    return {
      "conv": layers.conv_init(keys[0], 3, 4, w),
      "dense": layers.dense_init(keys[1], 100 * w, 8 * w),
      "values": layers.dense_init(keys[2], 8 * w, 3),
    }

  def apply(self, params: Any, inputs: jax.Array) -> jax.Array:
    x = jax.nn.relu(layers.conv(params["conv"], inputs))
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(layers.dense(params["dense"], x))
    return layers.dense(params["values"], x)

  def example(self, data: Any) -> jax.Array:
    return jnp.broadcast_to(data["frame"], (self.batch_size, 10, 10, 4))

  def optimizer(self) -> optax.GradientTransformation:
    return optax.adam(self.learning_rate)

  def start(self, params: Any, data: Any, key: jax.Array) -> EnvState:
    env, env_params = self.game_and_params()
    n = self.environments
    keys = jax.random.split(key, n)
    seen, state = jax.vmap(lambda k: env.reset(k, env_params))(keys)
    rows = self.memory // n
    frames = jnp.zeros((rows, n, *data["frame"].shape), jnp.uint8)
    flags = jnp.zeros((rows, n))
    replay = Replay(frames, flags.astype(jnp.int32), flags, flags, frames)
    return EnvState(state, seen, replay, params)

  def interact(
    self,
    env_state: EnvState,
    params: Any,
    data: Any,
    key: jax.Array,
    step: jax.Array,
  ) -> tuple[EnvState, Any]:
    del data
    n = self.environments
    greedy_key, move_key, row_key, column_key = jax.random.split(
      jax.random.fold_in(key, step), 4
    )
    # Exploration falls to 5 % over the first fifth of training.
    epsilon = jnp.maximum(0.05, 1 - step / (0.2 * self.steps))
    action = self.act(params, env_state.seen, greedy_key, epsilon)
    seen, state, reward, over, _, last = self.move(
      env_state.env, action, move_key
    )
    rows = env_state.replay.reward.shape[0]
    now = step % rows
    fresh = Replay(
      env_state.seen.astype(jnp.uint8),
      action,
      reward,
      over.astype(jnp.float32),
      last.astype(jnp.uint8),
    )
    replay = jax.tree.map(
      lambda ring, x: ring.at[now].set(x.astype(ring.dtype)),
      env_state.replay,
      fresh,
    )
    filled = jnp.minimum(step + 1, rows)
    row = jax.random.randint(row_key, (self.batch_size,), 0, filled)
    column = jax.random.randint(column_key, (self.batch_size,), 0, n)
    picked = jax.tree.map(lambda ring: ring[row, column], replay)
    target = jax.lax.cond(
      step % self.refresh == 0, lambda: params, lambda: env_state.target
    )
    best = self.apply(target, picked.after.astype(jnp.float32)).max(-1)
    goal = picked.reward + self.discount * (1 - picked.done) * best
    batch = (picked.seen.astype(jnp.float32), picked.action, goal)
    return EnvState(state, seen, replay, target), batch

  def move(self, state: Any, action: jax.Array, key: jax.Array) -> tuple:
    """Return (frames, state, reward, lost, cut short, last frames).

    gymnax resets a finished environment by itself: `frames` is then the next
    episode's first, and the finished episode's last one comes last.
    """
    env, params = self.game_and_params()
    keys = jax.random.split(key, len(action))
    seen, state, reward, over, cut, info = jax.vmap(
      lambda k, s, a: env.step(k, s, a, params)
    )(keys, state, action)
    return seen, state, reward, over, cut, info["final_observation"]

  def act(
    self, params: Any, seen: jax.Array, key: jax.Array, epsilon: Any
  ) -> jax.Array:
    """Choose the best action, or any with probability epsilon."""
    values = self.apply(params, seen)
    coin_key, any_key = jax.random.split(key)
    some = jax.random.randint(any_key, (len(seen),), 0, values.shape[-1])
    coin = jax.random.uniform(coin_key, (len(seen),)) < epsilon
    return jnp.where(coin, some, values.argmax(-1))

  def loss(self, params: Any, batch: Any, key: jax.Array) -> jax.Array:
    del key
    seen, action, goal = batch
    values = jnp.take_along_axis(self.apply(params, seen), action[:, None], 1)
    return optax.huber_loss(values[:, 0], goal).mean()

  def evaluate(self, params: Any, data: Any) -> dict[str, jax.Array]:
    """Return the mean return of episodes played with 1 % exploration."""
    del data
    env, env_params = self.game_and_params()
    key = jax.random.key(1)
    keys = jax.random.split(key, 32)
    seen, state = jax.vmap(lambda k: env.reset(k, env_params))(keys)

    def move(carry, t):
      seen, state, running, total, episodes = carry
      move_key = jax.random.fold_in(key, t)
      action = self.act(params, seen, move_key, 0.01)
      step_key = jax.random.fold_in(move_key, 1)
      seen, state, reward, over, cut, _ = self.move(state, action, step_key)
      done = over | cut
      running = running + reward
      total = total + (running * done).sum()
      episodes = episodes + done.sum()
      return (seen, state, running * (1 - done), total, episodes), None

    zero = jnp.zeros([])
    carry = (seen, state, jnp.zeros(32), zero, zero)
    (_, _, running, total, episodes), _ = jax.lax.scan(
      move, carry, jnp.arange(1000)
    )
    # Unfinished episodes count as far as they came: dropping them would
    # punish agents that do not lose.
    return {"return": (total + running.sum()) / (episodes + 32)}
