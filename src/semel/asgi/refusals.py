"""FastAPI's own refusals, noted where they are raised: on the way to a handler, by a dependency or for the parameters.

The guard around the app may see nothing of them: a ``BaseHTTPMiddleware`` in between runs the app in a task of its own,
and an exception that was answered there does not come out of it. What becomes of the answer is not decided here.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from semel.asgi.protocol import OPERATION, ASGIApp, ASGIScope, ASGISend, Receive, is_before_handler

#: Where FastAPI puts its exception handlers around each route, by the name that its module knows it by.
_MODULE, _NAME = "fastapi.routing", "wrap_app_handling_exceptions"
#: On what was put there.
_MARK = "semel_sees"


def see_refusals() -> None:
    """Have FastAPI's routes, where there are any in this process, note what they refuse. Asked again, do nothing."""
    routing: Any = sys.modules.get(_MODULE)
    wrap = getattr(routing, _NAME, None)
    if wrap is None or hasattr(wrap, _MARK):
        return

    @wraps(wrap)
    def with_an_eye(app: ASGIApp, connection: Any) -> ASGIApp:
        async def seen(scope: ASGIScope, receive: Receive, send: ASGISend) -> None:
            try:
                await app(scope, receive, send)
            except Exception as error:
                operation = scope.get(OPERATION)
                if operation is not None and is_before_handler(error):
                    operation.is_refused = True
                raise

        wrapped: ASGIApp = wrap(seen, connection)
        return wrapped

    setattr(with_an_eye, _MARK, True)
    setattr(routing, _NAME, with_an_eye)
