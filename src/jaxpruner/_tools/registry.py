"""Open tables: from names in configuration to classes and functions.

Entries of the library and of users are treated alike: they are found by name,
listed together, and refused if the name is taken.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

from jaxpruner import _tools

T = TypeVar("T")

# Every table of the library, so that tests can restore them all.
TABLES: "list[Registry[Any]]" = []


class Registry(MutableMapping[str, T], Generic[T]):
  """A table from names to entries that users may extend.

  An entry written as `"module:attribute"` is imported on first use, so that a
  table does not slow down the import of the library.

  Args:
    argument: the word before the name in errors, such as `dist_type`.
    door: the public function that adds an entry, named in errors.
    entries: the library's own entries.
    owner: entry -> the class or function whose module and name identify it.

  Attributes:
    argument: as above.
    door: as above.

  Example:
    >>> table = Registry("format", "register_format", {"sqrt": "math:sqrt"})
    >>> table.find("sqrt")(9.0)
    3.0
    >>> table.find("sqr")
    Traceback (most recent call last):
    ValueError: format: 'sqr' is unknown, not registered; did you mean 'sqrt'? \
(register your own with register_format)
  """

  def __init__(
    self,
    argument: str,
    door: str,
    entries: Mapping[str, Any] | None = None,
    owner: Callable[[Any], Any] = lambda entry: entry,
  ):
    self.argument, self.door = argument, door
    self._owner = owner
    self._entries: dict[str, Any] = dict(entries or {})
    TABLES.append(self)

  def __getitem__(self, name: str) -> T:
    entry = self._entries[name]
    if isinstance(entry, str):
      module, _, attribute = entry.partition(":")
      entry = getattr(importlib.import_module(module), attribute)
      self._entries[name] = entry
    return entry

  def __setitem__(self, name: str, entry: T) -> None:
    self._entries[name] = entry

  def __delitem__(self, name: str) -> None:
    del self._entries[name]

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)

  def __contains__(self, name: object) -> bool:
    return isinstance(name, str) and name in self._entries

  def find(self, name: Any) -> T:
    """Return the entry of a name.

    Args:
      name: the name.

    Returns:
      The entry, imported if necessary.

    Raises:
      ValueError: the name is unknown; the message shows the nearest one.
    """
    if name not in self:
      raise ValueError(
        f"{self.argument}: {name!r} is unknown, not registered; "
        f"{_tools.nearest(name, self)} (register your own with {self.door})"
      )
    return self[name]

  def name_of(self, entry: Any) -> str | None:
    """Return the name that an entry is registered under, or None."""
    return next((name for name in self if self[name] is entry), None)

  def register(self, name: str, entry: T) -> None:
    """Add an entry; a name that is taken by another entry is refused.

    A class or function of the same module and qualified name replaces the old
    one: this happens when a module is reloaded or a notebook cell runs again.

    Args:
      name: the name, a non-empty string.
      entry: the class or function.

    Raises:
      ValueError: names the modules of both entries.
    """
    if not isinstance(name, str) or not name:
      raise ValueError(
        f"name={name!r} must be a non-empty string; choose one for {entry!r}"
      )
    if name in self:
      old, new = self._home(self[name]), self._home(entry)
      if old != new:
        raise ValueError(
          f"name={name!r}: the {self.argument} already stands for "
          f"{'.'.join(old)}; choose another for {'.'.join(new)}"
        )
    self[name] = entry

  def _home(self, entry: Any) -> tuple[str, str]:
    owner = self._owner(entry)
    if not hasattr(owner, "__qualname__"):
      owner = type(owner)
    return owner.__module__, owner.__qualname__


@contextlib.contextmanager
def restored() -> Iterator[None]:
  """Undo all registrations of a `with` block at its end."""
  before = [dict(table._entries) for table in TABLES]
  try:
    yield
  finally:
    for table, entries in zip(TABLES, before, strict=False):
      table._entries = entries
