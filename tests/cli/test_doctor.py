"""`semel doctor`, `semel doctor list` and `semel doctor explain`."""

import json
import os
import pty
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psycopg
import pytest

from semel.doctor import CHECKS
from tests.conftest import migrate

Semel = Callable[..., subprocess.CompletedProcess[str]]

APP = """
from semel.wsgi import IdempotencyMiddleware

def application(environ, start_response): ...

app = IdempotencyMiddleware(application, store={url!r}, scope=lambda request: {scope})
"""


@pytest.fixture
def file_url(sqlite_url: str, tmp_path: Path) -> str:
    """A healthy file."""
    tmp_path.chmod(0o700)
    migrate(sqlite_url)
    return sqlite_url


def test_nothing_wrong(semel: Semel, file_url: str) -> None:
    """A healthy store is a line for each check, by subject, and the status 0."""
    done = semel("doctor", file_url)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == file_url
    assert "SQLite" in lines
    assert any(re.fullmatch(r"  ok  sqlite-journal +journal_mode = wal\.", line) for line in lines)
    assert lines[-1] == f"0 errors, 0 warnings, {len(lines) - 6} ok, 0 cannot tell."
    assert not any(line.endswith(" ") for line in lines)
    assert not done.stderr


def test_something_wrong(semel: Semel, file_url: str, tmp_path: Path) -> None:
    """What is wrong comes first and in full: what is wanted, what was seen, why, what to type, what to read."""
    (tmp_path / "semel.db").chmod(0o644)
    done = semel("doctor", file_url)
    assert done.returncode == 1
    shown = "\n".join(done.stdout.splitlines()[:8])
    assert shown.startswith(f"{file_url}\n\nerror sqlite-private\n  want  Other users")
    assert f"  seen  {tmp_path}/semel.db has mode 0644." in shown
    assert f"  type  chmod o-rw {tmp_path}/semel.db*" in shown
    assert "  read  docs/how-to/sqlite.md" in shown


def test_fail_on(semel: Semel, file_url: str, tmp_path: Path) -> None:
    """A warning is no failure unless it is asked for."""
    with closing(sqlite3.connect(tmp_path / "semel.db")) as connection, connection:
        connection.execute("INSERT INTO semel_keys_migrations VALUES ('9999_pre_future', 0)")
    done = semel("doctor", file_url)
    assert done.returncode == 0
    assert "warning sqlite-schema-newer" in done.stdout
    assert semel("doctor", file_url, "--fail-on", "warning").returncode == 1


def test_cannot_tell(semel: Semel, file_url: str, tmp_path: Path) -> None:
    """What can't be told is no failure, and no success either: 2, where it counts."""
    source = APP.format(url=file_url, scope="").replace("lambda request: ", "str")
    (tmp_path / "shop.py").write_text(source)
    done = semel("doctor", "--app", "shop:app")
    assert done.returncode == 2, done.stdout
    assert "?   app-scope-constant" in done.stdout
    assert "cannot tell: The code of str can't be read." in done.stdout


def test_app(semel: Semel, file_url: str, tmp_path: Path) -> None:
    """With an app, the store that it uses is examined, and the app itself."""
    (tmp_path / "shop.py").write_text(APP.format(url=file_url, scope="request.headers['x-account']"))
    done = semel("doctor", "--app", "shop:app")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(file_url)
    assert "app-scope-constant" in done.stdout
    (tmp_path / "shop.py").write_text(APP.format(url=file_url, scope="'everyone'"))
    assert "error app-scope-constant" in semel("doctor", "--app", "shop:app").stdout


FACTORY = """
def create_app(kind="plain", *, also=()):
    print("made", kind, also)
    return app

async def on_a_loop(): return app
def nothing(): return None
def configured(settings): return app
class made:
    app = staticmethod(create_app)
"""


@pytest.mark.parametrize(
    "name, kind",
    [
        ("create_app", "plain ()"),
        ("create_app()", "plain ()"),
        ("create_app('test', also=[1, 2])", "test [1, 2]"),
        ("made.app()", "plain ()"),
    ],
)
def test_factories(semel: Semel, file_url: str, tmp_path: Path, name: str, kind: str) -> None:
    """An app may be made by a function, which is named with or without what it is given."""
    (tmp_path / "shop.py").write_text(APP.format(url=file_url, scope="request.headers['x-account']") + FACTORY)
    done = semel("doctor", "--app", f"shop:{name}", "--only", "app-guard")
    assert (done.returncode, f"made {kind}" in done.stderr) == (0, True), done.stderr
    assert "app-guard  1: IdempotencyMiddleware" in done.stdout


