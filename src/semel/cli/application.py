"""The application that ``semel work --app module:name`` finishes operations with: found, started and stopped.

It serves no port. Its lifespan start-up is run, because a handler may need what that opens.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import semel.asgi
import semel.wsgi
from semel.errors import ConfigurationError

Middleware = semel.asgi.IdempotencyMiddleware | semel.wsgi.IdempotencyMiddleware

#: Attributes in which frameworks and middleware keep the app that they wrap.
_INSIDE = ("app", "wsgi_app", "middleware_stack", "application")
#: More layers than any app has. The search must end even if an app is wrapped around itself.
_MAX_LAYERS = 100


def load(spec: str) -> tuple[Any, Middleware]:
    """Import the app that *spec* names, and find Semel's middleware in it."""
    app = imported(spec)
    return app, middleware_of(app)


def imported(spec: str) -> Any:
    """Import the app that *spec* names, or have its factory make it, as ``gunicorn`` and ``flask`` do:
    ``shop:app``, ``shop:create_app()``, ``shop:create_app("test")``, ``shop:create_app``.
    """
    module, _, name = spec.partition(":")
    path, given = _parsed(name)
    if not path or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigurationError(
            f"{spec!r} is not the name of an app. Write it as module:name, such as shop.main:app, or with a function "
            "that makes the app, such as 'shop.main:create_app()'."
        )
    sys.path.insert(0, "")  # As servers do: the module is looked for in the current folder.
    try:
        app: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in {module, module.partition(".")[0]}:
            raise ConfigurationError(f"{module} can't be imported: {error}") from error
        raise ConfigurationError(f"There is no module {module!r} that can be imported from this folder.") from error
    for part in path:
        if not hasattr(app, part):
            raise ConfigurationError(f"{module} has no {'.'.join(path)!r}.")
        app = getattr(app, part)
    if given is None and not _is_factory(spec, app):
        return app
    arguments, named = given or ((), {})
    made = app(*arguments, **named)
    if inspect.iscoroutine(made):
        made.close()
    if not callable(made):
        raise ConfigurationError(f"{spec} made {type(made).__name__}, and that is no app.")
    return made


def _parsed(name: str) -> tuple[list[str], tuple[list[Any], dict[str, Any]] | None]:
    """Return what leads to an app, or to what makes it, and what that is given; None: it is not called."""
    try:
        found: Any = ast.parse(name, mode="eval").body
        given = None
        if isinstance(found, ast.Call):
            named = {str(each.arg): ast.literal_eval(each.value) for each in found.keywords}
            given = [ast.literal_eval(each) for each in found.args], named
            found = found.func
    except (SyntaxError, ValueError):
        return [], None
    path: list[str] = []
    while isinstance(found, ast.Attribute):
        path.insert(0, found.attr)
        found = found.value
    return ([found.id, *path] if isinstance(found, ast.Name) else []), given


def _is_factory(spec: str, app: Any) -> bool:
    """Whether it is a function that makes an app: it can be called with nothing. An app is given two or three things,
    and what takes any number is an app that something is wrapped around.
    """
    if not inspect.isroutine(app) and not isinstance(app, partial):
        return False
    try:
        signature = inspect.signature(app)
    except (TypeError, ValueError):
        return False
    if any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values()):
        return False
    if _takes(signature, 0):
        return True
    if _takes(signature, 2) or _takes(signature, 3):
        return False
    raise ConfigurationError(f"{spec} is no app, and to make one it needs arguments. Write them: '{spec}(\"test\")'.")


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def middleware_of(app: Any) -> Middleware:
    """Return Semel's middleware: *app* itself, or one of the layers inside it."""
    layer = app
    for _ in range(_MAX_LAYERS):
        if isinstance(layer, Middleware):
            return layer
        if getattr(layer, "middleware_stack", layer) is None:
            # Starlette builds its middleware for the first request.
            layer.middleware_stack = layer.build_middleware_stack()
        layer = next((getattr(layer, name) for name in _INSIDE if callable(getattr(layer, name, None))), None)
        if layer is None:
            break
    raise ConfigurationError("This app has no IdempotencyMiddleware of Semel.")


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[dict[str, Any]]:
    """Run the lifespan start-up of an ASGI *app* before the block, its shutdown after it; yield the lifespan state."""
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
        # An app without lifespan support raises here.
        answer.cancel()
        return
    message = answer.result()
    if message["type"].endswith(".failed"):
        raise ConfigurationError(f"The {what} of the app failed: {message.get('message') or 'it gave no reason'}")
