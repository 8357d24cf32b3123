"""A store that was asked for everything writes a line for every change of a record; one that was told off, none."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from semel import stores
from semel.core.commands import Complete, Note, ReadTrail, Release
from semel.core.message import Answer
from semel.core.record import Hold
from semel.core.state import Event
from semel.errors import ConfigurationError
from semel.stores.base import AsyncStore, Store
from semel.stores.memory import AsyncMemoryStore, MemoryStore
from semel.testing.clock import Clock
from semel.testing.conformance import Candidate
from semel.testing.conformance.base import claim_on
from semel.testing.conformance.trail import FullTrail

MINUTE = timedelta(minutes=1)


class TestMemory(FullTrail):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        memory = MemoryStore("memory://?audit=all")
        return Candidate(open=lambda: memory, age=Clock(memory).advance)


class TestAsyncMemory(FullTrail):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls) -> Candidate:
        memory = MemoryStore("memory://?audit=replays")
        return Candidate(open=lambda: AsyncMemoryStore(memory=memory), age=Clock(memory).advance)


def sqlite_candidate(path: Path, audit: str, open_store: Callable[[str], Store | AsyncStore]) -> Candidate:
    url = f"sqlite:///{path}?audit={audit}"
    return Candidate(open=lambda: open_store(url), age=Clock(url).advance)


class TestSQLite(FullTrail):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        return sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "semel.db", "all", stores.store)


class TestAsyncSQLite(FullTrail):
    @pytest.fixture(scope="class")
    @classmethod
    def candidate(cls, tmp_path_factory: pytest.TempPathFactory) -> Candidate:
        return sqlite_candidate(tmp_path_factory.mktemp("sqlite") / "semel.db", "replays", stores.async_store)


def url_of(kind: str, tmp_path: Path, audit: str) -> str:
    return {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/semel.db"}[kind] + f"?audit={audit}"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("audit, notes_replays", [("on", False), ("all", False), ("replays", True), ("off", False)])
def test_replays_are_noted_on_request(tmp_path: Path, kind: str, audit: str, notes_replays: bool) -> None:
    """A store says that it wants to be told of replays with audit=replays alone, in both colours."""
    url = url_of(kind, tmp_path, audit)
    assert stores.store(url).notes_replays is notes_replays
    assert stores.async_store(url).notes_replays is notes_replays


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_off(tmp_path: Path, kind: str) -> None:
    """With audit=off nothing is written down, not even what is noted."""
    with stores.store(url_of(kind, tmp_path, "off")) as store:
        hold = store.perform(claim_on("scope"))
        assert isinstance(hold, Hold)
        store.perform(Note(hold, "fenced"))
        store.perform(Complete(hold, Event.COMPLETE, Answer(201)))
        released = store.perform(claim_on("scope", "released"))
        assert isinstance(released, Hold)
        store.perform(Release(released))
        assert store.perform(ReadTrail("scope", "key")) == store.perform(ReadTrail("scope", "released")) == ()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_other_words_are_refused(tmp_path: Path, kind: str) -> None:
    """A setting that is not known is refused, with those that are."""
    with pytest.raises(ConfigurationError, match="on, all, replays or off"):
        stores.store(url_of(kind, tmp_path, "yes"))
