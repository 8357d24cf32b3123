"""A web page about one store: what is in it, what is stuck, and what an operator can do about it. It guards no request.

:class:`Console` is an ASGI app; ``semel.console.wsgi`` and ``semel.console.django`` have the same one for others. It is
off until it is told who may see it: ``auth=``.
"""

from semel.console.access import Token, User
from semel.console.asgi import Console

__all__ = ["Console", "Token", "User"]
