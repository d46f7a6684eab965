"""Deprecate names: one warning class, one form of message.

CONTRIBUTING.md says how long a deprecated name stays.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class JaxprunerDeprecationWarning(FutureWarning):
  """Warn that a public name of jaxpruner will be removed.

  A `FutureWarning`, since Python hides a `DeprecationWarning` that is raised
  for code outside `__main__`: users would never see it.

  Example:
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...   warnings.simplefilter("error", JaxprunerDeprecationWarning)
  """


class Moved(NamedTuple):
  """Where a deprecated attribute of a module is found now.

  Attributes:
    get: returns the object; imports it only then.
    since: the version that deprecated the name.
    removed_in: the version that will remove it.
    use: what to write instead, as the user writes it.
  """

  get: Callable[[], Any]
  since: str
  removed_in: str
  use: str


def message(name: str, since: str, removed_in: str, use: str) -> str:
  """Return the text of a deprecation warning.

  Args:
    name: the deprecated name, as the user writes it.
    since: the version that deprecated it.
    removed_in: the version that will remove it.
    use: what to write instead.

  Returns:
    One sentence with the name, both versions and the replacement.

  Example:
    >>> message("jaxpruner.old", "1.1", "2.0", "jaxpruner.new")
    'jaxpruner.old is deprecated since 1.1 and goes in 2.0; use jaxpruner.new'
  """
  return (
    f"{name} is deprecated since {since} and goes in {removed_in}; use {use}"
  )


def deprecated(
  name: str, since: str, removed_in: str, use: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
  """Return a decorator: the function works as before, and warns when called.

  Args:
    name: the deprecated name, as the user writes it.
    since: the version that deprecates it.
    removed_in: the version that will remove it.
    use: what to write instead.

  Returns:
    A decorator for functions, and for the `__init__` of classes.

  Example:
    >>> import warnings
    >>> @deprecated("double", "1.1", "2.0", "twice")
    ... def double(x):
    ...   return 2 * x
    >>> with warnings.catch_warnings(record=True) as caught:
    ...   warnings.simplefilter("always")
    ...   double(3), str(caught[0].message)
    (6, 'double is deprecated since 1.1 and goes in 2.0; use twice')
  """

  def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(fn)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
      warn(message(name, since, removed_in, use))
      return fn(*args, **kwargs)

    return wrapped

  return decorate


def moved_attributes(
  module: str, table: Mapping[str, Moved], frames: int = 3
) -> Callable[[str], Any]:
  """Return a module's `__getattr__` that finds moved names, with a warning.

  Args:
    module: the module's `__name__`.
    table: deprecated name -> where it is now.
    frames: as in `warn`.

  Returns:
    A function from a name to its object. Any other name raises
    `AttributeError`, as a module without `__getattr__` does.

  Example:
    >>> import math, warnings
    >>> get = moved_attributes(
    ...   "shapes", {"tau": Moved(lambda: math.tau, "1.1", "2.0", "math.tau")})
    >>> with warnings.catch_warnings(record=True) as caught:
    ...   warnings.simplefilter("always")
    ...   round(get("tau"), 2), str(caught[0].message)
    (6.28, 'shapes.tau is deprecated since 1.1 and goes in 2.0; use math.tau')
  """

  def get(name: str) -> Any:
    if name not in table:
      raise AttributeError(f"module {module!r} has no attribute {name!r}")
    entry = table[name]
    warn(message(f"{module}.{name}", *entry[1:]), frames)
    return entry.get()

  return get


def warn(text: str, frames: int = 3) -> None:
  """Warn at the line of the user.

  Args:
    text: the message.
    frames: where that line is: 2 is the caller of this function, 3 the caller's
      caller.
  """
  warnings.warn(text, JaxprunerDeprecationWarning, stacklevel=frames)
