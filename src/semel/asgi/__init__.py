"""The ASGI door: middleware for FastAPI, Starlette, Litestar or any ASGI app, on the server's own event loop.

What is decided, ``flows/serve`` decides.

    app = IdempotencyMiddleware(app, store="postgresql://…", scope=whose_request)
"""

from semel.asgi.middleware import IdempotencyMiddleware

__all__ = ["IdempotencyMiddleware"]
