"""Webhooks to a real server: what is sent, and what becomes of each answer."""

import asyncio
import json
import logging
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks

from semel.core.delivery import Answered
from semel.core.outbox import WEBHOOK_SCHEDULE, Delivered, Failed, Message, Rejected, Unreachable, Verdict
from semel.core.webhook import PRESETS, new_keys, new_secret, read_secret, verified
from semel.errors import ConfigurationError
from semel.publishers import Publisher, publisher
from semel.publishers.webhook import MAX_CONNECTIONS, READ_BYTES, Webhook
from tests.kit.servers import free_port
from tests.webhooks.endpoint import Answer, Got, Server, http, serving

SECRET, OLD = new_secret(b"s" * 32), new_secret(b"o" * 32)
SHORT = timedelta(milliseconds=300)
BODY = b'{"order": 17}'


def message(number: int = 1, payload: bytes = BODY, **rest: Any) -> Message:
    return Message(f"01920000-0000-7000-8000-{number:012}", "order.paid", "acme", payload, **rest)


def webhook(server: Server, **settings: Any) -> Webhook:
    usual: dict[str, Any] = {"secrets": [SECRET], "allow_private": True}
    return Webhook("acme", server.url(), **usual | settings)


async def sent(answer: Answer, *messages: Message, **settings: Any) -> tuple[list[Answered], Server]:
    async with serving(answer) as server:
        sender = webhook(server, **settings)
        await sender.open()
        try:
            return [*await sender.deliver(messages or [message()])], server
        finally:
            await sender.close()


async def verdict_of(answer: Answer, **settings: Any) -> Verdict:
    (tried,), _ = await sent(answer, **settings)
    return tried.verdict


async def test_a_webhook() -> None:
    """A webhook is a POST with the payload as it is, its id, the time, a signature, and the application's headers."""
    odd = message(headers=(("X-Shop", "7"), ("webhook-id", "evil"), ("Host", "evil")), traceparent="00-aa-bb-01")
    (tried,), server = await sent(lambda _: http(204), odd)
    assert tried == Answered(Delivered())
    (got,) = server.requests
    assert got.line == "POST /hooks HTTP/1.1"
    assert got.body == BODY
    assert (got.headers["webhook-id"], got.headers["content-type"]) == (odd.id, "application/json")
    assert (got.headers["x-shop"], got.headers["traceparent"]) == ("7", "00-aa-bb-01")
    assert got.headers["host"] == f"127.0.0.1:{server.port}"
    assert got.headers["user-agent"].startswith("semel")


async def test_another_library_verifies() -> None:
    """The package of the specification's authors accepts what is sent, with either secret of a rotation."""
    _, server = await sent(lambda _: http(), secrets=[SECRET, OLD])
    (got,) = server.requests
    for secret in (SECRET, OLD):
        assert standardwebhooks.Webhook(secret).verify(got.body, got.headers) == json.loads(BODY)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(new_secret(b"x" * 32)).verify(got.body, got.headers)


async def test_a_pair_of_keys() -> None:
    """Signed with a private key, a webhook is verified with the public one."""
    private, public = new_keys(b"k" * 32)
    _, server = await sent(lambda _: http(), message(payload=b"\x00\xff"), secrets=[private])
    (got,) = server.requests
    assert got.headers["webhook-signature"].startswith("v1a,")
    now = float(got.headers["webhook-timestamp"])
    assert verified(PRESETS["standard"], [read_secret(public)], got.headers, got.body, now=now).payload == b"\x00\xff"


STATUSES: list[tuple[int, dict[str, str], type[Verdict]]] = [
    (200, {}, Delivered),
    (202, {}, Delivered),
    (299, {}, Delivered),
    (301, {"location": "http://127.0.0.1/"}, Failed),
    (302, {"location": "/else"}, Failed),
    (307, {"location": "/else"}, Failed),
    (308, {"location": "/else"}, Failed),
    (304, {}, Failed),
    (400, {}, Failed),
    (401, {}, Failed),
    (404, {}, Failed),
    (409, {}, Failed),
    (410, {}, Rejected),
    (422, {"webhook-delivery": "abort-message"}, Rejected),
    (429, {}, Failed),
    (500, {}, Failed),
    (502, {}, Failed),
    (503, {}, Failed),
    (504, {}, Failed),
]


@pytest.mark.parametrize("status, headers, kind", STATUSES)
async def test_statuses(status: int, headers: dict[str, str], kind: type[Verdict]) -> None:
    """2xx alone is a success; no redirect is followed; 410 and abort-message are the end of a message."""
    (tried,), server = await sent(lambda _: http(status, b"", **headers))
    assert type(tried.verdict) is kind
    assert len(server.requests) == 1
    assert (tried.turns_off is not None) == (status == 410)


