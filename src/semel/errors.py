"""Every exception of Semel, grouped by its cause. Nothing here sends, logs or decides anything.

    SemelError
    ├── Refusal                    knows the status and the problem type it is answered with
    │   ├── RequestRefused         caused by the client
    │   │   ├── KeyMissing         400
    │   │   ├── KeyInvalid         400
    │   │   ├── ScopeMissing       400
    │   │   ├── Unauthenticated    401   by the proxy: no bearer token, or one that is not accepted
    │   │   ├── BodyIncomplete     400
    │   │   ├── RequestAmbiguous   400   by the proxy, as are the next one and the upstream's
    │   │   ├── IdentityRefused    400
    │   │   ├── OperationNotFound  404
    │   │   ├── Abandoned          408
    │   │   ├── InProgress         409
    │   │   ├── NotReplayable      409
    │   │   ├── OutcomeUnknown     409
    │   │   ├── KeyExpired         410
    │   │   ├── OperationExpired   410
    │   │   ├── BodyTooLarge       413
    │   │   ├── KeyReused          422
    │   │   └── RowDiffers         422   raised to the application, for a natural key
    │   ├── WebhookRefused         answered to the sender of a webhook
    │   │   ├── WebhookMalformed   400
    │   │   ├── WebhookTooOld      400
    │   │   ├── SignatureInvalid   401
    │   │   ├── WebhookReused      422   another event under an id that is known
    │   │   ├── WebhookBusy        503   another delivery of it is being handled
    │   │   └── WebhookParked      503   it waits for an operator
    │   ├── HandlerEnded           caused by the handler
    │   │   ├── OperationFailed    500
    │   │   ├── OperationUnfinished 503  raised in the middle of its steps: a retry goes on
    │   │   ├── UpstreamLost       502   the server behind the proxy
    │   │   │   └── UpstreamTimeout 504
    │   │   └── NoEffect           503   raised by a handler, to say that nothing happened
    │   │       └── UpstreamUnreachable 503
    │   ├── StoreError             caused by the store
    │   │   ├── StoreUnavailable   503
    │   │   │   ├── CommitUnknown  503   the reply to a COMMIT was lost
    │   │   │   └── Overtaken      503   another transaction was in the way
    │   │   ├── StoreRefused       503   the database refused a statement
    │   │   ├── StoreNotReady      503   the table is missing, or is not Semel's
    │   │   │   └── StoreNotPermitted  503   the role may not use the table
    │   │   ├── StoreReadOnly      503   a replica, or a server that was made read-only
    │   │   ├── SecretMissing      503   what is stored is encrypted, and can't be read here
    │   │   └── AnswerNotStored    503
    │   └── ShuttingDown           503   this process is about to end
    ├── ConfigurationError         caused by the application's code
    │   ├── NotGuarded
    │   ├── UnknownField
    │   ├── NoConnection
    │   ├── NoDatabase
    │   └── StepError              a phase or an effect that is used wrongly
    │       ├── StepNameInvalid
    │       ├── StepRepeated
    │       ├── StepInsideStep
    │       ├── StepUnfinished
    │       ├── HandlerIsOver
    │       ├── ResultNotJSON
    │       └── RecoveryPointLost
    ├── MessageInvalid             a message that can't be sent, or not in this way
    │   └── MessageReused          another message has this id
    ├── MessageRefused             caused by the message that a consumer received
    │   ├── MessageDiffers         another payload under an id that was received before
    │   └── MessageUnidentified    no id to know it by
    ├── RowNotSeen                 the database neither inserts a row nor shows the existing one
    ├── EndpointUnknown            there is no endpoint of webhooks with this name
    ├── ClientError                met by the client of an API; it has the key
    │   ├── RequestOutcomeUnknown  no answer came, or none that tells what happened
    │   ├── RequestNotRepeatable   its body is too large to be kept for another try
    │   ├── RedirectRefused        to another host
    │   ├── IntentDiffers          another request has the same intent
    │   ├── IntentBusy             another process sends it
    │   └── AnswerNotKept          it is done, and its answer was too large to be kept
    ├── JournalError               the journal of a client can't be used; nothing was sent
    │   ├── JournalNewer
    │   └── JournalFull
    ├── FailedBefore               the function raised, and that is its outcome
    ├── LeaseLost                  another worker has the operation now
    └── Interrupted                the caller of a flow was cancelled

An exception's docstring is its message.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


class SemelError(Exception):
    """Something went wrong inside Semel."""

    def __init__(self, message: str | None = None) -> None:
        """Use *message*, or else the docstring of the class."""
        super().__init__(message or _said(type(self)))


class Refusal(SemelError):
    """This request is refused."""

    #: The last part of the problem's ``type`` URI: stable, clients compare it.
    slug: ClassVar[str] = "refused"
    title: ClassVar[str] = "Request refused"
    status: ClassVar[int] = 400
    #: Whether the same request, sent again unchanged, may succeed.
    retryable: ClassVar[bool] = False
    #: Stripe's ``error.type`` and ``error.code``, and its status where that differs.
    stripe_type: ClassVar[str] = "invalid_request_error"
    stripe_code: ClassVar[str | None] = None
    stripe_status: ClassVar[int | None] = None

    def __init__(self, message: str | None = None, *, retry_after: int | None = None) -> None:
        """Refuse with *message* for the reader, and *retry_after* whole seconds for the program."""
        super().__init__(message)
        self.retry_after = retry_after

    @property
    def detail(self) -> str:
        """What the client is told."""
        return str(self)


class RequestRefused(Refusal):
    """This request is refused as it stands."""


class KeyMissing(RequestRefused):
    """This operation needs an idempotency key. Make one per operation (a UUID will do) and send it with every retry."""

    slug = "idempotency-key-missing"
    title = "Idempotency key missing"
    stripe_code = "parameter_missing"


class KeyInvalid(RequestRefused):
    """The idempotency key can't be read."""

    slug = "idempotency-key-invalid"
    title = "Idempotency key invalid"
    stripe_code = "parameter_invalid_string"


