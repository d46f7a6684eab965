"""The former path of this module, which now lives in a package."""

import sys

from jaxpruner.sparsity_distributions import allocation

sys.modules[__name__] = allocation
