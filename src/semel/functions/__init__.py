"""Any function, once for each key: jobs, tasks, receivers of webhooks, scripts. It is guarded by what guards a request;
here is only how a function asks for it.
"""

from semel.errors import FailedBefore
from semel.functions.decorator import idempotent, once
from semel.functions.guards import close
from semel.functions.results import Codec

__all__ = ["Codec", "FailedBefore", "close", "idempotent", "once"]
