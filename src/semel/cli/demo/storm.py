"""The storm of requests: customers that pay over a bad network, click twice, and never give up. They use HTTP only."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import uuid4

import httpx

from semel.cli.demo.referee import Heard, Outcome

CUSTOMERS = 40

#: Long enough for any answer; one that takes longer is lost.
ANSWER_SECONDS = 10.0
#: A customer that hangs up does so while the payment is under way.
PATIENCE_SECONDS = (0.01, 0.2)
#: Full jitter: customers that lost their connections together should not retry together.
BACK_OFF_SECONDS = (0.05, 0.4)
PAUSE_SECONDS = (0.1, 0.6)

AMOUNTS = range(100, 10_000)


class Habit(StrEnum):
    """How a customer sends a payment."""

    WAITS = "waits"
    CLICKS_TWICE = "clicks twice"
    HANGS_UP = "hangs up"
    ASKS_AGAIN = "asks again"  #: and so does a network that loses the answer


@dataclass(frozen=True, slots=True)
class Payment:
    """One order to be paid for, under one key, however often it is sent."""

    order: str
    amount: int
    key: str = field(default_factory=lambda: str(uuid4()))


class Storm:
    """Customers that each pay again and again until it is over."""

    def __init__(self, url: str, seed: str, expect: Callable[[str], None], hear: Callable[[Heard], None]) -> None:
        """Pay at *url*; call *expect* for each order and *hear* for each request. *seed* decides what they do."""
        context = ssl.create_default_context()  # TLS is not used, but making one for each customer takes long.
        self._customers = [
            Customer(number, url, f"{seed}/{number}", expect=expect, hear=hear, context=context)
            for number in range(CUSTOMERS)
        ]

    async def blow(self, over: asyncio.Event) -> None:
        """Let every customer pay until it is *over*, and finish the payments begun by then."""
        await asyncio.gather(*(customer.shop(over) for customer in self._customers))

    async def ask_again(self) -> None:
        """Let every customer send each payment that was answered once more."""
        await asyncio.gather(*(customer.ask_again() for customer in self._customers))

    @property
    def asked_again(self) -> int:
        """How many payments were answered once more at the end."""
        return sum(customer.asked_again for customer in self._customers)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(customer.close() for customer in self._customers))


class Customer:
    """One customer, with its own connections."""

    def __init__(
        self,
        number: int,
        url: str,
        seed: str,
        *,
        expect: Callable[[str], None],
        hear: Callable[[Heard], None],
        context: ssl.SSLContext,
    ) -> None:
        """Act by *seed* alone: the order of the customers does not matter."""
        self._url = url
        self._number = number
        self._expect = expect
        self._hear = hear
        self._chance = random.Random(seed)  # noqa: S311 - habits have no enemy
        self._client = httpx.AsyncClient(timeout=ANSWER_SECONDS, verify=context, trust_env=False)
        self._paid: list[Payment] = []
        self.asked_again = 0

    async def shop(self, over: asyncio.Event) -> None:
        """Pay until it is *over*."""
        await asyncio.sleep(self._chance.uniform(0, PAUSE_SECONDS[1]))
        bought = 0
        while not over.is_set():
            bought += 1
            payment = Payment(f"order-{self._number}-{bought}", self._chance.choice(AMOUNTS))
            self._expect(payment.order)
            await self._pay(payment)
            await asyncio.sleep(self._chance.uniform(*PAUSE_SECONDS))

    async def ask_again(self) -> None:
        """Send each payment that was answered once more."""
        for payment in self._paid:
            await self._insist(payment)
            self.asked_again += 1

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _pay(self, payment: Payment) -> None:
        match self._chance.choice(tuple(Habit)):
            case Habit.WAITS:
                await self._insist(payment)
            case Habit.CLICKS_TWICE:
                await asyncio.gather(self._insist(payment), self._insist(payment))
            case Habit.HANGS_UP:
                await self._hang_up(payment)
                await self._insist(payment)
            case Habit.ASKS_AGAIN:
                await self._insist(payment)
                await self._insist(payment)
        self._paid.append(payment)

    async def _insist(self, payment: Payment) -> None:
        """Send the payment until there is an answer."""
        while True:
            heard, retry_after = await self._send(payment)
            self._hear(heard)
            if heard.outcome in {Outcome.PAID, Outcome.REFUSED}:
                return
            await asyncio.sleep(retry_after or self._chance.uniform(*BACK_OFF_SECONDS))

    async def _hang_up(self, payment: Payment) -> None:
        """Send the payment, and break the connection if it is not answered at once."""
        try:
            async with asyncio.timeout(self._chance.uniform(*PATIENCE_SECONDS)):
                heard, _ = await self._send(payment)
        except TimeoutError:
            heard = Heard(payment.order, Outcome.HUNG_UP)
        self._hear(heard)

    async def _send(self, payment: Payment) -> tuple[Heard, float]:
        """Send it once; return the answer, and after how many seconds to retry, if the answer says so."""
        bill = {"order": payment.order, "amount": payment.amount}
        try:
            response = await self._client.post(self._url, json=bill, headers={"Idempotency-Key": payment.key})
        except httpx.TransportError:
            return Heard(payment.order, Outcome.LOST), 0
        is_replay = response.headers.get("Idempotent-Replayed") == "true"
        heard = Heard(payment.order, _outcome(response.status_code), response.content, is_replay)
        return heard, float(response.headers.get("Retry-After", 0))


def _outcome(status: int) -> Outcome:
    if status == httpx.codes.CREATED:
        return Outcome.PAID
    if status == httpx.codes.CONFLICT:
        return Outcome.CONFLICT
    return Outcome.FAILED if status >= httpx.codes.INTERNAL_SERVER_ERROR else Outcome.REFUSED
