"""``operation.publish``: the answer, the business row and the message commit together."""

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import semel
from semel import SINGLE_TENANT, Policy
from semel.asgi import IdempotencyMiddleware
from semel.errors import ConfigurationError
from semel.wsgi import IdempotencyMiddleware as WSGIMiddleware
from tests.outbox.conftest import rows

ATOMIC, STEPS = Policy.ietf(mode="atomic"), Policy.ietf()
COUNTS = "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM semel_outbox), (SELECT count(*) FROM semel_keys)"


@pytest.fixture(autouse=True)
def shop(url: str) -> Iterator[None]:
    """A table of orders, in the same database."""
    rows(url, "CREATE TABLE orders (number integer)")
    yield
    if not url.startswith("sqlite"):
        rows(url, "DROP TABLE orders")


def insert(connection: Any) -> Any:
    return connection.execute("INSERT INTO orders VALUES (17)")


async def maybe(result: Any) -> Any:
    return await result if hasattr(result, "__await__") else result


class App:
    """An ASGI app: one order, and the messages of it. It may fail at the end."""

    def __init__(self, *, steps: bool = False, publishes: int = 1) -> None:
        self.steps = steps
        self.publishes = publishes
        self.fails = False
        self.ids: list[str] = []

    async def order(self, connection: Any) -> str:
        await maybe(insert(connection))
        for number in range(self.publishes):
            made = semel.current().publish("order.paid", {"order": 17, "part": number}, key="order-17")
            self.ids.append(await maybe(made))
        if self.fails:
            raise RuntimeError("after all was written")
        return self.ids[-1]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        operation = semel.current()
        if self.steps:
            await operation.phase("order_created", self.order)
        else:
            await self.order(operation.connection)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


