"""Stripe's own client against an API in the Stripe preset, on a real socket: what it retries, and what it is told."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, Literal

import pytest
import stripe
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from semel import Policy
from semel.asgi import IdempotencyMiddleware
from semel.guard.request import RequestView
from tests.web.harness import HANG_SECONDS, wait_until

ACCOUNTS = {"Bearer sk_test_alice": "acct_alice", "Bearer sk_test_bob": "acct_bob"}
MAX_RESPONSE_BODY = 1000


def user_of(request: RequestView) -> str | None:
    return ACCOUNTS.get(request.headers.get("authorization", ""))


class Api:
    """A small API of payments. What it does is told by the description of the payment."""

    def __init__(self, store: str) -> None:
        self.charges: list[str] = []
        #: The status of every response, in order.
        self.statuses: list[int] = []
        self.let_go = threading.Event()
        routes = [Route("/v1/payment_intents", self.pay, methods=["POST"])]
        self._app = Starlette(routes=routes)
        policy = Policy.stripe(max_response_body=MAX_RESPONSE_BODY)
        self._guarded = IdempotencyMiddleware(self.work, store=store, scope=user_of, policy=policy)

    async def work(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/v1/refunds":
            raise RuntimeError("It broke half-way.")
        await self._app(scope, receive, send)

    async def pay(self, request: Request) -> Response:
        form = await request.form()
        self.charges.append(str(form["amount"]))
        payment: dict[str, Any] = {
            "id": f"pi_{len(self.charges)}",
            "object": "payment_intent",
            "amount": form["amount"],
        }
        match form.get("description"):
            case "slow":
                await asyncio.to_thread(self.let_go.wait, HANG_SECONDS)
            case "large":
                payment["description"] = "x" * MAX_RESPONSE_BODY
            case "away":
                return JSONResponse({"error": {"type": "api_error", "message": "The bank is away."}}, 503)
            case "away for good":
                headers = {"Stripe-Should-Retry": "false"}
                return JSONResponse({"error": {"type": "api_error", "message": "It is gone."}}, 503, headers)
            case _:
                pass
        return JSONResponse(payment)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counting(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
            await send(message)

        await self._guarded(scope, receive, counting)


@contextmanager
def served(app: Any, lifespan: Literal["on", "off"] = "on") -> Iterator[int]:
    """A real server of *app* on a free port of this machine."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, ws="none", loop="asyncio", log_level="critical", lifespan=lifespan)
    server = uvicorn.Server(config)
    running = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    running.start()
    try:
        wait_until(lambda: server.started)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        running.join(HANG_SECONDS)
        listening.close()


