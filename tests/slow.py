"""Which combinations ``make test`` leaves to ``.ci/run``, beside the tests that are marked ``slow`` where they stand.

Every one of these stays in ``make test`` on at least one store. What is left out are its repetitions on others, where
the store has no part in what is tested, or each takes minutes. What is about the syntax of a request is not run at all
in a world that repeats another one: it is answered before there is a store.
"""

import re
from collections import defaultdict
from typing import Any
from zlib import crc32

import pytest

#: Where a row of a table is always run: through each code that reads a request, on the quickest store. Litestar has the
#: middleware of ``asgi``, what Django serves is read in one place, and Flask's world has the name of its store.
USUAL_WORLDS = frozenset(
    {"asgi-sqlite", "wsgi-sqlite", "fastapi-sqlite", "sqlite", "async-sqlite", "middleware-sqlite"}
)
#: Worlds that repeat what another one shows: the entry point is there with another store, and the store with another
#: entry point.
REPETITIONS = frozenset(
    {
        *("asgi-memory", "asgi-tiered", "wsgi-memory", "wsgi-postgres", "wsgi-redis", "wsgi-tiered"),
        *("fastapi-postgres", "litestar-postgres", "decorator-sqlite", "async-postgres", "rest-postgres"),
        "proxy-postgres",
    }
)
#: Names and values of parameters that say where something is tested: under which server, in which colour, on which
#: store, through which driver, prepared in which way.
PLACES = frozenset(
    {
        *("analyse", "app", "async_lender", "bank", "database", "durable_url", "lender", "open_store", "opener"),
        *("options", "stage", "under", "where", "works"),
    }
)
STORES = frozenset({"sqlite", "postgres", "sqlite_url", "postgres_url", "redis_url"})
COLOURS = frozenset({"sync", "async", "threads", "loop"})
CONNECTIONS = frozenset({"driver", "gated", "kind"})
DRIVERS = ("psycopg", "asyncpg", "aiosqlite", "engine", "pool")
#: A walk of some thousand commands, and stores on which it shows no more than on the same store in the other colour,
#: through another driver, or without what is in front of it.
LIKENESS = "test_likeness_to_the_reference"
MUCH_ALIKE = ("::TestAsync", "::TestOverSQLite", "django/test_conformance.py::TestPostgres")
#: Stores that have their statements from another one: of the tests of conformance each runs every other one, by turns.
TURNS = {
    "stores/shared/test_conformance.py::TestPostgres::": 0,
    "stores/shared/test_conformance.py::TestAsyncPostgres::": 1,
    "django/test_conformance.py::TestSQLite::": 0,
    "stores/tiered/test_conformance.py::TestOverSQLite::": 1,
}

#: Each takes seconds: stories and loads from end to end, and a cluster that is started for a test. What they show is
#: shown in small by quicker tests, and by one of their own kind where one is not named here.
LONG = (
    r"bench/test_bench",
    r"cli/test_demo\.py::test_(interrupted|unprotected)",
    r"cli/test_finding\.py::test_a_scope_can_be_copied\[(?!-x)",
    r"cli/test_resolving\.py::test_asking\[(?!(y\\n-0-command0|n\\n-1-command1)\])",
    r"cli/test_watching\.py::(?!test_a_watched_list_in_a_pipe)",
    r"cli/test_work_accepted\.py::test_(kill_9_in|a_second_signal|sigterm).*\[sqlite",
    r"client/test_interrupted\.py::test_interrupted_at_any_line\[new",
    r"client/test_javascript\.py::test_package",
    r"client/test_killed\.py::test_killed_(while_it_resumes\[requests|at_every_line\[(requests|async))",
    r"console/test_browser\.py::test_a_night_on_duty",
    r"console/test_postgres\.py::test_a_table_that_is_locked",
    r"django/test_killed\.py::.*(plain|rest)\]",
    r"django/test_reads\.py::.*\[unprepared",
    r"django/test_scenarios\.py::.*\[(decorator|rest)",
    r"docs/test_django_examples\.py::test_rest_framework",
    r"docs/test_inbox_examples\.py::test_rabbitmq",
    r"docs/test_testing_examples\.py::test_(django|pytest\[testing/test_flask)",
    r"examples/test_report\.py::test_the_story_ends_well",
    r"functions/test_processes\.py::test_a_worker_of_celery",
    r"inbox/test_celery\.py::test_(once|a_retry_that_cant_be_sent)",
    r"inbox/test_killed\.py::test_killed\[(psycopg-before|sqlite-(in|before the)|async)",
    r"inbox/test_rabbitmq",
    r"inbox/test_receive\.py::test_a_thousand_redeliveries\[async engine",
    r"ops/test_queries",
    r"proxy/test_processes\.py::test_(workers|end_of_grace)",
    r"publishers/test_celery\.py::test_(everything_arrives_through_rabbitmq|killed_in_the_middle_of_a_batch)",
    r"publishers/test_celery\.py::test_a_queue_that_is_there",
    r"stores/postgres/test_liveness\.py::Test(Loss::test_restart_of_the_server|Off::test_both_kinds)",
    r"stores/postgres/test_pgbouncer\.py::Test(Outage|Rivals|Session::test_locked_row)",
    r"stores/postgres/test_postgres\.py::TestCost::test_statements_look.*\[(?!claim-).*50000",
    r"stores/postgres/test_postgres\.py::TestTrouble::test_server_that_comes_back",
    r"stores/postgres/test_take_over\.py::.*gunicorn",
    r"stores/redis/test_(cluster|listening|sentinel)",
    r"stores/tiered/test_load",
    r"web/test_blocked_loops\.py::.*\[redis",
    r"web/test_processes\.py::test_(a_|gate_4_|sigterm\[.*guard).*gunicorn",
    r"web/test_processes\.py::test_gate_9_.*gunicorn",
    r"web/test_scenarios_asgi\.py::.*\[litestar",
    r"web/test_servers\.py::test_server\[.*(hypercorn|sync|preload|2 workers)",
    r"web/test_waiting_servers\.py::.*gunicorn",
)
_LONG = re.compile("|".join(LONG))

