"""Webhooks are received in FastAPI, Starlette, Flask and Django: verified first, then handled once."""

import io
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import django.test
import flask
import pytest
import standardwebhooks
import stripe
import werkzeug.datastructures
from werkzeug.test import create_environ, run_wsgi_app

import semel.webhooks.django
import semel.webhooks.fastapi
import semel.webhooks.flask
from semel.core.webhook import new_secret, read_secret, signatures
from semel.errors import ConfigurationError, Refusal, SignatureInvalid, StoreUnavailable
from semel.webhooks import verify
from semel.webhooks.receiving import TOLERANCE, Receiver
from tests.webhooks.receivers import WORLDS, Busy, ForLoops, Parked, World

SECRET, OLD = new_secret(b"s" * 32), new_secret(b"o" * 32)
# With blanks that a second writing of the JSON would lose.
BODY = b'{ "type": "order.paid",  "data": {"order": 17} }'


@pytest.fixture(params=WORLDS, ids=lambda kind: kind.__name__)
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.param()
    return made


def headers(secret: str = SECRET, *, body: bytes = BODY, age: int = 0, message_id: str = "msg_1") -> dict[str, str]:
    at = int(time.time()) - age
    return {
        "Webhook-Id": message_id,
        "Webhook-Timestamp": str(at),
        "Webhook-Signature": signatures([read_secret(secret)], message_id, at, body),
    }


async def test_received(world: World) -> None:
    """A genuine webhook is handled with the inbox's connection, and its bytes are those that were sent."""
    async with world.serving(world.view(secrets=[SECRET])) as post:
        answer = await post(headers(), BODY)
    assert (answer.status, json.loads(answer.body)) == (200, {"outcome": "ran"})
    ((connection, event),) = world.handled
    assert connection == "a connection"
    assert (event.id, event.type, event.payload) == ("msg_1", "order.paid", BODY)
    assert event.json()["data"] == {"order": 17}
    assert world.inbox.payloads == [BODY]


async def test_delivered_twice(world: World) -> None:
    """A second delivery is answered like the first, and not handled."""
    async with world.serving(world.view(secrets=[SECRET])) as post:
        answers = [await post(headers(), BODY), await post(headers(age=10), BODY)]
    assert [json.loads(each.body)["outcome"] for each in answers] == ["ran", "duplicate"]
    assert [each.status for each in answers] == [200, 200]
    assert len(world.handled) == 1


async def test_the_other_library_sends(world: World) -> None:
    """What the package of the specification's authors signs is accepted."""
    now = datetime.fromtimestamp(time.time(), UTC)
    signed = standardwebhooks.Webhook(SECRET).sign("msg_2", now, BODY.decode())
    sent = {"webhook-id": "msg_2", "webhook-timestamp": str(int(now.timestamp())), "webhook-signature": signed}
    async with world.serving(world.view(secrets=[SECRET])) as post:
        assert (await post(sent, BODY)).status == 200