class ScopeMissing(RequestRefused):
    """An idempotency key belongs to a user, and this request has no user. Authenticate, then send it again."""

    slug = "idempotency-scope-missing"
    title = "No owner for the idempotency key"


class Unauthenticated(RequestRefused):
    """An idempotency key belongs to a user, and this request has no bearer token. Send it again with one."""

    slug = "unauthenticated"
    title = "Bearer token missing or not accepted"
    status = 401

    def __init__(self, message: str | None = None, *, challenge: str = "Bearer") -> None:
        """Refuse with *message*; *challenge* is the value of ``WWW-Authenticate`` (RFC 6750)."""
        super().__init__(message)
        self.challenge = challenge


class BodyIncomplete(RequestRefused):
    """The request body ended before its declared length. Nothing was run; send the whole request again."""

    slug = "request-body-incomplete"
    title = "Request body incomplete"
    retryable = True


class RequestAmbiguous(RequestRefused):
    """Two servers could read this request differently. Nothing was forwarded."""

    slug = "request-ambiguous"
    title = "Request can be read in two ways"


class IdentityRefused(RequestRefused):
    """What names the user of this request can't be trusted. Nothing was forwarded."""

    slug = "identity-refused"
    title = "User not accepted"


class OperationNotFound(RequestRefused):
    """You have no such operation. Ask at the status URL that came with its 202, as the same user."""

    slug = "operation-not-found"
    title = "Operation not found"
    status = 404


class OperationExpired(RequestRefused):
    """This operation is past its retention, and its answer is no longer kept."""

    slug = "operation-expired"
    title = "Operation expired"
    status = 410


class Abandoned(RequestRefused):
    """This operation was not finished within its retention, and is given up. It may have taken effect in part."""

    slug = "operation-abandoned"
    title = "Operation abandoned"
    status = 408
    stripe_type = "api_error"


class InProgress(RequestRefused):
    """The first request with this key is still running. Wait, then send the same request again."""

    slug = "idempotency-key-in-progress"
    title = "Request in progress"
    status = 409
    retryable = True
    stripe_code = "idempotency_key_in_use"


class NotReplayable(RequestRefused):
    """The operation took effect, but its answer was not kept (too large, a stream, or erased). It was not run again."""

    slug = "response-not-replayable"
    title = "Completed, answer not kept"
    status = 409
    stripe_type = "idempotency_error"


class OutcomeUnknown(RequestRefused):
    """An earlier attempt stopped half-way, and its outcome is unknown. It was not run again; ask before you retry."""

    slug = "outcome-unknown"
    title = "Outcome unknown"
    status = 409
    stripe_type = "idempotency_error"


