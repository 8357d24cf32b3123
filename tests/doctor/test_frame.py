"""The frame of an examination: what is run, what is skipped, how long a check may take."""

import importlib
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main

from semel.cli.app import app as cli
from semel.doctor import CHECKS, Finding, Limits, Report, Severity, Verdict, examine, examining
from semel.doctor.model import Judgement, Kind, ok
from semel.errors import ConfigurationError
from tests.doctor.planting import NAMES, PLANTED
from tools.docs import anchors

ROOT = Path(__file__).parents[2]


def test_every_check_has_a_planted_fault() -> None:
    """There is no check that no test has seen to go wrong."""
    for each in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.doctor.{each.stem}")
    assert sorted(NAMES - PLANTED) == []


def test_there_are_many_checks() -> None:
    """Names are unique, a check comes after those that it depends on, and its page is there."""
    names = [each.name for each in CHECKS]
    assert len(names) == len(set(names)) >= 40
    for place, each in enumerate(CHECKS):
        others = {name for name in each.after if name.startswith(each.kind)}
        assert others <= set(names[:place]), each.name
        page, _, anchor = each.page.partition("#")
        text = (ROOT / "docs" / page).read_text()
        assert not anchor or anchor in anchors(text), each.page


def test_each_check_says_what_to_do() -> None:
    """Every check has a title, a reason and something to type, each as one line of plain text."""
    for each in CHECKS:
        assert each.title[0].isupper(), each.name
        assert not each.title.endswith("."), each.name
        assert each.why.endswith("."), each.name
        assert each.mend.strip() == each.mend, each.name
        assert "\n" not in each.title + each.why + each.mend, each.name


def test_commands_that_are_told_exist() -> None:
    """Every command of Semel's own that a check tells people to type is there, with its options."""
    for each in CHECKS:
        for typed in re.findall(r"semel [a-z]+(?: (?:--)?[a-z]+)*", each.mend):
            command: Any = typer.main.get_command(cli)
            for word in typed.split()[1:]:
                if word.startswith("--"):
                    assert word in {name for given in command.params for name in given.opts}, typed
                elif hasattr(command, "commands"):
                    assert word in command.commands, typed
                    command = command.commands[word]
            assert not hasattr(command, "commands"), typed


def test_only(sqlite_url: str) -> None:
    """Of those that are asked for by name, no other is told unless something is wrong with it."""
    report = examine(sqlite_url, only=["sqlite-jour*"])
    assert [each.check.name for each in report.findings] == ["sqlite-journal"]
    missing = examine("sqlite:///nowhere.db", only=["sqlite-journal"])
    assert [each.check.name for each in missing.findings] == ["sqlite-file", "sqlite-journal"]


def test_an_unknown_check(sqlite_url: str) -> None:
    """A name that no check has is an error, and not an empty report."""
    with pytest.raises(ConfigurationError, match="no check 'sqlite-jurnal'"):
        examine(sqlite_url, only=["sqlite-jurnal"])


@pytest.mark.parametrize(
    "url",
    ["foo://x", "nonsense", "postgresql://[x", "postgresql://h/d?colour=red", "redis://h:99999999", "sqlite:///a?b=c"],
)
def test_a_url_that_cannot_be_read(url: str) -> None:
    """A URL that names no store is an error of the usage."""
    with pytest.raises(ConfigurationError):
        examine(url)


def test_nothing_to_examine() -> None:
    """Without a URL and without an app there is nothing to examine."""
    with pytest.raises(ConfigurationError, match="Give the URL"):
        examine()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("scheme", ["postgresql", "redis"])
def test_a_server_that_does_not_answer(scheme: str, silent_port: int) -> None:
    """A server that hangs is told to hang, when the time is up; and the rest is skipped."""
    report = examine(f"{scheme}://user@127.0.0.1:{silent_port}/0", limits=Limits(seconds=1))
    first, *others = report.findings
    assert first.verdict is not Verdict.OK
    assert "time" in first.evidence.lower() or "within" in first.evidence
    assert all(each.is_skipped for each in others)


def _misreads(seen: dict[str, Judgement], _limits: Limits) -> Judgement:
    return seen["x"]


def test_a_check_that_fails_by_itself(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that raises, or never ends, can't tell; checks that need none of it go on."""
    usual = replace(CHECKS[0], kind=Kind.SQLITE, after=(), judge=lambda _seen, _limits: ok("fine"))
    hanging = socket.socketpair()
    made = (
        replace(usual, name="raises", look=lambda _: 1 / 0),
        replace(usual, name="hangs", look=lambda _: hanging[0].recv(1)),
        replace(usual, name="judges badly", look=lambda _: {}, judge=_misreads),
        replace(usual, name="works", look=lambda _: None),
        replace(usual, name="needs", look=lambda _: None, after=("raises",)),
    )
    monkeypatch.setattr(examining, "CHECKS", made)
    report = examine(sqlite_url, limits=Limits(seconds=0.1, grace=0.1))
    hanging[1].close()
    hanging[0].close()
    told = {each.check.name: (str(each.verdict), each.evidence) for each in report.findings}
    assert told == {
        "raises": ("cannot tell", "division by zero"),
        "hangs": ("cannot tell", "There was no answer within 0.1 s."),
        "judges badly": ("cannot tell", "The answer can't be read: 'x'"),
        "works": ("ok", "fine"),
        "needs": ("cannot tell", "Skipped, because raises could not be told."),
    }


def test_a_server_that_hangs_in_the_middle(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two looks without an answer no more are tried: it is told soon that the server hangs."""
    usual = replace(CHECKS[0], kind=Kind.SQLITE, after=(), judge=lambda _seen, _limits: ok("fine"))
    hanging = socket.socketpair()
    looks = [lambda _, number=number: hanging[0].recv(number) for number in range(1, 6)]
    made = tuple(replace(usual, name=f"hangs {number}", look=look) for number, look in enumerate(looks))
    monkeypatch.setattr(examining, "CHECKS", made)
    report = examine(sqlite_url, limits=Limits(seconds=0.1, grace=0.1))
    hanging[1].close()
    hanging[0].close()
    assert [each.evidence for each in report.findings] == [
        *["There was no answer within 0.1 s."] * 2,
        *["It was not tried: others before it got no answer."] * 3,
    ]


@pytest.mark.parametrize(
    "severity, verdict, error, warning",
    [
        (Severity.ERROR, Verdict.WRONG, Verdict.WRONG, Verdict.WRONG),
        (Severity.WARNING, Verdict.WRONG, Verdict.OK, Verdict.WRONG),
        (Severity.ERROR, Verdict.CANNOT_TELL, Verdict.CANNOT_TELL, Verdict.CANNOT_TELL),
        (Severity.WARNING, Verdict.CANNOT_TELL, Verdict.OK, Verdict.CANNOT_TELL),
    ],
)
def test_the_verdict_on_everything(severity: Severity, verdict: Verdict, error: Verdict, warning: Verdict) -> None:
    """The worst of the checks that count is the verdict; something wrong outweighs what can't be told."""
    found = Finding(replace(CHECKS[0], severity=severity), verdict, "", "")
    report = Report("x", (found, replace(found, verdict=Verdict.OK)))
    assert (report.worst(Severity.ERROR), report.worst(Severity.WARNING)) == (error, warning)


def test_memory() -> None:
    """A store in the memory of another process can't be examined, and that is no clean bill of health."""
    with pytest.raises(ConfigurationError, match="nothing to examine"):
        examine("memory://")
