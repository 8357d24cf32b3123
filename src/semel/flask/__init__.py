"""Semel for Flask: an extension for the app, and a decorator for the views to guard, below the app's own login.

It is not a WSGI middleware: for a whole app, or for another framework, there is ``semel.wsgi``.

    semel = Semel(app, store="postgresql://…", scope=lambda: current_user.get_id())

    @app.post("/payments")
    @login_required
    @idempotent
    def pay(): ...
"""

from semel.flask.decorator import idempotent
from semel.flask.extension import Semel

__all__ = ["Semel", "idempotent"]
