"""Train the agent of `mspacman_dqn.gin` with Dopamine's own runner.

    python examples/recipes/mspacman_dopamine.py FOLDER \\
      --set "SparseDQNAgent.algorithm='magnitude_ste'"

Needs Dopamine and `ale-py`.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import gin
from dopamine.discrete_domains import run_experiment

from jaxpruner.integrations import dopamine

GIN = pathlib.Path(__file__).parent / "mspacman_dqn.gin"


def train(folder: str, bindings: Sequence[str] = ()) -> Any:
  """Run the experiment; return Dopamine's runner with the trained agent.

  Args:
    folder: where checkpoints and logs go.
    bindings: lines of gin that replace those of the file.

  Returns:
    The runner.
  """
  gin.parse_config_files_and_bindings([str(GIN)], list(bindings))
  runner = run_experiment.TrainRunner(folder, dopamine.create_agent)
  runner.run_experiment()
  return runner


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("folder")
  parser.add_argument("--set", action="append", default=[], metavar="BINDING")
  args = parser.parse_args()
  train(args.folder, args.set)


if __name__ == "__main__":
  main()
