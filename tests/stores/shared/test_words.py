"""Names that no table can have are refused when a URL is read, and not by a syntax error of the database."""

import re
from importlib.resources import files
from importlib.resources.abc import Traversable

import psycopg
import pytest

from semel.errors import ConfigurationError
from semel.stores import store
from semel.stores.words import PARTS, RESERVED

_PART = re.compile(r"(?:\bWITH(?: RECURSIVE)?|,)\s+([a-z_]+)(?: \([^)]*\))? AS (?:NOT )?(?:MATERIALIZED )?\(")


def scripts(folder: Traversable) -> list[str]:
    found = [each.read_text() for each in folder.iterdir() if each.name.endswith(".sql")]
    return found + [text for each in folder.iterdir() if each.is_dir() for text in scripts(each)]


def test_parts_of_statements() -> None:
    """Whatever a statement calls its parts, no table is called so: it would be hidden."""
    used = {name for text in scripts(files("semel.stores")) for name in _PART.findall(re.sub("--.*", "", text))}
    assert used == PARTS


def test_words_of_postgresql(postgres_url: str) -> None:
    """Every word that PostgreSQL reserves is known."""
    with psycopg.connect(postgres_url) as connection:
        words = connection.execute("SELECT word FROM pg_get_keywords() WHERE catcode IN ('R', 'T')").fetchall()
    assert {word for (word,) in words} - RESERVED == set()


@pytest.mark.parametrize(
    "setting", ["table=user", "table=semel_outbox", "table=walked", "schema=pg_shop", "schema=select"]
)
def test_refused(setting: str) -> None:
    """The message names the word."""
    with pytest.raises(ConfigurationError, match=setting.partition("=")[2]):
        store(f"postgresql://localhost/shop?{setting}")