@pytest.mark.parametrize(
    "name, said",
    [
        ("nothing()", "shop:nothing() made NoneType, and that is no app."),
        ("on_a_loop", "shop:on_a_loop made coroutine, and that is no app."),
        ("absent()", "shop has no 'absent'."),
        ("configured", "to make one it needs arguments. Write them: 'shop:configured"),
        ("create_app(os.getcwd())", "is not the name of an app"),
        ("create_app(", "is not the name of an app"),
        ("create_app()()", "is not the name of an app"),
    ],
)
def test_what_makes_no_app(semel: Semel, file_url: str, tmp_path: Path, name: str, said: str) -> None:
    """A function that makes no app is said, and so is what can't be read; nothing else than a call is run."""
    (tmp_path / "shop.py").write_text(APP.format(url=file_url, scope="'a'") + FACTORY)
    done = semel("doctor", "--app", f"shop:{name}")
    assert (done.returncode, said in done.stderr) == (3, True), done.stderr


def test_a_wrapped_app(semel: Semel, file_url: str, tmp_path: Path) -> None:
    """A function around an app is not taken for a factory: it is not called."""
    source = APP.format(url=file_url, scope="'a'") + "\ndef around(*args): raise SystemExit(9)\n"
    (tmp_path / "shop.py").write_text(source)
    done = semel("doctor", "--app", "shop:around", "--only", "app-guard")
    assert "No guard was found around the function around" in done.stdout


def test_json(semel: Semel, file_url: str) -> None:
    """For programs, every finding has the same fields."""
    done = semel("doctor", file_url, "--json", "--only", "sqlite-journal")
    said = json.loads(done.stdout)
    check = next(each for each in CHECKS if each.name == "sqlite-journal")
    assert said == {
        "store": file_url,
        "verdict": "ok",
        "counts": {"ok": 1, "wrong": 0, "cannot tell": 0},
        "findings": [
            {
                "check": "sqlite-journal",
                "subject": "SQLite",
                "severity": "warning",
                "title": check.title,
                "why": check.why,
                "mend": said["findings"][0]["mend"],
                "page": "docs/how-to/sqlite.md",
                "verdict": "ok",
                "evidence": "journal_mode = wal.",
                "skipped": False,
            }
        ],
    }


def test_a_server_that_is_away(semel: Semel) -> None:
    """A store that can't be reached is one finding, and one line for the rest; the password is not shown."""
    done = semel("doctor", "postgresql://shop:secret@127.0.0.1:1/shop")
    assert done.returncode == 1
    assert "error postgres-reachable" in done.stdout
    assert re.search(r"\d+ checks were skipped, because postgres-reachable is wrong\.", done.stdout)
    assert "secret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_old_store(semel: Semel, postgres_url: str) -> None:
    """A store of an older or a newer schema is told what to type."""
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DELETE FROM semel_keys_migrations WHERE name LIKE '0005%'")
    done = semel("doctor", postgres_url, "--only", "postgres-schema")
    assert f"type  semel migrate {postgres_url}" in done.stdout


def slow(*values: object) -> object:
    """What shows the same as another, of many."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["foo://x"], "No store is known for foo://"),
        slow(["postgresql://user:p%ss@host/db"], "can't be read"),
        slow(["sqlite:///x.db", "--only", "sqlite-jurnal"], "There is no check 'sqlite-jurnal'"),
        slow(["--app", "nowhere:app"], "There is no module 'nowhere'"),
        (["--app", "nowhere"], "is not the name of an app"),
        ([], "Which store?"),
        slow(["explain", "journal"], "Did you mean sqlite-journal?"),
        (["explain", "redis-evicton"], "Did you mean redis-eviction"),
        slow(["explain", "zzz"], "semel doctor list"),
        slow(["--fail-on", "sometimes"], "sometimes"),
        (["--nonsense"], "No such option"),
    ],
)
def test_a_wrong_command_line(semel: Semel, arguments: list[str], said: str) -> None:
    """What was typed wrong is told in a line, and the status is 3."""
    done = semel("doctor", *arguments)
    assert done.returncode == 3
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_app_that_does_not_start(semel: Semel, tmp_path: Path) -> None:
    """An app that raises when it is imported is told in one line."""
    (tmp_path / "shop.py").write_text("raise RuntimeError('no database')")
    done = semel("doctor", "--app", "shop:app")
    assert done.returncode == 3
    assert done.stderr == "semel: shop can't be imported: RuntimeError: no database\n"


@pytest.mark.parametrize("where", ["import", "look"])
def test_an_app_that_ends_the_program(semel: Semel, tmp_path: Path, where: str) -> None:
    """An app that ends the program, even with a good status, is not taken for one that was examined."""
    code = "raise SystemExit(0)" if where == "import" else LEAVING
    (tmp_path / "leaving.py").write_text(code)
    ended = semel("doctor", "--app", "leaving:app")
    assert ended.returncode == 3
    assert "SystemExit" in ended.stderr


def test_an_app_that_imports_what_is_not_there(semel: Semel, tmp_path: Path) -> None:
    """A module that the application needs, and that is not there, is told with the application's name."""
    (tmp_path / "shop.py").write_text("import nothing_of_this_name")
    ended = semel("doctor", "--app", "shop:app")
    assert ended.returncode == 3
    assert ended.stderr == "semel: shop can't be imported: No module named 'nothing_of_this_name'\n"