async def test_disable() -> None:
    """An endpoint that asks to be turned off is, whatever became of the message."""
    (taken,), _ = await sent(lambda _: http(200, webhook_delivery="disable"))
    (refused,), _ = await sent(lambda _: http(500, webhook_delivery="disable"))
    assert (type(taken.verdict), type(refused.verdict)) == (Delivered, Failed)
    assert taken.turns_off == refused.turns_off == "The endpoint answered webhook-delivery: disable."


async def test_retry_after() -> None:
    """A pause that the endpoint asks for is handed on, in seconds or as a date, and at most a day."""
    assert await verdict_of(lambda _: http(429, retry_after="17")) == Failed(
        "The endpoint answered 429", timedelta(seconds=17)
    )
    distant = formatdate(4_000_000_000, usegmt=True)
    assert await verdict_of(lambda _: http(503, retry_after=distant)) == Failed(
        "The endpoint answered 503", timedelta(days=1)
    )


async def test_the_answer_is_told() -> None:
    """What an endpoint says of a failure is in the reason, in one line."""
    assert await verdict_of(lambda _: http(400, b"no\r\nsuch order")) == Failed(
        "The endpoint answered 400: no\\r\\nsuch order"
    )


async def test_a_huge_answer() -> None:
    """Of an endless answer only the beginning is read."""
    written = 0

    async def endless(got: Got) -> None:
        nonlocal written
        got.writer.write(b"HTTP/1.1 500 X\r\n\r\n")
        while not got.writer.is_closing():
            got.writer.write(b"x" * 65536)
            written += 65536
            await got.writer.drain()

    verdict = await verdict_of(endless)
    assert isinstance(verdict, Failed)
    assert len(verdict.reason) < READ_BYTES


async def test_a_hanging_endpoint() -> None:
    """An endpoint that takes a webhook and says nothing has failed: the try counts, and ends."""

    async def hang(_: Got) -> None:
        await asyncio.Event().wait()

    verdict = await verdict_of(hang, timeout=SHORT)
    assert verdict == Failed("The endpoint got the webhook and did not answer: no answer within 0.3 s.")


async def test_a_dripping_endpoint() -> None:
    """One that sends a byte now and then is given the same time, and no more."""

    async def drip(got: Got) -> None:
        for each in b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000:
            got.writer.write(bytes([each]))
            await asyncio.sleep(0.02)

    assert isinstance(await verdict_of(drip, timeout=SHORT), Failed)


async def test_the_status_decides() -> None:
    """Once its status is there, an answer counts, whether or not the rest of it arrives."""

    async def stop(got: Got) -> None:
        got.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await asyncio.Event().wait()

    async def break_off(got: Got) -> None:
        got.writer.write(b"HTTP/1.1 503 X\r\ncontent-length: 9\r\nretry-after: 3\r\n\r\nhalf")

    assert await verdict_of(stop, timeout=SHORT) == Delivered()
    assert await verdict_of(break_off) == Failed("The endpoint answered 503", timedelta(seconds=3))


async def test_a_dropped_connection() -> None:
    """One that closes the connection instead of an answer has failed."""

    async def drop(got: Got) -> None:
        got.writer.transport.abort()

    verdict = await verdict_of(drop)
    assert isinstance(verdict, Failed)
    assert verdict.reason.startswith("The endpoint got the webhook and did not answer: ")


async def test_garbage() -> None:
    """What is not HTTP is a failure."""
    assert isinstance(await verdict_of(lambda _: b"220 smtp.example ready\r\n\r\n"), Failed)


async def test_no_server() -> None:
    """An endpoint that can't be connected to is unreachable: it costs the message nothing."""
    sender = Webhook("acme", f"http://127.0.0.1:{free_port()}/", secrets=[SECRET], allow_private=True)
    (verdict,) = await sender.publish([message()])
    await sender.close()
    assert isinstance(verdict, Unreachable)
    assert "can't be reached" in verdict.reason


async def test_no_such_host() -> None:
    """So is one without an address."""
    for url in ("https://no-such-host.invalid/", f"https://{'a.' * 120}invalid/"):
        sender = Webhook("acme", url, secrets=[SECRET])
        (verdict,) = await sender.publish([message()])
        await sender.close()
        assert isinstance(verdict, Unreachable)


