"""How requests have ended is counted in each process that guards any, and added to the store beside them."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any
from weakref import ref
from wsgiref.util import setup_testing_defaults

import pytest

from semel import SINGLE_TENANT
from semel.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.core.commands import AddCounts, Command, ReadCounts
from semel.errors import StoreUnavailable
from semel.functions import once
from semel.stores import AsyncStore, Store, async_store, endings
from semel.stores import store as open_store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.wsgi import IdempotencyMiddleware
from tests.stores.colours import wait_until


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The thread of this test adds after a moment."""
    monkeypatch.setattr(endings, "COUNT_INTERVAL", timedelta(milliseconds=10))
    monkeypatch.setattr(endings, "_thread", endings._Thread())
    yield
    gc.collect()


def app(_environ: Any, start_response: Any) -> list[bytes]:
    start_response("201 Created", [("Content-Type", "text/plain")])
    return [b"done"]


def ask(guarded: Any, key: str) -> bytes:
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ |= {"REQUEST_METHOD": "POST", "HTTP_IDEMPOTENCY_KEY": key}
    return b"".join(guarded(environ, lambda *_: None))


def counted(store: Store) -> dict[str, int]:
    found: Counter[str] = Counter()
    for _, outcome, number in store.perform(ReadCounts(60)).counts:
        found[outcome] += number
    return dict(found)


class TestThreads:
    def test_counted_and_added_at_close(self) -> None:
        """Requests are counted without a sink and without a service, and added when the store is closed."""
        store = MemoryStore()
        guarded = IdempotencyMiddleware(app, store=store, scope=SINGLE_TENANT, work=False)
        for key in ("first", "first", "second"):
            ask(guarded, key)
        assert dict(store.ended) == {"ran": 2, "replayed": 1}
        assert counted(store) == {}
        store.close()
        assert counted(store) == {"ran": 2, "replayed": 1, "added": 1}
        store.close()
        assert counted(store)["added"] == 1, "nothing was counted since"
        ask(guarded, "third")
        store.close()
        assert counted(store) == {"ran": 3, "replayed": 1, "added": 2}

    @pytest.mark.usefixtures("at_once")
    def test_added_beside_the_requests(self) -> None:
        """One request is enough; after it, a minute without requests is counted as one."""
        store = MemoryStore()
        ask(IdempotencyMiddleware(app, store=store, scope=SINGLE_TENANT), "first")
        wait_until(lambda: counted(store).get("added", 0) >= 3)
        assert counted(store)["ran"] == 1

    @pytest.mark.usefixtures("at_once")
    def test_a_store_that_is_no_longer_used(self) -> None:
        """The thread holds no store, and ends with the last of them."""
        store = MemoryStore()
        store.ended["ran"] += 1
        gone = ref(store)
        [thread] = [each for each in threading.enumerate() if each is endings._thread._thread]
        del store
        wait_until(lambda: gc.collect() is not None and gone() is None)
        wait_until(lambda: not thread.is_alive())
        another = MemoryStore()
        another.ended["ran"] += 1
        wait_until(lambda: counted(another).get("ran") == 1)

    @pytest.mark.usefixtures("at_once")
    def test_a_store_that_can_not_be_written(self, caplog: pytest.LogCaptureFixture) -> None:
        """What can't be written is dropped, and said once: no request notices."""
        tries = []

        class Failing(MemoryStore):
            def perform(self, command: Command[Any]) -> Any:
                if isinstance(command, AddCounts):
                    tries.append(command)
                    raise StoreUnavailable("It is away.")
                return super().perform(command)

        store = Failing()
        with caplog.at_level(logging.DEBUG, logger="semel"):
            store.ended["ran"] += 1
            wait_until(lambda: len(tries) >= 3)
            store.close()
        assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
            ("INFO", "How requests end can't be added to the store's counts, and the console lacks it: It is away.")
        ]
        assert dict(store.ended) == {}

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_a_forked_child_counts_its_own(self, tmp_path: Path) -> None:
        """What the parent has counted, the parent adds; the child has a thread of its own when it needs one."""
        url = f"sqlite:///{tmp_path}/semel.db"
        store = open_store(url)
        guarded = IdempotencyMiddleware(app, store=store, scope=SINGLE_TENANT)
        ask(guarded, "first")
        child = os.fork()
        if not child:
            try:
                ask(guarded, "second")
                ask(guarded, "second")
                store.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        store.close()
        assert counted(store) == {"ran": 2, "replayed": 1, "added": 2}

    def test_functions(self) -> None:
        """Calls of a guarded function are counted, too."""
        store = MemoryStore()

        for _ in range(2):
            once("first", print, store=store)
        store.close()
        assert counted(store) == {"ran": 1, "replayed": 1, "added": 1}