async def post(app: App, url: str, policy: Policy, times: int = 1, key: str = "key-1") -> list[int]:
    middleware = IdempotencyMiddleware(app, store=url, scope=SINGLE_TENANT, policy=policy)
    transport = httpx.ASGITransport(middleware, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        answers = [(await client.post("/orders", headers={"Idempotency-Key": key})).status_code for _ in range(times)]
    await middleware.store.close()
    return answers


@pytest.mark.parametrize("steps", [False, True], ids=["atomic", "phase"])
class TestTogether:
    async def test_committed(self, url: str, steps: bool) -> None:
        """One order, one message, one answer; a retry replays the answer and adds nothing."""
        app = App(steps=steps)
        assert await post(app, url, STEPS if steps else ATOMIC, times=3) == [201, 201, 201]
        assert rows(url, COUNTS) == [(1, 1, 1)]
        assert [str(each) for each in rows(url, "SELECT id FROM semel_outbox")] == app.ids
        assert rows(url, "SELECT aggregatetype, aggregateid, type FROM semel_outbox") == [
            ("events", "order-17", "order.paid")
        ]

    async def test_rolled_back(self, url: str, steps: bool) -> None:
        """A handler that fails after it has published leaves neither; the next try makes the same id."""
        app = App(steps=steps)
        app.fails = True
        policy = STEPS if steps else ATOMIC
        assert (await post(app, url, policy))[0] >= 500
        assert rows(url, "SELECT count(*) FROM semel_outbox") == [0]
        app.fails = False
        rows(url, "DELETE FROM semel_keys")
        assert await post(app, url, policy) == [201]
        assert rows(url, "SELECT count(*) FROM orders") == [1]
        assert app.ids[0] == app.ids[1]

    async def test_several(self, url: str, steps: bool) -> None:
        """Messages of one type have ids of their own, by their count, and another operation has others."""
        app = App(steps=steps, publishes=3)
        policy = STEPS if steps else ATOMIC
        await post(app, url, policy)
        await post(app, url, policy, key="key-2")
        assert len(set(app.ids)) == 6
        assert rows(url, "SELECT count(*) FROM semel_outbox") == [6]


async def test_a_key_that_is_used_again(url: str) -> None:
    """After its retention a key is a new operation's. Its message has the same id; one that was sent is sent again."""
    app = App()
    await post(app, url, ATOMIC)
    rows(url, "UPDATE semel_outbox SET state = 'sent', ended_at = created_at")
    rows(url, "DELETE FROM semel_keys")
    await post(app, url, ATOMIC)
    assert rows(url, "SELECT count(*) FROM orders") == [2]
    assert rows(url, "SELECT state FROM semel_outbox") == ["waiting"]


class TestElsewhere:
    async def test_outside_of_a_transaction(self, url: str) -> None:
        """In a guarded handler without a transaction it is refused, in words that say where to call it."""
        errors: list[str] = []

        class Loose(App):
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                with pytest.raises(ConfigurationError) as refused:
                    semel.current().publish("order.paid", {})
                errors.append(str(refused.value))
                await send({"type": "http.response.start", "status": 201, "headers": []})
                await send({"type": "http.response.body", "body": b"{}"})

        assert await post(Loose(), url, STEPS) == [201]
        assert "Call it inside a phase, or in mode=" in errors[0]

    def test_in_a_store_without_an_outbox(self) -> None:
        """In memory there is no transaction to join."""
        errors: list[str] = []

        def phase(connection: Any) -> None:
            with pytest.raises(ConfigurationError) as refused:
                semel.current().publish("order.paid", {})
            errors.append(str(refused.value))

        def app(environ: Any, start_response: Any) -> list[bytes]:
            semel.current().phase("created", phase)
            start_response("201 Created", [])
            return [b"{}"]

        middleware = WSGIMiddleware(app, store="memory://", scope=SINGLE_TENANT, policy=STEPS)
        with httpx.Client(transport=httpx.WSGITransport(middleware), base_url="http://shop") as client:
            assert client.post("/orders", headers={"Idempotency-Key": "k"}).status_code == 201
        assert "has no outbox" in errors[0]


@pytest.mark.parametrize("steps", [False, True], ids=["atomic", "phase"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_not_awaited(url: str, steps: bool) -> None:
    """A handler that forgets to await it commits nothing: neither the order nor an answer goes without its message."""

    class Forgetful(App):
        async def order(self, connection: Any) -> str:
            await maybe(insert(connection))
            semel.current().publish("order.paid", {})
            return ""

    assert (await post(Forgetful(steps=steps), url, STEPS if steps else ATOMIC))[0] >= 500
    assert rows(url, "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM semel_outbox)") == [(0, 0)]
    gc.collect()  # Python warns of it here, and in no other test.


@pytest.mark.parametrize("url", ["postgres_url"], indirect=True)
def test_in_an_operation_of_its_own(url: str) -> None:
    """What is served inside a phase of another operation publishes in its own transaction, not in that one's."""

    def inner(environ: Any, start_response: Any) -> list[bytes]:
        insert(semel.current().connection)
        semel.current().publish("order.paid", {})
        start_response("201 Created", [])
        return [b"{}"]

    inside = WSGIMiddleware(inner, store=url, scope=lambda _: "inner", policy=ATOMIC)

    def created(connection: Any) -> None:
        with httpx.Client(transport=httpx.WSGITransport(inside), base_url="http://shop") as client:
            assert client.post("/o", headers={"Idempotency-Key": "inner"}).status_code == 201
        raise RuntimeError("after the other has committed")

    def outer(environ: Any, start_response: Any) -> list[bytes]:
        semel.current().phase("created", created)
        return []

    outside = WSGIMiddleware(outer, store=url, scope=lambda _: "outer", policy=STEPS)
    with (
        httpx.Client(transport=httpx.WSGITransport(outside), base_url="http://shop") as client,
        pytest.raises(RuntimeError, match="after the other"),
    ):
        client.post("/o", headers={"Idempotency-Key": "outer"})
    inside.store.close()
    outside.store.close()
    assert rows(url, "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM semel_outbox)") == [(1, 1)]


@pytest.mark.parametrize("steps", [False, True], ids=["atomic", "phase"])
def test_in_threads(url: str, steps: bool) -> None:
    """The same without ``await``, in a WSGI app."""
    made: list[str] = []

    def order(connection: Any) -> None:
        insert(connection)
        made.append(semel.current().publish("order.paid", {"order": 17}))

    def app(environ: Any, start_response: Any) -> list[bytes]:
        operation = semel.current()
        if steps:
            operation.phase("created", order)
        else:
            order(operation.connection)
        start_response("201 Created", [])
        return [b"{}"]

    middleware = WSGIMiddleware(app, store=url, scope=SINGLE_TENANT, policy=STEPS if steps else ATOMIC)
    with httpx.Client(transport=httpx.WSGITransport(middleware), base_url="http://shop") as client:
        assert [client.post("/o", headers={"Idempotency-Key": "k"}).status_code for _ in range(2)] == [201, 201]
    middleware.store.close()
    assert rows(url, COUNTS) == [(1, 1, 1)]
    assert len(made) == 1


@pytest.mark.parametrize("url", ["postgres_url"], indirect=True)
async def test_in_a_thread_of_an_async_handler(url: str) -> None:
    """In a thread, a transaction that has to be awaited can't be joined: an error that says where to publish."""
    told: list[str] = []

    class Threaded(App):
        async def order(self, connection: Any) -> str:
            try:
                await asyncio.to_thread(semel.current().publish, "order.paid", {})
            except ConfigurationError as error:
                told.append(str(error))
            return ""

    assert (await post(Threaded(), url, ATOMIC))[0] == 201
    assert "on the event loop" in told[0]
    assert rows(url, "SELECT count(*) FROM semel_outbox") == [0]
