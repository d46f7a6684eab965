"""Look at a sparse model: summaries, metrics, costs, checks."""
