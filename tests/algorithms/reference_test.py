"""Every registered algorithm against its paper, step by step.

The references are in `tests/helpers/papers.py`. Masks must be equal, and what
the loss sees must agree to rounding. That is what a training can observe: where
a straight-through method keeps its dense weights is its own affair.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import papers
import pytest

import jaxpruner

STRAIGHT_THROUGH = (
  "magnitude_ste random_ste saliency_ste sr_ste movement soft_movement str "
  "top_kast s_ste"
).split()


def loss(params, targets):
  return sum(
    jnp.sum(papers.CURVES[k] * (params[k] - targets[k]) ** 2) / 2
    for k in papers.SHAPES
  )


def network(params, x):
  """For SynFlow: the two leaves as linear layers."""
  return x @ params["in"] @ params["out"]


def make(name, options):
  config = {"algorithm": name, **options}
  if name != "no_prune":
    config |= {"sparsity": papers.SPARSITY, "dist_type": "uniform"}
    config |= {"rng_seed": 0}
  pruner = jaxpruner.create_updater_from_config(config)
  return pruner.bind(loss, papers.TARGETS[0], network, jnp.ones((1, 4)))


def optimizer(name):
  if name == "fisher":
    return optax.adam(0.05)
  momentum = None if name in STRAIGHT_THROUGH else 0.5
  rate = 0.05 if name == "powerpropagation" else papers.RATE
  return optax.sgd(rate, momentum=momentum)


def train(name, options):
  """Yield masks and seen parameters, as `papers` does."""
  pruner = make(name, options)
  tx = pruner.wrap_optax(optimizer(name))

  @jax.jit
  def step(params, state, targets):
    seen = lambda p: pruner.pre_forward_update(p, state)
    grad = jax.grad(lambda p: loss(seen(p), targets))
    updates, state = tx.update(grad(params), state, params, grad_fn=grad)
    params = optax.apply_updates(params, updates)
    return params, state, pruner.pre_forward_update(params, state)

  params = jax.tree.map(jnp.asarray, papers.WEIGHTS)
  state = jax.jit(tx.init)(params)
  params = pruner.post_gradient_update(params, state)
  yield state.masks, pruner.pre_forward_update(params, state)
  for targets in papers.TARGETS:
    params, state, seen = step(params, state, targets)
    yield state.masks, seen


@pytest.mark.parametrize("name", jaxpruner.all_algorithm_names())
def test_an_algorithm_trains_as_its_paper_says(name):
  assert name in papers.PAPERS, f"write a reference for {name!r}"
  written, options = papers.PAPERS[name]
  shapes = jax.tree.map(jnp.asarray, papers.WEIGHTS)
  draws = lambda salt: jax.tree.map(
    np.asarray, make(name, options).random_scores(shapes, None, salt)
  )
  changed, last = 0, None
  pairs = zip(train(name, options), written(draws), strict=True)
  for t, ((masks, seen), (mask, wanted)) in enumerate(pairs):
    for k in papers.SHAPES:
      if mask:
        where = f"{name}: mask of {k} after {t} steps"
        np.testing.assert_array_equal(masks[k], mask[k], where)
      np.testing.assert_allclose(seen[k], wanted[k], 1e-4, 1e-5)
    changed += (
      bool(mask)
      and last is not None
      and any((mask[k] != last[k]).any() for k in papers.SHAPES)
    )
    last = {k: np.copy(v) for k, v in mask.items()}
  moves = jaxpruner.algorithm_category(name)
  if moves.when == "during" and name not in (
    "no_prune",
    "decaying_mask",
    "admm",
  ):
    assert changed >= 2, "the masks must change for the test to say something"


def test_every_algorithm_is_on_the_page_of_papers():
  page = pathlib.Path(__file__).parents[2] / "docs" / "papers.md"
  rows = [
    [cell.strip() for cell in line.split(" | ")]
    for line in page.read_text().splitlines()
    if line.startswith("| `")
  ]
  found = {row[0].strip("|` "): row[1:] for row in rows}
  assert list(found) == list(jaxpruner.all_algorithm_names())
  for name, (cls, paper, formula) in found.items():
    assert cls == f"`{jaxpruner.algorithm_class(name).__name__}`"
    assert paper == (jaxpruner.algorithm_category(name).paper or "–")
    assert len(formula) > 20
  assert test_an_algorithm_trains_as_its_paper_says.__name__ in page.read_text()
