"""The tokenizer of a folder of the hub, by the `tokenizers` package."""

import importlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jaxpruner.post_training.models.hub import FileFormatError, named
from jaxpruner.sparse import _shards

_MAX = 200_000_000  # bytes of tokenizer.json


class HubTokenizer:
  """Text to token ids and back, as `tokenizer.json` describes it."""

  def __init__(self, folder: str | os.PathLike):
    path = named(folder) / "tokenizer.json"
    if not path.is_file():
      raise FileFormatError(
        f"{folder}: no tokenizer.json; save the tokenizer into the folder "
        "(tokenizer.save_pretrained)"
      )
    if path.stat().st_size > _MAX:
      raise FileFormatError(f"{path}: more than {_MAX} bytes")
    try:
      package = importlib.import_module("tokenizers")
    except ImportError as e:
      raise ValueError(
        f"{path} needs the package tokenizers: pip install 'jaxpruner[hub]'"
      ) from e
    try:
      self._inner: Any = package.Tokenizer.from_file(
        str(_shards.inside(pathlib.Path(folder), "tokenizer.json"))
      )
    except FileFormatError:
      raise
    except Exception as e:  # the package raises bare exceptions
      raise FileFormatError(f"{path}: {e!s:.300}") from e
    # As in `transformers`: the file may say where others cut and fill texts.
    self._inner.no_truncation()
    self._inner.no_padding()
    self._path = path

  def encode(self, text: str) -> list[int]:
    """Return the ids of a text, with the marks that its model expects."""
    return self._asked(self._inner.encode, text).ids

  def decode(self, ids: list[int]) -> str:
    """Return the text of ids, marks left out."""
    return self._asked(self._inner.decode, ids)

  def _asked(self, function: Callable[[Any], Any], value: Any) -> Any:
    try:
      return function(value)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
      raise
    except BaseException as e:  # a panic of its Rust code is no Exception
      raise FileFormatError(
        f"{self._path}: {type(e).__name__}: {e!s:.300}"
      ) from e
