"""The recipes of the paper's table: exactly sparse after a few steps."""

import importlib
import pathlib

import framework
import jax
import numpy as np
import pytest

import jaxpruner

RECIPES = pathlib.Path(__file__).parents[1] / "examples" / "recipes"


@pytest.fixture
def recipe(monkeypatch):
  """Imports a recipe by name."""
  monkeypatch.syspath_prepend(str(RECIPES))
  return importlib.import_module


def test_every_cell_of_the_table_is_a_configuration(recipe):
  paper = recipe("paper")
  params = {
    "a": {"kernel": np.ones((50, 20))},
    "b": {"kernel": np.ones((20, 5))},
  }
  for row, settings in paper.ROWS.items():
    for column in paper.ALGORITHMS:
      config = paper.pruner_config(row, column)
      pruner = jaxpruner.create_updater_from_config(config)
      if column == "Dense":
        continue
      assert pruner.scheduler.update_end_step < settings.steps
      if column != "Mag-G":  # its ranking decides
        shares = pruner.sparsity_distribution_fn(params)
        assert shares["a"]["kernel"] > 0
  with pytest.raises(ValueError, match="must be one of resnet50"):
    paper.pruner_config("resnet", "rigl")


def test_the_paper_s_numbers(recipe):
  """What section 4 of the paper states."""
  paper = recipe("paper")
  config = paper.pruner_config("emnist", "magnitude")
  assert config["sparsity"] == 0.8
  assert config["dist_type"] == "erk"
  assert config["update_freq"] == 10
  assert config["update_start_step"] == 250
  assert config["update_end_step"] == 750
  assert paper.pruner_config("emnist", "RigL")["update_start_step"] == 1
  assert paper.ROWS["emnist"].steps == 1000
  assert paper.ROWS["resnet50"].distribution == "uniform"
  assert paper.ROWS["vit_b16"].distribution == "erk"
  assert paper.ROWS["vit_b16_long"].steps == 300 * (1_281_167 // 4096)
  assert paper.ROWS["mspacman"].sparsity == 0.98
  # 40 M frames: four frames per agent step, four agent steps per update.
  assert paper.ROWS["mspacman"].steps * 16 == 40_000_000


def tiny(recipe, row):
  nnx = pytest.importorskip("flax.nnx")
  models = recipe("imagenet_models")
  if row == "resnet50":
    return models.ResNet(nnx.Rngs(0), blocks=(1,), width=4, classes=5)
  small = {"image": 16, "patch": 8, "width": 8, "depth": 1, "heads": 2}
  return models.ViT(nnx.Rngs(0), **small, classes=5)


def parts(nnx, done):
  """Parameters and optimizer state as plain trees of arrays."""
  boxed = lambda node: isinstance(node, nnx.Variable)
  plain = lambda v: v.get_value() if boxed(v) else v
  trees = nnx.state(done.model, nnx.Param), done.opt_state
  return [jax.tree.map(plain, tree, is_leaf=boxed) for tree in trees]


# Not all pairs: each takes seconds to compile.
@pytest.mark.parametrize(
  "row, algorithm",
  [
    ("resnet50", "magnitude"),
    ("vit_b16", "rigl"),
    pytest.param("vit_b16", "magnitude_ste", marks=pytest.mark.slow),
  ],
)
def test_a_plain_loop_ends_exactly_sparse(recipe, row, algorithm):
  nnx = pytest.importorskip("flax.nnx")
  loop = recipe("imagenet_nnx")
  rng = np.random.default_rng(0)
  batch = {
    "image": rng.normal(size=(8, 16, 16, 3)).astype(np.float32),
    "label": rng.integers(0, 5, 8),
  }
  model = tiny(recipe, row)
  done = loop.train(row, algorithm, model, iter([batch] * 8), steps=8)
  params, opt_state = parts(nnx, done)
  assert np.isfinite(done.losses).all()
  grows = algorithm == "rigl"
  if row == "resnet50":  # uniform: every leaf by itself
    pairs = framework.masked_leaves(params, opt_state)
    for _, mask in pairs:
      kept = max(1, round(0.2 * mask.size))
      assert abs(int(mask.sum()) - kept) <= 1
    stem = jaxpruner.summarize_sparsity(params)["stem/kernel"]
    assert stem == 0
  else:
    framework.assert_sparse(params, opt_state, 0.8, grows)
  assert int(opt_state.count) == 8
  assert 0 <= loop.accuracy(done.model, [batch]) <= 100


def test_the_models_have_the_papers_sizes(recipe):
  """ResNet-50 has 25.6 million weights, ViT-B/16 86.6 and its hidden layer."""
  nnx = pytest.importorskip("flax.nnx")
  models = recipe("imagenet_models")

  def size(kind):
    made = nnx.eval_shape(lambda: kind(nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(made, nnx.Param))
    return sum(int(np.prod(leaf.shape)) for leaf in leaves)

  assert size(models.ResNet) == 25_557_032
  assert size(models.ViT) == 86_567_656 + 768 * 768 + 768
