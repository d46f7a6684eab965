"""Bridges to frameworks, one file each, imported on use.

Most frameworks need none: they accept `pruner.wrap_optax(tx)` in place of an
Optax optimizer. The documentation's page on integrations lists both kinds.
"""
