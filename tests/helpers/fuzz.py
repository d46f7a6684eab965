"""Damage inputs, by bytes and by structure, the same way for the same seed."""

import copy
import json
import struct

# Values that readers get wrong: limits, signs, other types, deep and wide ones.
ODD = (
  0, 1, -1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**400, 1.5, 1e308,
  float("nan"), float("inf"), True, False, None, "", "x", "\ud800", "\0",
  "../x", "F32", "BOOL", [], {}, [[]], [0], [2**61, 8], [-1], ["x"], {"a": 1},
)  # fmt: skip
WORDS = [struct.pack("<Q", v) for v in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1)]


def damage_bytes(rng, content, others=()):
  """Return the content with one to four random edits."""
  content = bytearray(content)
  for _ in range(rng.choice((1, 1, 1, 2, 4))):
    edit = rng.randrange(8)
    at = rng.randrange(len(content) + 1)
    if edit == 0:
      content = content[:at]
    elif edit == 1 and at < len(content):
      content[at] ^= 1 << rng.randrange(8)
    elif edit == 2 and at < len(content):
      content[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif edit == 3:
      content[at : at + 8] = rng.choice(WORDS)
    elif edit == 4:
      del content[at : at + rng.choice((1, 2, 8, 64))]
    elif edit == 5:
      content[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
    elif edit == 6:
      stop = at + rng.choice((1, 8, 64))
      content[at:at] = content[at:stop]
    elif others:
      other = rng.choice(others)
      content[at:] = other[rng.randrange(len(other) + 1) :]
  return bytes(content)


def odd(rng):
  return copy.deepcopy(rng.choice(ODD))


def places(tree, found=None):
  """Return every (container, key) of a JSON value."""
  found = [] if found is None else found
  pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
  for key, value in pairs:
    found.append((tree, key))
    if isinstance(value, dict | list):
      places(value, found)
  return found


def damage_tree(rng, tree):
  """Return a JSON value with one to three nodes replaced, gone or copied."""
  tree = json.loads(json.dumps(tree))
  for _ in range(rng.choice((1, 1, 2, 3))):
    spots = places(tree)
    if not spots:
      return odd(rng)
    container, key = rng.choice(spots)
    edit = rng.randrange(5)
    if edit == 0:
      del container[key]
    elif edit == 1:
      other, name = rng.choice(spots)
      if name in other if isinstance(other, dict) else name < len(other):
        container[key] = json.loads(json.dumps(other[name]))
    elif edit == 2 and isinstance(container, dict):
      container[str(rng.choice(ODD))] = container[key]
    elif isinstance(container[key], int) and rng.random() < 0.5:
      container[key] += rng.choice((-8, -1, 1, 8))
    else:
      container[key] = odd(rng)
  return tree


def damage_json(rng, text):
  """Damage JSON by its structure, or else its bytes."""
  if rng.random() < 0.2:
    return damage_bytes(rng, text)
  return json.dumps(damage_tree(rng, json.loads(text))).encode()
