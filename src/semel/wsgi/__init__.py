"""The WSGI entry point: middleware for Flask, Django or any WSGI app, in the server's own threads.

It makes no decisions: ``flows/serve`` does.

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="postgresql://…", scope=account_of)
"""

from semel.guard.request import PRINCIPAL, RequestView
from semel.wsgi.middleware import IdempotencyMiddleware

__all__ = ["PRINCIPAL", "IdempotencyMiddleware", "RequestView"]
