"""The former path of this module, which now lives in a package."""

import sys

from jaxpruner.algorithms import transforms

sys.modules[__name__] = transforms
