"""Activation sparsity: keep the largest activations, and measure the zeros.

`top_k` and `threshold` are activation functions to use inside a model.
`sparsify` adds them to an existing model of any framework: it traces the model
and finds its activations.
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
# gelu, are traced as plain arithmetic: call `top_k` after them in the model.
NAMES = frozenset(
  "relu relu6 silu swish elu selu celu leaky_relu softplus mish hard_silu "
  "hard_sigmoid hard_tanh squareplus".split()
)


def top_k(x: Array, sparsity: float, axis: int = -1) -> Array:
  """Keep the entries with the largest |x| along an axis, set others to zero.

  Gradients flow through the kept entries only (Ahmad & Scheinkman, "How Can We
  Be So Dense?", 2019).

  Args:
    x: the activations.
    sparsity: the fraction of entries to set to zero along the axis.
    axis: the axis; each slice along it keeps the same number of entries.

  Returns:
    An array of the same shape.

  Example:
    >>> top_k(jnp.array([3.0, -1.0, -4.0, 2.0]), 0.5).tolist()
    [3.0, 0.0, -4.0, 0.0]
  """
  ones = mask_calculator.num_ones(x.shape[axis], check_sparsity(sparsity))
  scores = jax.lax.stop_gradient(jnp.moveaxis(jnp.abs(x), axis, -1))
  rows = mask_calculator.rank(scores.reshape(-1, scores.shape[-1])) < ones
  kept = jnp.moveaxis(rows.reshape(scores.shape), -1, axis)
  return jnp.where(kept, x, 0)


def threshold(x: Array, level: float) -> Array:
  """Set entries with |x| of at most `level` to zero.

  Kurtz et al., "Inducing and Exploiting Activation Sparsity for Fast Neural
  Network Inference", 2020.

  Args:
    x: the activations.
    level: the largest absolute value that is set to zero.

  Returns:
    An array of the same shape.

  Example:
    >>> threshold(jnp.array([3.0, -1.0, -4.0, 2.0]), 2.0).tolist()
    [3.0, 0.0, -4.0, 0.0]
  """
  return jnp.where(jnp.abs(x) > level, x, 0)


def sparsify(
  fn: Callable[..., Any],
  activation: Callable[[Array], Array],
  names: frozenset[str] = NAMES,
) -> Callable[..., Any]:
  """Return `fn` with a function applied after every activation in it.

  The model is traced, and the results of `jax.nn` functions in it are passed
  through `activation`. Not reached are activations inside `scan`, `while`,
  `cond` and `checkpoint`, and functions that leave no name in the trace (gelu).
  The result can be differentiated, jitted and vmapped.

  Args:
    fn: the model, a function of arrays: `apply` of Flax or Haiku, a call of an
      Equinox or NNX module.
    activation: the function to apply, such as
      `functools.partial(top_k, sparsity=0.9)`.
    names: the functions that count as activations. Primitives such as "tanh"
      may be added if the model uses them only as activations.

  Returns:
    A function with the arguments of `fn`. It raises `ValueError` if it finds
    no activation.

  Example:
    >>> model = lambda w, x: jax.nn.relu(x @ w).sum()
    >>> sparse = sparsify(model, functools.partial(top_k, sparsity=0.75))
    >>> float(sparse(jnp.eye(4), jnp.array([[1.0, 2.0, 3.0, 4.0]])))
    4.0
  """

  @jax.jit  # `measure` finds it in the trace by its name
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
  fn: Callable[..., Any],
  *args: Any,
  names: frozenset[str] = NAMES,
  **kwargs: Any,
) -> dict[str, Array]:
  """Return the fraction of zeros in the activations of one call.

  Args:
    fn: the model, or the result of `sparsify`.
    *args: the arguments to call it with.
    names: the functions that count as activations, as in `sparsify`.
    **kwargs: keyword arguments to call it with.

  Returns:
    `"number:function"` -> fraction of zeros, numbered in the order of
    computation. In a sparsified model every activation is followed by an entry
    `sparsified`, the fraction after the added function.

  Example:
    >>> model = lambda x: jax.nn.relu(x)
    >>> shares = measure(model, jnp.array([-1.0, 0.0, 1.0, 2.0]))
    >>> {name: float(share) for name, share in shares.items()}
    {'0:relu': 0.5}
  """
  found: dict[str, Array] = {}

  def note(name, x):
    found[f"{len(found)}:{name}"] = jnp.mean(x == 0, dtype=jnp.float32)
    return x

  _interpret(fn, args, kwargs, note, names | {"sparsified"})
  return found


def _interpret(fn, args, kwargs, at_site, names) -> Any:
  """Evaluate a function; pass each activation through `at_site(name, x)`."""
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
  """Return the name of the function or primitive that an equation calls."""
  if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
    inner = jaxprs.opened(jaxprs.callee(eqn))[0].eqns
    if len(inner) == 1:
      return _function_name(inner[0])
  return (
    eqn.params["name"] if eqn.primitive.name == "jit" else eqn.primitive.name
  )
