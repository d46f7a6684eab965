"""Dopamine: a DQN agent on CartPole, its pruner set in gin."""

import framework
import numpy as np
import pytest
from framework import SPARSITY, STEPS, assert_same, assert_sparse

framework.require("dopamine", "dopamine", "baselines")

import gin
from dopamine.discrete_domains import gym_lib, run_experiment
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


@framework.each_kind
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


gin.constant("float32", np.float32)
RUNNER = """
JaxDQNAgent.observation_shape = (4, 1)
JaxDQNAgent.observation_dtype = %float32
JaxDQNAgent.stack_size = 1
JaxDQNAgent.network = @networks.ClassicControlDQNNetwork
JaxDQNAgent.min_replay_history = 20
JaxDQNAgent.update_period = 1
JaxDQNAgent.seed = 0
Runner.create_environment_fn = @create_gym_environment
Runner.training_steps = 90
Runner.evaluation_steps = 10
Runner.max_steps_per_episode = 90
"""


@framework.each_kind
def test_dopamines_own_runner_ends_exactly_sparse_and_resumes(
  algorithm, tmp_path
):
  run = lambda iterations: run_experiment.Runner(
    str(tmp_path), dopamine.create_agent, num_iterations=iterations
  )
  gin.clear_config()
  gin.parse_config(REPLAY + RUNNER + GIN.format(algorithm))
  first = run(1)
  first.run_experiment()
  agent = first._agent
  assert int(agent.optimizer_state.count) >= STEPS
  grows = algorithm == "rigl"
  assert_sparse(agent.online_params, agent.optimizer_state, grows=grows)
  second = run(2)
  assert_same(second._agent.optimizer_state, agent.optimizer_state)
  second.run_experiment()
  again = second._agent
  assert int(again.optimizer_state.count) > int(agent.optimizer_state.count)
  assert_sparse(again.online_params, again.optimizer_state, grows=grows)


def test_the_examples_of_its_docstrings_run():
  framework.assert_examples_run("dopamine")


@pytest.mark.parametrize("algorithm", ["magnitude", "rigl"])
def test_the_recipe_of_the_papers_table_ends_exactly_sparse(
  algorithm, tmp_path
):
  pytest.importorskip("ale_py")
  recipe, paper = (
    framework.recipe("mspacman_dopamine"),
    framework.recipe("paper"),
  )
  gin.clear_config()
  gin.parse_config_file(str(recipe.GIN))
  options = gin.query_parameter("SparseDQNAgent.pruner_options")
  row = paper.pruner_config("mspacman", "magnitude")
  assert options == {key: row[key] for key in options}
  assert gin.query_parameter("SparseDQNAgent.sparsity") == row["sparsity"]
  assert (
    gin.query_parameter("SparseDQNAgent.total_steps")
    == paper.ROWS["mspacman"].steps
  )
  gin.clear_config()
  start = 1 if algorithm == "rigl" else 3
  times = f"'update_freq': 2, 'update_start_step': {start}"
  runner = recipe.train(
    str(tmp_path),
    [
      f"SparseDQNAgent.algorithm = '{algorithm}'",
      f"SparseDQNAgent.pruner_options = {{{times}, 'update_end_step': 8}}",
      "JaxDQNAgent.min_replay_history = 40",
      "ReplayBuffer.max_capacity = 200",
      "Runner.num_iterations = 1",
      "Runner.training_steps = 100",
      "Runner.max_steps_per_episode = 100",
    ],
  )
  agent = runner._agent
  assert int(agent.optimizer_state.count) >= 8
  params, state = agent.online_params, agent.optimizer_state
  assert_sparse(params, state, 0.98, grows=algorithm == "rigl")
