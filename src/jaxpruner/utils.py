"""Summaries of sparsity, under the name they have in the paper's library."""

from jaxpruner.inspect.summary import (
  sparsity_table as sparsity_table,
)
from jaxpruner.inspect.summary import (
  summarize_intersection as summarize_intersection,
)
from jaxpruner.inspect.summary import (
  summarize_sparsity as summarize_sparsity,
)
