"""Files of kept weights whose description is wrong are refused in words."""

import numpy as np
import pytest

from jaxpruner import kept
from jaxpruner.sparse import files

GOOD = [[4, 4], 1, "", None, None]


def write(path, forms):
  """Return a file whose sums are right, as whoever wrote it can make them."""
  tree = {
    "w": {
      "positions": np.arange(4, dtype=np.int32),
      "values": np.ones(4, "f4"),
    },
    "dense": np.arange(3.0),
  }
  files.save(path, tree, metadata={"jaxpruner.kept": forms})
  return path


def test_what_the_others_damage_is_read(tmp_path):
  found = kept.load(write(tmp_path / "x", {"w": GOOD}))
  np.testing.assert_array_equal(found["w"].todense()[0], np.ones(4))


@pytest.mark.parametrize(
  "form",
  [
    [[4.0, 4.0], 1, "", None, None],
    [[-4, -4], 1, "", None, None],
    [[True, 4], 1, "", None, None],
    [["4", "4"], 1, "", None, None],
    [[2**62, 4], 1, "", None, None],
    [[4, 4] * 40, 1, "", None, None],
    [4, 1, "", None, None],
    [[4, 4], True, "", None, None],
    [[4, 4], 1.0, "", None, None],
    [[4, 4], 1, ["name"], None, None],
    [[4, 4], 1, "", 5, None],
    [[4, 4], 1, "", None, "0"],
    [[4, 4], 1, "", None, False],
    [[4, 4], 1, "", None, None, 7],
    [[4, 4], 1],
    {"shape": [4, 4]},
    "text",
    None,
  ],
)
def test_a_form_of_wrong_types_is_refused(tmp_path, form):
  with pytest.raises(files.FileFormatError, match="tensor 'w'"):
    kept.load(write(tmp_path / "x", {"w": form}))


@pytest.mark.parametrize("name", ["dense", "dense/0", "w/values", "", "-1"])
def test_a_name_of_something_else_is_refused(tmp_path, name):
  with pytest.raises(files.FileFormatError, match="does not hold kept weights"):
    kept.load(write(tmp_path / "x", {name: GOOD}))


@pytest.mark.parametrize("name", ["positions", "values"])
@pytest.mark.parametrize("nest", [lambda x: {"x": x}, lambda x: [x]])
def test_parts_that_are_no_arrays_are_refused(tmp_path, name, nest):
  parts = {"positions": np.arange(4, dtype=np.int32), "values": np.ones(4, "f")}
  parts[name] = nest(parts[name])
  path = tmp_path / "x"
  files.save(path, {"w": parts}, metadata={"jaxpruner.kept": {"w": GOOD}})
  with pytest.raises(files.FileFormatError, match="one array each"):
    kept.load(path)
