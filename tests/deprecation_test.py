"""A deprecated name works, and says what to write instead."""

import types
import warnings

import pytest

from jaxpruner._tools import deprecation

WORDS = "old is deprecated since 1.1 and goes in 2.0; use new"


@deprecation.deprecated("old", "1.1", "2.0", "new")
def old(x: int, *, scale: int = 1) -> int:
  """Scale a number."""
  return x * scale


def test_a_deprecated_function_works_and_names_its_replacement():
  with pytest.warns(deprecation.JaxprunerDeprecationWarning) as caught:
    assert old(3, scale=2) == 6
  assert [str(w.message) for w in caught] == [WORDS]


def test_the_warning_points_at_the_line_of_the_user():
  with pytest.warns(deprecation.JaxprunerDeprecationWarning) as caught:
    old(3)
  assert caught[0].filename == __file__


def test_a_deprecated_function_keeps_its_name_and_docstring():
  assert (old.__name__, old.__doc__) == ("old", "Scale a number.")


def test_a_moved_attribute_is_found_with_a_warning():
  module = types.ModuleType("home")
  entry = deprecation.Moved(lambda: 7, "1.1", "2.0", "new")
  module.__getattr__ = deprecation.moved_attributes("home", {"old": entry})  # type: ignore[method-assign]
  with pytest.warns(deprecation.JaxprunerDeprecationWarning) as caught:
    assert module.old == 7
  assert str(caught[0].message) == f"home.{WORDS}"
  assert caught[0].filename == __file__


def test_an_unknown_attribute_is_refused_without_a_warning():
  get = deprecation.moved_attributes("home", {})
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    with pytest.raises(AttributeError, match="'home' has no attribute 'x'"):
      get("x")


def test_deprecations_are_shown_by_default():
  # Python hides DeprecationWarning outside __main__.
  assert issubclass(deprecation.JaxprunerDeprecationWarning, FutureWarning)
