"""The application that ``semel work --app module:name`` finishes operations with: found, started and stopped.

It is served to nobody. Its start is run, because a handler may need what that opens.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import semel.asgi
import semel.wsgi
from semel.errors import ConfigurationError

Middleware = semel.asgi.IdempotencyMiddleware | semel.wsgi.IdempotencyMiddleware

#: Where frameworks and middleware keep the app that they are wrapped around.
_INSIDE = ("app", "wsgi_app", "middleware_stack", "application")
#: More layers than anybody has. One that is wrapped around itself must not be walked for ever.
_MAX_LAYERS = 100


def load(spec: str) -> tuple[Any, Middleware]:
    """Import the app that *spec* names, and find Semel's middleware in it."""
    module, _, name = spec.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigurationError(f"{spec!r} names no app. Write it as module:name, such as shop.main:app.")
    sys.path.insert(0, "")  # As servers do: an app is named from the folder that one is in.
    try:
        app: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in {module, module.partition(".")[0]}:
            raise
        raise ConfigurationError(f"There is no module {module!r} to be imported from this folder.") from error
    for part in name.split("."):
        if not hasattr(app, part):
            raise ConfigurationError(f"{module} has no {name!r}.")
        app = getattr(app, part)
    return app, middleware_of(app)


def middleware_of(app: Any) -> Middleware:
    """Return the middleware of Semel's that is around *app*, or among those around it."""
    layer = app
    for _ in range(_MAX_LAYERS):
        if isinstance(layer, Middleware):
            return layer
        if getattr(layer, "middleware_stack", layer) is None:
            # Starlette builds it for its first request.
            layer.middleware_stack = layer.build_middleware_stack()
        layer = next((getattr(layer, name) for name in _INSIDE if callable(getattr(layer, name, None))), None)
        if layer is None:
            break
    raise ConfigurationError("No IdempotencyMiddleware of Semel's is around this app.")


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[dict[str, Any]]:
    """Run the start of an ASGI *app* before the block, and its end after it; lend what the start left behind."""
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    state: dict[str, Any] = {}
    scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": state}
    running = asyncio.ensure_future(app(scope, events.get, told.put))
    try:
        await _pass(events, told, running, "startup")
        yield state
        await _pass(events, told, running, "shutdown")
    finally:
        running.cancel()
        await asyncio.wait([running])


async def _pass(events: asyncio.Queue[Any], told: asyncio.Queue[Any], running: asyncio.Future[Any], what: str) -> None:
    await events.put({"type": f"lifespan.{what}"})
    answer = asyncio.ensure_future(told.get())
    await asyncio.wait([answer, running], return_when=asyncio.FIRST_COMPLETED)
    if not answer.done():
        # An app may know nothing of this, and say so by raising.
        answer.cancel()
        return
    message = answer.result()
    if message["type"].endswith(".failed"):
        raise ConfigurationError(f"The app could not pass its {what}: {message.get('message') or 'it says no more'}")
