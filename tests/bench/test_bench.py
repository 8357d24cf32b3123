"""The bench runs and counts right. How fast anything is, no test asserts: a machine has neighbours."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import httpx
import psycopg
import pytest

from bench import cpu
from bench.__main__ import main
from bench.cases import CASES, NAMES, Plan
from bench.databases import Databases, databases
from bench.load import LOOPBACK, ROOT
from bench.measure import fresh, measure
from bench.report import as_json
from bench.table import NoReport, comparison, read_facts, table
from bench.web import WebServer
from bench.wire import Wire
from tests.kit import servers
from tests.kit.servers.programs import REDIS

TINY = Plan(
    extras=(),
    connections=4,
    rounds=1,
    seconds=0.2,
    lone_seconds=0.1,
    replayed_keys=40,
    growth_keys=200,
    warm_up_requests=40,
    counted_requests=20,
    waiters=20,
    waiting_seconds=0.5,
    waiting_rounds=1,
    settling_seconds=0,
    beside_per_second=40,
    recoveries=1,
    short_lease_seconds=0.5,
    sender="own",
)
#: What a lone request is known to send to PostgreSQL.
TRIPS = {
    "control-first": {"trips": 2, "statements": 2},
    "control-replay": {"trips": 1, "statements": 1},
    "postgres-first": {"trips": 2, "statements": 2},
    "postgres-replay": {"trips": 1, "statements": 1},
    # From process memory, or from Redis: PostgreSQL is not asked.
    "tiered-replay": {"trips": 0, "statements": 0},
    "transaction": {"trips": 3, "statements": 3},
    "transaction-guard": {"trips": 5, "statements": 5},
    "commits": {"trips": 9, "statements": 9},
    "django": {"trips": 1, "statements": 1},
}
only_on_linux = pytest.mark.skipif(not cpu.IS_KNOWN, reason="The kernel's clocks of other processes are Linux's.")


@pytest.fixture(scope="module")
def bases() -> Iterator[Databases]:
    """A PostgreSQL for the servers of these tests."""
    with databases(["PostgreSQL"]) as made:
        yield made


@pytest.mark.slow
@pytest.mark.usefixtures("redis_server")
@pytest.mark.parametrize("baseline", ["bare", "transaction", "commits", "django"])
def test_bench_prints_every_row(baseline: str, tmp_path: Path) -> None:
    """A very small run ends, its table and its JSON have every case, and it can be compared with itself."""
    cases = tuple(case for case in CASES if case.baseline == baseline)
    report = measure(dataclasses.replace(TINY, cases=cases))
    shown = table(report).splitlines()
    facts = json.loads(as_json(report))
    assert facts["cases"].keys() == {case.name for case in cases}
    file = tmp_path / "run.json"
    file.write_text(as_json(report))
    for case in cases:
        assert any(line.startswith(f"{case.title} ") for line in shown)
        assert case.name in comparison(report, file)
        counted = facts["cases"][case.name]
        assert (counted["traffic"] is None) is (not case.uses_postgres)
        for name, least in TRIPS.get(case.name, {}).items():
            # Where Semel is, a statement of one of its timers may come in between.
            assert least <= counted["traffic"][name] <= least + (0.5 if case.store else 0)
        if case.name in {"control-first", "django-guard", "postgres-first"}:
            assert 0 <= counted["hot_share"] <= 1
    if baseline == "bare":
        assert "1 connection, first / by hand" in "\n".join(shown)
        # Half of each page is free, and no index has a column that an answer changes.
        assert facts["cases"]["control-first"]["hot_share"] > 0.9


@pytest.mark.slow
def test_bench_prints_what_waiting_and_dying_cost() -> None:
    """Duplicates that wait get one answer, a killed worker's client gets one from another; and each has its rows."""
    report = measure(dataclasses.replace(TINY, cases=(NAMES["bare"],), extras=("memory", "waiters", "recovery")))
    shown = table(report)
    for what in (
        "memory after 200 keys, bare",
        "20 wait for one key, 40 requests a second with others",
        "statements a second of all that wait",
        "p99 ms of others, all wait",
        "takeover=instant, lease 30 s",
        "takeover=lease, lease 0.5 s",
    ):
        assert what in shown
    facts = json.loads(as_json(report))
    assert facts["waiting"]["waiters"] == 20
    assert [each["is_instant"] for each in facts["recovery"]] == [True, False]


