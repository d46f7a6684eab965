"""Activation sparsity: keep the largest activations, and measure how few.

`top_k` and `threshold` are activation functions like any other, for a layer of
your own. `sparsify` finds the activations of a function it is given, in any
framework, by tracing it.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpruner import mask_calculator, program
from jaxpruner.program import jaxprs
from jaxpruner.sparsity_types import check_sparsity

Array: TypeAlias = jax.Array
# jax.nn functions that keep their name in a traced function. Others, such as
# gelu, dissolve into arithmetic: follow those by `top_k` in the model itself.
NAMES = frozenset(
  "relu relu6 silu swish elu selu celu leaky_relu softplus mish hard_silu "
  "hard_sigmoid hard_tanh squareplus".split()
)


def top_k(x: Array, sparsity: float, axis: int = -1) -> Array:
  """Keep the largest |x| along an axis, zero the fraction `sparsity`.

  Gradients flow through what is kept (Ahmad & Scheinkman, 2019).

  >>> top_k(jnp.array([3.0, -1.0, -4.0, 2.0]), 0.5).tolist()
  [3.0, 0.0, -4.0, 0.0]
  """
  ones = mask_calculator.num_ones(x.shape[axis], check_sparsity(sparsity))
  scores = jax.lax.stop_gradient(jnp.moveaxis(jnp.abs(x), axis, -1))
  rows = mask_calculator.rank(scores.reshape(-1, scores.shape[-1])) < ones
  kept = jnp.moveaxis(rows.reshape(scores.shape), -1, axis)
  return jnp.where(kept, x, 0)


def threshold(x: Array, level: float) -> Array:
  """Zero what is at most `level` in size (Kurtz et al., 2020).

  >>> threshold(jnp.array([3.0, -1.0, -4.0, 2.0]), 2.0).tolist()
  [3.0, 0.0, -4.0, 0.0]
  """
  return jnp.where(jnp.abs(x) > level, x, 0)


def sparsify(
  fn: Callable[..., Any],
  activation: Callable[[Array], Array],
  names: frozenset[str] = NAMES,
) -> Callable[..., Any]:
  """Return `fn` with every activation in it followed by another function.

  The function is traced, and the results of `jax.nn` functions are passed
  through `activation` where they arise: `apply` of Flax and Haiku, a call of
  Equinox or NNX. Not reached: activations inside `scan`, `while`, `cond`
  and `checkpoint`,
  and functions without a name of their own (gelu). A function in which nothing
  is found is refused. Differentiate, jit and vmap the result as you like.

  Args:
    fn: the model, a function of arrays.
    activation: such as `functools.partial(top_k, sparsity=0.9)`.
    names: which functions count as activations; primitives such as "tanh" may
      be added, where the model uses them for nothing else.

  Example:
    >>> model = lambda w, x: jax.nn.relu(x @ w).sum()
    >>> sparse = sparsify(model, functools.partial(top_k, sparsity=0.75))
    >>> float(sparse(jnp.eye(4), jnp.array([[1.0, 2.0, 3.0, 4.0]])))
    4.0
  """

  @jax.jit  # whose name tells `measure` what became of an activation
  def sparsified(x):
    return activation(x)

  @functools.wraps(fn)
  def sparse(*args, **kwargs):
    found = []

    def at_site(name, x):
      found.append(name)
      return sparsified(x)

    out = _interpret(fn, args, kwargs, at_site, names)
    if not found:
      raise ValueError(
        f"sparsify: no activation found in {fn!r}; it looks for "
        f"{', '.join(sorted(names))}: pass other names, or call top_k in the "
        "model"
      )
    return out

  return sparse


def measure(
  fn: Callable[..., Any], *args: Any, names: frozenset[str] = NAMES, **kwargs
) -> dict[str, Array]:
  """Return the share of zeros among the activations of a call, per site.

  Sites are numbered in the order they are computed: `{"0:relu": 0.53, …}`.
  After `sparsify`, what it made of each follows as `sparsified`.
  """
  found: dict[str, Array] = {}

  def note(name, x):
    found[f"{len(found)}:{name}"] = jnp.mean(x == 0, dtype=jnp.float32)
    return x

  _interpret(fn, args, kwargs, note, names | {"sparsified"})
  return found


def _interpret(fn, args, kwargs, at_site, names) -> Any:
  """Evaluate a function, with `at_site(name, x)` after each activation."""
  flat, treedef = jax.tree.flatten((args, kwargs))
  arrays = [i for i, x in enumerate(flat) if isinstance(x, jax.Array | float)]
  shape: list[Any] = []

  def call(*given):
    leaves = list(flat)
    for i, x in zip(arrays, given, strict=True):
      leaves[i] = x
    given_args, given_kwargs = treedef.unflatten(leaves)
    out, structure = jax.tree.flatten(fn(*given_args, **given_kwargs))
    shape.append(structure)
    return out

  def visit(node, values):
    name = _function_name(node.eqn)
    if name not in names and node.name == "jit":
      return program.run(jaxprs.callee(node.eqn), values, visit)
    results = program.bind(node, values)
    return [at_site(name, x) for x in results] if name in names else results

  inputs = [flat[i] for i in arrays]
  out = program.run(jax.make_jaxpr(call)(*inputs), inputs, visit)
  return shape[-1].unflatten(out)


def _function_name(eqn: Any) -> str:
  """Return the name of the function an equation stands for."""
  if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
    inner = jaxprs.opened(jaxprs.callee(eqn))[0].eqns
    if len(inner) == 1:
      return _function_name(inner[0])
  return (
    eqn.params["name"] if eqn.primitive.name == "jit" else eqn.primitive.name
  )