async def test_rotation(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several secrets is accepted; they may be named by where they are, and change there."""
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    async with world.serving(world.view(secrets=["env:HOOK_SECRET", OLD])) as post:
        assert (await post(headers(OLD), BODY)).status == 200
        assert (await post(headers(SECRET, message_id="msg_2"), BODY)).status == 200
        newer = new_secret(b"n" * 32)
        monkeypatch.setenv("HOOK_SECRET", newer)
        assert (await post(headers(newer, message_id="msg_3"), BODY)).status == 200
        assert (await post(headers(SECRET, message_id="msg_4"), BODY)).status == 401


REFUSED: dict[str, tuple[Callable[[], dict[str, str]], bytes, int, str]] = {
    "another's secret": (lambda: headers(new_secret(b"x" * 32)), BODY, 401, "webhook-signature-invalid"),
    "another body": (headers, BODY + b" ", 401, "webhook-signature-invalid"),
    "written again": (headers, json.dumps(json.loads(BODY)).encode(), 401, "webhook-signature-invalid"),
    "old": (lambda: headers(age=400), BODY, 400, "webhook-too-old"),
    "of the future": (lambda: headers(age=-86400 * 3650), BODY, 400, "webhook-too-old"),
    "not signed": (dict, BODY, 400, "webhook-malformed"),
    "nonsense": (lambda: headers() | {"Webhook-Signature": "nonsense"}, BODY, 400, "webhook-malformed"),
    "large": (lambda: headers(body=b"x" * 2000), b"x" * 2000, 413, "request-body-too-large"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_refused(world: World, case: str) -> None:
    """What is not genuine, fresh and small is refused before any of the application's code runs."""
    sent, body, status, code = REFUSED[case]
    async with world.serving(world.view(secrets=[SECRET], max_body=1024)) as post:
        answer = await post(sent(), body)
    assert (answer.status, json.loads(answer.body)["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/problem+json"
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert world.handled == []
    assert world.inbox.seen == set()


async def test_busy_and_parked(world: World) -> None:
    """While another delivery is handled, and while it waits for an operator, the sender is asked to come back."""
    async with world.serving(world.view(secrets=[SECRET])) as post:
        for verdict, code, seconds in ((Busy(), "webhook-busy", "5"), (Parked(), "webhook-parked", "3600")):
            world.inbox.verdict = verdict
            answer = await post(headers(), BODY)
            assert (answer.status, answer.headers["retry-after"]) == (503, seconds)
            assert json.loads(answer.body)["code"] == code
        world.inbox.verdict = None
        assert (await post(headers(), BODY)).status == 200


async def test_a_failing_handler(world: World) -> None:
    """An exception of the handler is a 500, and the next delivery is handled; so is it when the store was away."""
    async with world.serving(world.view(secrets=[SECRET])) as post:
        world.error = RuntimeError("no luck")
        assert (await post(headers(), BODY)).status == 500
        world.error = StoreUnavailable("db7 is down")
        away = await post(headers(), BODY)
        assert away.status == 503
        assert b"db7" not in away.body
        world.error = None
        assert (await post(headers(), BODY)).status == 200
    assert len(world.handled) == 1


async def test_without_an_inbox(world: World) -> None:
    """Without an inbox, the handler gets each delivery, verified."""
    async with world.serving(world.view(with_inbox=False, secrets=[SECRET])) as post:
        answers = [await post(headers(), BODY) for _ in range(2)]
        assert (await post(headers(OLD), BODY)).status == 401
    assert [each.status for each in answers] == [200, 200]
    assert [connection for connection, _ in world.handled] == [None, None]


async def test_stripe(world: World) -> None:
    """Stripe's own library signs an event; it is told by the event's id."""
    event = json.dumps({"id": "evt_1", "object": "event", "type": "charge.succeeded", "data": {"object": {}}})
    sign: Any = stripe.WebhookSignature.generate_signature_header
    sent = {"Stripe-Signature": sign(event, "whsec_stripe")}
    stripe.Webhook.construct_event(event, sent["Stripe-Signature"], "whsec_stripe")
    forged = {"Stripe-Signature": sign(event, "whsec_forged")}
    old = {"Stripe-Signature": sign(event, "whsec_stripe", int(time.time()) - 400)}
    async with world.serving(world.view(secrets=["whsec_stripe"], preset="stripe")) as post:
        answers = [await post(each, event.encode()) for each in (sent, sent, forged, old)]
    assert [each.status for each in answers] == [200, 200, 401, 400]
    ((_, received),) = world.handled
    assert (received.id, received.type) == ("evt_1", "charge.succeeded")
    # Its payload may differ from try to try, and is not compared.
    assert world.inbox.payloads == [None, None]


async def test_github(world: World) -> None:
    """GitHub's example is accepted, by the id of its delivery."""
    sent = {
        "X-Hub-Signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
        "X-GitHub-Delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "X-GitHub-Event": "ping",
    }
    async with world.serving(world.view(secrets=["It's a Secret to Everybody"], preset="github")) as post:
        answers = [await post(sent, b"Hello, World!") for _ in range(2)]
        assert (await post(sent, b"Hello, World?")).status == 401
    assert [json.loads(each.body)["outcome"] for each in answers] == ["ran", "duplicate"]
    ((_, received),) = world.handled
    assert (received.id, received.type) == (sent["X-GitHub-Delivery"], "ping")


async def test_an_inbox_that_is_none(world: World) -> None:
    """What is no verdict is not taken for one."""
    world.inbox.verdict = "done"
    async with world.serving(world.view(secrets=[SECRET])) as post:
        assert (await post(headers(), BODY)).status == 500


@pytest.mark.parametrize("decorator", [World.decorator, semel.webhooks.flask.webhook, semel.webhooks.django.webhook])
@pytest.mark.parametrize(
    "args, settings, words",
    [
        ((), {"secrets": []}, "at least one secret"),
        ((), {"secrets": SECRET}, "a list"),
        ((), {"secrets": ["env:NO_SUCH_VARIABLE"]}, "no secret at env:NO_SUCH_VARIABLE"),
        ((), {"secrets": ["hunter2"]}, "begins with whsec_"),
        ((), {"secrets": [SECRET], "preset": "gitlab"}, "There are standard, stripe, github"),
        ((), {"secrets": [" "], "preset": "github"}, "The secret is empty"),
        ((), {"secrets": [None]}, "a list of at least one secret"),
        ((), {"secrets": [SECRET], "tolerance": 300}, "tolerance is a timedelta"),
        ((), {"secrets": [SECRET], "max_body": "1 MiB"}, "max_body is a number of bytes"),
        ((len,), {"secrets": [SECRET]}, "first argument is the inbox"),
    ],
)
def test_misconfigured(decorator: Any, args: tuple[Any, ...], settings: dict[str, Any], words: str) -> None:
    """What can't work is told when the application starts."""
    with pytest.raises(ConfigurationError, match=words):
        decorator(*args, **settings)


@pytest.mark.parametrize(
    "spelled",
    [
        lambda sent: sent,
        lambda sent: list(sent.items()),
        lambda sent: [(name.encode(), value.encode()) for name, value in sent.items()],
        werkzeug.datastructures.Headers,
    ],
    ids=["mapping", "pairs", "bytes", "werkzeug"],
)
def test_without_a_framework(spelled: Callable[[dict[str, str]], Any]) -> None:
    """``verify`` returns the event, however headers and body are at hand."""
    for body in (BODY, bytearray(BODY), BODY.decode()):
        event = verify(spelled(headers()), body, secrets=[OLD, SECRET])
        assert (event.id, event.type, event.payload) == ("msg_1", "order.paid", BODY)
    empty = headers(body=b"")
    assert verify(spelled(empty), "", secrets=[SECRET]).payload == b""


@pytest.mark.parametrize("case", [name for name in REFUSED if name != "large"])
def test_refused_without_a_framework(case: str) -> None:
    """What is not genuine and fresh is refused as a framework's receiver refuses it."""
    sent, body, status, code = REFUSED[case]
    with pytest.raises(Refusal) as refused:
        verify(sent(), body, secrets=[SECRET])
    assert (refused.value.status, refused.value.slug) == (status, code)


def test_other_senders_without_a_framework() -> None:
    """A preset is named as elsewhere."""
    body = json.dumps({"id": "evt_1", "type": "charge.succeeded"})
    sign: Any = stripe.WebhookSignature.generate_signature_header
    sent = {"STRIPE-SIGNATURE": sign(body, "whsec_stripe")}
    assert verify(sent, body, secrets=["whsec_stripe"], preset="stripe").id == "evt_1"


def test_texts_that_are_none() -> None:
    """Half of a surrogate pair was never signed; several values of one header are to be given as pairs."""
    with pytest.raises(SignatureInvalid):
        verify(headers(), "\ud800", secrets=[SECRET])
    several: Any = {name: [value] for name, value in headers().items()}
    with pytest.raises(ConfigurationError, match="name and a value"):
        verify(several, BODY, secrets=[SECRET])


@pytest.mark.parametrize(
    "body, settings, words",
    [
        (json.loads(BODY), {"secrets": [SECRET]}, "not dict"),
        (BODY, {"secrets": SECRET}, "a list"),
        (BODY, {"secrets": [SECRET], "preset": "gitlab"}, "There are standard, stripe, github"),
    ],
)
def test_misused_without_a_framework(body: Any, settings: dict[str, Any], words: str) -> None:
    """What was parsed can't be verified, and settings are checked as elsewhere."""
    with pytest.raises(ConfigurationError, match=words):
        verify(headers(), body, **settings)


def test_flask_and_loops() -> None:
    """Flask is told that it needs an inbox for threads."""
    with pytest.raises(ConfigurationError, match="the one for threads"):
        semel.webhooks.flask.webhook(ForLoops(), secrets=[SECRET])


@pytest.mark.parametrize("kind", [each for each in WORLDS if "Django" in each.__name__], ids=lambda kind: kind.__name__)
async def test_django_takes_posts_only(kind: type[World]) -> None:
    """Django's views answer every method; these POST alone."""
    world = kind()
    async with world.serving(world.view(secrets=[SECRET])):
        answer = await django.test.AsyncClient().get("/hooks")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")


def test_a_view_has_its_handlers_name() -> None:
    """Routes and logs show the handler's own name and words."""

    async def paid(connection: Any, event: Any) -> None:
        """An order was paid."""

    view = semel.webhooks.fastapi.webhook(secrets=[SECRET])(paid)
    assert (view.__name__, view.__doc__) == ("paid", "An order was paid.")


def test_a_receiver_shows_no_secret() -> None:
    """Pages of errors show what local variables hold: a receiver's secrets are not among it."""
    made = Receiver.of(None, secrets=[SECRET], preset="standard", tolerance=TOLERANCE, max_body=1)
    assert SECRET.removeprefix("whsec_") not in repr(made)


def test_an_endless_body_in_flask() -> None:
    """A body without a declared length is read up to max_body, and no further."""

    class Endless(io.RawIOBase):
        given = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            self.given += len(buffer)
            return len(buffer) if self.given < 10_000_000 else 0

    app, body = flask.Flask("receiver"), Endless()
    app.post("/hooks")(semel.webhooks.flask.webhook(secrets=[SECRET], max_body=1024)(print))
    request = create_environ("/hooks", method="POST")
    chunked = {"wsgi.input": io.BufferedReader(body), "wsgi.input_terminated": True}
    parts, status, _ = run_wsgi_app(app, {**request, **chunked, "HTTP_TRANSFER_ENCODING": "chunked"})
    assert (status[:3], json.loads(b"".join(parts))["code"]) == ("413", "request-body-too-large")
    assert body.given < 1_000_000