def test_without_redis_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no Redis, its cases are named as left out, and the rest is measured."""

    def nowhere(**_: object) -> NoReturn:
        raise servers.NoServerBinary(REDIS)

    monkeypatch.setattr(servers, "redis", nowhere)
    cases = tuple(NAMES[name] for name in ("bare", "redis-first", "tiered-replay"))
    report = measure(dataclasses.replace(TINY, cases=cases))
    assert "not measured: redis-first, tiered-replay" in table(report)
    assert json.loads(as_json(report))["cases"].keys() == {"bare"}


def test_calls_are_counted() -> None:
    """A first execution makes more calls and objects than its replay, and a phase makes calls of its own."""
    command = [sys.executable, "-m", "bench", "calls", "--json", "--stores", "PostgreSQL,SQLite"]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    counted = {(each["store"], each["request"]): each for each in json.loads(said)}
    for store in ("PostgreSQL", "SQLite"):
        one, other = counted[store, "first"], counted[store, "replay"]
        for what in ("calls", "files", "objects", "coroutines"):
            assert one[what] > other[what] > 0
    assert counted["PostgreSQL", "three phases"]["calls"] > counted["PostgreSQL", "first"]["calls"]
    assert {"atomic, first", "atomic, replay"} < {request for _, request in counted}


def test_a_pipeline_is_one_round_trip(bases: Databases) -> None:
    """A trip ends when the client waits for an answer: statements sent ahead of it are in the same trip."""
    with (
        Wire(bases.postgres_url) as wire,
        psycopg.connect(wire.address(bases.postgres_url), autocommit=True) as connection,
    ):
        before = wire.seen()
        connection.execute("SELECT 1")
        connection.execute("SELECT %s::int", [2])
        with connection.pipeline():
            for number in range(3):
                connection.execute("SELECT %s::int", [number])
    seen = wire.seen()  # when all is over: the client's goodbye is no trip
    assert seen.trips - before.trips == 3
    assert seen.statements - before.statements == 5


def test_the_control_is_correct(bases: Databases) -> None:
    """The guard by hand runs a key once, repeats its answer, and refuses another body."""
    with WebServer(fresh(NAMES["control-first"], bases)) as server:
        first, again = (_post(server, b'{"amount": 1, "currency": "EUR"}') for _ in range(2))
        assert first == again
        assert first[0] == 201
        assert server.facts().ran == 1
        assert _post(server, b'{"amount": 2, "currency": "EUR"}')[0] == 422


@only_on_linux
def test_processor_time_is_told_apart(bases: Databases) -> None:
    """PostgreSQL's connections are told from its writers, and a connection that works is seen to work."""
    with psycopg.connect(bases.postgres_url) as connection:
        before = bases.processor_time()
        connection.execute("SELECT count(*) FROM generate_series(1, 200000)")
        after = bases.processor_time()
        assert connection.info.backend_pid in after.backends
    assert after.backends.keys().isdisjoint(after.writers)
    assert cpu.between(before.backends, after.backends) > 0


@only_on_linux
def test_servers_have_a_core_of_their_own() -> None:
    """While cores are shared out, a server's core is no one else's; afterwards all is as before."""
    cores = os.sched_getaffinity(0)
    with cpu.cores_shared(wanted=True) as is_so:
        assert is_so == (len(cores) > 1)
        ours = os.sched_getaffinity(0)
        code = "import os; from bench import cpu; cpu.take_own_core(); print(*os.sched_getaffinity(0))"
        taken = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        if is_so:
            assert {int(core) for core in taken.stdout.split()} | ours == cores
            assert len(taken.stdout.split()) == 1
            assert not ours & {int(taken.stdout)}
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize(
    "typed, said",
    [
        ("--only postgres", "no such thing: postgres. There are: bare, postgres-replay"),
        ("--rounds 0", "'0' is not a number of 1 or more"),
        ("--connections many", "'many' is not a number of 1 or more"),
        ("--compare nowhere.json", "nowhere.json can't be read: No such file or directory"),
        ("--compare pyproject.toml", "is not the JSON of a run. Make one with"),
        ("calls --stores MySQL", "no such thing: MySQL. There are: PostgreSQL, SQLite"),
    ],
)
def test_wrong_input_is_refused(
    typed: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is started, the bench says what was wrong and what there is."""
    monkeypatch.setattr(sys, "argv", ["bench", *typed.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert said in f"{ended.value}{capsys.readouterr().err}"


def test_a_file_without_cases_is_no_run(tmp_path: Path) -> None:
    """JSON of something else is refused like anything else that is no run."""
    file = tmp_path / "other.json"
    file.write_text("[]")
    with pytest.raises(NoReport, match="not the JSON of a run"):
        read_facts(file)


def _post(server: WebServer, body: bytes) -> tuple[int, bytes]:
    headers = {"Idempotency-Key": "order-17", "Content-Type": "application/json"}
    answer = httpx.post(f"http://{LOOPBACK}:{server.port}/orders", content=body, headers=headers)
    return answer.status_code, answer.content
