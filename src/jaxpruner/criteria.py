"""The former path of this module, which now lives in a package."""

import sys

from jaxpruner.algorithms import criteria

sys.modules[__name__] = criteria
