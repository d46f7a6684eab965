"""The `jaxpruner` command: a table of subcommands, each imported on use."""

import argparse
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

# name -> (module with `add_arguments(parser)` and `run(args) -> int`, help)
COMMANDS = {
  "compare": ("jaxpruner.compare.command", "compare algorithms fairly"),
  "report": ("jaxpruner.compare.report_command", "rebuild a run's report"),
  "records": (
    "jaxpruner.compare.records_command",
    "publish a run's records, or restore a run",
  ),
  "reproduce": (
    "jaxpruner.compare.reproduce_command",
    "run a published cell again, bit for bit",
  ),
  "fit": ("jaxpruner.compare.fit_command", "fit a law of scale to runs"),
  "data": (
    "jaxpruner.post_training.data_command",
    "list the data sets of the tasks",
  ),
  "oneshot": (
    "jaxpruner.post_training.oneshot_command",
    "prune a pretrained model",
  ),
  "generate": (
    "jaxpruner.post_training.generate_command",
    "write text with a model",
  ),
  "reduce": (
    "jaxpruner.post_training.reduce_command",
    "remove experts or layers of a model",
  ),
  "gguf": (
    "jaxpruner.post_training.gguf_command",
    "write a model for llama.cpp",
  ),
  "inspect": (
    "jaxpruner.sparse.inspect_command",
    "show the sparsity of a checkpoint",
  ),
  "prune": ("jaxpruner.sparse.prune_command", "prune a checkpoint"),
  "pack": ("jaxpruner.sparse.pack_command", "store zeros as bits"),
  "unpack": ("jaxpruner.sparse.unpack_command", "store it dense again"),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Run one subcommand and return its exit code.

  Args:
    argv: the arguments after `jaxpruner`; by default those of the process.

  Returns:
    0 on success.

  Example:
    >>> sorted(COMMANDS)[:3]
    ['compare', 'data', 'fit']
    >>> main(["data", "--help"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    SystemExit: 0
  """
  argv = list(sys.argv[1:] if argv is None else argv)
  parser = argparse.ArgumentParser(prog="jaxpruner", description=__doc__)
  subparsers = parser.add_subparsers(dest="command", required=True)
  for name, (module, text) in COMMANDS.items():
    sub = subparsers.add_parser(name, help=text)
    # Import only the chosen subcommand: `--help` needs no JAX, and an extra
    # that one command needs and that is not installed breaks no other.
    if name in argv[:1]:
      implementation = importlib.import_module(module)
      implementation.add_arguments(sub)
      sub.set_defaults(run=implementation.run)
  args = parser.parse_args(argv)
  try:
    code = args.run(args)
    if sys.stdout is not None:  # closed before the start, as by `>&-`
      sys.stdout.flush()
  except OSError as error:
    if error.errno == errno.ENOSPC and error.filename is not None:
      print(
        f"jaxpruner: {error.filename}: {error.strerror}; free some space "
        "there, and run the command again",
        file=sys.stderr,
      )
      return 1
    if error.filename is not None or error.errno not in _NO_OUTPUT:
      raise
    # What is still buffered goes nowhere, so that Python's own flush at exit
    # does not raise again.
    if sys.stdout is not None:
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
      return 128 + signal.SIGPIPE
    print(
      f"jaxpruner: {error.strerror}; free some space where the output goes, "
      "and run the command again",
      file=sys.stderr,
    )
    return 1
  return code


# The reader, such as `head`, has seen enough; the disk behind a `>` is full.
_NO_OUTPUT = (errno.EPIPE, errno.ENOSPC)


if __name__ == "__main__":
  raise SystemExit(main())
