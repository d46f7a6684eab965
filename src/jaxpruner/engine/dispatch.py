# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Tell a function whether the program that it becomes a part of is sharded.

Whether arrays are sharded is unknown while a function is traced under an
`Auto` mesh: the partitioner decides later. It is known when the program is
lowered for its devices, so the function is traced there, by a primitive.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.core
from jax import Array
from jax.extend import core
from jax.interpreters import batching, mlir

from jaxpruner.engine.leaves import manual_axes

Run: TypeAlias = Callable[..., list[Array]]

_choice_p: Any = core.Primitive("jaxpruner_choice")
_choice_p.multiple_results = True


def _lower(ctx: Any, *args: Any, run: Run, shapes: Any) -> Any:
  del shapes
  context = ctx.module_context.axis_context
  manual = getattr(context, "manual_axes", None)
  if manual is not None:
    is_sharded = set(manual) != set(context.mesh.axis_names)
  else:
    is_sharded = getattr(context, "num_devices", 2) > 1
  run = functools.partial(run, is_sharded)
  return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _batch(args: Any, dims: Any, *, run: Run, shapes: Any) -> Any:
  pairs = zip(args, dims, strict=True)
  (size,) = {x.shape[dim] for x, dim in pairs if dim is not None}
  each = lambda sharded, *x: jax.vmap(functools.partial(run, sharded), dims)(*x)
  shapes = tuple(shape.update(shape=(size, *shape.shape)) for shape in shapes)
  out = _choice_p.bind(*args, run=each, shapes=shapes)
  return out, [0] * len(out)


def _evaluate(*args: Any, run: Run, shapes: Any) -> list[Array]:
  del shapes
  return run(any(len(x.sharding.device_set) > 1 for x in args), *args)


_choice_p.def_impl(_evaluate)
_choice_p.def_abstract_eval(lambda *_, shapes, **__: list(shapes))
mlir.register_lowering(_choice_p, _lower)
batching.primitive_batchers[_choice_p] = _batch


def tell_if_sharded(run: Run, shapes: list[Any], *args: Any) -> list[Array]:
  """Return `run(is_sharded, *args)`.

  Args:
    run: a function of a bool and of `args` that closes over no arrays. If the
      bool is true, it must use operations that the partitioner splits without
      gathering.
    shapes: (shape, dtype) of each result.
    *args: pytrees of arrays.

  Returns:
    Its results.
  """
  flat, treedef = jax.tree.flatten(args)
  if any(map(manual_axes, flat)):
    # Inside `shard_map`; axes that are not manual may still split an array.
    meshes = [jax.typeof(x).sharding.mesh for x in flat]
    return run(
      any(set(m.manual_axes) != set(m.axis_names) for m in meshes), *args
    )
  if any(jax.typeof(x).sharding.mesh.explicit_axes for x in flat):
    # Shardings are part of the types. Counting leaves where they are is right
    # for replicated ones too.
    return run(True, *args)
  results = tuple(jax.core.ShapedArray(*shape) for shape in shapes)
  on_flat = lambda sharded, *flat: run(sharded, *treedef.unflatten(flat))
  return _choice_p.bind(*flat, run=on_flat, shapes=results)