#: Parameters of tests that are about what a request says, not about where it is kept.
SYNTAX = {"test_malformed_names": "name", "test_strange_keys": "key"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    facts: defaultdict[object, list[tuple[pytest.Function, bool]]] = defaultdict(list)
    numbers = Numbers()
    items[:] = [item for item in items if not _is_repeated_syntax(item)]
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if _is_slow(item):
            item.add_marker(pytest.mark.slow)
        if hasattr(item, "callspec"):
            fact, is_the_turn_of_others = numbers.told(item)
            if item.get_closest_marker("slow") is None:
                facts[fact].append((item, is_the_turn_of_others))
    for told in facts.values():
        left_out = [item for item, is_the_turn_of_others in told if is_the_turn_of_others]
        if len(left_out) < len(told):
            for item in left_out:
                item.add_marker(pytest.mark.slow)


def _is_slow(item: pytest.Function) -> bool:
    if _LONG.match(item.nodeid.removeprefix("tests/")):
        return True
    if item.originalname == LIKENESS and any(each in item.nodeid for each in MUCH_ALIKE):
        return True
    turn = next((turn for place, turn in TURNS.items() if place in item.nodeid), None)
    if turn is not None and item.originalname != LIKENESS and crc32(item.name.encode()) % 2 != turn:
        return True
    given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if given.get("times") == 2 and given.get("shop") != "memory":
        return True  # A death at each step, and again at each step of the recovery: up to a minute each.
    worlds = _worlds(given)
    if not REPETITIONS.isdisjoint(worlds):
        return True
    return _is_syntax(item, given) and USUAL_WORLDS.isdisjoint(worlds)


def _is_repeated_syntax(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    given = item.callspec.params
    return _is_syntax(item, given) and not REPETITIONS.isdisjoint(_worlds(given))


def _is_syntax(item: pytest.Function, given: dict[str, Any]) -> bool:
    return getattr(given.get("scenario"), "is_syntax", False) or SYNTAX.get(item.originalname, "-") in given


def _worlds(given: dict[str, Any]) -> list[str]:
    return [value for value in given.values() if isinstance(value, str)]


class Numbers:
    """Counts the values of each parameter of each test, in the order in which they come."""

    def __init__(self) -> None:
        self._seen: defaultdict[tuple[str, str], dict[str | int, int]] = defaultdict(dict)

    def told(self, item: pytest.Function) -> tuple[object, bool]:
        """Return what is tested, wherever it is; and whether it is the turn of other places.

        What can be tested in either of two places is tested in one of them, by turns; of the combinations of several
        such parameters, every other one is run, so that each value meets some value of each other parameter.
        """
        test = item.nodeid.partition("[")[0]
        given: dict[str, Any] = item.callspec.params
        what, where = [], []
        for name, value in given.items():
            seen = self._seen[test, name]
            number = seen.setdefault(value if isinstance(value, str) else id(value), len(seen))
            if _is_a_place(name, value):
                where.append(number)
            else:
                what.append((name, number))
        if not where or "memory" in given.values():  # What is in memory costs nothing.
            return (test, *what), False
        return (test, *what), (crc32(item.originalname.encode()) + sum(where)) % 2 == 1


def _is_a_place(name: str, value: object) -> bool:
    if name in PLACES:
        return True
    if not isinstance(value, str):
        return False
    return value in STORES | COLOURS or (name in CONNECTIONS and any(driver in value for driver in DRIVERS))
