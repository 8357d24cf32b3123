"""A real server, killed between its ORM write and its answer: a retry makes one row, and one row stays."""

import os
import signal
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import COMMANDS, Backstage, seen
from tests.web.test_processes import HELD, is_decided, pay_until

pytestmark = pytest.mark.slow

APPS = ("fastapi", "litestar")


@pytest.mark.parametrize("app", APPS)
def test_killed_between_the_row_and_the_answer(
    app: str, migrated_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In atomic mode a process killed after its INSERT leaves no row and no record; the retry writes the only row."""
    command = ("uvicorn", f"tests.web.fastapi.served:{app}_app", "--port", "{port}", "--log-level", "warning")
    monkeypatch.setitem(COMMANDS, app, command)
    store = "postgresql+asyncpg" + migrated_postgres_url[migrated_postgres_url.index(":") :]
    backstage = Backstage(tmp_path, store)
    with psycopg.connect(migrated_postgres_url, autocommit=True) as database:
        database.execute("CREATE TABLE payments (amount INTEGER)")
        try:
            doomed, heir = backstage.serve(app), backstage.serve(app)
            lost = doomed.start_paying()
            wait_until(lambda: len(backstage.effects) == 1)
            os.kill(backstage.effects[0].pid, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                lost.result(HANG_SECONDS)
            backstage.let_go()
            # The database may take a moment to notice that its client is gone.
            answer = pay_until(heir, is_decided)
            assert seen(answer) == (201, False)
            assert seen(heir.pay(body=HELD)) == (201, True)
        finally:
            backstage.close()
        assert database.execute("SELECT amount FROM payments").fetchall() == [(5,)]
