"""`jaxpruner unpack CHECKPOINT -o OUT`: store it dense again."""

import argparse

from jaxpruner.sparse import pack_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
  pack_command.add_arguments(parser, layout="dense")


run = pack_command.run
