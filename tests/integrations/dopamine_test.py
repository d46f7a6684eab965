"""Dopamine: a DQN agent on CartPole, its pruner set in gin."""

import framework
import numpy as np
import pytest
from framework import SPARSITY, STEPS, assert_same, assert_sparse

framework.require("dopamine", "dopamine", "baselines")

import gin
from dopamine.discrete_domains import gym_lib
from dopamine.jax import networks

from jaxpruner.integrations import dopamine

GIN = f"""
SparseDQNAgent.algorithm = "{{}}"  # added
SparseDQNAgent.sparsity = {SPARSITY}  # added
SparseDQNAgent.total_steps = {STEPS}  # added
"""


REPLAY = """
ReplayBuffer.max_capacity = 200
ReplayBuffer.batch_size = 8
create_gym_environment.environment_name = "CartPole"
create_gym_environment.version = "v1"
"""


def make(algorithm):
  gin.clear_config()
  gin.parse_config(REPLAY + GIN.format(algorithm))
  return dopamine.SparseDQNAgent(
    num_actions=2,
    observation_shape=(4, 1),
    observation_dtype=np.float32,
    stack_size=1,
    network=networks.ClassicControlDQNNetwork,
    min_replay_history=20,
    update_period=1,
    target_update_period=10,
    seed=0,
  )


@pytest.mark.parametrize("algorithm", ["magnitude", "rigl"])
def test_an_agent_in_gin_ends_exactly_sparse_and_survives(algorithm, tmp_path):
  agent = make(algorithm)
  environment = gym_lib.create_gym_environment()
  agent.eval_mode = False
  action = agent.begin_episode(environment.reset())
  for _ in range(STEPS + 40):
    observation, reward, terminal, _ = environment.step(action)
    if terminal:
      agent.end_episode(reward)
      action = agent.begin_episode(environment.reset())
    else:
      action = agent.step(reward, observation)
  assert int(agent.optimizer_state.count) >= STEPS
  assert_sparse(
    agent.online_params, agent.optimizer_state, grows=algorithm == "rigl"
  )
  bundle = agent.bundle_and_checkpoint(str(tmp_path), 1)
  again = make(algorithm)
  assert again.unbundle(str(tmp_path), 1, bundle)
  assert_same(again.optimizer_state, agent.optimizer_state)
  assert_same(again.online_params, agent.online_params)
  again._train_step()
  assert_sparse(
    again.online_params, again.optimizer_state, grows=algorithm == "rigl"
  )


def test_algorithms_of_the_forward_pass_are_refused():
  with pytest.raises(ValueError, match="masks the forward pass"):
    make("magnitude_ste")
