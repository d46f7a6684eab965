"""Allocation: distributions that read the weights, or a loss.

Like all distributions they return a tree of sparsities with an exact total. But
they read the values of arrays: call them once, outside `jit`, and pass the
result to a pruner with `fixed`.

>>> import functools, jax.numpy as jnp, jaxpruner
>>> params = {"a": {"kernel": jnp.eye(4)}, "b": {"kernel": jnp.ones((4, 4))}}
>>> sparsities = lamp(params, 0.5)
>>> pruner = jaxpruner.MagnitudePruning(
...   sparsity_distribution_fn=functools.partial(fixed, sparsities=sparsities))
>>> sparsities["a"]["kernel"], sparsities["b"]["kernel"]
(0.75, 0.25)
"""

from jaxpruner.sparsity_distributions.fixed import fixed as fixed
from jaxpruner.sparsity_distributions.lamp import lamp as lamp
from jaxpruner.sparsity_distributions.lamp import lamp_scores as lamp_scores
from jaxpruner.sparsity_distributions.owl import outlier_ratio as outlier_ratio
from jaxpruner.sparsity_distributions.owl import owl as owl
from jaxpruner.sparsity_distributions.owl import owl_densities as owl_densities
from jaxpruner.sparsity_distributions.sensitivity import (
  sensitivity as sensitivity,
)
