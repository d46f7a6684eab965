"""The former path of this module, which now lives in a package."""

import sys

from jaxpruner.algorithms import redistribution

sys.modules[__name__] = redistribution
