"""Dopamine: a DQN agent whose pruner is set in gin.

```
SparseDQNAgent.algorithm = 'rigl'
SparseDQNAgent.sparsity = 0.9
SparseDQNAgent.total_steps = 1_000_000
```

beside the agent's own configuration, and `Runner(folder, create_agent)`.
"""

from typing import Any

import gin
from dopamine.jax.agents.dqn import dqn_agent

import jaxpruner


class SparseNetwork:
  """Wrap the optimizer of any of Dopamine's JAX agents; put it first.

  `class SparseRainbow(SparseNetwork, JaxRainbowAgent): ...` works alike.
  """

  pruner: Any

  def _build_networks_and_optimizer(self):
    super()._build_networks_and_optimizer()  # pyright: ignore
    self.optimizer: Any = self.pruner.wrap_optax(self.optimizer)
    self.optimizer_state = self.optimizer.init(self.online_params)
    # Sparse trainers act sparsely from the first step on.
    self.online_params: Any = self.pruner.post_gradient_update(
      self.online_params, self.optimizer_state
    )
    self.target_network_params = self.online_params


@gin.configurable
class SparseDQNAgent(SparseNetwork, dqn_agent.JaxDQNAgent):
  """DQN with a sparse network (the paper's section 4.4).

  Args:
    num_actions: of the environment.
    algorithm: name of a registered algorithm.
    sparsity: fraction removed.
    total_steps: number of training updates; they pace the pruner.
    dist_type: "uniform" or "erk".
    pruner_options: any further key of the configuration.
    options: those of `JaxDQNAgent`.
  """

  def __init__(
    self,
    num_actions,
    algorithm="magnitude",
    sparsity=0.9,
    total_steps=1_000_000,
    dist_type="uniform",
    pruner_options=None,
    **options,
  ):
    self.pruner = jaxpruner.create_updater_from_config(
      {
        "algorithm": algorithm,
        "sparsity": sparsity,
        "total_steps": total_steps,
        "dist_type": dist_type,
        **(pruner_options or {}),
      }
    )
    dense = self.pruner.category.start == "dense"
    if not self.pruner.holds_zeros and not dense:
      raise ValueError(
        f"algorithm={algorithm!r} masks the forward pass, which belongs to "
        "Dopamine's loss; choose one that masks the weights"
      )
    super().__init__(num_actions, **options)  # pyright: ignore[reportCallIssue]


def create_agent(session: Any, environment: Any, summary_writer: Any = None):
  """Return the agent, as `run_experiment.Runner(folder, create_agent)` asks."""
  del session
  actions = environment.action_space.n
  return SparseDQNAgent(actions, summary_writer=summary_writer)
