"""Publishes to NATS JetStream (``nats://``, ``tls://``), with the message's id as ``Nats-Msg-Id``. It makes no streams.

JetStream drops a message with an id that the stream has taken within its *duplicate window*: 2 minutes, unless the
stream says otherwise. A relay that was away for longer than that delivers a message twice, so a consumer needs an inbox
still. An acknowledgement is no fsync: it says that a majority of the replicas has the message, and a server writes to
disk every two minutes unless ``sync_interval: always`` is set.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress

from semel.core.outbox import BROKER_SCHEDULE, Delivered, Failed, Message, Rejected, Schedule, Unreachable, Verdict
from semel.errors import ConfigurationError
from semel.publishers.address import TIMEOUT_SECONDS, Table, address, dropped, filled, template

try:
    from nats import errors
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js import errors as js_errors
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("NATS needs nats-py. Run: pip install 'semel[nats]'") from error

_logger = logging.getLogger("semel")

_SETTINGS = frozenset({"cafile", "certfile", "keyfile", "subject", "timeout"})

#: The duplicate window that JetStream has by itself, in seconds. A shorter one is less than the relay's pauses.
_WINDOW_SECONDS = 120.0

#: Between the two tries that the client makes at least.
_RETRY_SECONDS = 0.01

#: What a message can't be published to: wildcards, empty parts, spaces.
_SUBJECT = re.compile(r"(?!.*\s)(?!(.*\.)?[*>](\.|$))[^.]+(\.[^.]+)*")

#: JetStream's own numbers for "too large": the message, and its headers.
_TOO_LARGE = frozenset({10054, 10097})
#: And for "full": the account, the server, its memory, its disk, and the stream.
_FULL = frozenset({10002, 10023, 10028, 10047, 10077})
_SERVICE_UNAVAILABLE = 503
#: Around each header, and around all of them.
_HEADER_BYTES, _HEADERS_BYTES = 4, 12

_MEANINGS: Table = (
    ((errors.BadHeaderError, errors.BadSubjectError), Rejected, "NATS can't carry this message: rename the header"),
    ((errors.Error, OSError), dropped, "The connection to NATS at {place} was lost"),
)


class NATS:
    """Publishes to the stream that takes the message's subject."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        subject: str = "",
        timeout: float = TIMEOUT_SECONDS,
        schedule: Schedule = BROKER_SCHEDULE,
    ) -> None:
        """Publish what is sent to *name* at *url*; what the URL says has precedence."""
        self.schedule = schedule
        self._address = address(name, url, _SETTINGS, several=True)
        self._subject = template(name, self._address.text("subject", subject) or f"{name}.{{type}}")
        self._timeout, self.limit = self._address.seconds(timeout)
        self._client: Client | None = None
        self._stream: JetStreamContext | None = None
        self._under_way: list[asyncio.Task[Verdict]] = []
        #: Streams with a duplicate window that was looked at.
        self._seen: set[str] = set()
        #: Streams that have acknowledged something.
        self._met: set[str] = set()
        #: What the server has said and no call has raised: above all, what the user has no right to.
        self._said: Exception | None = None

    async def open(self) -> None:
        """Connect to one of the servers, and see how long the stream tells duplicates."""
        await self.close()
        self._client = await self._connected()
        self._stream = self._client.jetstream(timeout=self._timeout)
        try:
            await self._look_at(await self._stream.find_stream_name_by_subject(_prefix(self._subject)))
        except js_errors.NotFoundError:
            _logger.warning("Destination %r: %s", self._address.name, self._no_stream(_prefix(self._subject)))
        except (errors.Error, js_errors.Error, OSError, TimeoutError) as error:
            if "permissions violation" in str(self._said).lower():  # It may publish nevertheless.
                _logger.info("Destination %r: how long duplicates are told can't be read.", self._address.name)
                return
            await self.close()
            raise ConnectionError(self._address.reason(self._no_jetstream(), error)) from None
        except ConfigurationError:
            await self.close()
            raise

    async def _connected(self) -> Client:
        where = self._address
        lost: BaseException | None = None
        for host in where.hosts:
            client = Client()
            try:
                async with asyncio.timeout(self._timeout):
                    await client.connect(
                        f"{where.scheme}://{host}",
                        user=where.user if where.password is not None else None,
                        password=where.password,
                        token=where.user if where.password is None else None,
                        name=f"semel relay: {where.name}",
                        tls=self._tls(),
                        # Behind the relay's back, what waits in its buffer would be sent a second time.
                        allow_reconnect=False,
                        # Otherwise it tries for two minutes before it says that it can't connect. 0 has no end.
                        max_reconnect_attempts=1,
                        reconnect_time_wait=_RETRY_SECONDS,  # type: ignore[arg-type]
                        connect_timeout=int(self._timeout) or 1,
                        closed_cb=self._on_closed,
                        error_cb=self._on_error,
                    )
            except (errors.Error, OSError, TimeoutError) as error:
                lost = error
                with suppress(errors.Error, OSError):
                    await client.close()
                # The client has a class for it, and raises another.
                if "authorization violation" in str(error).lower():
                    # A user without a password is a token, and as secret as a password.
                    who = f"user {where.user!r}" if where.password is not None or not where.user else "the token"
                    refused = f"NATS at {host} refuses {who}: check user, password and rights."
                    raise PermissionError(refused) from None
            else:
                return client
        raise ConnectionError(where.reason(f"NATS at {where.place} can't be reached", self._said or lost))

    def _tls(self) -> ssl.SSLContext | None:
        given = self._address
        cafile, certfile = given.text("cafile", ""), given.text("certfile", "")
        if given.scheme != "tls" and not cafile and not certfile:
            return None
        try:
            context = ssl.create_default_context(cafile=cafile or None)
            if certfile:
                context.load_cert_chain(certfile, given.text("keyfile", "") or None)
        except OSError as error:
            raise ConfigurationError(
                given.reason(f"Destination {given.name!r}: a certificate can't be read", error)
            ) from None
        return context

    async def _on_closed(self) -> None:
        for task in self._under_way:
            task.cancel()  # Its answer will not come.

    async def _on_error(self, error: Exception) -> None:
        self._said = error

    async def _look_at(self, name: str) -> None:
        """Say how long the stream *name* tells duplicates, once."""
        if name in self._seen or self._stream is None:
            return
        self._seen.add(name)
        config = (await self._stream.stream_info(name)).config
        if config.no_ack:
            raise ConfigurationError(
                f"Stream {name!r} acknowledges nothing. Set no_ack to false: a relay needs to know."
            )
        window = config.duplicate_window
        say = _logger.warning if window < _WINDOW_SECONDS else _logger.info
        say("Stream %r tells duplicates for %g s: an outage that is longer delivers messages twice.", name, window)

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        """Send all at once, and wait for each acknowledgement."""
        client, stream = self._client, self._stream
        if client is None or stream is None or not client.is_connected:
            return [Unreachable(f"The connection to NATS at {self._address.place} is lost.")] * len(messages)
        self._said = None
        tasks = [asyncio.ensure_future(self._send(client, stream, each)) for each in messages]
        self._under_way = tasks
        try:
            # Its own time limits begin when a message is written, and none is for that.
            _, silent = await asyncio.wait(tasks, timeout=self._timeout)
        finally:
            self._under_way = []
            for task in tasks:
                task.cancel()
        verdicts = await asyncio.gather(*tasks, return_exceptions=True)
        # What is confirmed is confirmed, whatever its stream is like, and however long it takes to see that.
        met, self._met = self._met, set()
        await asyncio.gather(*(self._look_at(stream_name) for stream_name in met), return_exceptions=True)
        lost = dropped(self._address.reason(f"The connection to NATS at {self._address.place} was lost"))
        return [
            self._silent(errors.TimeoutError()) if task in silent else self._final(verdict, lost)
            for task, verdict in zip(tasks, verdicts, strict=True)
        ]

    @staticmethod
    def _final(verdict: Verdict | BaseException, lost: Unreachable) -> Verdict:
        if isinstance(verdict, asyncio.CancelledError):
            return lost
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    async def _send(self, client: Client, stream: JetStreamContext, message: Message) -> Verdict:
        subject, headers = filled(self._subject, message), _headers(message)
        if wrong := _wrong(subject, message.payload, headers, client.max_payload):
            return Rejected(self._address.reason(wrong))
        try:
            ack = await stream.publish(subject, message.payload, timeout=self._timeout, headers=headers)
        except js_errors.NoStreamResponseError:
            return await self._without_stream(stream, subject)
        except js_errors.APIError as error:
            return self._refused(error)
        except errors.TimeoutError as error:
            return self._silent(error)
        except (errors.Error, OSError) as error:
            return self._address.verdict(_MEANINGS, error)
        self._met.add(ack.stream)
        return Delivered()

    def _silent(self, error: Exception) -> Unreachable:
        """Nothing was acknowledged: the server has said why, or it takes too long."""
        said = f"NATS at {self._address.place} acknowledged nothing: {self._said or 'it gave no reason'}"
        return Unreachable(self._address.reason(said, error), is_late=self._said is None)

    async def _without_stream(self, stream: JetStreamContext, subject: str) -> Verdict:
        """No server listens for *subject*: there is no stream for it, or its stream has no leader just now."""
        try:
            name = await stream.find_stream_name_by_subject(subject)
        except js_errors.NotFoundError:
            return Rejected(self._no_stream(subject))
        except (errors.Error, js_errors.Error, OSError, TimeoutError) as error:
            return Unreachable(self._address.reason(self._no_jetstream(), error))
        return Unreachable(f"Stream {name!r} has no leader at the moment.")

    def _refused(self, error: js_errors.APIError) -> Verdict:
        said = self._address.reason(error.description or "no reason given")
        if error.err_code in _TOO_LARGE:
            return Rejected(f"The message is too large for its stream ({said}): raise its max_msg_size.")
        if error.code == _SERVICE_UNAVAILABLE and error.err_code not in _FULL:
            return Unreachable(f"JetStream is not available at the moment ({said}).")
        return Failed(
            f"JetStream refused the message ({said}). If the stream is full: raise its limits, or consume it."
        )

    def _no_stream(self, subject: str) -> str:
        return f"No stream takes subject {subject!r}. Make one (nats stream add), then requeue what was rejected."

    def _no_jetstream(self) -> str:
        return f"JetStream does not answer at {self._address.place}: it is off (start NATS with -js), or has no leader"

    async def close(self) -> None:
        """Disconnect."""
        client, self._client, self._stream, self._said = self._client, None, None, None
        self._seen.clear()
        if client is not None and not client.is_closed:
            with suppress(errors.Error, OSError, TimeoutError):
                async with asyncio.timeout(self._timeout):
                    await client.close()


