"""Thin bridges to frameworks, one file each, imported on use.

Most frameworks need none: they take `pruner.wrap_optax(tx)` where they take an
Optax optimizer. The documentation's page on integrations lists both kinds.
"""
