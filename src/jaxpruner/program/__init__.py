# pyright: strict
# JAX's own annotations are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Functions as programs: one tracer, one evaluator, one set of tables.

`trace` turns a function into a `Program`, a flat list of operations. `run`
evaluates it with a visitor that may replace any operation. The tables in
`primitives` classify the operations. See README.md in this folder.
"""

from jaxpruner.program.errors import Unsupported, describe, unsupported
from jaxpruner.program.running import Visit, bind, consists_of, run
from jaxpruner.program.tracing import UNROLL, Node, Program, Var, read, trace

__all__ = [
  "UNROLL",
  "Node",
  "Program",
  "Unsupported",
  "Var",
  "Visit",
  "bind",
  "consists_of",
  "describe",
  "read",
  "run",
  "trace",
  "unsupported",
]