class KeyExpired(RequestRefused):
    """This key is past its retention, so its outcome is no longer known. Use a new key for a new operation."""

    slug = "idempotency-key-expired"
    title = "Idempotency key expired"
    status = 410
    stripe_type = "idempotency_error"


class BodyTooLarge(RequestRefused):
    """The request body is larger than this operation accepts."""

    slug = "request-body-too-large"
    title = "Request body too large"
    status = 413


class KeyReused(RequestRefused):
    """This key was used for a different request. Use a new key for a new operation."""

    slug = "idempotency-key-reused"
    title = "Idempotency key reused"
    status = 422
    stripe_type = "idempotency_error"
    stripe_status = 400


class RowDiffers(RequestRefused):
    """A different row is stored under this key. Nothing was written."""

    slug = "natural-key-reused"
    title = "Natural key reused"
    status = 422
    stripe_type = "idempotency_error"
    stripe_status = 400

    def __init__(self, message: str | None = None, *, got: Any = None) -> None:
        """Keep the stored row: *got* has it, and the columns that differ."""
        super().__init__(message)
        self.got = got

    @property
    def detail(self) -> str:
        """What the client is told: no tables and columns, which are for the log."""
        return "This was sent before with other content, and that is what is stored. Nothing was changed."


class WebhookRefused(Refusal):
    """This webhook is not accepted."""


class WebhookMalformed(WebhookRefused):
    """The headers that show where this webhook comes from are missing, or can't be read. Nothing was done."""

    slug = "webhook-malformed"
    title = "Webhook can't be read"


class WebhookTooOld(WebhookRefused):
    """This webhook was sent too long ago, or in the future: see whether both clocks are right. Send it again, signed
    with the present time.
    """

    slug = "webhook-too-old"
    title = "Webhook too old"


class SignatureInvalid(WebhookRefused):
    """None of the secrets of this endpoint has signed this webhook. Check the secret, and that no proxy changes the
    body.
    """

    slug = "webhook-signature-invalid"
    title = "Signature invalid"
    status = 401


class WebhookReused(WebhookRefused):
    """A webhook with this id was received before, with another body. Nothing was done: each event needs its own id."""

    slug = "webhook-id-reused"
    title = "Webhook id reused"
    status = 422


class WebhookBusy(WebhookRefused):
    """This webhook is being handled at this moment, after another delivery of it. Send it again later."""

    slug = "webhook-busy"
    title = "Webhook being handled"
    status = 503
    retryable = True


class WebhookParked(WebhookRefused):
    """This webhook has failed too often here, and waits for an operator. Keep it, and send it again later."""

    slug = "webhook-parked"
    title = "Webhook parked"
    status = 503
    retryable = True


class HandlerEnded(Refusal):
    """The handler ended without an answer."""


class OperationFailed(HandlerEnded):
    """The operation failed, and may have taken effect in part. This answer is final for this key."""

    slug = "operation-failed"
    title = "Operation failed"
    status = 500
    stripe_type = "api_error"


class OperationUnfinished(HandlerEnded):
    """The operation stopped half-way. What it has done is recorded; send the same request again, and it goes on."""

    slug = "operation-unfinished"
    title = "Operation not finished"
    # Not 500: clients and their libraries retry after a 503, and obey its Retry-After.
    status = 503
    retryable = True
    stripe_type = "api_error"


class NoEffect(HandlerEnded):
    """The operation could not start and changed nothing. Send the same request again."""

    slug = "no-effect"
    title = "Nothing happened"
    status = 503
    retryable = True
    stripe_type = "api_error"


class UpstreamUnreachable(NoEffect):
    """The server behind this proxy can't be reached. Nothing was sent to it; send the same request again."""

    slug = "upstream-unreachable"
    title = "Upstream can't be reached"


class UpstreamLost(HandlerEnded):
    """The server behind this proxy broke off, or answered what can't be read. The request may have been carried out."""

    slug = "upstream-lost"
    title = "Upstream lost"
    status = 502
    stripe_type = "api_error"


class UpstreamTimeout(UpstreamLost):
    """The server behind this proxy did not answer in time. The request may have been carried out."""

    slug = "upstream-timeout"
    title = "Upstream silent"
    status = 504


class StoreError(Refusal):
    """The store can't do what was asked."""

    slug = "store-unavailable"
    title = "Idempotency store unavailable"
    status = 503
    retryable = True
    stripe_type = "api_error"

    @property
    def detail(self) -> str:
        """What the client is told: no servers and tables, which are for the log."""
        return "This request can't be guarded against running twice just now, so it was not run. Send it again."