@pytest.mark.parametrize(
    "line, says",
    [
        ("import time; time.sleep(1000)", "shop is not imported after 0.5 s"),
        ("input('Which database? ')", "shop can't be imported: EOFError"),
    ],
    ids=["hangs", "asks"],
)
def test_an_app_that_does_not_get_ready(line: str, says: str, tmp_path: Path) -> None:
    """An app that waits for something when it is imported is told in one line, and nothing waits with it."""
    (tmp_path / "shop.py").write_text(line)
    hasty = "from semel.cli import doctor, main; doctor.IMPORT_SECONDS = 0.5; main.main()"
    command = [sys.executable, "-c", hasty, "doctor", "--app", "shop:app", "--json"]
    reading, writing = os.pipe()  # No one types.
    with closing(os.fdopen(reading)), closing(os.fdopen(writing, "w")):
        done = subprocess.run(
            command, cwd=tmp_path, stdin=reading, capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 3
    assert done.stdout == ""
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_app_that_prints(semel: Semel, file_url: str, tmp_path: Path) -> None:
    """What an app prints is no part of the report: with --json, a program can read that."""
    chatty = "import os, subprocess\nprint('Hello')\nsubprocess.run(['echo', 'from a child'])\nos.write(1, b'raw')\n"
    (tmp_path / "shop.py").write_text(chatty + APP.format(url=file_url, scope="print('scope') or 'all'"))
    done = semel("doctor", "--app", "shop:app", "--json")
    assert json.loads(done.stdout)["findings"]
    assert "Hello" in done.stderr
    assert "from a child" in done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_an_app_that_forks(semel: Semel, file_url: str, tmp_path: Path) -> None:
    """A child that an app leaves behind when it is imported reports nothing."""
    (tmp_path / "shop.py").write_text("import os\nos.fork()\n" + APP.format(url=file_url, scope="request.path"))
    done = semel("doctor", "--app", "shop:app", "--json")
    assert json.loads(done.stdout)["findings"]


#: An application that ends the program when one of its attributes is read.
LEAVING = """
class App:
    def __call__(self, environ, start_response):
        return []

    def __getattr__(self, name):
        raise SystemExit(0)

app = App()
"""


def test_list(semel: Semel) -> None:
    """Every check is listed, for people and for programs."""
    shown = semel("doctor", "list").stdout
    assert all(each.name in shown for each in CHECKS)
    said = json.loads(semel("doctor", "list", "--json").stdout)
    assert [each["check"] for each in said] == [each.name for each in CHECKS]


def test_explain(semel: Semel) -> None:
    """A check is explained by its name."""
    done = semel("doctor", "explain", "redis-eviction")
    assert done.returncode == 0
    assert done.stdout.startswith("redis-eviction: The server evicts nothing\n")
    assert "volatile-*" in done.stdout
    assert json.loads(semel("doctor", "explain", "redis-eviction", "--json").stdout)["check"] == "redis-eviction"


def test_the_store_in_the_environment(semel: Semel, file_url: str) -> None:
    """Without a URL, SEMEL_STORE is examined; else the usual file."""
    assert semel("doctor", SEMEL_STORE=f"{file_url}").stdout.startswith(file_url)
    assert semel("doctor").stdout.startswith("sqlite:///")


def test_in_a_terminal(environment: dict[str, str], file_url: str) -> None:
    """In a terminal of 80 columns no line is longer but a command, which is copied; what is wrong has a colour."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "semel", "doctor", file_url.replace("semel.db", "other.db")]
    variables = environment | {"COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=variables) as process:
        os.close(follower)
        shown = b""
        with suppress(OSError):  # Linux says so when the other side is closed.
            while chunk := os.read(leader, 65536):
                shown += chunk
    os.close(leader)
    assert process.returncode == 1
    assert b"\x1b[1;31merror" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    (typed,) = [each for each in plain.splitlines() if each.startswith("  type  ")]
    assert typed.endswith("correct the path in the store's address")
    assert max(len(each) for each in plain.splitlines() if each != typed) <= 80
