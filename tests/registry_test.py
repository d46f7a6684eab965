"""Open tables: look-up, refusal of taken names, entries imported on use."""

import math
import sys

import pytest

from jaxpruner._tools.registry import Registry, restored


def make(name, module, qualname=None):
  return type(
    name, (), {"__module__": module, "__qualname__": qualname or name}
  )


@pytest.fixture
def table():
  return Registry("shape", "register_shape", {"round": make("Round", "ours")})


def test_a_name_leads_to_its_entry_and_back(table):
  square = make("Square", "theirs")
  table.register("square", square)
  assert list(table) == ["round", "square"] and len(table) == 2
  assert table.find("square") is square
  assert table.name_of(square) == "square" and table.name_of(int) is None


def test_an_unknown_name_is_refused_with_the_nearest(table):
  with pytest.raises(ValueError, match=r"shape: 'ruond'.*'round'") as error:
    table.find("ruond")
  assert "register_shape" in str(error.value)
  with pytest.raises(ValueError, match=r"shape: \['round'\]"):
    table.find(["round"])


def test_a_taken_name_is_refused_with_both_modules(table):
  # The class has the same name, and yet is another.
  with pytest.raises(ValueError, match="'round'.*ours.Round.*theirs.Round"):
    table.register("round", make("Round", "theirs"))
  assert table["round"].__module__ == "ours"


def test_the_same_class_defined_again_replaces_the_old(table):
  again = make("Round", "ours")
  table.register("round", again)
  assert table["round"] is again
  table.register("round", again)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_a_word(table, name):
  with pytest.raises(ValueError, match=f"name={name!r}"):
    table.register(name, int)


def test_an_entry_may_be_imported_on_first_use():
  sys.modules.pop("this", None)
  table = Registry("n", "register", {"zen": "this:d", "root": "math:sqrt"})
  assert "zen" in table and list(table) == ["zen", "root"]
  assert table["root"] is math.sqrt and "this" not in sys.modules
  with pytest.raises(ValueError, match="math.sqrt.*math.floor"):
    table.register("root", math.floor)


def test_registrations_can_be_undone(table):
  with restored():
    table.register("square", int)
  assert list(table) == ["round"]
