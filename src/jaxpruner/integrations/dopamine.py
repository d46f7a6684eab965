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
  """A base class that wraps the optimizer of any JAX agent of Dopamine.

  List it before the agent's class, and set `self.pruner` before calling the
  agent's `__init__`.

  Attributes:
    pruner: the updater that wraps the optimizer.

  Example:
    >>> class SparseAgent(SparseNetwork, dqn_agent.JaxDQNAgent):
    ...   pruner = jaxpruner.NoPruning()
    >>> SparseAgent.__mro__[1].__name__
    'SparseNetwork'
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
  """DQN with a sparse network (JaxPruner paper, section 4.4).

  Args:
    num_actions: number of actions of the environment.
    algorithm: name of a registered algorithm.
    sparsity: fraction removed.
    total_steps: number of training updates; the schedule ends by then.
    dist_type: "uniform" or "erk".
    pruner_options: further keys of the configuration.
    **options: options of `JaxDQNAgent`.

  Example:
    >>> gin.bind_parameter("SparseDQNAgent.sparsity", 0.75)
    >>> gin.query_parameter("SparseDQNAgent.sparsity")
    0.75
    >>> gin.clear_config()
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
    super().__init__(num_actions, **options)  # pyright: ignore[reportCallIssue]


def create_agent(session: Any, environment: Any, summary_writer: Any = None):
  """Return the agent for an environment, configured by gin.

  Pass it to Dopamine: `run_experiment.Runner(folder, create_agent)`.

  Args:
    session: unused; Dopamine passes None.
    environment: the environment; its `action_space.n` is the number of actions.
    summary_writer: Dopamine's writer of summaries.

  Returns:
    A `SparseDQNAgent`.

  Example:
    >>> import inspect
    >>> list(inspect.signature(create_agent).parameters)
    ['session', 'environment', 'summary_writer']
  """
  del session
  actions = environment.action_space.n
  return SparseDQNAgent(actions, summary_writer=summary_writer)
