"""Tokenizers of the built-in language models."""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence

from jaxpruner.datasets.archives import DataError


def _merge(
  parts: list[str], rank: Mapping[tuple[str, str], float]
) -> list[str]:
  """Join the neighbours of lowest rank until none has one."""
  while len(parts) > 1:
    pairs = list(zip(parts, parts[1:], strict=False))
    best = min(pairs, key=lambda pair: rank.get(pair, float("inf")))
    if best not in rank:
      break
    merged, i = [], 0
    while i < len(parts):
      if i + 1 < len(parts) and (parts[i], parts[i + 1]) == best:
        merged.append(parts[i] + parts[i + 1])
        i += 2
      else:
        merged.append(parts[i])
        i += 1
    parts = merged
  return parts


class ByteBPE:
  """GPT-2's tokenizer: merges of bytes within words; digits stand alone."""

  _WORDS = re.compile(
    r"'(?:[sdmt]|ll|ve|re)|\d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
  )

  def __init__(self, tokens: Sequence[str], merges: Iterable[str]):
    self._ids = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
      raise DataError("tokenizer: a merge is not a pair")
    self._rank = {(a, b): float(i) for i, (a, b) in enumerate(pairs)}
    # Bytes that print stand for themselves, the others for 256, 257, …
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    self._byte = {b: chr(b) for b in plain} | {
      b: chr(256 + i) for i, b in enumerate(others)
    }
    self._memo: dict[str, list[int]] = {}

  def encode(self, text: str) -> list[int]:
    """Return the ids of a text."""
    ids: list[int] = []
    for word in self._WORDS.findall(text):
      if word not in self._memo:
        parts = [self._byte[b] for b in word.encode()]
        unknown = self._ids.get("<|endoftext|>", 0)
        self._memo[word] = [
          self._ids.get(p, unknown) for p in _merge(parts, self._rank)
        ]
      ids += self._memo[word]
    return ids


class ScoredBPE:
  """Llama's tokenizer: joins the neighbours whose union scores highest."""

  def __init__(self, tokens: Sequence[str], scores: Sequence[float]):
    # Single characters come twice: as raw bytes first, as themselves later.
    self._ids = {token: i for i, token in enumerate(tokens)}
    self._score = dict(zip(tokens, scores, strict=True))
    self._memo: dict[str, list[int]] = {}

  @classmethod
  def parse(cls, raw: bytes, vocab: int) -> "ScoredBPE":
    """Parse llama2.c's tokenizer: (score, length, bytes) of each token."""
    tokens, scores, at = [], [], 4
    for _ in range(vocab):
      if at + 8 > len(raw):
        raise DataError("tokenizer: the file is cut short")
      score, length = struct.unpack("<fi", raw[at : at + 8])
      at += 8
      if not 0 <= length <= 256 or at + length > len(raw):
        raise DataError(f"tokenizer: a token of {length} bytes at {at}")
      tokens.append(raw[at : at + length].decode("utf-8", "replace"))
      scores.append(score)
      at += length
    return cls(tokens, scores)

  def encode(self, text: str) -> list[int]:
    """Return the ids of a text, the start token first."""
    ids = [1]
    for word in re.findall(r" ?[^ ]+| ", " " + text):
      if word not in self._memo:
        self._memo[word] = self._word(word)
      ids += self._memo[word]
    return ids

  def _word(self, word: str) -> list[int]:
    parts = list(word)
    while len(parts) > 1:
      unions = [a + b for a, b in zip(parts, parts[1:], strict=False)]
      known = [i for i, u in enumerate(unions) if u in self._score]
      if not known:
        break
      best = max(known, key=lambda i: (self._score[unions[i]], -i))
      parts[best : best + 2] = [unions[best]]
    ids = []
    for part in parts:
      if part in self._ids:
        ids.append(self._ids[part])
      else:  # bytes follow the three special tokens
        ids += [b + 3 for b in part.encode()]
    return ids
