"""Publishes to Kafka (``kafka://``) through librdkafka's idempotent producer, with ``acks=all``. It makes no topics.

The ordering key is the message's key, so that Kafka keeps the order of one key in one partition. A message is delivered
when all replicas in sync have it (``min.insync.replicas`` of the topic says how many these must be). The producer drops
its own repetitions; a relay that sends again after a crash is another producer, so a consumer tells duplicates by the
header ``id``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from semel.core.outbox import BROKER_SCHEDULE, Delivered, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.errors import ConfigurationError
from semel.publishers.address import TIMEOUT_SECONDS, address

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("Kafka needs confluent-kafka. Run: pip install 'semel[kafka]'") from error

#: Settings of the URL, and what librdkafka calls them.
_CLIENT = {
    "cafile": "ssl.ca.location",
    "certfile": "ssl.certificate.location",
    "keyfile": "ssl.key.location",
    "mechanism": "sasl.mechanisms",
    "security": "security.protocol",
}
_SETTINGS = frozenset({"timeout", "topic", *_CLIENT})

_NO_CONFIG: Mapping[str, Any] = MappingProxyType({})

#: Over what an outbox takes: the topic's own limit decides.
_MAX_BYTES = 4 * 1024 * 1024

#: How long one call waits for reports before it looks at the clock again.
_POLL_SECONDS = 0.1

_REJECTED = {
    KafkaError._UNKNOWN_TOPIC: "There is no topic {topic!r}. Make it, then requeue.",  # noqa: SLF001 - its own name
    KafkaError.UNKNOWN_TOPIC_OR_PART: "There is no topic {topic!r}. Make it, then requeue.",
    KafkaError.TOPIC_EXCEPTION: "{topic!r} is no name of a topic: set topic= in the URL of the destination.",
    KafkaError.MSG_SIZE_TOO_LARGE: "The message is too large for topic {topic!r}: raise its max.message.bytes.",
    KafkaError.INVALID_RECORD: "Topic {topic!r} takes no such message: a compacted one needs a key.",
    KafkaError.INVALID_TIMESTAMP: "Its time is out of the range of topic {topic!r}: set LogAppendTime there.",
    KafkaError.INVALID_MSG_SIZE: "The message is too large for topic {topic!r}: raise its max.message.bytes.",
}
#: Of these, one message in a batch may be the reason for all of it.
_SHARED = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_MSG_SIZE,
    }
)
_FAILED = frozenset(
    {
        KafkaError.POLICY_VIOLATION,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError._QUEUE_FULL,  # noqa: SLF001 - its own name
    }
)
_LATE = frozenset({KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT})  # noqa: SLF001 - its own names
_REFUSED = frozenset(
    {
        KafkaError._AUTHENTICATION,  # noqa: SLF001 - its own name
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)


class Kafka:
    """Publishes to a topic."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        topic: str = "",
        timeout: float = TIMEOUT_SECONDS,
        config: Mapping[str, Any] = _NO_CONFIG,
        schedule: Schedule = BROKER_SCHEDULE,
    ) -> None:
        """Publish what is sent to *name* at *url*; what the URL says has precedence.

        *config* are more settings of librdkafka, by its own names.
        """
        self.schedule = schedule
        where = self._address = address(name, url, _SETTINGS, several=True)
        self._topic = where.text("topic", topic) or name
        self._timeout, self.limit = where.seconds(timeout)
        self._config: dict[str, Any] = {
            "message.max.bytes": _MAX_BYTES,
            "linger.ms": 5,
            **config,
            **{_CLIENT[key]: text for key, text in where.settings if key in _CLIENT},
            **self._login(),
            "bootstrap.servers": where.place,
            "client.id": f"semel-relay-{name}",
            "enable.idempotence": True,
            "acks": "all",
            # Each message has its verdict by then.
            "message.timeout.ms": int(self._timeout * 1000),
            "socket.connection.setup.timeout.ms": max(1000, int(self._timeout * 1000)),
            # A topic that was made a moment ago is not known everywhere yet.
            "topic.metadata.propagation.max.ms": int(self._timeout * 500),
            "log_level": 0,  # It would write to standard error; what matters of it is in the verdicts.
        }
        self._producer: Producer | None = None
        self._said: KafkaError | None = None

    def _login(self) -> dict[str, str]:
        where = self._address
        if where.user is None:
            return {}
        usual = {} if where.text("mechanism", "") else {"sasl.mechanisms": "PLAIN"}
        secure = {} if where.text("security", "") else {"security.protocol": "SASL_SSL"}
        return {**usual, **secure, "sasl.username": where.user, "sasl.password": where.password or ""}

    async def open(self) -> None:
        """Connect to one of the brokers."""
        await self.close()
        try:
            self._producer = Producer({**self._config, "error_cb": self._on_error})
            await asyncio.to_thread(self._producer.list_topics, timeout=self._timeout)
        except KafkaException as error:
            said = self._said or error.args[0]
            is_wrong = self._producer is None
            await self.close()
            if is_wrong:
                raise ConfigurationError(
                    self._reason(f"Destination {self._address.name!r}: a wrong setting", said)
                ) from None
            raise ConnectionError(self._reason(f"Kafka at {self._address.place} can't be reached", said)) from None
        except BaseException:
            await self.close()
            raise

    def _on_error(self, error: KafkaError) -> None:
        self._said = error

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Hand all to the producer, and wait for its reports, in a thread."""
        producer = self._producer
        if producer is None:
            return [Unreachable(f"The connection to Kafka at {self._address.place} is lost.")] * len(messages)
        sending = asyncio.ensure_future(asyncio.to_thread(self._send_all, producer, messages))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            producer.purge()  # The thread has nothing to wait for now.
            await self.close()
            raise

    def _send_all(self, producer: Producer, messages: Sequence[Message]) -> list[Verdict]:
        deadline = time.monotonic() + self._timeout
        errors = self._send(producer, messages)
        if len(messages) > 1:
            for number, error in enumerate(errors):
                if error is not None and error.code() in _SHARED:
                    if time.monotonic() > deadline:
                        errors[number] = KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 - its own name
                        continue
                    errors[number] = self._send(producer, [messages[number]])[0]
        return [self._verdict(error) for error in errors]

    def _send(self, producer: Producer, messages: Sequence[Message]) -> list[KafkaError | None]:
        """Return what the producer reports of each message: None if it is confirmed."""
        reports: dict[int, KafkaError | None] = {}
        for number, message in enumerate(messages):

            def report(error: KafkaError | None, _message: object, number: int = number) -> None:
                reports[number] = error

            try:
                producer.produce(
                    self._topic,
                    value=message.payload,
                    key=message.key,
                    headers=_headers(message),
                    timestamp=int(message.created_at * 1000),
                    on_delivery=report,
                )
            except KafkaException as error:
                reports[number] = error.args[0]
            except BufferError:
                reports[number] = KafkaError(KafkaError._QUEUE_FULL)  # noqa: SLF001 - its own name
        # Twice: a report comes a moment after the time limit that it is about.
        deadline = time.monotonic() + 2 * self._timeout
        while len(reports) < len(messages) and time.monotonic() < deadline:
            producer.poll(_POLL_SECONDS)
        silent = KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001 - its own name
        return [reports.get(number, silent) for number in range(len(messages))]

    def _verdict(self, error: KafkaError | None) -> Verdict:
        if error is None:
            return Delivered()
        if rejected := _REJECTED.get(error.code()):
            return Rejected(self._reason(rejected.format(topic=self._topic), error))
        if error.code() in _FAILED:
            return Failed(self._reason("Kafka refused the message for now", error))
        if error.code() in _REFUSED:
            return Unreachable(self._reason("Kafka refuses the user: give it the right to write to the topic", error))
        return Unreachable(
            self._reason(f"Kafka at {self._address.place} did not confirm", error), is_late=error.code() in _LATE
        )

    def _reason(self, text: str, error: KafkaError) -> str:
        return self._address.reason(text, RuntimeError(error.str()))

    async def close(self) -> None:
        """Drop the producer, with all that is not confirmed: its messages are still in the outbox."""
        producer, self._producer, self._said = self._producer, None, None
        if producer is not None:
            producer.purge()
            await asyncio.to_thread(producer.flush, 1.0)


def _headers(message: Message) -> list[tuple[str, str | bytes | None]]:
    own = {"id": message.id, "type": message.type, "content-type": message.content_type}
    if message.traceparent is not None:
        own["traceparent"] = message.traceparent
    return [(name, text.encode()) for name, text in (*message.headers, *own.items()) if own.get(name, text) == text]
