"""One guarded call of the application's, from its flow's first command to its last, in both colours. Which call it is,
and what comes of it, is for the doors to say: a view of a framework's, a job, a plain function.
"""

from semel.exchange.loops import AsyncExchange, AsyncGuard, AsyncHands
from semel.exchange.threads import Exchange, Guard, Hands, Performs

__all__ = ["AsyncExchange", "AsyncGuard", "AsyncHands", "Exchange", "Guard", "Hands", "Performs"]
