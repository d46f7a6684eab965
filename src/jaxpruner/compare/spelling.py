"""The texts of the command line: lists, algorithms with options, types."""

import re
from collections.abc import Mapping
from typing import Any

import jaxpruner

# Words for a type -> what `parse_sparsity_type` reads.
TYPES = {"unstructured": "", "channels": "channel_-1"}
# Keys of an updater's configuration that the comparison sets by itself.
TAKEN = {
  "algorithm": "--algorithms",
  "sparsity": "--sparsity",
  "dist_type": "--distribution",
  "sparsity_type": "--type",
  "total_steps": "--steps",
}
# Options in braces that are the comparison's own, for any row that trains.
OURS = ("distill", "distill_temperature")


def parsed(text: str) -> int | float | bool | str:
  """Return the value that a text spells: a number, true, false, or itself.

  Args:
    text: what the user typed.

  Returns:
    The value.

  Example:
    >>> parsed("3"), parsed("1e-3"), parsed("true"), parsed("adam")
    (3, 0.001, True, 'adam')
  """
  if text.lower() in ("true", "false"):
    return text.lower() == "true"
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text


def spelled(values: Mapping[str, Any]) -> str:
  """Return options as `a=1,b=x`, sorted by name; `options_of` reads it.

  Args:
    values: option -> number, true, false or text.

  Returns:
    The text; the same for the same options.

  Raises:
    ValueError: a text contains a comma, a brace or an equals sign.

  Example:
    >>> spelled({"width": 64, "rate": 0.1})
    'rate=0.1,width=64'
  """
  parts = []
  for name in sorted(values):
    value = values[name]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if re.search(r"[,{}=]", text):
      raise ValueError(
        f"{name}={text!r}: must not contain a comma, a brace or '='"
      )
    parts.append(f"{name}={text}")
  return ",".join(parts)


def options_of(text: str) -> dict[str, Any]:
  """Return the options in a text such as `a=1,b=x`.

  Args:
    text: the text; "" has no options.

  Returns:
    Option -> value.

  Raises:
    ValueError: a part is not `name=value`, or a name comes twice.

  Example:
    >>> options_of("rate=0.1,width=64")
    {'rate': 0.1, 'width': 64}
  """
  found: dict[str, Any] = {}
  for part in filter(None, text.split(",")):
    name, equals, value = part.partition("=")
    name, value = name.strip(), value.strip()
    if not name or not equals or not value:
      raise ValueError(f"{part!r}: write NAME=VALUE")
    if name in found:
      raise ValueError(f"{name!r} is given twice")
    found[name] = parsed(value)
  return found


def algorithm_of(text: str) -> tuple[str, dict[str, Any]]:
  """Return (name, options) of an algorithm such as `rigl{drop_fraction=0.1}`.

  Args:
    text: a name, with options in braces if wanted.

  Returns:
    The name, and keys of the updater's configuration.

  Raises:
    ValueError: the braces do not match, or an option has an option of the
      command for it.

  Example:
    >>> algorithm_of("rigl{drop_fraction=0.1}")
    ('rigl', {'drop_fraction': 0.1})
  """
  match = re.fullmatch(r"([^{}]+)(?:\{([^{}]*)\})?", text.strip())
  if match is None:
    raise ValueError(
      f"--algorithms {text!r}: write NAME or NAME{{OPTION=VALUE,...}}"
    )
  try:
    options = options_of(match[2] or "")
  except ValueError as error:
    raise ValueError(f"--algorithms {text!r}: {error}") from error
  for key in options:
    if key in TAKEN:
      raise ValueError(
        f"--algorithms {text!r}: {key!r} is the same for all rows; use "
        f"{TAKEN[key]}"
      )
  return match[1].strip(), options


def canonical(text: str) -> str:
  """Return an algorithm with its options sorted and without spaces.

  Args:
    text: as the user typed it.

  Returns:
    The text that names its rows.

  Example:
    >>> canonical("rigl{ grow = random, drop_fraction=.1}")
    'rigl{drop_fraction=0.1,grow=random}'
  """
  name, options = algorithm_of(text)
  return f"{name}{{{spelled(options)}}}" if options else name


def listed(text: str) -> list[str]:
  """Split at commas outside of braces.

  Args:
    text: what the user typed.

  Returns:
    The parts that are not empty.

  Example:
    >>> listed("rigl, rigl{a=1,b=2},set")
    ['rigl', 'rigl{a=1,b=2}', 'set']
  """
  parts, depth, current = [], 0, ""
  for letter in text:
    depth += {"{": 1, "}": -1}.get(letter, 0)
    if letter == "," and depth == 0:
      parts.append(current)
      current = ""
    else:
      current += letter
  found = [part.strip() for part in [*parts, current]]
  return [part for part in found if part]


def types_of(text: str) -> list[str]:
  """Return the sparsity types in a list such as `unstructured,2:4,block_4,4`.

  Args:
    text: what the user typed; types may contain commas themselves.

  Returns:
    The types, each as typed.

  Raises:
    ValueError: a part describes no type.

  Example:
    >>> types_of("unstructured,2:4,block_4,4,channels")
    ['unstructured', '2:4', 'block_4,4', 'channels']
  """
  pieces = [piece.strip() for piece in text.split(",")]
  found = []
  while pieces:
    for end in range(len(pieces), 0, -1):
      candidate = ",".join(pieces[:end])
      if _is_type(candidate):
        break
    else:
      parse_type(pieces[0])  # raises, with the valid spellings
      raise ValueError(f"--type {text!r}: is not understood")
    found.append(candidate)
    pieces = pieces[end:]
  return found


def _is_type(text: str) -> bool:
  try:
    parse_type(text)
  except ValueError:
    return False
  return True


def parse_type(name: str) -> Any:
  """Return the sparsity type that a name describes.

  Args:
    name: "" or "unstructured", "channels" (output channels), or what
      `jaxpruner.parse_sparsity_type` reads.

  Returns:
    The type.

  Raises:
    ValueError: names the valid spellings.

  Example:
    >>> parse_type("channels")
    Channel(axis=-1)
  """
  try:
    return jaxpruner.parse_sparsity_type(
      TYPES.get(name, name) or "unstructured"
    )
  except ValueError as error:
    raise ValueError(
      f"--type {name!r}: {error}; also 'unstructured' and 'channels'"
    ) from error
