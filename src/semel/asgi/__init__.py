"""The ASGI entry point: middleware for FastAPI, Starlette, Litestar or any ASGI app, on the server's own event loop.

What is decided, ``flows/serve`` decides.

    app = IdempotencyMiddleware(app, store="postgresql://…", scope=account_of)
"""

from semel.asgi.middleware import IdempotencyMiddleware
from semel.asgi.route import PER_ROUTE, Settled, claim
from semel.guard.request import PRINCIPAL, RequestView

__all__ = ["PER_ROUTE", "PRINCIPAL", "IdempotencyMiddleware", "RequestView", "Settled", "claim"]
