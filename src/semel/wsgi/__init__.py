"""The WSGI door: middleware for Flask, Django or any WSGI app, in the server's own threads.

What is decided, ``flows/serve`` decides.

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="postgresql://…", scope=whose_request)
"""

from semel.wsgi.middleware import IdempotencyMiddleware

__all__ = ["IdempotencyMiddleware"]
