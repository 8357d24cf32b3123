"""Real servers, as people run them: each serves, replays, lets one of many run, and ends when it is told to."""

import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import as_completed
from pathlib import Path

import pytest

from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import COMMANDS, Backstage, code, seen

AT_ONCE = 5
LOGGED = "RuntimeError: as the client asked"

#: What the app sends in answer to "large"; the app itself can't be imported here, it reads the servers' environment.
LARGE = [bytes([number]) * 100_000 for number in range(30)]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def backstage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backstage]:
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "migrated_postgres_url")
    backstage = Backstage(tmp_path, url)
    yield backstage
    backstage.close()


@pytest.fixture
def on_sqlite(sqlite_url: str, tmp_path: Path) -> Iterator[Backstage]:
    backstage = Backstage(tmp_path, sqlite_url)
    yield backstage
    backstage.close()


@pytest.mark.slow
def test_gevent_and_preload(on_sqlite: Backstage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gevent replaces what Semel has imported already, a guarded request is an error that says what to write;
    so written, it is served.
    """
    late = [*COMMANDS["gunicorn gevent"], "--preload"]
    monkeypatch.setitem(COMMANDS, "too late", late)
    monkeypatch.setitem(COMMANDS, "first", [*late, "--config", "python:tests.web.patched"])
    server = on_sqlite.serve("too late")
    assert [server.pay().status_code for _ in range(2)] == [500, 500]
    assert "from gevent import monkey; monkey.patch_all()" in server.log.read_text()
    assert server.is_up()
    assert on_sqlite.effects == []
    assert [seen(on_sqlite.serve("first").pay()) for _ in range(2)] == [(201, False), (201, True)]


@pytest.mark.parametrize("kind", COMMANDS)
def test_server(backstage: Backstage, kind: str) -> None:
    """A request runs once, its retry is a replay, of many at once one runs, and SIGTERM ends it all in good order."""
    server = backstage.serve(kind)

    first, again, other = server.pay(), server.pay(), server.pay(body='{"amount": 6}')
    assert seen(first) == (201, False), server.log.read_text()
    assert seen(again) == (201, True)
    assert again.content == first.content
    assert (other.status_code, code(other)) == (422, "idempotency-key-reused")
    assert len(backstage.effects) == 1

    rivals = [server.start_paying("key-2") for _ in range(AT_ONCE)]
    wait_until(lambda: len(backstage.effects) == 2)
    ended = as_completed(rivals, HANG_SECONDS)
    busy = [next(ended).result() for _ in range(AT_ONCE - 1)]
    assert Counter(code(response) for response in busy) == {"idempotency-key-in-progress": AT_ONCE - 1}
    backstage.let_go()
    assert seen(next(ended).result()) == (201, False)
    assert seen(server.pay("key-2", '{"hold": true}')) == (201, True)
    assert [effect.key for effect in backstage.effects] == ["key-1", "key-2"]

    assert server.stop() in {0, -signal.SIGTERM}
    assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
def test_large_and_failed_answers(on_sqlite: Backstage, kind: str) -> None:
    """A server passes a large answer on complete, and an error's answer too, before it logs the error."""
    server = on_sqlite.serve(kind)

    large = server.pay("key-1", '{"large": true}')
    assert (large.status_code, large.content) == (201, b"".join(LARGE))
    assert code(server.pay("key-1", '{"large": true}')) == "response-not-replayable"
    assert "Traceback" not in server.log.read_text()

    failed, again = (server.pay("key-2", '{"raise": true}') for _ in range(2))
    assert (failed.status_code, code(failed)) == (500, "operation-failed")
    assert (seen(again), again.content) == ((500, True), failed.content)
    assert len(on_sqlite.effects) == 2
    # The answer comes first, and a server that is stopped in between has not logged it yet.
    wait_until(lambda: LOGGED in server.log.read_text())
    assert server.stop() in {0, -signal.SIGTERM}
    assert server.log.read_text().count(LOGGED) == 1
