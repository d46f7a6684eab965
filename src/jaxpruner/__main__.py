"""`python -m jaxpruner`: the same as the command `jaxpruner`."""

from jaxpruner.cli import main

if __name__ == "__main__":
  raise SystemExit(main())
