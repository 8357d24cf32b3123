"""What is sent to an endpoint, and what its answer means."""

from datetime import timedelta
from email.utils import formatdate

import pytest

from semel.core.delivery import Target, answered, is_ours, read_url, request_headers, retry_after
from semel.core.outbox import Delivered, Failed, Message, Rejected, Verdict
from semel.errors import ConfigurationError

NOW = 1_700_000_000
DAY = timedelta(days=1)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success(status: int) -> None:
    """Every 2xx is a success, whatever else is said."""
    assert answered(status, {"webhook-delivery": "abort-message"}, b"", now=NOW).verdict == Delivered()


@pytest.mark.parametrize(
    "status, headers, body, verdict",
    [
        (404, {}, b"", Failed("The endpoint answered 404")),
        (500, {}, b" no\nluck\x1b ", Failed("The endpoint answered 500: no\\nluck\\x1b")),
        (502, {}, b"\xff", Failed("The endpoint answered 502: \N{REPLACEMENT CHARACTER}")),
        (429, {"retry-after": "7"}, b"", Failed("The endpoint answered 429", timedelta(seconds=7))),
        (503, {"retry-after": "x"}, b"", Failed("The endpoint answered 503")),
        (100, {}, b"", Failed("The endpoint answered 100")),
        (410, {}, b"bye", Rejected("The endpoint answered 410: bye")),
        (
            422,
            {"webhook-delivery": " Abort-Message "},
            b"",
            Rejected("The endpoint answered 422 (webhook-delivery: abort-message)"),
        ),
        (
            301,
            {"location": "https://new.example/\r\n"},
            b"",
            Failed(
                "The endpoint answered 301, to https://new.example/\\r\\n. Redirects are not followed: change its URL."
            ),
        ),
    ],
)
def test_failure(status: int, headers: dict[str, str], body: bytes, verdict: Verdict) -> None:
    """Every other status is a failure; which, and what the endpoint said, is told in one line."""
    assert answered(status, headers, body, now=NOW).verdict == verdict


def test_turning_off() -> None:
    """An endpoint turns itself off by 410, or by a header, with any status."""
    assert answered(410, {}, b"", now=NOW).turns_off == "The endpoint answered 410 (Gone)."
    for status in (200, 500):
        assert "disable" in (answered(status, {"webhook-delivery": "disable"}, b"", now=NOW).turns_off or "")
    assert answered(500, {}, b"", now=NOW).turns_off is None


def test_only_the_beginning_is_shown() -> None:
    """A long answer is cut."""
    verdict = answered(500, {}, b"x" * 5000, now=NOW).verdict
    assert isinstance(verdict, Failed)
    assert len(verdict.reason) < 250


@pytest.mark.parametrize(
    "said, pause",
    [
        (None, None),
        ("soon", None),
        ("-5", None),
        ("0", timedelta(0)),
        (" 120 ", timedelta(minutes=2)),
        ("9" * 5000, DAY),
        ("86401", DAY),
        (formatdate(NOW + 90, usegmt=True), timedelta(seconds=90)),
        ("Tue, 14 Nov 2023 22:14:50 -0000", timedelta(seconds=90)),
        (formatdate(NOW - 90, usegmt=True), timedelta(0)),
        (formatdate(NOW + 10**8, usegmt=True), DAY),
        ("Tue, 14 Nov 99999 22:14:50 GMT", None),
        ("Tue, 14 Nov 99999999999999999999 22:14:50 GMT", None),
    ],
)
def test_retry_after(said: str | None, pause: timedelta | None) -> None:
    """`Retry-After` is seconds or a date, and at most a day; what can't be read says nothing."""
    assert retry_after(said, now=NOW) == pause


def message(*headers: tuple[str, str], traceparent: str | None = None) -> Message:
    return Message("0192", "order.paid", "acme", b"{}", headers=headers, traceparent=traceparent)


def test_headers() -> None:
    """A webhook has its id, time and signature, its content type, its trace, and the application's headers."""
    made = dict(request_headers(message(("X-Shop", "münchen"), traceparent="00-a-b-01"), NOW, "v1,abc", "semel"))
    assert made == {
        b"X-Shop": "münchen".encode(),
        b"user-agent": b"semel",
        b"content-type": b"application/json",
        b"accept-encoding": b"identity",
        b"webhook-id": b"0192",
        b"webhook-timestamp": b"1700000000",
        b"webhook-signature": b"v1,abc",
        b"traceparent": b"00-a-b-01",
    }


@pytest.mark.parametrize(
    "name", ["Webhook-Id", "webhook-signature", "Host", "Content-Length", "Transfer-Encoding", "TE"]
)
def test_headers_that_applications_cant_set(name: str) -> None:
    """An application's header never takes the place of one that is signed, or that HTTP itself needs."""
    assert is_ours(name)
    made = request_headers(message((name, "evil"), ("User-Agent", "shop")), NOW, "v1,abc", "semel")
    assert b"evil" not in dict(made).values()
    assert [value for key, value in made if key.lower() == b"user-agent"] == [b"shop"]


@pytest.mark.parametrize(
    "header", [("X-A", "b\r\nHost: evil"), ("X A", "b"), ("", "b"), ("X-A", " b"), ("X-A", "b\x00")]
)
def test_headers_that_cant_be_sent(header: tuple[str, str]) -> None:
    """A header that would break the request is refused by name."""
    with pytest.raises(ConfigurationError, match="can't be sent"):
        request_headers(message(header), NOW, "v1,abc", "semel")


@pytest.mark.parametrize(
    "url, target",
    [
        ("https://a.example", Target("https://a.example")),
        ("http://a.example:8080/in?x=1", Target("http://a.example:8080/in?x=1")),
        ("https://münchen.example/", Target("https://münchen.example/")),
        ("https://[2606:4700::1]/", Target("https://[2606:4700::1]/")),
        (
            "https://a.example/in#secret=env:A&secret=file:/b&private=allow",
            Target("https://a.example/in", ("env:A", "file:/b"), allows_private=True),
        ),
    ],
)
def test_urls(url: str, target: Target) -> None:
    """An endpoint is a URL of HTTP, on any port; its fragment has settings, and is not sent."""
    assert read_url("acme", url) == target


@pytest.mark.parametrize(
    "url, words",
    [
        ("ftp://a.example", "https://host/path"),
        ("https://", "https://host/path"),
        ("a.example/hooks", "https://host/path"),
        ("https://a.example/a b", "https://host/path"),
        ("https://a.example/\n", "https://host/path"),
        ("https://[::1", "can't be read"),
        ("https://a.example:port/", "can't be read"),
        ("https://" + "a" * 64 + ".example/", "can't be read"),
        ("https://user:secret@a.example/", "Remove it"),
        ("https://token@a.example/", "Remove it"),
        ("https://a.example/#top", "can't be read"),
        ("https://a.example/#secrets=env:A", "after # there can be"),
        ("https://a.example/#private=yes", "after # there can be"),
    ],
)
def test_urls_that_are_refused(url: str, words: str) -> None:
    """A URL that names no endpoint, or has a password in it, is refused, and the password not repeated."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_url("acme", url)
    assert "secret@" not in str(caught.value)