class Wire:
    """The way to the server: it passes everything on, and can lose an answer that the server has given."""

    def __init__(self, port: int) -> None:
        self._port = port
        #: How many of the next answers are lost.
        self.losses = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(HANG_SECONDS)
        for end in self._ends:
            _hang_up(end)
        for thread in self._threads:
            thread.join(HANG_SECONDS)
        for end in (self._listening, *self._ends):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._ends += [client, server]
            for way in (self._pass_on, self._pass_back):
                self._threads.append(threading.Thread(target=way, args=(client, server)))
                self._threads[-1].start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
        _hang_up(server)

    def _pass_back(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if self.losses:
                    self.losses -= 1
                    break
                client.sendall(data)
        _hang_up(client)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def api(sqlite_url: str) -> Api:
    return Api(sqlite_url)


@pytest.fixture
def wire(api: Api) -> Iterator[Wire]:
    with served(api) as port, closing(Wire(port)) as wire:
        yield wire


@pytest.fixture
def client(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[stripe.StripeClient]:
    """Stripe's client, which speaks to nobody but this machine and waits no longer than it has to."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(stripe, "enable_telemetry", False)
    monkeypatch.setattr(stripe.HTTPClient, "INITIAL_DELAY", 0.01)
    with closing(stripe.RequestsClient()) as http:
        yield stripe.StripeClient(
            "sk_test_alice", base_addresses={"api": wire.url}, max_network_retries=2, http_client=http
        )


def pay(client: stripe.StripeClient, amount: int = 5, *, key: str | None = None, **more: Any) -> stripe.PaymentIntent:
    options: Any = {"idempotency_key": key} if key else {}
    params: Any = {"amount": amount, "currency": "eur", **more}
    return client.v1.payment_intents.create(params, options)


def is_replay(payment: stripe.PaymentIntent) -> bool:
    response = payment.last_response
    return response is not None and response.headers.get("idempotent-replayed") == "true"


def should_retry(error: stripe.StripeError) -> str | None:
    headers: Any = error.headers
    value: str | None = headers.get("stripe-should-retry")
    return value


def test_a_lost_answer_is_replayed(api: Api, wire: Wire, client: stripe.StripeClient) -> None:
    """When the answer is lost on its way, the client asks again by itself with its own key, and there is one charge."""
    wire.losses = 2
    payment = pay(client)
    assert (payment.id, is_replay(payment)) == ("pi_1", True)
    assert (api.charges, api.statuses) == (["5"], [200, 200, 200])


def test_another_payment_under_one_key(api: Api, client: stripe.StripeClient) -> None:
    """Other parameters under a used key are an IdempotencyError with words for a person, and are not sent again."""
    pay(client, 5, key="k")
    with pytest.raises(stripe.IdempotencyError) as refused:
        pay(client, 6, key="k")
    assert refused.value.http_status == 400
    assert refused.value.user_message == "This key was used for a different request. Use a new key for a new operation."
    assert (api.charges, api.statuses) == (["5"], [200, 400])


def test_a_key_in_use_is_asked_for_again(api: Api, wire: Wire, client: stripe.StripeClient) -> None:
    """While the first request runs the client gets 409 and comes back, until it has the first one's answer."""
    patient = stripe.StripeClient("sk_test_alice", base_addresses={"api": wire.url}, max_network_retries=12)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pay, client, key="k", description="slow")
        wait_until(lambda: bool(api.charges))
        second = threads.submit(pay, patient, key="k", description="slow")
        wait_until(lambda: 409 in api.statuses)
        api.let_go.set()
        payments = [each.result(HANG_SECONDS) for each in (first, second)]
    assert [payment.id for payment in payments] == ["pi_1", "pi_1"]
    assert [is_replay(payment) for payment in payments] == [False, True]
    assert api.charges == ["5"]


def test_a_key_in_use_for_too_long(api: Api, client: stripe.StripeClient) -> None:
    """A client that has come back as often as it may says what it was told."""
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(pay, client, key="k", description="slow")
        wait_until(lambda: bool(api.charges))
        with pytest.raises(stripe.APIError) as refused:
            pay(client, key="k", description="slow")
        api.let_go.set()
        first.result(HANG_SECONDS)
    assert refused.value.http_status == 409
    assert refused.value.error is not None
    assert refused.value.error.code == "idempotency_key_in_use"
    assert api.statuses[:3] == [409, 409, 409]


def test_two_accounts_never_meet(api: Api, wire: Wire, client: stripe.StripeClient) -> None:
    """One key of two accounts is two keys."""
    bob = stripe.StripeClient("sk_test_bob", base_addresses={"api": wire.url})
    assert [pay(each, key="k").id for each in (client, bob, client)] == ["pi_1", "pi_2", "pi_1"]


def test_a_key_that_can_not_be_read(api: Api, client: stripe.StripeClient) -> None:
    """A key that is too long is an InvalidRequestError, and nothing is charged."""
    with pytest.raises(stripe.InvalidRequestError) as refused:
        pay(client, key="k" * 256)
    assert (refused.value.http_status, refused.value.code) == (400, "parameter_invalid_string")
    assert api.charges == []


def test_a_server_error_is_asked_for_once_more(api: Api, client: stripe.StripeClient) -> None:
    """A server error is kept; its replay says that asking again is of no use, and the client stops."""
    with pytest.raises(stripe.APIError, match=r"The bank is away\.") as failed:
        pay(client, description="away")
    assert should_retry(failed.value) == "false"
    assert (api.charges, api.statuses) == (["5"], [503, 503])


def test_a_crash_of_the_application_is_final(api: Api, client: stripe.StripeClient) -> None:
    """An application that breaks half-way is answered for, and the client is told at once that this is final."""
    for _ in range(2):
        with pytest.raises(stripe.APIError, match="The operation failed") as failed:
            client.v1.refunds.create({"payment_intent": "pi_1"}, {"idempotency_key": "k"})
        assert should_retry(failed.value) == "false"
    assert api.statuses == [500, 500]


def test_the_application_has_its_say(api: Api, client: stripe.StripeClient) -> None:
    """An answer of the application's own that says not to retry is passed on, and honoured."""
    with pytest.raises(stripe.APIError, match=r"It is gone\."):
        pay(client, key="k", description="away for good")
    assert api.statuses == [503]


def test_an_answer_that_was_not_kept_is_final(api: Api, client: stripe.StripeClient) -> None:
    """A 409 that can't change is not asked for again, unlike that of a key in use."""
    pay(client, key="k", description="large")
    with pytest.raises(stripe.APIError, match="was not kept") as refused:
        pay(client, key="k", description="large")
    assert refused.value.http_status == 409
    assert (api.charges, api.statuses) == (["5"], [200, 409])


def test_a_store_that_is_away_is_asked_for_again(client: stripe.StripeClient) -> None:
    """A request that could not be guarded was not run, and the client sends it again."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    api = Api(f"postgresql://127.0.0.1:{port}/semel")
    with served(api, lifespan="off") as port:
        other = stripe.StripeClient(
            "sk_test_alice", base_addresses={"api": f"http://127.0.0.1:{port}"}, max_network_retries=2
        )
        with pytest.raises(stripe.APIError) as refused:
            pay(other)
    assert (refused.value.http_status, should_retry(refused.value)) == (503, "true")
    assert (api.charges, api.statuses) == ([], [503, 503, 503])
