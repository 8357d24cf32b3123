"""The relay, on real databases: what is sent, in which order, and what becomes of what can't be."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

from semel.core.outbox import Delivered, Ending, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.errors import ConfigurationError, StoreNotReady, StoreUnavailable
from semel.outbox import Outbox
from semel.publishers import Publisher, publisher
from semel.stores import AsyncStore, Store
from semel.stores import store as open_store
from semel.stores.dialect import messages_of
from semel.stores.outbox import OutboxStatements, carry_out
from semel.stores.transaction import at_once
from semel.work.relay import AsyncRelay, Relay
from tests.outbox.conftest import Broker, connect, relay_of, rows

SOON = Schedule((timedelta(), timedelta(), timedelta()))
STATES = "SELECT payload, state, attempts FROM semel_outbox ORDER BY seq"


def add(url: str, *payloads: Any, **how: Any) -> list[str]:
    """Add messages in one transaction."""
    with closing(connect(url)) as connection:
        made = [Outbox(url).add(connection, "t", payload, **how) for payload in payloads]
        connection.commit()
        return made


def left(url: str) -> list[tuple[str, str, int]]:
    return [(bytes(payload).decode(), state, attempts) for payload, state, attempts in rows(url, STATES)]


def only(*bad: str, verdict: Verdict) -> Callable[[Message], Verdict]:
    return lambda message: verdict if message.payload.decode() in bad else Delivered()


class TestDelivery:
    """What is confirmed is gone."""

    def test_sent_and_deleted(self, url: str, store: Store, broker: Broker) -> None:
        """Everything of a message arrives, and the row is deleted once it is confirmed."""
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        (made,) = add(url, {"n": 1}, key="k", headers={"tenant": "acme"}, traceparent=trace)
        report = relay_of(store, "events", broker).run_once()
        assert (report.sent, report.error, report.is_idle) == (1, None, False)
        (message,) = broker.got
        assert (message.id, message.type, message.to, message.key) == (made, "t", "events", "k")
        assert (message.payload, message.content_type) == (b'{"n":1}', "application/json")
        assert (message.headers, message.traceparent, message.attempts) == ((("tenant", "acme"),), trace, 0)
        assert message.created_at > 1_700_000_000
        assert left(url) == []

    async def test_on_an_event_loop(self, url: str, async_store: AsyncStore, broker: Broker) -> None:
        """The same, with a store for an event loop."""
        add(url, 1, 2, 3)
        relay = AsyncRelay(async_store, "events", broker)
        assert (await relay.run_once()).sent == 3
        assert (await relay.run_once()).is_idle
        await relay.close()
        assert (broker.opened, broker.closed) == (1, 1)
        assert left(url) == []

    def test_only_its_own_destination(self, url: str, store: Store, broker: Broker) -> None:
        """A relay leaves the messages of others alone."""
        add(url, 1, to="mail")
        assert relay_of(store, "events", broker).run_once().is_idle
        assert relay_of(store, "mail", broker).run_once().sent == 1

    def test_many_batches(self, url: str, store: Store, broker: Broker) -> None:
        """One run sends all that is there."""
        add(url, *range(25))
        assert relay_of(store, "events", broker, batch=4).run_once().sent == 25
        assert broker.payloads == [str(number) for number in range(25)]

    def test_large_messages_go_a_few_at_a_time(self, url: str, store: Store, broker: Broker) -> None:
        """However large they are, a batch is not more than a process can hold; and each is sent."""
        add(url, *(b"x" * 1_000_000 for _ in range(20)), content_type="application/octet-stream")
        sizes: list[int] = []

        class Measured(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                sizes.append(sum(len(message.payload) for message in messages))
                return await super().publish(messages)

        assert relay_of(store, "events", Measured()).run_once().sent == 20
        assert max(sizes) <= 10_000_000

    def test_kept_on_request(self, url: str, store: Store, broker: Broker) -> None:
        """With keep=, what was sent stays for so long, and is not sent again."""
        add(url, 1, key="a")
        relay = relay_of(store, "events", broker, keep=timedelta(hours=1))
        assert relay.run_once().sent == 1
        assert relay.run_once().is_idle
        assert left(url) == [("1", "sent", 0)]
        while left(url):
            relay_of(store, "events", broker, keep=timedelta(microseconds=1)).run_once()
        assert len(broker.got) == 1

    def test_kept_by_another(self, url: str, store: Store, broker: Broker) -> None:
        """What one destination keeps for long, a relay to another that keeps for less does not delete."""
        add(url, 1, to="audit")
        add(url, 2)
        relay_of(store, "audit", broker, keep=timedelta(days=30)).run_once()
        while len(left(url)) == 2:  # SQLite's clock has milliseconds.
            relay_of(store, "events", broker, keep=timedelta()).run_once()
        assert left(url) == [("1", "sent", 0)]

    def test_a_database_that_is_down(self, broker: Broker) -> None:
        """A relay asks less and less often, down to once a second, and its log has as many lines."""
        with closing(open_store("postgresql://u@127.0.0.1:1/none")) as away:
            relay = relay_of(away, "events", broker)
            intervals = []
            for _ in range(9):
                assert isinstance(relay.run_once().error, StoreUnavailable)
                intervals.append(relay.interval)
        assert intervals == sorted(intervals)
        assert intervals[-1] == timedelta(seconds=1)

    def test_no_outbox(self, broker: Broker) -> None:
        """A store without transactions has nothing to relay."""
        with closing(open_store("memory://")) as memory, pytest.raises(ConfigurationError, match="no outbox"):
            relay_of(memory, "events", broker)

    def test_no_table(self, empty_postgres_url: str, broker: Broker) -> None:
        """Where the tables are missing, the report says which command makes them."""
        with closing(open_store(empty_postgres_url)) as store:
            report = relay_of(store, "events", broker).run_once()
        assert isinstance(report.error, StoreNotReady)
        assert "semel migrate" in str(report.error)


class TestFailures:
    """Three kinds, and what each costs."""

    def test_rejected(self, url: str, store: Store, broker: Broker) -> None:
        """What the destination will never take is a dead letter at once, with the reason and a line in the trail."""
        (made,) = add(url, "bad")
        add(url, "good")
        broker.answer = only('"bad"', verdict=Rejected("no such queue"))
        report = relay_of(store, "events", broker).run_once()
        assert (report.sent, report.dead) == (1, 1)
        assert left(url) == [('"bad"', "dead", 1)]
        assert rows(url, "SELECT error FROM semel_outbox") == ["no such queue"]
        assert rows(url, "SELECT scope, key, event, detail FROM semel_audit") == [
            ("outbox:events", made, "dead", "no such queue")
        ]

    def test_failed(self, url: str, store: Store, broker: Broker) -> None:
        """Another failure costs a try, and the next one comes after a pause; when there are none left, it is dead."""
        broker.schedule = SOON
        broker.answer = lambda _: Failed("full")
        add(url, 1)
        relay = relay_of(store, "events", broker)
        tried = []
        for _ in range(4):
            relay.run_once()
            tried.append(len(broker.tried))
        assert left(url) == [("1", "dead", 4)]
        assert len({message.id for message in broker.tried}) == 1
        assert [message.attempts for message in broker.tried] == [0, 1, 2, 3]

    def test_back_off(self, url: str, store: Store, broker: Broker) -> None:
        """Until its pause is over, it is not tried again."""
        broker.schedule = Schedule((timedelta(hours=1),))
        broker.answer = lambda _: Failed("full", timedelta(hours=5))
        add(url, 1)
        relay = relay_of(store, "events", broker)
        relay.run_once()
        assert relay.run_once().is_idle
        assert len(broker.tried) == 1
        due = rows(url, _DUE_IN[url.partition(":")[0]])
        assert 4.9 * 3600 < float(due[0]) < 5.1 * 3600

    def test_unreachable(self, url: str, store: Store, broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
        """A destination that can't be reached costs no message a try; it is left alone, then asked by one message."""
        caplog.set_level(logging.INFO, "semel")
        broker.answer = lambda _: Unreachable("connection refused")
        add(url, 1, 2, 3)
        relay = relay_of(store, "events", broker)
        assert relay.run_once().unreachable == "connection refused"
        assert len(broker.tried) == 3
        assert relay.run_once().is_idle
        assert len(broker.tried) == 3
        relay._alone_until = 0.0
        relay.run_once()
        assert len(broker.tried) == 4
        assert left(url) == [("1", "ready", 0), ("2", "ready", 0), ("3", "ready", 0)]
        broker.answer = lambda _: Delivered()
        relay._alone_until = 0.0
        assert relay.run_once().sent == 3
        assert "events can't be reached, and is left alone for 1 s: connection refused" in caplog.messages
        assert "events can be reached again." in caplog.messages

    def test_half_an_hour(self, url: str, store: Store, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        """An outage of half an hour makes no dead letter, and is asked about every 30 s."""
        now = [1000.0]
        monkeypatch.setattr("semel.work.relay.time.monotonic", lambda: now[0])
        broker.answer = lambda _: Unreachable("down")
        add(url, *range(5))
        relay = relay_of(store, "events", broker)
        while now[0] < 1000 + 1800:
            relay.run_once()
            now[0] += 1
        assert len(broker.tried) <= 5 + 2 + 1800 // 30
        assert {state for _, state, _ in left(url)} == {"ready"}
        assert {attempts for *_, attempts in left(url)} == {0}

    @pytest.mark.parametrize("is_raised", [False, True])
    def test_one_message_ends_the_connection(self, url: str, store: Store, is_raised: bool) -> None:
        """A message over which the destination ends the connection, three times while it is alone, costs its own tries
        from then on, and keeps none of the others.
        """

        class Dropping(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                if any(message.payload == b"0" for message in messages):
                    self.tried += messages
                    if is_raised:
                        raise ConnectionResetError("frame too large")
                    return [Unreachable("frame too large", is_dropped=True)] * len(messages)
                return await super().publish(messages)

        broker = Dropping()
        add(url, *range(5))
        relay = relay_of(store, "events", broker)
        for _ in range(3):
            report = relay.run_once()
            assert (report.sent, report.retried) == (0, 0)
            assert "frame too large" in str(report.unreachable)
            relay._alone_until = 0.0
        report = relay.run_once()
        assert (report.sent, report.retried, report.unreachable) == (4, 1, None)
        assert left(url) == [("0", "waiting", 1)]
        (why,) = rows(url, "SELECT error FROM semel_outbox")
        assert why.startswith("The destination ended the connection 3 times while it had this message alone: ")
        assert "frame too large" in why
        # Longer than the destination is left alone: the others come first.
        assert float(rows(url, _DUE_IN[url.partition(":")[0]])[0]) > 45
        # By now it is known, and is sent after the others, alone.
        rows(url, "UPDATE semel_outbox SET due_at = created_at")
        add(url, 5, 6)
        report = relay.run_once()
        assert (report.sent, report.retried, report.unreachable) == (2, 1, None)
        assert left(url) == [("0", "waiting", 2)]

    def test_one_message_is_never_confirmed_in_time(self, url: str, store: Store) -> None:
        """A message that the destination does not confirm in time, three times while it is alone, costs its own tries
        from then on: once another has got through meanwhile, since the destination may be blocked.
        """

        class Blocked(Broker):
            is_blocked = True

            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                if self.is_blocked or any(message.payload == b"0" for message in messages):
                    self.tried += messages
                    return [Unreachable("no confirmation", is_late=True)] * len(messages)
                return await super().publish(messages)

        broker = Blocked()
        add(url, *range(5))
        relay = relay_of(store, "events", broker)
        for _ in range(20):
            assert relay.run_once().unreachable == "no confirmation"
            relay._alone_until = 0.0
        assert {(state, attempts) for _, state, attempts in left(url)} == {("ready", 0)}
        broker.is_blocked = False
        report = relay.run_once()
        assert (report.sent, report.retried, report.unreachable) == (4, 1, None)
        assert left(url) == [("0", "waiting", 1)]
        (why,) = rows(url, "SELECT error FROM semel_outbox")
        assert "did not confirm in time" in why
        assert "while it had this message alone: no confirmation" in why

    def test_a_slow_destination(self, url: str, store: Store, broker: Broker) -> None:
        """What was confirmed within the time limit is settled whatever becomes of the rest, which costs no try. The
        next call has fewer messages, and those after it twice as many each.
        """
        sizes: list[int] = []

        class Slow(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                sizes.append(len(messages))
                await super().publish(messages[:10])
                return [Delivered()] * len(messages[:10]) + [Unreachable("too slow")] * len(messages[10:])

        slow = Slow()
        add(url, *range(40))
        report = relay_of(store, "events", slow, batch=40).run_once()
        assert (report.sent, report.retried, report.unreachable) == (40, 0, None)
        assert sizes == [40, 5, 10, 15, 5]
        assert slow.payloads == [str(number) for number in range(40)]

    def test_back_after_an_outage(self, url: str, store: Store) -> None:
        """A destination that is back is asked by one message, then by two, and so on: not by all at once."""
        sizes: list[int] = []

        class Away(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                sizes.append(len(messages))
                return [Unreachable("away")] * len(messages) if len(sizes) == 1 else await super().publish(messages)

        add(url, *range(40))
        relay = relay_of(store, "events", Away(), batch=40)
        assert relay.run_once().unreachable == "away"
        relay._alone_until = 0.0
        assert relay.run_once().sent == 40
        assert sizes == [40, 1, 2, 4, 8, 16, 9]

    def test_a_connection_that_is_lost_now_and_then(self, url: str, store: Store, broker: Broker) -> None:
        """A message that gets through in the end was not to blame, and has lost no try."""
        relay = relay_of(store, "events", broker)
        for number in range(4):
            add(url, number)
            for _ in range(2):
                broker.answer = lambda _: Unreachable("reset", is_dropped=True)
                assert relay.run_once().unreachable == "reset"
                relay._alone_until = 0.0
            broker.answer = lambda _: Delivered()
            assert relay.run_once().sent == 1
        assert [message.attempts for message in broker.got] == [0] * 4

    @pytest.mark.parametrize(
        "error", [ConnectionRefusedError("refused"), TimeoutError(), ConfigurationError("wrong"), ImportError("x")]
    )
    def test_errors_of_the_network(self, url: str, store: Store, error: Exception) -> None:
        """What a publisher raises because of the network, or of its settings, costs no message a try."""

        class Broken(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                raise error

        add(url, 1)
        report = relay_of(store, "events", Broken()).run_once()
        assert type(error).__name__ in str(report.unreachable)
        assert left(url) == [("1", "ready", 0)]

    def test_one_message_breaks_its_publisher(self, url: str, store: Store) -> None:
        """One that a publisher stumbles over keeps none of the others: they are sent one by one."""

        class Fragile(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                if any(message.payload == b"13" for message in messages):
                    raise RuntimeError("thirteen\nlines")
                return await super().publish(messages)

        broker = Fragile()
        add(url, *range(20))
        report = relay_of(store, "events", broker).run_once()
        assert (report.sent, report.retried) == (19, 1)
        assert len(broker.got) == 19
        assert left(url) == [("13", "waiting", 1)]
        assert rows(url, "SELECT error FROM semel_outbox") == ["RuntimeError: thirteen lines"]

    def test_too_few_verdicts(self, url: str, store: Store) -> None:
        """A publisher that forgets a message has confirmed none."""

        class Forgetful(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                return []

        add(url, 1, 2)
        report = relay_of(store, "events", Forgetful()).run_once()
        assert (report.sent, report.retried) == (0, 2)

    @pytest.mark.parametrize(
        "said,becomes",
        [
            (Rejected("no\0pe \ud800"), ("dead", "no\\x00pe \\ud800")),
            (Rejected("x" * 10_000), ("dead", "x" * 500)),
            (Rejected(ValueError("never")), ("dead", "never")),  # type: ignore[arg-type]  # as users do
            (Failed("later", 30), ("waiting", "later")),  # type: ignore[arg-type]  # as users do
            (None, ("waiting", "Broker.publish returned None, which is no verdict.")),
            (True, ("waiting", "Broker.publish returned True, which is no verdict.")),
        ],
    )
    def test_verdicts_that_are_not_quite_right(
        self, url: str, store: Store, said: Any, becomes: tuple[str, str]
    ) -> None:
        """They are written as well as they can be, and cost no other message: each was sent once."""
        broker = Broker()
        add(url, 1, 2, 3)
        broker.answer = only("2", verdict=said)
        relay_of(store, "events", broker).run_once()
        assert broker.payloads == ["1", "3"]
        assert [message.payload for message in broker.tried] == [b"1", b"2", b"3"]
        assert rows(url, "SELECT state, error, attempts FROM semel_outbox") == [(*becomes, 1)]

    def test_a_publisher_that_hangs(self, url: str, store: Store) -> None:
        """One that does not return in time counts as unreachable."""

        class Hanging(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                await asyncio.sleep(3600)
                raise AssertionError

        add(url, 1)
        relay = relay_of(store, "events", Hanging(), publish_limit=timedelta(milliseconds=50))
        assert "TimeoutError" in str(relay.run_once().unreachable)
        assert left(url) == [("1", "ready", 0)]


_DUE_IN = {
    "postgresql": "SELECT extract(epoch FROM due_at - now()) FROM semel_outbox",
    "sqlite": "SELECT (due_at - (SELECT now FROM semel_keys_clock)) / 1000.0 FROM semel_outbox",
}


class TestOrder:
    """Messages of one key arrive in their order."""

    def test_a_failure_stops_its_key_alone(self, url: str, store: Store, broker: Broker) -> None:
        """Behind a message that failed, its key waits; other keys, and messages without one, do not."""
        broker.answer = only("2", verdict=Failed("not now"))
        for number in range(10):
            add(url, number, key=f"k{number % 2}" if number < 8 else None)
        relay = relay_of(store, "events", broker)
        relay.run_once()
        assert set(broker.payloads) == {"0", "1", "3", "5", "7", "8", "9"}
        broker.answer = lambda _: Delivered()
        rows(url, "UPDATE semel_outbox SET due_at = created_at WHERE due_at IS NOT NULL")
        _drain(relay)
        assert [each for each in broker.payloads if each in {"0", "2", "4", "6"}] == ["0", "2", "4", "6"]
        assert left(url) == []

    def test_a_poison_key_parks_itself(self, url: str, store: Store, broker: Broker) -> None:
        """Behind a dead letter its key waits, however much comes after it, and nothing else does."""
        broker.answer = only("0", verdict=Rejected("poison"))
        add(url, *range(40), key="poison")
        add(url, "a", "b", key="healthy")
        relay = relay_of(store, "events", broker, batch=4)
        relay.run_once()
        assert broker.payloads == ['"a"', '"b"']
        states = [state for _, state, _ in left(url)]
        assert states[0] == "dead"
        assert states.count("behind") > 30
        broker.answer = lambda _: Delivered()
        rows(
            url, "UPDATE semel_outbox SET state = 'waiting', due_at = created_at, ended_at = NULL WHERE state = 'dead'"
        )
        _drain(relay)
        assert broker.payloads[2:] == [str(number) for number in range(40)]
        assert left(url) == []

    def test_what_is_due_behind_a_dead_letter(self, url: str, store: Store, broker: Broker) -> None:
        """Messages of a parked key that are due again do not stand in the way of others that are."""
        add(url, *range(20), key="parked")
        add(url, "late")
        rows(url, "UPDATE semel_outbox SET state = 'waiting', due_at = created_at, attempts = 1")
        first = rows(url, "SELECT min(seq) FROM semel_outbox")[0]
        rows(url, f"UPDATE semel_outbox SET state = 'dead', ended_at = created_at WHERE seq = {first}")
        relay = relay_of(store, "events", broker, batch=4)
        for _ in range(12):
            relay.run_once()
        assert broker.payloads == ['"late"']

    def test_what_was_set_aside_for_nothing(self, url: str, store: Store, broker: Broker) -> None:
        """A message that was set aside just as the one before it was sent is found, and sent."""
        add(url, 1, 2, key="k")
        rows(url, "UPDATE semel_outbox SET state = 'behind'")
        _drain(relay_of(store, "events", broker))
        assert broker.payloads == ["1", "2"]

    def test_what_was_set_aside_behind_another_relays(self, url: str, store: Store, broker: Broker) -> None:
        """Of a key that goes on, none is sent before those that another relay had when it was set aside, and handed
        back.
        """
        add(url, 1, 2, 3, key="k")
        first, second = relay_of(store, "events", broker), relay_of(store, "events", broker)
        taken = at_once(first.claim(2, aside=False)).messages
        assert at_once(second.claim(3, aside=True)).messages == ()
        at_once(first.settle([Ending(taken[0].id, "dead", error="poison"), Ending(taken[1].id, "released")]))
        assert [state for _, state, _ in left(url)] == ["dead", "ready", "behind"]
        at_once(carry_out(store, OutboxStatements(messages_of(store)).requeue(to="events")))
        _drain(second)
        assert broker.payloads == ["1", "2", "3"]

    def test_dropping_a_dead_letter_frees_its_key(self, url: str, store: Store, broker: Broker) -> None:
        """When an operator deletes it, the rest of its key goes on."""
        broker.answer = only("1", verdict=Rejected("poison"))
        add(url, 1, 2, 3, key="k")
        relay = relay_of(store, "events", broker)
        relay.run_once()
        rows(url, "DELETE FROM semel_outbox WHERE state = 'dead'")
        _drain(relay)
        assert broker.payloads == ["2", "3"]

    @pytest.mark.parametrize("relays", [1, 3])
    def test_across_relays_and_retries(self, url: str, relays: int) -> None:
        """With several relays and random failures, each key arrives in order, and each message at least once."""
        chance = random.Random(7)
        keys, each = 8, 6
        for number in range(each):
            with closing(connect(url)) as connection:
                for key in range(keys):
                    Outbox(url).add(connection, "t", number, key=f"k{key}")
                connection.commit()
        got: list[Message] = []
        mutex = threading.Lock()

        class Shaky(Broker):
            schedule = Schedule((timedelta(),) * 200)

            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                verdicts: list[Verdict] = []
                with mutex:
                    for message in messages:
                        if chance.random() < 0.2:
                            verdicts.append(Failed("shaky"))
                        else:
                            got.append(message)
                            verdicts.append(Delivered())
                return verdicts

        def run() -> None:
            with closing(open_store(url)) as own:
                relay = relay_of(own, "events", Shaky(), batch=10)
                while len(got) < keys * each:
                    assert relay.run_once().error is None

        with ThreadPoolExecutor(relays) as pool:
            for future in [pool.submit(run) for _ in range(relays)]:
                future.result(120)
        for key in range(keys):
            assert [int(each.payload) for each in got if each.key == f"k{key}"] == list(range(each))
        assert len({message.id for message in got}) == len(got) == keys * each


class TestLease:
    """A relay that is silent loses what it has."""

    def test_paused_past_its_lease(self, url: str, store: Store) -> None:
        """Another relay sends it, under the same id; the first one, when it goes on, changes nothing."""
        second = Broker()
        add(url, 1, key="k")

        class Paused(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                rows(url, _EXPIRE)
                with closing(open_store(url)) as other:
                    assert await asyncio.to_thread(lambda: relay_of(other, "events", second).run_once().sent) == 1
                return await super().publish(messages)

        first = Paused()
        report = relay_of(store, "events", first).run_once()
        assert (report.sent, report.fenced) == (1, 1)
        assert first.got[0].id == second.got[0].id
        assert left(url) == []

    def test_taken_is_not_taken_twice(self, url: str, store: Store) -> None:
        """While one relay sends, another finds nothing, and keeps the order of keys."""
        others: list[int] = []
        add(url, 1, key="k")
        add(url, 2)
        add(url, 3, key="k")

        class Slow(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                with closing(open_store(url)) as other:
                    report = await asyncio.to_thread(relay_of(other, "events", Broker()).run_once)
                others.append(report.sent)
                return await super().publish(messages)

        relay_of(store, "events", Slow(), batch=2).run_once()
        assert others == [0, 0]

    def test_a_second_relay_takes_the_rest(self, url: str, store: Store) -> None:
        """While one relay has the head of the queue, another sends what comes after it."""
        sent: list[int] = []
        add(url, *range(30))

        class Slow(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                if not sent:
                    with closing(open_store(url)) as other:
                        rest = relay_of(other, "events", Broker(), batch=10)
                        sent.append((await asyncio.to_thread(rest.run_once)).sent)
                return await super().publish(messages)

        assert relay_of(store, "events", Slow(), batch=10).run_once().sent == 10
        assert sent == [20]

    def test_renewed_while_it_is_sent(self, url: str, store: Store) -> None:
        """A batch that takes longer than its lease is kept: the lease is renewed meanwhile."""
        others: list[int] = []

        class Slow(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                ends = time.monotonic() + 1.5
                while time.monotonic() < ends:
                    await asyncio.sleep(0.05)
                    with closing(open_store(url)) as other:
                        report = await asyncio.to_thread(relay_of(other, "events", Broker()).run_once)
                    others.append(report.sent)
                return await super().publish(messages)

        add(url, 1)
        broker = Slow()
        report = relay_of(store, "events", broker, lease=timedelta(seconds=0.6)).run_once()
        assert (report.sent, report.fenced) == (1, 0)
        assert set(others) == {0}

    @pytest.mark.parametrize("breaks", [False, True], ids=["waves", "one-by-one"])
    def test_renewed_between_waves(self, url: str, store: Store, breaks: bool) -> None:
        """So is one of many short calls: all of it, whatever was sent already and whatever waits for its turn."""
        free: list[Any] = []

        class Slow(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                if len(messages) > 1:
                    raise ValueError("Not together.")
                await asyncio.sleep(0.1)
                free.extend(await asyncio.to_thread(rows, url, _FREE[url.partition(":")[0]]))
                return await super().publish(messages)

        add(url, *range(12), key=None if breaks else "k")
        report = relay_of(store, "events", Slow(), lease=timedelta(seconds=0.6)).run_once()
        assert (report.sent, report.fenced) == (12, 0)
        assert free == [0] * 12

    def test_stops_when_its_lease_is_lost(self, url: str, store: Store) -> None:
        """A relay that was paused for long asks, before it sends on, whether the rest is still its own."""
        add(url, 1, 2, 3, key="k")

        class Paused(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                await asyncio.to_thread(rows, url, _OVERTAKE[url.partition(":")[0]])
                await asyncio.sleep(0.1)  # Longer than a third of its lease.
                return await super().publish(messages)

        broker = Paused()
        report = relay_of(store, "events", broker, lease=timedelta(seconds=0.15)).run_once()
        assert broker.payloads == ["1"]
        assert (report.sent, report.released, report.fenced) == (1, 2, 3)

    def test_stopped_in_the_middle(self, url: str, store: Store) -> None:
        """A relay that is told to stop hands back what it has not begun, for others to take at once."""

        class Stopping(Broker):
            async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
                relay.stop()
                return await super().publish(messages)

        add(url, 1, 2, 3, key="k")
        broker = Stopping()
        relay = relay_of(store, "events", broker)
        report = relay.run_once()
        assert (report.sent, report.released) == (1, 2)
        assert broker.payloads == ["1"]
        rest = Broker()
        assert relay_of(store, "events", rest).run_once().sent == 2


_FREE = {
    "postgresql": "SELECT count(*) FROM semel_outbox WHERE coalesce(lease_until <= clock_timestamp(), true)",
    "sqlite": "SELECT count(*) FROM semel_outbox, semel_keys_clock WHERE coalesce(lease_until <= now, true)",
}
_OVERTAKE = {
    "postgresql": "UPDATE semel_outbox SET token = 'another', lease_until = lease_until + interval '1 hour'",
    "sqlite": "UPDATE semel_outbox SET token = x'00', lease_until = lease_until + 3600000",
}
_EXPIRE = "UPDATE semel_outbox SET lease_until = created_at WHERE lease_until IS NOT NULL"


class TestPublishers:
    """Which publisher a URL names."""

    def test_unknown(self) -> None:
        """A scheme that is not known is refused, with those that are."""
        with pytest.raises(ConfigurationError, match=r"'events': no publisher is known for carrier-pigeon://.*amqp"):
            publisher("events", "carrier-pigeon://home")
        with pytest.raises(ConfigurationError, match="an address without a scheme"):
            publisher("events", "localhost")

    def test_discard(self, url: str, store: Store) -> None:
        """``discard://`` confirms everything."""
        add(url, 1)
        found = publisher("events", "discard://")
        assert isinstance(found, Publisher)
        assert relay_of(store, "events", found).run_once().sent == 1


def _drain(relay: Relay[Store]) -> None:
    """Run a few times, and look each time for what was set aside."""
    for _ in range(5):
        relay._freed_at = float("-inf")
        relay.run_once()
