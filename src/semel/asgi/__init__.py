"""The ASGI door: middleware for FastAPI, Starlette, Litestar or any ASGI app, on the server's own event loop.

What is decided, ``flows/serve`` decides.

    app = IdempotencyMiddleware(app, store="postgresql://…", scope=whose_request)
"""

from semel.asgi.middleware import IdempotencyMiddleware
from semel.asgi.route import PER_ROUTE, Settled, claim

__all__ = ["PER_ROUTE", "IdempotencyMiddleware", "Settled", "claim"]
