"""Choose between two formulations by where the program will run.

Whether arrays are sharded is unknown while a function is traced under an
`Auto` mesh: the partitioner decides later. It is known when the program is
lowered for its devices, so the choice is made there, by a primitive.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax import Array
from jax.extend import core
from jax.interpreters import batching, mlir

from jaxpruner.engine.leaves import manual_axes

_choice_p = core.Primitive("jaxpruner_choice")
_choice_p.multiple_results = True


def _is_sharded(context) -> bool:
  """Whether the lowered program is split over devices by the partitioner."""
  manual = getattr(context, "manual_axes", None)
  if manual is not None:
    return set(manual) != set(context.mesh.axis_names)
  return getattr(context, "num_devices", 2) > 1


def _lower(ctx, *args, local, sharded, treedef, shapes):
  del shapes
  split = _is_sharded(ctx.module_context.axis_context)
  fun = sharded if split else local
  run = lambda *flat: fun(*treedef.unflatten(flat))
  return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _batch(args, dims, *, local, sharded, treedef, shapes):
  (size,) = {
    x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None
  }
  axes = treedef.unflatten(dims)
  out = _choice_p.bind(
    *args,
    local=jax.vmap(local, axes),
    sharded=jax.vmap(sharded, axes),
    treedef=treedef,
    shapes=tuple(((size, *shape), dtype) for shape, dtype in shapes),
  )
  return out, [0] * len(out)


@functools.lru_cache(1024)
def _jitted(fun):
  return jax.jit(lambda *args: fun(*args))


def _evaluate(*args, local, sharded, treedef, shapes):
  del shapes
  split = any(len(x.sharding.device_set) > 1 for x in args)
  return _jitted(sharded if split else local)(*treedef.unflatten(args))


_choice_p.def_impl(_evaluate)
_choice_p.def_abstract_eval(
  lambda *_, shapes, **__: [
    jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes
  ]
)
mlir.register_lowering(_choice_p, _lower)
batching.primitive_batchers[_choice_p] = _batch


def dispatch_on_sharding(
  local: Callable[..., list[Array]],
  sharded: Callable[..., list[Array]],
  shapes: Any,
  *args: Any,
) -> list[Array]:
  """Return `local(*args)`, or `sharded(*args)` where arrays are sharded.

  Args:
    local: for a program that runs on one device, or inside `shard_map`;
      hashable, so that it is compiled once.
    sharded: the same function, in operations that the partitioner splits
      without gathering.
    shapes: `jax.ShapeDtypeStruct`s of the results, a list.
    *args: pytrees of arrays.
  """
  flat, treedef = jax.tree.flatten(args)
  if any(map(manual_axes, flat)):
    return local(*args)
  specs = [jax.typeof(x).sharding.spec for x in flat]
  if any(axis is not None for spec in specs for axis in spec):
    return sharded(*args)
  return _choice_p.bind(
    *flat,
    local=local,
    sharded=sharded,
    treedef=treedef,
    shapes=tuple((s.shape, s.dtype) for s in shapes),
  )
