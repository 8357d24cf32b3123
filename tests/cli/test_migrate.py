"""`semel migrate`."""

import json
import os
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from semel.stores import store
from semel.stores.statement import Names, load_migrations

Semel = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["sqlite_url", "empty_postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


def test_the_command_of_a_message(semel: Semel, empty_postgres_url: str) -> None:
    """A store without tables says what to type, and a shell takes that as it stands: a URL may have ? and & in it."""
    mark = "&" if "?" in empty_postgres_url else "?"
    refused = semel("keys", "list", "--store", f"{empty_postgres_url}{mark}schema=public&table=my_keys")
    assert refused.returncode == 1
    program, command, url = shlex.split(refused.stderr.partition("Run: ")[2])
    assert (program, command, semel("migrate", url).returncode) == ("semel", "migrate", 0)
    with closing(connect(empty_postgres_url)) as connection:
        assert connection.execute("SELECT count(*) FROM my_keys").fetchone() == (0,)


def test_the_command_keeps_what_leads_there(semel: Semel, empty_postgres_url: str) -> None:
    """The command that is said connects where the URL did, whichever part of it names the server."""
    parts = urlsplit(empty_postgres_url)
    given = f"postgresql://{parts.path}?host={parts.hostname}&port={parts.port}&user={parts.username}&sslmode=prefer"
    _, _, typed = shlex.split(semel("keys", "list", "--store", given).stderr.partition("Run: ")[2])
    assert typed == given
    assert semel("migrate", typed).returncode == 0


@pytest.mark.parametrize("where", ["password", "query"])
def test_the_command_has_no_password(semel: Semel, empty_postgres_url: str, where: str) -> None:
    """A password is not said: the command that is said takes the URL from the environment, and works as it is."""
    if where == "password":
        given = empty_postgres_url.replace("@", ":hush@", 1)
    else:
        given = f"{empty_postgres_url}?password=hush"
    refused = semel("keys", "list", SEMEL_STORE=given).stderr
    assert "hush" not in refused
    typed = refused.partition("Run: ")[2].partition(",")[0]
    assert typed == 'semel migrate "$SEMEL_STORE"'
    program = f'semel() {{ {shlex.quote(sys.executable)} -m semel "$@"; }}; {typed}'
    subprocess.run(["/bin/sh", "-c", program], env=os.environ | {"SEMEL_STORE": given}, capture_output=True, check=True)
    assert semel("keys", "list", SEMEL_STORE=given).stdout == "No keys.\n"
    assert "hush" not in semel("doctor", SEMEL_STORE=given).stdout


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg2"])
def test_urls_of_sqlalchemy(semel: Semel, migrated_postgres_url: str, driver: str) -> None:
    """A URL with a driver in it, as SQLAlchemy has them, names the same store."""
    url = migrated_postgres_url.replace("postgresql:", f"postgresql+{driver}:", 1)
    assert semel("migrate", url).stdout == "nothing to do\n"
    assert semel("keys", "list", SEMEL_STORE=url).stdout == "No keys.\n"
    assert "postgres-tables" in semel("doctor", url).stdout


def test_urls_of_files_of_sqlalchemy(semel: Semel, sqlite_url: str) -> None:
    """A URL of a file with a driver in it names the same file."""
    url = sqlite_url.replace("sqlite:", "sqlite+aiosqlite:", 1)
    assert semel("migrate", url).returncode == 0
    assert semel("migrate", sqlite_url).stdout == "nothing to do\n"


def test_repeated(semel: Semel, url: str) -> None:
    """The first migration makes the tables and says so; the second has nothing to do and says so."""
    first, second = semel("migrate", url), semel("migrate", url)
    assert first.stdout.splitlines()[0] == "0001_pre_keys applied"
    assert all(line.endswith(" applied") for line in first.stdout.splitlines())
    assert second.stdout == "nothing to do\n"
    assert (first.returncode, second.returncode) == (0, 0)


def test_environment(semel: Semel, url: str) -> None:
    """The store may be named by SEMEL_STORE."""
    assert "0001_pre_keys applied\n" in semel("migrate", SEMEL_STORE=url).stdout


def test_argument_wins(semel: Semel, url: str, tmp_path: Path) -> None:
    """What is typed goes before what is set."""
    semel("migrate", url, SEMEL_STORE=f"sqlite:///{tmp_path}/other.db")
    assert semel("migrate", url).stdout == "nothing to do\n"
    assert not (tmp_path / "other.db").exists()


def test_two_stores(semel: Semel) -> None:
    """Two different stores are refused rather than one of them forgotten."""
    ended = semel("migrate", "sqlite:///a.db", "--store", "sqlite:///b.db")
    assert ended.returncode == 2
    assert "one at a time" in ended.stderr


def test_beside_other_tables(semel: Semel, url: str) -> None:
    """Where tables are made among others, what keeps other tools from dropping them is said, once."""
    with closing(store(url)) as keys:
        kind = "SERIAL" if url.startswith("postgresql") else "INTEGER"
        with closing(connect(url)) as connection:
            connection.execute(f"CREATE TABLE orders (id {kind} PRIMARY KEY)")
            connection.commit()
        said = semel("migrate", url).stdout
        assert "include_name=semel.stores.alembic.include_name" in said
        assert "a schema of their own by ?schema=NAME" in said
        assert keys.has_neighbours()
    assert semel("migrate", url).stdout == "nothing to do\n"


def connect(url: str) -> Any:
    return psycopg.connect(url) if url.startswith("postgresql") else sqlite3.connect(url.removeprefix("sqlite:///"))


class TestPlan:
    def test_shown(self, semel: Semel, empty_postgres_url: str) -> None:
        """A plan has each statement, what it locks, and what has to wait; it changes nothing."""
        made_up_to(empty_postgres_url, "0003_pre_accepted")
        shown = semel("migrate", empty_postgres_url, "--plan")
        assert shown.returncode == 0
        assert "0004_pre_lean: pre, before the new code is started\n" in shown.stdout
        assert OF_AN_INDEX in shown.stdout
        assert "     blocks: nothing: no code uses the new table yet\n" in shown.stdout
        assert "\x1b" not in shown.stdout
        assert semel("migrate", empty_postgres_url, "--plan").stdout == shown.stdout
        assert semel("migrate", empty_postgres_url).stdout.startswith("0004_pre_lean applied\n")

    def test_coloured(self, semel: Semel, sqlite_url: str) -> None:
        """A terminal gets colours."""
        assert "\x1b[1m" in semel("migrate", sqlite_url, "--plan", FORCE_COLOR="1", TERM="xterm").stdout

    def test_json(self, semel: Semel, url: str) -> None:
        """Programs get the same as JSON; in a store without tables, nothing is blocked."""
        planned = json.loads(semel("migrate", url, "--plan", "--json").stdout)
        assert [each["name"] for each in planned][:2] == ["0001_pre_keys", "0002_pre_steps"]
        assert {each["phase"] for each in planned} == {"pre"}
        statements = [statement for each in planned for statement in each["statements"]]
        assert statements[0].keys() == {"sql", "table", "lock", "work", "blocks"}
        assert statements[0]["sql"].startswith("CREATE TABLE semel_keys (\n")
        assert all(statement["blocks"].startswith("nothing") for statement in statements)

    def test_nothing(self, semel: Semel, url: str) -> None:
        """A store that is up to date has no plan."""
        semel("migrate", url)
        shown = semel("migrate", url, "--plan")
        assert (shown.stdout, shown.returncode) == ("nothing to do\n", 0)
        assert semel("migrate", url, "--plan", "--json").stdout == "[]\n"
        assert json.loads(semel("migrate", url, "--json").stdout) == {"applied": [], "left": [], "notes": []}

    def test_no_file(self, semel: Semel, sqlite_url: str) -> None:
        """A plan makes no file."""
        assert "CREATE TABLE semel_keys" in semel("migrate", sqlite_url, "--plan").stdout
        assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()

    def test_sqlite_in_use(self, semel: Semel, sqlite_url: str) -> None:
        """A file with tables is locked as a whole, for those who write."""
        with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as file:
            file.executescript(dict(load_migrations("semel.stores.sqlite", Names()))["0001_pre_keys"])
            file.execute("INSERT INTO semel_keys_migrations VALUES ('0001_pre_keys', 0)")
            file.commit()
        shown = semel("migrate", sqlite_url, "--plan").stdout
        assert "0001_pre_keys" not in shown
        assert "     rows:   all rows are written anew\n" in shown
        assert "     blocks: what writes to the file, until the migration is committed; replays go on\n" in shown

    def test_half(self, semel: Semel, empty_postgres_url: str) -> None:
        """A migration that stopped on the way is shown from where it goes on."""
        made_up_to(empty_postgres_url, "0004_pre_lean")
        with closing(connect(empty_postgres_url)) as connection:
            connection.execute("CREATE TABLE semel_outbox (state text, ended_at text)")
            connection.execute("INSERT INTO semel_keys_migrations VALUES ('0005_pre_messages (6 of 10)')")
            connection.commit()
        shown = semel("migrate", empty_postgres_url, "--plan").stdout
        assert "an earlier run stopped after 6 of its statements; these are left\n" in shown
        assert "\n  7. CREATE TABLE semel_inbox (" in shown
        assert "  1. " not in shown.partition("0006_pre_trace")[0]
        assert "0005_pre_messages applied\n" in semel("migrate", empty_postgres_url).stdout


class TestLayout:
    def test_there_and_back(self, semel: Semel, empty_postgres_url: str) -> None:
        """The layout is planned, applied and applied again by one option, beside what is missing."""
        url = empty_postgres_url
        shown = semel("migrate", url, "--layout", "partitioned", "--plan").stdout
        assert "\npartitioned layout: post, when no process runs the old code any more\n" in shown
        assert "     locks:  SHARE ROW EXCLUSIVE on semel_keys\n" in shown
        assert semel("migrate", url, "--layout", "partitioned").stdout.endswith("partitioned layout applied\n")
        assert semel("migrate", url, "--layout", "partitioned").stdout == "nothing to do\n"
        [planned] = json.loads(semel("migrate", url, "--layout", "plain", "--plan", "--json").stdout)
        assert (planned["name"], planned["phase"]) == ("plain layout", "post")
        assert semel("migrate", url, "--layout", "plain").stdout == "plain layout applied\n"
        assert semel("migrate", url, "--layout", "plain").stdout == "nothing to do\n"

    def test_refused(self, semel: Semel, sqlite_url: str) -> None:
        """A store without partitions says so, and is not even made."""
        refused = semel("migrate", sqlite_url, "--layout", "partitioned")
        assert refused.returncode == 2
        assert "SQLiteStore has one layout, so there is no partitioned one to choose" in refused.stderr
        assert not Path(sqlite_url.removeprefix("sqlite:///")).exists()


OF_AN_INDEX = """\
  6. CREATE INDEX IF NOT EXISTS semel_keys_age ON semel_keys (created_at)
     locks:  SHARE on semel_keys
     rows:   all rows are read
     blocks: claims, answers and replays, while it reads the whole table
"""


def made_up_to(url: str, last: str) -> None:
    """Make the tables of an older checkout."""
    with closing(connect(url)) as connection:
        connection.execute("CREATE TABLE semel_keys_migrations (name text PRIMARY KEY, applied_at timestamptz)")
        for name, script in load_migrations("semel.stores.postgres", Names()):
            if name <= last:
                connection.execute(script)
                connection.execute(f"INSERT INTO semel_keys_migrations VALUES ('{name}')")
        connection.commit()
