# pyright: strict
"""The parts of a jaxpr's equations, for all supported releases of JAX.

JAX 0.10 has open jaxprs and closed ones (a jaxpr and its constants); since
0.12 every jaxpr holds its constants. JAX 0.10 stores the number of a scan's
constants and carries in `num_consts` and `num_carry`, 0.12 in `ft_in`. The rest
of the library reads equations through this file only; `engine.expression` and
fingerprints read the constants of what they have just traced.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxpruner.program import primitives

# Parameters that hold derivative rules, which are no part of the function.
_RULES = frozenset("bwd fwd_jaxpr_thunk jvp_jaxpr_fun jvp_jaxpr_thunk".split())


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """Return the jaxpr without its constants, and the constants."""
  return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def callee(eqn: Any) -> Any:
  """Return the jaxpr that a call evaluates on its operands, else None."""
  parameter = primitives.CALLS.get(eqn.primitive.name)
  jaxpr = None if parameter is None else eqn.params.get(parameter)
  if jaxpr is None or len(opened(jaxpr)[0].invars) != len(eqn.invars):
    return None
  return jaxpr


def bodies(eqn: Any) -> list[Any]:
  """Return all jaxprs inside an equation: branches, bodies, conditions."""
  found: list[Any] = []
  for key, value in eqn.params.items():
    several = type(value) in (tuple, list)
    items = value if several else (value,)
    if key not in _RULES:
      found += [item for item in items if hasattr(opened(item)[0], "eqns")]
  return found


def bind_params(primitive: Any, params: dict[str, Any]) -> tuple[Any, Any]:
  """Return the functions to bind before the operands, and the parameters."""
  found: Any = primitive.get_bind_params(params)
  # JAX 0.10 returns functions to bind apart from the parameters.
  return ((), found) if hasattr(found, "keys") else found


class Scan(NamedTuple):
  """The parts of a scan.

  Its operands are the constants, then the carry, then the arrays to slice.

  Attributes:
    body: the jaxpr of one iteration.
    constants: the number of constants.
    carried: the number of arrays in the carry.
    length: the number of iterations.
    reverse: whether it starts from the end.
    unroll: the parameter of `jax.lax.scan`.
  """

  body: Any
  constants: int
  carried: int
  length: int
  reverse: bool
  unroll: Any


def scan(eqn: Any) -> Scan:
  """Return the parts of a scan's equation."""
  params = eqn.params
  if "ft_in" in params:  # JAX 0.12
    constants, carried, _ = map(len, params["ft_in"].unpack())
  else:
    constants, carried = params["num_consts"], params["num_carry"]
  return Scan(
    params["jaxpr"],
    constants,
    carried,
    params["length"],
    params["reverse"],
    params["unroll"],
  )
