"""Inspect a sparse model: summaries, metrics, costs, checks."""