class StoreUnavailable(StoreError):
    """The store can't be reached."""

    def __init__(self, message: str | None = None, *, was_sent: bool = False) -> None:
        """*was_sent*: whether the statement was sent, and so may have been carried out."""
        super().__init__(message)
        self.was_sent = was_sent
        #: Whether the store cancelled the statement at a time-out. Sent again, it would take as long again.
        self.was_too_slow = False
        #: Whether the store has no space for what was sent. For less there may be.
        self.has_no_space = False


class CommitUnknown(StoreUnavailable):
    """The reply to a COMMIT was lost: it was carried out, or it was not."""

    def __init__(self, message: str | None = None) -> None:
        """It is always *was_sent*: a COMMIT that was not sent did not happen."""
        super().__init__(message, was_sent=True)


class Overtaken(StoreUnavailable):
    """A conflict with another transaction: this whole transaction would have to run again."""


class AnswerNotStored(StoreError):
    """The handler ran and its answer could not be stored."""

    slug = "answer-not-stored"
    title = "Answer not stored"

    @property
    def detail(self) -> str:
        """What the client is told."""
        return "The operation may have taken effect, but its answer could not be stored. Send the same request again."


class StoreRefused(StoreError):
    """The database refused a statement."""


class StoreNotReady(StoreError):
    """The store does not have Semel's tables yet. Run: semel migrate URL."""


class StoreNotPermitted(StoreNotReady):
    """The role of this connection lacks a privilege on Semel's tables. Grant it."""


class StoreReadOnly(StoreError):
    """This server takes no writes: it is a replica, or was made read-only. Give the address of the primary."""


class SecretMissing(StoreError):
    """What is stored is encrypted, and this process lacks the secret. Give ?encrypt= with every secret that is in use
    to every process of the store; after a change, the new one first and the old one behind it.
    """


class ShuttingDown(Refusal):
    """This server is about to stop and accepts nothing new. Nothing was run; send the same request again."""

    slug = "shutting-down"
    title = "Shutting down"
    status = 503
    retryable = True
    stripe_type = "api_error"


class ConfigurationError(SemelError, ValueError):
    """Semel is set up wrongly."""


class NotGuarded(ConfigurationError, LookupError):
    """This code does not run in a guarded request: the request has no idempotency key, or passed no guard of Semel."""


class UnknownField(ConfigurationError, TypeError):
    """There is no setting of this name."""


class NoConnection(ConfigurationError):
    """There is no open transaction here: use policy mode="atomic", or the connection that a phase is given."""


class NoDatabase(ConfigurationError, AttributeError):
    """There is no database behind memory://, so there is no connection. Test what writes to one with sqlite:/// or
    with the store that you run.
    """


class StepError(ConfigurationError):
    """This phase or effect is used wrongly."""


class StepNameInvalid(StepError):
    """A step is named by at most 100 letters, digits and _ . : -, such as "charge_created"."""

    def __init__(self, name: object) -> None:
        """Say which *name* it was."""
        super().__init__(f"{name!r} can't be the name of a step. {_said(type(self))}")


class StepRepeated(StepError):
    """Two steps of one operation have the same name. Its result is stored by that name, so each needs its own."""

    def __init__(self, name: str) -> None:
        """Say which *name* it was."""
        super().__init__(f"{name!r}: {_said(type(self))}")


class StepInsideStep(StepError):
    """A step was begun before the one around it had ended. A call to another service in a phase holds a transaction
    open meanwhile, and is made again after a rollback: make it an effect after the phase.
    """

    def __init__(self, inner: str, outer: str) -> None:
        """Say which step began inside which."""
        super().__init__(f"{inner!r} was begun inside {outer!r}. {_said(type(self))}")


class StepUnfinished(StepError):
    """This step has not ended, or its outcome is unknown, so the handler must not go on or end as if it had succeeded.
    Await each step before the next. A failure that is an outcome, such as a declined card, is for the effect's function
    to catch and to return.
    """

    def __init__(self, name: str) -> None:
        """Say which step it was."""
        super().__init__(f"{name!r}: {_said(type(self))}")


class HandlerIsOver(StepError):
    """A step was begun after its handler had answered: in a task that was not awaited, or in a background task."""


