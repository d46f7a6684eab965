"""Names in two languages, from the translation catalogues of a package."""

import struct

from jaxpruner.datasets.archives import (
  DataError,
  read_bounded,
  readable,
  verified,
)
from jaxpruner.datasets.catalogue import SOURCES

_LIMIT = 4 * 1024 * 1024  # bytes of a catalogue
# Languages, countries, and their regions.
_FILES = {
  "iso639-3.mo": (
    "4efba243b7b93e28b34784882dabaf4151cb214edd58627afd83ee21fbab91a2"
  ),
  "iso3166-1.mo": (
    "d31aaea143b639a5db97938f055c3ba82498a950497224d9be3806d6782c3be6"
  ),
  "iso3166-2.mo": (
    "0b7cc99b53a9b19c14826f21fa72c1efdcf00edabff328e0d27346255ec7b328"
  ),
}


def read_mo(raw: bytes) -> dict[str, str]:
  """Return the texts of a gettext catalogue (a `.mo` file).

  Args:
    raw: the content of the file.

  Returns:
    Original -> translation; the empty original, which holds the header, and
    plural forms after the first are left out.

  Raises:
    DataError: it is not a catalogue, or a text lies outside of it.

  Example:
    >>> from struct import pack
    >>> tables = pack("<7I", 0x950412DE, 0, 1, 28, 36, 0, 0)
    >>> tables += pack("<2I", 2, 44) + pack("<2I", 3, 47)
    >>> read_mo(tables + b"no" + bytes(1) + b"non" + bytes(1))
    {'no': 'non'}
  """
  if len(raw) < 28 or struct.unpack("<I", raw[:4])[0] != 0x950412DE:
    raise DataError("not a little-endian gettext catalogue")
  count, here, there = struct.unpack("<3I", raw[8:20])

  def text(table: int, number: int) -> str:
    place = table + 8 * number
    if place + 8 > len(raw):
      raise DataError(f"text {number}: its entry is behind the end")
    size, start = struct.unpack("<2I", raw[place : place + 8])
    if start + size > len(raw):
      raise DataError(f"text {number}: lies behind the end")
    try:
      return raw[start : start + size].split(b"\0")[0].decode()
    except UnicodeDecodeError as error:
      raise DataError(f"text {number}: is not UTF-8") from error

  if count > len(raw) // 8:
    raise DataError(f"{count} texts do not fit into {len(raw)} bytes")
  pairs = {text(here, i): text(there, i) for i in range(count)}
  return {one: other for one, other in pairs.items() if one and other}


def load_names(folder: str | None = None) -> list[tuple[str, str]]:
  """Return names of languages, countries and regions in English and French.

  The catalogues are those of Debian's iso-codes, in the package `pycountry`.

  Args:
    folder: the folder of the `.mo` files; by default that of the package.

  Returns:
    Pairs whose names differ, sorted.

  Raises:
    DataError: the files are missing or damaged.
  """
  where = SOURCES["names"].find(folder)
  found: dict[str, str] = {}
  for name, sha256 in _FILES.items():
    with readable(where / name), (where / name).open("rb") as file:
      raw = read_bounded(file, _LIMIT, name)
    found |= read_mo(verified(raw, sha256, name))
  return sorted((one, other) for one, other in found.items() if one != other)
