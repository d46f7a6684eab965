"""Values that are kept until others were needed more recently."""

import collections
import hashlib
from collections.abc import Callable
from typing import Any


class Recent:
  """The values that were asked for last, such as compiled functions.

  Args:
    most: how many are kept.

  Example:
    >>> recent = Recent(1)
    >>> [recent.get(key, list) is recent.get(key, list) for key in "ab"]
    [True, True]
    >>> first = recent.get("a", list)
    >>> recent.get("b", list), recent.get("a", list) is first
    ([], False)
  """

  def __init__(self, most: int):
    self._most = most
    self._kept: collections.OrderedDict[bytes, Any] = collections.OrderedDict()

  def get(self, description: Any, make: Callable[[], Any]) -> Any:
    """Return the value of this description; make it if it is not there.

    Args:
      description: what decides the value; two are the same if their `repr` is.
      make: called without arguments for a new value.

    Returns:
      The value.
    """
    key = hashlib.sha256(repr(description).encode()).digest()
    value = self._kept.pop(key) if key in self._kept else make()
    self._kept[key] = value  # the last used last
    if len(self._kept) > self._most:
      self._kept.popitem(last=False)
    return value
