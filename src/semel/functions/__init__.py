"""Any function, once for each key: jobs, tasks, receivers of webhooks, scripts. The guard is the same as for requests;
this package only adapts functions to it.
"""

from semel.errors import FailedBefore
from semel.functions.decorator import idempotent, once
from semel.functions.guards import close
from semel.functions.results import Codec

__all__ = ["Codec", "FailedBefore", "close", "idempotent", "once"]
