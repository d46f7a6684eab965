"""A traced function as a flat list of operations on arrays.

Calls that only wrap a function (`jit`, `checkpoint`, custom derivatives) are
opened and scans of moderate length unrolled, so that an analysis sees plain
operations, layer by layer. Other loops and branches stay single operations.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# Primitive -> the parameter that holds the function it wraps.
_CALLS = {
  "jit": "jaxpr",
  "pjit": "jaxpr",
  "closed_call": "call_jaxpr",
  "core_call": "call_jaxpr",
  "checkpoint": "jaxpr",
  "remat2": "jaxpr",
  "custom_jvp_call": "call_jaxpr",
  "custom_vjp_call": "call_jaxpr",
  "custom_vjp_call_jaxpr": "fun_jaxpr",
}
_UNROLL = 128  # longer scans run over time rather than over layers
_JAX = str(pathlib.Path(jax.__file__).parent)


@dataclasses.dataclass(eq=False, slots=True)
class Var:
  """An array of the program; constants carry their value."""

  shape: tuple[int, ...]
  dtype: Any
  value: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Node:
  """One operation."""

  primitive: Any
  params: dict[str, Any]
  inputs: list[Var]
  outputs: list[Var]
  source: str

  @property
  def name(self) -> str:
    return self.primitive.name

  def __str__(self) -> str:
    shapes = ", ".join(str(list(v.shape)) for v in self.inputs)
    return f"{self.name}({shapes}) at {self.source}"


@dataclasses.dataclass(eq=False, slots=True)
class Program:
  """A function's operations; the first inputs are the parameters' leaves."""

  nodes: list[Node]
  inputs: list[Var]
  outputs: list[Var]
  out_tree: Any

  def signature(self) -> list[Any]:
    """Return what two programs share exactly if they compute the same."""
    number: dict[Var, Any] = {v: i for i, v in enumerate(self.inputs)}

    def spell(v: Var) -> Any:
      if v.value is not None:
        return (v.shape, str(v.dtype), np.asarray(v.value).tobytes())
      return number[v]

    rows: list[Any] = [[(v.shape, str(v.dtype)) for v in self.inputs]]
    for node in self.nodes:
      ins = [spell(v) for v in node.inputs]
      for v in node.outputs:
        number[v] = len(number)
      shapes = [v.shape for v in node.outputs]
      params = sorted(f"{k}={_plain(p)}" for k, p in node.params.items())
      rows.append((node.name, params, ins, shapes))
    return [*rows, [spell(v) for v in self.outputs]]


def _plain(value: Any) -> Any:
  """Spell NumPy's integers like Python's."""
  if type(value) in (tuple, list):
    return tuple(_plain(v) for v in value)
  return int(value) if isinstance(value, np.integer) else value


def trace(fn: Callable[..., Any], *args: Any) -> Program:
  """Trace `fn(*args)`; `args` may be shapes."""
  closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
  inputs = [_var(v.aval) for v in closed.jaxpr.invars]
  nodes: list[Node] = []
  outputs = _inline(closed.jaxpr, closed.consts, inputs, nodes)
  return Program(nodes, inputs, outputs, jax.tree.structure(out))


def _var(aval: Any, value: Any = None) -> Var:
  return Var(tuple(aval.shape), aval.dtype, value)


def _inline(
  jaxpr: Any, consts: Sequence[Any], args: list[Var], nodes: list[Node]
) -> list[Var]:
  env: dict[Any, Var] = dict(zip(jaxpr.invars, args, strict=True))
  for v, value in zip(jaxpr.constvars, consts, strict=True):
    env[v] = _var(v.aval, value)

  def read(atom: Any) -> Var:
    if hasattr(atom, "val"):
      return _var(atom.aval, np.asarray(atom.val, atom.aval.dtype))
    return env[atom]

  for eqn in jaxpr.eqns:
    inputs = [read(atom) for atom in eqn.invars]
    callee = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
    inner = getattr(callee, "jaxpr", callee)
    if inner is not None and len(inner.invars) == len(inputs):
      outputs = _inline(inner, getattr(callee, "consts", ()), inputs, nodes)
    elif eqn.primitive.name == "scan" and 0 < eqn.params["length"] <= _UNROLL:
      outputs = _unroll(eqn, inputs, nodes)
    else:
      outputs = [_var(v.aval) for v in eqn.outvars]
      nodes.append(
        Node(eqn.primitive, dict(eqn.params), inputs, outputs, _source(eqn))
      )
    env.update(zip(eqn.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _call(
  fn: Callable[..., Any], args: list[Var], nodes: list[Node]
) -> list[Var]:
  """Append the operations of a function of ours."""
  closed = jax.make_jaxpr(fn)(
    *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in args)
  )
  return _inline(closed.jaxpr, closed.consts, args, nodes)


def _unroll(eqn: Any, inputs: list[Var], nodes: list[Node]) -> list[Var]:
  """Write a scan out, one step after the other."""
  params = eqn.params
  body, length = params["jaxpr"], params["length"]
  if "ft_in" in params:  # JAX 0.12 and later
    first, second, _ = map(len, params["ft_in"].unpack())
  else:
    first, second = params["num_consts"], params["num_carry"]
  closed = getattr(body, "consts", ())
  body = getattr(body, "jaxpr", body)
  consts, rest = inputs[:first], inputs[first:]
  carry, xs = rest[:second], rest[second:]
  steps: dict[int, list[Var]] = {}
  order = range(length)
  for i in reversed(order) if params["reverse"] else order:
    items = [
      _call(lambda x, i=i: jax.lax.index_in_dim(x, i, 0, False), [x], nodes)[0]
      for x in xs
    ]
    outs = _inline(body, closed, [*consts, *carry, *items], nodes)
    carry, steps[i] = outs[:second], outs[second:]
  columns = zip(*(steps[i] for i in order), strict=True)
  ys = [
    _call(lambda *y: jax.numpy.stack(y), list(column), nodes)[0]
    for column in columns
  ]
  return [*carry, *ys]


def _source(eqn: Any) -> str:
  """Return the module path (name stack) and the user's line."""
  scope = str(eqn.source_info.name_stack)
  frames = getattr(eqn.source_info.traceback, "frames", ())
  for frame in frames:
    if not frame.file_name.startswith(_JAX) and "/flax/" not in frame.file_name:
      line = f"{pathlib.Path(frame.file_name).name}:{frame.line_num}"
      return f"{scope} ({line})" if scope else line
  return scope or "an unknown line"
