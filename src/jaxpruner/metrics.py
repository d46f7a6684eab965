"""The former path of this module, which now lives in a package."""

import sys

from jaxpruner.inspect import metrics

sys.modules[__name__] = metrics
