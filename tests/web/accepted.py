"""An app behind either entry point that accepts requests to be run later, and its worker: run when the test says so."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

import semel.asgi
import semel.wsgi
from semel import Policy
from semel.core.commands import Browse, Command
from semel.core.record import Record
from semel.flows.finish import FinishReport
from semel.guard.request import Paths, RequestView
from semel.work import AsyncCompleter, Completer
from tests.web.harness import (
    HANG_SECONDS,
    AsgiWorld,
    Request,
    Response,
    Shop,
    WsgiWorld,
    call_asgi,
    call_wsgi,
    plain,
    starlette,
)


class ThreadWorld(WsgiWorld):
    """The WSGI entry point, and whatever else is done in a thread."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self._threads.submit(call, *arguments)


World = AsgiWorld | ThreadWorld
ACCEPT = Policy.ietf(in_progress="accept")


class Office:
    """A shop, its entry point and its worker, on a store of their own."""

    def __init__(self, world: World, policy: Policy = ACCEPT, paths: Paths = None, **settings: Any) -> None:
        self.world = world
        self.shop = Shop()
        self.tenant = uuid4().hex
        app: Any
        if isinstance(world, AsgiWorld):
            app = semel.asgi.IdempotencyMiddleware(
                starlette(self.shop), store=world.store, scope=self.principal, policy=policy, paths=paths, **settings
            )
        else:
            app = semel.wsgi.IdempotencyMiddleware(
                plain(self.shop), store=world.store, scope=self.principal, policy=policy, paths=paths, **settings
            )
        self.app = app

    def principal(self, request: RequestView) -> str | None:
        account = request.headers.get("x-account", "alice")
        return f"{self.tenant}/{account}" if account else None

    def start(
        self,
        target: str = "/pay",
        *,
        method: str = "POST",
        key: str | None = "key-1",
        body: bytes = b'{"amount": 5}',
        mount: str = "",
        **headers: str,
    ) -> "Future[Response]":
        lines = [(name.replace("_", "-"), value.encode()) for name, value in headers.items()]
        if method == "POST":
            lines.append(("Content-Type", b"application/json"))
            if key is not None:
                lines.append(("Idempotency-Key", key.encode()))
        request = Request(method, target, tuple(lines), body if method == "POST" else b"", mount)
        if isinstance(self.world, AsgiWorld):
            return self.world.submit(call_asgi(self.app, request))
        return self.world.submit(call_wsgi, self.app, request)

    def send(self, target: str = "/pay", **request: Any) -> Response:
        return self.start(target, **request).result(HANG_SECONDS)

    def ask(self, where: "str | Response", **request: Any) -> Response:
        """Ask for the state of an operation, at its address or at the one that came with a 202."""
        if isinstance(where, Response):
            where = location(where)
        return self.send(where, method=request.pop("method", "GET"), **request)

    def work(self, **settings: Any) -> FinishReport:
        """Run all that is to be run now, as ``semel work`` does, and come back when it has ended."""
        return self.start_work(**settings).result(HANG_SECONDS)

    def start_work(self, **settings: Any) -> "Future[FinishReport]":
        if isinstance(self.world, AsgiWorld):
            return self.world.submit(AsyncCompleter(self.world.store, self.app.finish, **settings).run_once())
        return self.world.submit(Completer(self.world.store, self.app.finish, **settings).run_once)

    def perform(self, command: Command[Any]) -> Any:
        return self.world.perform(command)

    @property
    def runs(self) -> int:
        return len(self.shop.runs)

    def records(self) -> list[Record]:
        found: tuple[Record, ...] = self.perform(Browse(limit=1000))
        return [record for record in found if record.scope.startswith(self.tenant)]


def location(response: Response) -> str:
    found = response.header("location")
    assert found is not None
    return found


Offices = Callable[..., Office]