async def test_many_at_once() -> None:
    """Messages of one call are sent side by side, over a few connections, each with a verdict of its own."""

    def every_other(got: Got) -> bytes:
        return http(500 if int(got.headers["webhook-id"][-1]) % 2 else 200)

    messages = [message(number) for number in range(40)]
    tries, server = await sent(every_other, *messages)
    assert [type(each.verdict) for each in tries] == [Delivered, Failed] * 20
    assert 1 <= server.connections <= MAX_CONNECTIONS


async def test_a_slow_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends in time, however slow an endpoint is: what has not had its turn loses no try, and what was delivered
    is delivered.
    """
    monkeypatch.setattr("semel.publishers.webhook.BEGIN_WITHIN", timedelta(0))
    tries, server = await sent(lambda _: http(), *[message(number) for number in range(3 * MAX_CONNECTIONS)])
    delivered = [each for each in tries if each.verdict == Delivered()]
    waiting = [each for each in tries if isinstance(each.verdict, Unreachable)]
    assert len(delivered) == len(server.requests)
    assert waiting
    assert len(delivered) + len(waiting) == 3 * MAX_CONNECTIONS


async def test_a_header_that_cant_be_sent() -> None:
    """A message with a broken header becomes a dead letter, and nothing of it is sent."""
    (tried,), server = await sent(lambda _: http(), message(headers=(("X-A", "1\r\nX-B: 2"),)))
    assert isinstance(tried.verdict, Rejected)
    assert server.requests == []


@pytest.mark.parametrize("fragment", ["private=allow", "secret=env:PATH", "top"])
def test_a_program_that_gives_the_url_of_a_customer(fragment: str) -> None:
    """A URL that a program gives has no settings: no customer allows private addresses, or names a secret."""
    with pytest.raises(ConfigurationError, match="customer"):
        Webhook("acme", f"https://127.0.0.1/#{fragment}", secrets=[SECRET])


async def test_large_payloads_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A payload over 20 kB is sent, and logged once for the endpoint."""
    with caplog.at_level(logging.WARNING, logger="semel"):
        tries, _ = await sent(lambda _: http(), message(1, b"x" * 20_001), message(2, b"x" * 30_000))
    assert [each.verdict for each in tries] == [Delivered()] * 2
    assert [vars(each)["semel_event"] for each in caplog.records] == ["LargeWebhook"]


async def test_secrets_by_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are read from the environment and from files, anew for each try: a file can be replaced."""
    monkeypatch.setenv("ACME_SECRET", SECRET)
    file = tmp_path / "secret"
    file.write_text(f"{OLD}\n")
    async with serving() as server:
        url = f"{server.url()}#secret=env:ACME_SECRET&secret=file:{file}&private=allow"
        sender = publisher("acme", url)
        await sender.open()
        assert await sender.publish([message()]) == [Delivered()]
        file.write_text(new_secret(b"n" * 32))
        assert await sender.publish([message()]) == [Delivered()]
        file.unlink()
        (verdict,) = await sender.publish([message()])
        await sender.close()
    assert isinstance(verdict, Unreachable)
    assert "can't be read" in verdict.reason
    first, second = server.requests
    assert first.line == "POST /hooks HTTP/1.1"
    for secret in (SECRET, OLD):
        standardwebhooks.Webhook(secret).verify(first.body, first.headers)
    standardwebhooks.Webhook(new_secret(b"n" * 32)).verify(second.body, second.headers)


@pytest.mark.parametrize(
    "url, words",
    [
        ("https://a.example/", "at least one secret"),
        ("https://a.example/#secret=env:NO_SUCH_VARIABLE", "no secret at env:NO_SUCH_VARIABLE"),
        ("https://a.example/#secret=file:/no/such/file", "can't be read"),
        ("https://a.example/#secret=file:/dev/null", "no secret at"),
        ("https://a.example/#secret=env:", "names nothing"),
        ("https://a.example/#secret=whsec_aGVsbG8=", "kept elsewhere"),
        ("https://user@a.example/", "Remove it"),
    ],
)
async def test_misconfigured(url: str, words: str) -> None:
    """What can't work is told before anything is sent, and no secret is repeated."""
    with pytest.raises(ConfigurationError, match=words) as caught:
        await publisher("acme", url).open()
    assert "aGVsbG8" not in str(caught.value)


async def test_it_is_a_publisher() -> None:
    """It has the methods of every publisher, and the specification's schedule: 75 hours."""
    sender = Webhook("acme", "https://a.example/", secrets=[SECRET])
    assert isinstance(sender, Publisher)
    assert sender.schedule is WEBHOOK_SCHEDULE
    assert sum(sender.schedule.pauses, timedelta()) > timedelta(hours=75)
    await sender.close()