def _headers(message: Message) -> dict[str, str]:
    headers = dict(message.headers)
    headers["Nats-Msg-Id"] = message.id
    headers["type"] = message.type
    headers["content-type"] = message.content_type
    if message.traceparent is not None:
        headers["traceparent"] = message.traceparent
    if message.key is not None:
        headers["semel-key"] = message.key
    return headers


def _wrong(subject: str, payload: bytes, headers: dict[str, str], max_payload: int) -> str | None:
    """Say why NATS would never take it. It answers what is too large by closing the connection."""
    if not _SUBJECT.fullmatch(subject):
        return (
            f"{subject!r} is no subject: spaces, wildcards and empty parts can't be published. Set subject= in the URL."
        )
    size = len(payload) + _HEADERS_BYTES
    size += sum(len(name.encode()) + len(text.encode()) + _HEADER_BYTES for name, text in headers.items())
    if size > max_payload:
        limit = f"NATS takes {max_payload}: raise max_payload, or send the address of a file"
        return f"The message is too large: it has {size} bytes with its headers, and {limit}."
    return None


def _prefix(subject: str) -> str:
    """Return what is fixed of a template, as a subject to look for streams by."""
    fixed, brace, _ = subject.partition("{")
    return f"{fixed.rpartition('.')[0]}.>".removeprefix(".") if brace else subject
