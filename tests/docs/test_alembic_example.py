"""Alembic beside Semel, in one database: what it generates leaves Semel's tables alone."""

import io
import re
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config

from semel.core.commands import Browse
from semel.stores import store
from semel.stores.alembic import include_name
from tests.docs.served import ROOT

ENV = (ROOT / "docs" / "examples" / "alembic_env").with_suffix(".py").read_text()
MESSAGES = {"semel_outbox", "semel_inbox", "semel_webhooks"}
OURS = {"semel_keys", "semel_audit", "semel_keys_migrations", "semel_counts", *MESSAGES}
#: PostgreSQL's sweeper remembers how far it has looked.
ON_POSTGRES = {"semel_keys_watermark"}


def ours(url: str) -> set[str]:
    return OURS | (ON_POSTGRES if url.startswith("postgresql") else set())


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def url(request: pytest.FixtureRequest) -> str:
    """A database with Semel's tables."""
    found: str = request.getfixturevalue(request.param)
    with closing(store(found)) as keys:
        keys.migrate()
    return found


class Project:
    """A project with Alembic, as ``alembic init`` makes it, and the ``env.py`` of the page."""

    def __init__(self, folder: Path, url: str, env: str = ENV) -> None:
        self._config = Config(folder / "alembic.ini", stdout=io.StringIO())
        self._config.set_main_option("script_location", str(folder / "migrations"))
        self._config.set_main_option("sqlalchemy.url", as_engine(url).replace("%", "%%"))
        command.init(self._config, str(folder / "migrations"))
        (folder / "migrations" / "env.py").write_text(env)

    def generated(self) -> str:
        """What ``alembic revision --autogenerate`` writes."""
        revision = command.revision(self._config, "next", autogenerate=True)
        assert revision is not None
        assert not isinstance(revision, list)
        return Path(revision.path).read_text().partition("def downgrade")[0]

    def upgrade(self) -> None:
        command.upgrade(self._config, "head")


def as_engine(url: str) -> str:
    return re.sub("^postgresql:", "postgresql+psycopg:", url)


def tables(url: str) -> set[str]:
    engine = sqlalchemy.create_engine(as_engine(url))
    try:
        return set(sqlalchemy.inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_autogenerate_leaves_semels_tables_alone(tmp_path: Path, url: str) -> None:
    """With the line of the page, a revision has the application's own tables in it, and the next one nothing."""
    project = Project(tmp_path, url)
    first = project.generated()
    assert "create_table('orders'" in first
    assert "drop_" not in first
    project.upgrade()
    assert "op." not in project.generated()
    assert tables(url) == ours(url) | {"orders", "alembic_version"}
    with closing(store(url)) as keys:
        assert keys.perform(Browse(1)) == ()


def test_what_alembic_does_without_it(tmp_path: Path, url: str) -> None:
    """Without that line Alembic would drop every one of them: this is what the line is for."""
    found = Project(tmp_path, url, ENV.replace("include_name=include_name", "include_name=None")).generated()
    assert set(re.findall(r"drop_table\('(\w+)'\)", found)) == ours(url)


def test_tables_of_another_name() -> None:
    """Semel's tables can be called otherwise; what only looks like them is compared as ever."""
    mine = partial(include_name, table="payments_keys")
    for name in ("payments_keys", "payments_keys_audit", "payments_keys_migrations"):
        assert not mine(name, "table", {})
        assert include_name(name, "table", {})
    assert include_name("semel_keys", "index", {"table_name": "orders"})
    assert include_name(None, "schema", {})
