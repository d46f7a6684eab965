"""Names of sparsity types in configuration: `"nm_2,4"`, `"4x4"`, and yours."""

import dataclasses
import json
import re
from typing import Any

from jaxpruner._tools import registry

_HERE = "jaxpruner.sparsity_types"
# The contract of an entry is `SparsityType`.
TYPES: registry.Registry[Any] = registry.Registry(
  "sparsity_type",
  "jaxpruner.register_sparsity_type",
  {
    "unstructured": f"{_HERE}.base:Unstructured",
    "nm": f"{_HERE}.grouped:NByM",
    "block": f"{_HERE}.pooled:Block",
    "channel": f"{_HERE}.pooled:Channel",
    "transposable": f"{_HERE}.transposable:TransposableNByM",
    "diagonal": f"{_HERE}.block_diagonal:BlockDiagonal",
    "diagonals": f"{_HERE}.diagonals:Diagonals",
    "fan_in": f"{_HERE}.grouped:ConstantFanIn",
  },
)
_NUMBER = r"(?:-?\d+(?:\.\d+)?(?:e-?\d+)?|true|false)"
_FIELDS = re.compile(rf"{_NUMBER}(?:,{_NUMBER})*")


def registered_name(cls: type) -> str:
  """Return the name that a class is registered under, or raise."""
  name = TYPES.name_of(cls)
  if name is None:
    raise ValueError(
      f"sparsity_type: {cls.__module__}.{cls.__qualname__} has no name in "
      f"configuration and cannot be written to JSON; call {TYPES.door}"
    )
  return name


def write(name: str, kind: Any) -> str:
  """Return the name followed by all field values: `nm_2,4,-2`."""
  values = [getattr(kind, field.name) for field in dataclasses.fields(kind)]
  if not values:
    return name
  return f"{name}_{','.join(json.dumps(value) for value in values)}"


def read(cls: Any, name: str, spec: str) -> Any:
  """Return the type that `name_value,value` describes, or None."""
  if spec == name:
    values = []
  elif spec.startswith(f"{name}_") and _FIELDS.fullmatch(spec[len(name) + 1 :]):
    values = json.loads(f"[{spec[len(name) + 1 :]}]")
  else:
    return None
  fields = [field for field in dataclasses.fields(cls) if field.init]
  required = [
    field
    for field in fields
    if field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  ]
  if not len(required) <= len(values) <= len(fields):
    return None
  return cls(*values)


def parse(spec: str) -> Any:
  """Return the registered type that a string describes, or None."""
  for cls in TYPES.values():
    found = cls.from_spec(spec)
    if found is not None:
      return found
  return None


def spell(kind: Any) -> str:
  """Return the string that `parse` turns into an equal type, or raise."""
  registered_name(type(kind))
  spec = kind.spec()
  if parse(spec) != kind:
    raise ValueError(
      f"sparsity_type={kind!r} cannot be written to JSON: its spec {spec!r} "
      f"does not give it back; change spec and from_spec of "
      f"{type(kind).__qualname__}"
    )
  return spec
