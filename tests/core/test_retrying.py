"""What a client does about an answer: the cases that the clients in every language share."""

import json
from pathlib import Path
from typing import Any

import pytest

from semel import errors
from semel.core.retrying import (
    CODES,
    Failure,
    Quota,
    judge,
    judge_failure,
    judge_look,
    origin_of,
    pause,
    said_of,
    status_url,
)

VECTORS: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[2] / "clients" / "vectors.json").read_text()
)


def spelled(verdict: Any) -> dict[str, Any]:
    fields = {name: getattr(verdict, name) for name in verdict.__slots__}
    return {"verdict": type(verdict).__name__.lower(), **fields}


@pytest.mark.parametrize("case", VECTORS["answers"], ids=lambda case: case["name"])
def test_answers(case: dict[str, Any]) -> None:
    """An answer means the same to every client."""
    about = {name: case[name] for name in ("method", "in_doubt") if name in case}
    verdict = judge(case["status"], case["headers"], case["body"].encode(), now=case.get("now", 0), **about)
    assert spelled(verdict) == case["expect"]


@pytest.mark.parametrize("case", VECTORS["looks"], ids=lambda case: case["name"])
def test_looks(case: dict[str, Any]) -> None:
    """An answer at a status URL means the same to every client."""
    verdict = judge_look(case["status"], case["headers"], case["body"].encode(), now=case.get("now", 0))
    assert spelled(verdict) == case["expect"]


@pytest.mark.parametrize("case", VECTORS["failures"], ids=lambda case: case["failure"])
def test_failures(case: dict[str, Any]) -> None:
    """Without an answer, only a request that was not sent leaves no doubt."""
    assert spelled(judge_failure(Failure(case["failure"]))) == case["expect"]


@pytest.mark.parametrize("case", VECTORS["pauses"], ids=str)
def test_pauses(case: dict[str, Any]) -> None:
    """Pauses double up to ten seconds, and are random throughout; one that the server asks for is not shortened."""
    assert pause(case["attempt"], case["after"], case["dice"]) == pytest.approx(case["expect"])


@pytest.mark.parametrize("case", VECTORS["quotas"], ids=lambda case: case["name"])
def test_quotas(case: dict[str, Any]) -> None:
    """A host gets ten retries at once, and then one for every ten answers."""
    quota = Quota()
    for step in case["steps"]:
        after = quota.answered(step["at"]) if step["do"] == "answer" else quota.spent(step["at"])
        assert (after is not None) == step["expect"]
        quota = after or quota


def test_every_code_of_semel_is_known() -> None:
    """No refusal that Semel sends to a client of an API is without a meaning."""
    kinds: list[type[errors.Refusal]] = [
        errors.RequestRefused,
        errors.HandlerEnded,
        errors.StoreError,
        errors.ShuttingDown,
    ]
    sent = {kind.slug for each in kinds for kind in [each, *each.__subclasses__()]} - {"refused", "natural-key-reused"}
    assert sent <= CODES.keys()


@pytest.mark.parametrize(
    "location, found",
    [
        ("/jobs/1", "https://api.example/jobs/1"),
        ("1?a=b", "https://api.example/pay/1?a=b"),
        ("https://API.example:443/jobs/1", "https://API.example:443/jobs/1"),
        ("http://api.example/jobs/1", None),
        ("https://api.example:8443/jobs/1", None),
        ("//other.example/jobs/1", None),
        ("https://api.example@other.example/", None),
        ("https://[/", None),
        ("https://api.example:99999/", None),
    ],
)
def test_status_url(location: str, found: str | None) -> None:
    """A status URL of another origin is not asked: credentials would go there."""
    assert status_url("https://api.example/pay/", location) == found


@pytest.mark.parametrize(
    "url", ["https://shop.example", "http://shop.example:8080", "https://[::1]", "http://[::1]:81"]
)
def test_origins(url: str) -> None:
    """An origin is written as its URLs begin, without a port that goes without saying."""
    assert said_of(origin_of(f"{url}/payments?x=1")) == url
