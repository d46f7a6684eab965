# pyright: strict, reportUnknownMemberType=false
"""A traced function as a flat list of operations on arrays.

Calls (`jit`, `checkpoint`, custom derivatives) are replaced by the operations
inside them, and scans of up to `UNROLL` iterations are unrolled, so that an
analysis sees plain operations, layer by layer. Other loops and branches stay
single operations.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np

from jaxpruner.program import jaxprs

UNROLL = 128  # longer scans usually run over time, not over layers
_JAX = str(pathlib.Path(jax.__file__).parent)


@dataclasses.dataclass(eq=False, slots=True)
class Var:
  """An array of a program.

  Attributes:
    shape: its shape.
    dtype: its dtype.
    value: the value of a constant, else None.

  Example:
    >>> Var((2,), np.dtype("float32"), [1, 2]).array.tolist()
    [1.0, 2.0]
  """

  shape: tuple[int, ...]
  dtype: Any
  value: Any = None

  @property
  def array(self) -> "np.ndarray[Any, Any]":
    """The value of a constant, as a NumPy array."""
    return np.asarray(self.value, self.dtype)


@dataclasses.dataclass(eq=False, slots=True)
class Node:
  """One operation of a program.

  Attributes:
    eqn: the equation of the jaxpr.
    inputs: the variables that it reads.
    outputs: the variables that it computes.

  Example:
    >>> import jax.numpy as jnp
    >>> node = trace(lambda x: x.sum(), jnp.ones(3)).nodes[0]
    >>> node.name, node.params["axes"], node.outputs[0].shape
    ('reduce_sum', (0,), ())
  """

  eqn: Any
  inputs: list[Var]
  outputs: list[Var]

  @property
  def name(self) -> str:
    return self.eqn.primitive.name

  @property
  def params(self) -> dict[str, Any]:
    return self.eqn.params

  @property
  def source(self) -> str:
    """The module path (JAX's name stack) and the user's line."""
    scope = str(self.eqn.source_info.name_stack)
    for frame in getattr(self.eqn.source_info.traceback, "frames", ()):
      file = frame.file_name
      if not file.startswith(_JAX) and "/flax/" not in file:
        line = f"{pathlib.Path(file).name}:{frame.line_num}"
        return f"{scope} ({line})" if scope else line
    return scope or "an unknown line"

  def __str__(self) -> str:
    shapes = ", ".join(str(list(v.shape)) for v in self.inputs)
    return f"{self.name}({shapes}) at {self.source}"


@dataclasses.dataclass(eq=False, slots=True)
class Program:
  """A function's operations, in an order in which they can run.

  Attributes:
    nodes: the operations.
    inputs: the variables of the flattened arguments.
    outputs: the variables of the flattened result.
    out_tree: the structure of the result; None for parts of a function.

  Example:
    >>> import jax.numpy as jnp
    >>> program = trace(lambda x: (jnp.sin(x), jnp.cos(x)), jnp.ones(3))
    >>> [node.name for node in program.slice(program.outputs[1:]).nodes]
    ['cos']
  """

  nodes: list[Node]
  inputs: list[Var]
  outputs: list[Var]
  out_tree: Any = None

  def slice(self, outputs: Sequence[Var]) -> "Program":
    """Return the operations that these variables depend on."""
    needed = set(outputs)
    nodes: list[Node] = []
    for node in reversed(self.nodes):
      if not needed.isdisjoint(node.outputs):
        needed.update(node.inputs)
        nodes.append(node)
    return Program(nodes[::-1], self.inputs, list(outputs))

  def users(self) -> dict[Var, list[Node]]:
    """Return the operations that read each variable."""
    found: dict[Var, list[Node]] = {}
    for node in self.nodes:
      for v in node.inputs:
        found.setdefault(v, []).append(node)
    return found

  def makers(self) -> dict[Var, Node]:
    """Return the operation that computes each variable."""
    return {v: node for node in self.nodes for v in node.outputs}

  def signature(self) -> list[Any]:
    """Return a description; if two are equal, the programs compute the same."""
    number: dict[Var, Any] = {v: i for i, v in enumerate(self.inputs)}

    def spell(v: Var) -> Any:
      if v.value is not None:
        return (v.shape, str(v.dtype), v.array.tobytes())
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
  """Return NumPy integers as Python integers."""
  if type(value) in (tuple, list):
    return tuple(_plain(v) for v in value)
  is_numpy = isinstance(value, np.integer)
  return int(cast("int", value)) if is_numpy else value


def trace(
  fn: Callable[..., Any],
  *args: Any,
  open_calls: bool = True,
  unroll: int = UNROLL,
) -> Program:
  """Trace `fn(*args)` without running it.

  Args:
    fn: any function that JAX can trace.
    *args: trees of arrays or of `jax.ShapeDtypeStruct`.
    open_calls: whether to replace calls (`jit`, `checkpoint`, custom
      derivatives) by the operations inside them.
    unroll: the length up to which scans are unrolled; 0 unrolls none.

  Returns:
    The program; its inputs are the leaves of `args`.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> program = trace(jax.jit(lambda x: jnp.sin(x) + 1), jnp.ones(3))
    >>> [node.name for node in program.nodes]
    ['sin', 'add']
  """
  closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
  program = read(closed, open_calls=open_calls, unroll=unroll)
  program.out_tree = jax.tree.structure(out)
  return program


def read(
  jaxpr: Any,
  *,
  constants: Sequence[Any] | None = None,
  open_calls: bool = False,
  unroll: int = 0,
) -> Program:
  """Return a jaxpr, such as the body of a loop, as a program.

  Args:
    jaxpr: a jaxpr, with or without constants.
    constants: values that replace its constants.
    open_calls: as in `trace`; by default calls stay single operations.
    unroll: as in `trace`; by default no scan is unrolled.

  Returns:
    The program, without `out_tree`.

  Example:
    >>> import jax.numpy as jnp
    >>> [node.name for node in read(jax.make_jaxpr(jnp.sin)(1.0)).nodes]
    ['sin']
  """
  reader = _Reader(open_calls, unroll, [])
  inputs = [_var(v.aval) for v in jaxprs.opened(jaxpr)[0].invars]
  outputs = reader.inline(jaxpr, inputs, constants)
  return Program(reader.nodes, inputs, outputs)


def _var(aval: Any, value: Any = None) -> Var:
  return Var(tuple(aval.shape), aval.dtype, value)


@dataclasses.dataclass(frozen=True)
class _Reader:
  """Appends the operations of jaxprs to `nodes`."""

  open_calls: bool
  unroll: int
  nodes: list[Node]

  def inline(
    self,
    jaxpr: Any,
    args: list[Var],
    constants: Sequence[Any] | None = None,
  ) -> list[Var]:
    """Append the operations of a jaxpr; return the variables of its results."""
    body, own = jaxprs.opened(jaxpr)
    constants = own if constants is None else constants
    env: dict[Any, Var] = dict(zip(body.invars, args, strict=True))
    for v, value in zip(body.constvars, constants, strict=True):
      env[v] = _var(v.aval, value)

    def lookup(atom: Any) -> Var:
      is_literal = hasattr(atom, "val")  # literals are not always hashable
      return _var(atom.aval, atom.val) if is_literal else env[atom]

    for eqn in body.eqns:
      outputs = self._add(eqn, [lookup(atom) for atom in eqn.invars])
      env.update(zip(eqn.outvars, outputs, strict=True))
    return [lookup(atom) for atom in body.outvars]

  def _add(self, eqn: Any, inputs: list[Var]) -> list[Var]:
    callee = jaxprs.callee(eqn) if self.open_calls else None
    if callee is not None:
      return self.inline(callee, inputs)
    if eqn.primitive.name == "scan" and 0 < eqn.params["length"] <= self.unroll:
      return self._unrolled(jaxprs.scan(eqn), inputs)
    outputs = [_var(v.aval) for v in eqn.outvars]
    self.nodes.append(Node(eqn, inputs, outputs))
    return outputs

  def _call(self, fn: Callable[..., Any], args: Sequence[Var]) -> Var:
    """Append the operations of a Python function with one result."""
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in args]
    return self.inline(jax.make_jaxpr(fn)(*shapes), list(args))[0]

  def _unrolled(self, scan: jaxprs.Scan, inputs: list[Var]) -> list[Var]:
    """Append the operations of all iterations of a scan."""
    start = scan.constants + scan.carried
    constants, xs = inputs[: scan.constants], inputs[start:]
    carry = inputs[scan.constants : start]
    steps: dict[int, list[Var]] = {}
    order = range(scan.length)
    for i in reversed(order) if scan.reverse else order:
      take = functools.partial(_element, index=i)
      items = [self._call(take, [x]) for x in xs]
      outs = self.inline(scan.body, [*constants, *carry, *items])
      carry, steps[i] = outs[: scan.carried], outs[scan.carried :]
    columns = zip(*(steps[i] for i in order), strict=True)
    return [*carry, *(self._call(_stack, column) for column in columns)]


def _element(stack: jax.Array, index: int) -> jax.Array:
  return jax.lax.index_in_dim(stack, index, 0, keepdims=False)


def _stack(*arrays: jax.Array) -> jax.Array:
  return jax.numpy.stack(arrays)