class TestLoops:
    async def test_counted_and_added_at_close(self) -> None:
        """A server that tells of its end has added everything; and one that tells of its start has counted since."""
        memory = MemoryStore()

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            for each in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{each}.complete"})

        guarded = AsgiMiddleware(inner, store=AsyncMemoryStore(memory=memory), scope=SINGLE_TENANT)
        messages = iter(["startup", "shutdown"])

        async def receive() -> Any:
            message = next(messages)
            if message == "shutdown":
                guarded.store.ended["ran"] += 1
            return {"type": f"lifespan.{message}"}

        async def send(_: Any) -> None:
            pass

        await guarded({"type": "lifespan"}, receive, send)
        assert counted(memory) == {"ran": 1, "added": 1}

    @pytest.mark.usefixtures("at_once")
    async def test_added_beside_the_requests(self) -> None:
        """On a loop it needs no thread."""
        memory = MemoryStore()
        store = AsyncMemoryStore(memory=memory)
        store.ended["ran"] += 1
        await asyncio.to_thread(wait_until, lambda: counted(memory).get("added", 0) >= 3)
        assert counted(memory)["ran"] == 1
        assert endings._thread._thread is None
        await store.close()
        assert store.ended._timer is None, "a store that is closed is left alone"

    @pytest.mark.usefixtures("at_once")
    async def test_a_store_that_can_not_be_written(self, caplog: pytest.LogCaptureFixture) -> None:
        """What can't be written is said once, whether the store raises or its answer does."""
        tries = []

        class Failing(AsyncMemoryStore):
            def perform(self, command: Command[Any]) -> Any:
                if not isinstance(command, AddCounts):
                    return super().perform(command)
                tries.append(command)
                if len(tries) == 1:
                    raise StoreUnavailable("It is closed.")
                answer = asyncio.get_running_loop().create_future()
                answer.set_exception(StoreUnavailable("It is a replica."))
                return answer

        store = Failing()
        with caplog.at_level(logging.DEBUG, logger="semel"):
            store.ended["ran"] += 1
            await asyncio.to_thread(wait_until, lambda: len(tries) >= 3)
            await store.close()
        assert len(caplog.records) == 1

    async def test_a_store_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It does not keep a server from ending."""
        monkeypatch.setattr(endings, "CLOSE_SECONDS", 0.01)

        class Silent(AsyncMemoryStore):
            def perform(self, command: Command[Any]) -> Any:
                if isinstance(command, AddCounts):
                    return asyncio.get_running_loop().create_future()
                return super().perform(command)

        store = Silent()
        store.ended["ran"] += 1
        await asyncio.wait_for(store.close(), 60)


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
async def test_every_store_adds_at_its_end(kind: str, tmp_path: Path, postgres_url: str, redis_url: str) -> None:
    """Whichever store it is, and for threads and loops alike, what is left is added when it is closed."""
    url = {"sqlite": f"sqlite:///{tmp_path}/semel.db", "postgres": postgres_url, "redis": redis_url}[kind]
    keys: Store = open_store(url)
    keys.migrate()
    before = counted(keys).get("ran", 0)
    on_loop: AsyncStore = async_store(url)
    keys.ended["ran"] += 2
    keys.close()
    on_loop.ended["ran"] += 3
    await on_loop.close()
    assert counted(keys).get("ran", 0) - before == 5
    keys.close()


PROGRAMS = {
    "wsgi": """
        from tests.stores.shared.test_endings import app, ask
        from semel.wsgi import IdempotencyMiddleware
        import semel
        guarded = IdempotencyMiddleware(app, store=URL, scope=semel.SINGLE_TENANT)
        ask(guarded, "first")
    """,
    "flask": """
        import flask, semel
        from semel.flask import Semel, idempotent
        app = flask.Flask("shop")
        Semel(app, store=URL, scope=semel.SINGLE_TENANT)
        @app.post("/pay")
        @idempotent
        def pay():
            return "paid"
        app.test_client().post("/pay", headers={"Idempotency-Key": "first"})
    """,
    "django": """
        import django
        from django.conf import settings
        settings.configure(
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": URL.removeprefix("sqlite:///")}},
            INSTALLED_APPS=["semel.django"],
            MIDDLEWARE=["semel.django.IdempotencyMiddleware"],
            SEMEL={"ALLOW_ANONYMOUS": True},
            ROOT_URLCONF="shop_urls",
            ALLOWED_HOSTS=["*"],
        )
        django.setup()
        import sys, types
        from django.core.handlers.wsgi import WSGIHandler
        from django.http import HttpResponse
        from django.urls import path
        urls = sys.modules["shop_urls"] = types.ModuleType("shop_urls")
        urls.urlpatterns = [path("", lambda request: HttpResponse("paid"))]
        from django.core.management import call_command
        call_command("migrate", verbosity=0)
        from tests.stores.shared.test_endings import ask
        assert ask(WSGIHandler(), "first") == b"paid"
    """,
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_end_of_a_process(kind: str, tmp_path: Path) -> None:
    """A process that ends by itself has added what it counted, whatever the framework."""
    url = f"sqlite:///{tmp_path}/semel.db"
    program = f"URL = {url!r}\n" + dedent(PROGRAMS[kind])
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3], timeout=60)
    with open_store(url) as store:
        assert counted(store)["ran"] == 1
