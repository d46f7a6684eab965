"""`jaxpruner data`: which data sets are here, and how to get the others."""

import argparse

from jaxpruner import datasets
from jaxpruner.post_training.models import zoo as models


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Declare the options."""
  parser.add_argument(
    "--data",
    metavar="DIR",
    help=f"look here only (default: $JAXPRUNER_DATA or {datasets.home()}, then "
    "where packages put their files)",
  )
  parser.add_argument(
    "--verify",
    action="store_true",
    help="also read each set in full and check its SHA-256 sums",
  )


_LOADERS = {
  "fashion-mnist": datasets.load_fashion,
  "cifar-10": datasets.load_cifar10,
  "sotu": datasets.load_speeches,
  "names": datasets.load_names,
  "enwik8": datasets.load_enwik8,
  "imdb": datasets.load_imdb,
}


def run(args: argparse.Namespace) -> int:
  """Print the state of each data set; return 1 if one is damaged."""
  status = 0
  for name, source in (datasets.SOURCES | models.SOURCES).items():
    try:
      where = source.find(None if name == "digits" else args.data)
      state = "present"
      if args.verify and name in _LOADERS:
        _LOADERS[name](args.data)
        state = "verified"
      elif args.verify and name in models.MODELS:
        models.load(name, args.data)
        state = "verified"
    except datasets.DataError as error:
      if "not found" in str(error) or "is missing" in str(error):
        print(f"missing   {name:14} {source.what} (for {source.tasks})")
        print(f"{'':10}get it: {source.command}")
      else:
        print(f"damaged   {name:14} {error}")
        status = 1
      continue
    print(f"{state:9} {name:14} {source.what} (for {source.tasks}): {where}")
  return status