class ResultNotJSON(StepError):
    """The result is stored as JSON, since a retry gets it again: return dicts, lists, strings, numbers or None."""

    def __init__(self, name: str, result: object, where: str | None = None) -> None:
        """Say the type of *result*, and *where* in it is what; not its value, which may be a secret."""
        what = type(result).__name__ + (f": {where}" if where else "")
        super().__init__(f"{name!r} returned {what}. {_said(type(self))}")


class RecoveryPointLost(StepError):
    """The stored steps of this operation differ from the steps in the code. Nothing was run. Put the old steps back
    until the operations that took them are finished, or free the key by hand.
    """

    def __init__(self, stored: tuple[str, ...], code: tuple[str, ...]) -> None:
        """Show both lists."""
        super().__init__(f"{_said(type(self))} Stored: {', '.join(stored)}. In the code: {', '.join(code) or 'none'}.")


class MessageInvalid(SemelError, ValueError):
    """This message can't be sent."""


class MessageReused(MessageInvalid):
    """Another message has this id: other content needs an id of its own."""


class MessageRefused(SemelError):
    """This message can't be received once, so it was not run."""


class MessageDiffers(MessageRefused):
    """A message with this id was received before, with another payload. Nothing was run: each message needs its id."""

    #: The digests of both payloads, in hexadecimal digits.
    stored: str = ""
    received: str = ""

    @classmethod
    def of(cls, *, stored: str, received: str) -> Self:
        """Show both."""
        differs = cls(f"{_said(cls)} Its digest was {stored}, and is {received}.")
        differs.stored, differs.received = stored, received
        return differs


class MessageUnidentified(MessageRefused):
    """This message has no id, so it can't be known again. Have its producer set one: the same with every delivery."""


class RowNotSeen(SemelError):
    """The database neither inserts this row nor shows the row that it conflicts with."""


class EndpointUnknown(SemelError, LookupError):
    """There is no endpoint of webhooks with this name. To see all: semel webhooks list."""


class FailedBefore(SemelError):
    """The first call with this key failed, and that is its outcome: nothing was run. Use a new key to try again."""

    #: What was raised then: the name of its type, and its message.
    error: str = ""
    words: str = ""

    @classmethod
    def of(cls, error: str, words: str) -> Self:
        """Say what was raised."""
        failed = cls(f"{_said(cls)} It was {error}: {words}")
        failed.error, failed.words = error, words
        return failed


class ClientError(SemelError):
    """A request with an idempotency key did not get its answer."""

    def __init__(
        self, message: str | None = None, *, key: str = "", intent: str | None = None, response: Any = None
    ) -> None:
        """Keep the *key*, for the next try; the *intent*, with a journal; and the last *response*, if there is one."""
        self.key = key
        self.intent = intent
        self.response = response
        about = f" Its key is {key}" if key else ""
        about += f", its intent {intent!r}" if key and intent is not None else ""
        super().__init__(f"{message or _said(type(self))}{about}{'.' if about else ''}")


class RequestOutcomeUnknown(ClientError):
    """It is not known whether this request took effect. Send it again with the same key, or look it up; with a new key
    it may take effect twice.
    """


class RequestNotRepeatable(ClientError):
    """The body of this request is too large to be kept for another try. Nothing was sent. Raise max_body, or send it
    through a client without retries.
    """


class RedirectRefused(ClientError):
    """This request was redirected to another host, port or scheme, which may know nothing of its key. It was not sent
    there; change its URL.
    """


class IntentDiffers(ClientError):
    """The journal has another request under this intent, or one of another account. Nothing was sent. Another operation
    needs an intent of its own.
    """


class IntentBusy(ClientError):
    """Another process is sending the request of this intent, and has not ended in time. Try again later."""


class AnswerNotKept(ClientError):
    """The operation of this intent is done. Its answer was too large to be kept, so it is not sent again."""


class JournalError(SemelError):
    """The journal can't be used. Nothing was sent."""


class JournalNewer(JournalError):
    """The journal was written by a newer version of Semel. Nothing was sent. Update Semel."""


class JournalFull(JournalError):
    """The journal is full. Nothing was sent. Remove what is no longer needed: semel journal forget."""


class LeaseLost(SemelError):
    """This worker was silent for longer than its lease, and another worker has the operation now. Stop."""


class Interrupted(SemelError):
    """The caller of this flow was cancelled: clean up and end."""


def _said(cls: type[SemelError]) -> str:
    return " ".join((cls.__doc__ or "").split())
