"""Optax transformations that prepare a network for pruning."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxpruner import _leaves, sparsity_distributions

PyTree: TypeAlias = Any


def _every_weight(params: PyTree) -> PyTree:
  return sparsity_distributions.uniform(params, 0.0)


def powerpropagation(
  inner: optax.GradientTransformation,
  alpha: float = 2.0,
  leaves: Callable[[PyTree], PyTree] = _every_weight,
) -> optax.GradientTransformationExtraArgs:
  """Train θ instead of w, where `w = θ·|θ|^(alpha-1)` (Schwarz et al., 2021).

  The optimizer `inner` sees θ. Its gradient is `α·|θ|^(α-1)·∂L/∂w`, so large
  weights change faster than small ones. Parameters and updates outside the
  transformation are those of `w`: initial values, checkpoints and the model do
  not change.

  Args:
    inner: the optimizer of θ.
    alpha: the power, above 0; 1 changes nothing.
    leaves: `params -> tree` with `None` for the leaves that are trained
      directly; by default these are biases and norm scales.

  Returns:
    A transformation whose state is that of `inner`.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> from jaxpruner import transforms
    >>> tx = transforms.powerpropagation(optax.sgd(0.5), alpha=2.0)
    >>> w, grads = jnp.array([[4.0, 1.0]]), jnp.array([[0.5, 0.5]])
    >>> updates, state = tx.update(grads, tx.init(w), w)
    >>> updates.tolist()
    [[-3.0, -0.75]]
  """
  inner = optax.with_extra_args_support(inner)

  def mapped(fn, params, *trees):
    chosen = leaves(params)
    return _leaves.map_masks(
      lambda _, p, chosen, *rest: (
        fn(p, *rest) if chosen is not None else (rest[0] if rest else p)
      ),
      params,
      chosen,
      *trees,
    )

  def root(w):
    w = w.astype(jnp.float32)
    return jnp.sign(w) * jnp.abs(w) ** (1 / alpha)

  def slope(w, grad):
    return grad.astype(jnp.float32) * alpha * jnp.abs(root(w)) ** (alpha - 1)

  def step(w, update):
    theta = root(w) + update
    power = jnp.sign(theta) * jnp.abs(theta) ** alpha
    return power - w.astype(jnp.float32)

  def init_fn(params):
    return inner.init(mapped(root, params))

  def update_fn(updates, state, params=None, **extra):
    if params is None:
      raise ValueError(
        "powerpropagation needs params: call tx.update(grads, state, params)"
      )
    updates, state = inner.update(
      mapped(slope, params, updates), state, mapped(root, params), **extra
    )
    return mapped(step, params, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def compression_aware(
  inner: optax.GradientTransformation,
  compress: Callable[[PyTree], PyTree] = lambda params: params,
  rho: float = 0.05,
  normalize: bool = False,
  dense_gradient: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Compute the gradient at `C(w + rho·∇L(w))`, where C compresses.

  This is CrAM (Peste et al., 2022). `dense_gradient` adds `∇L(w)`, which is
  CrAM+. With the default `compress` and with `normalize` it is SAM (Foret et
  al., 2021). `update` takes the gradient function as an extra argument and
  calls it once: `tx.update(grads, state, params, grad_fn=jax.grad(loss))`,
  where `grads` is the gradient at `params`.

  Args:
    inner: the optimizer that receives the gradient.
    compress: `params -> params`, the compression C.
    rho: length of the ascent step.
    normalize: divide the ascent step by the norm of the gradient.
    dense_gradient: add the gradient at `params`.

  Returns:
    A transformation whose state is that of `inner`.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxpruner import transforms
    >>> grad_fn = jax.grad(lambda w: 0.5 * jnp.sum(w**2))
    >>> tx = transforms.compression_aware(optax.sgd(1.0), jnp.round, rho=0.5)
    >>> w = jnp.array([1.0, 2.0])  # round(1.5 * w) is [2, 3]
    >>> tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)[0].tolist()
    [-2.0, -3.0]
  """
  inner = optax.with_extra_args_support(inner)

  def update_fn(updates, state, params=None, *, grad_fn=None, **extra):
    if params is None or grad_fn is None:
      raise ValueError(
        "compression_aware takes a second gradient: call tx.update(grads, "
        "state, params, grad_fn=jax.grad(loss)), with a function of params"
      )
    length = rho
    if normalize:
      norm = optax.tree.norm(updates)
      length = rho / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)
    ascended = jax.tree.map(
      lambda p, g: (p + length * g).astype(p.dtype), params, updates
    )
    grads = grad_fn(compress(ascended))
    if dense_gradient:
      grads = jax.tree.map(jnp.add, grads, updates)
    return inner.update(grads, state, params, grad_fn=grad_fn, **extra)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)
