"""What `memory://` can do for the tests of an application: steps and atomic mode run, and there is no database."""

from typing import Any

import httpx
import pytest

import semel
import semel.wsgi
from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware
from semel.core.policy import Mode
from semel.errors import ConfigurationError, NoDatabase

KEY = {"Idempotency-Key": "k"}
SAYS = "memory://.*sqlite:///"


def serve(handler: Any, mode: Mode = "guard") -> httpx.Response:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        body = handler(semel.current())
        start_response("201 Created", [])
        return [str(body).encode()]

    guarded = semel.wsgi.IdempotencyMiddleware(
        app, store="memory://", scope=SINGLE_TENANT, policy=Policy.ietf(mode=mode, required=True)
    )
    with httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://test") as client:
        try:
            first = client.post("/", headers=KEY)
            assert client.post("/", headers=KEY).headers["idempotent-replayed"] == "true"
            return first
        finally:
            guarded.guard.leases.close()


def test_phases_that_use_no_connection_run() -> None:
    """A handler with phases can be tested in memory, as long as its functions don't use the connection."""
    given: list[Any] = []

    def make(connection: Any) -> int:
        given.append(connection)
        return 7

    assert serve(lambda operation: operation.phase("made", make)).text == "7"
    assert "memory://" in repr(given[0])


@pytest.mark.parametrize("mode", ["guard", "atomic"])
def test_the_connection_says_that_there_is_none(mode: Mode) -> None:
    """What uses the connection, in a phase or in atomic mode, is told that memory has none, and which store does."""

    def handler(operation: semel.Operation) -> Any:
        if mode == "atomic":
            return operation.connection.execute("SELECT 1")
        return operation.phase("made", lambda connection: connection.execute("SELECT 1"))

    with pytest.raises(NoDatabase, match=SAYS) as raised:
        serve(handler, mode)
    assert isinstance(raised.value, ConfigurationError)


async def test_the_same_on_a_loop() -> None:
    """An async function is told the same, and a plain one runs in a thread."""

    async def use(connection: Any) -> None:
        await connection.execute("SELECT 1")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert await semel.current().phase("plain", semel.in_thread(lambda _: 5)) == 5
        await semel.current().phase("made", use)

    guarded = IdempotencyMiddleware(app, store="memory://", scope=SINGLE_TENANT)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://test") as client:
        with pytest.raises(NoDatabase, match=SAYS):
            await client.post("/", headers=KEY)
