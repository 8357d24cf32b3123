"""Every exception of Semel, by whose fault it is. Nothing here sends, logs or decides anything.

    SemelError
    ├── Refusal                    knows the status and the problem type it is answered with
    │   ├── RequestRefused         the caller's
    │   │   ├── KeyMissing         400
    │   │   ├── KeyInvalid         400
    │   │   ├── ScopeMissing       400
    │   │   ├── BodyIncomplete     400
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
    │   ├── HandlerEnded           the handler's
    │   │   ├── OperationFailed    500
    │   │   ├── OperationUnfinished 503  raised in the middle of its steps: a retry goes on
    │   │   └── NoEffect           503   raised by a handler, to say that nothing happened
    │   ├── StoreError             the store's
    │   │   ├── StoreUnavailable   503
    │   │   │   ├── CommitUnknown  503   the reply to a COMMIT was lost
    │   │   │   └── Overtaken      503   another transaction was in the way
    │   │   ├── StoreRefused       503   for a reason of its own
    │   │   ├── StoreNotReady      503   the table is not there, or not ours
    │   │   │   └── StoreNotPermitted  503   it is there, and the role may not use it
    │   │   ├── StoreReadOnly      503   a replica, or a server that was made read-only
    │   │   └── AnswerNotStored    503
    │   └── ShuttingDown           503   nobody's: this process is about to end
    ├── ConfigurationError         the developer's
    │   ├── NotGuarded
    │   ├── UnknownField
    │   ├── NoConnection
    │   ├── NoDatabase
    │   └── StepError              a phase or an effect that can't be right
    │       ├── StepNameInvalid
    │       ├── StepRepeated
    │       ├── StepInsideStep
    │       ├── StepUnfinished
    │       ├── HandlerIsOver
    │       ├── ResultNotJSON
    │       └── RecoveryPointLost
    ├── RowNotSeen                 the database's: a row that it neither takes nor shows
    ├── FailedBefore               the function's own: it raised, and that is its outcome
    ├── LeaseLost                  nobody's: another worker has the operation now
    └── Interrupted                nobody's: the caller of a flow has gone

An exception's docstring is its message.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self


class SemelError(Exception):
    """Something went wrong inside Semel."""

    def __init__(self, message: str | None = None) -> None:
        """Say *message*, or else what the class says of itself."""
        super().__init__(message or _said(type(self)))


class Refusal(SemelError):
    """This request is refused."""

    #: The last part of the problem's ``type`` URI: stable, clients compare it.
    slug: ClassVar[str] = "refused"
    title: ClassVar[str] = "Request refused"
    status: ClassVar[int] = 400
    #: Whether the same request, sent again unchanged, may fare better.
    retryable: ClassVar[bool] = False
    #: Stripe's ``error.type`` and ``error.code``, and its status where that differs.
    stripe_type: ClassVar[str] = "invalid_request_error"
    stripe_code: ClassVar[str | None] = None
    stripe_status: ClassVar[int | None] = None

    def __init__(self, message: str | None = None, *, retry_after: int | None = None) -> None:
        """Refuse with *message* for a person, and *retry_after* whole seconds for a machine."""
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
    """An idempotency key belongs to somebody, and this request is nobody's. Authenticate, then send it again."""

    slug = "idempotency-scope-missing"
    title = "No owner for the idempotency key"


class BodyIncomplete(RequestRefused):
    """The request body ended before its declared length. Nothing was run; send the whole request again."""

    slug = "request-body-incomplete"
    title = "Request body incomplete"
    retryable = True


class OperationNotFound(RequestRefused):
    """There is no such operation of yours. Ask at the address that was given with its 202, as the same user."""

    slug = "operation-not-found"
    title = "Operation not found"
    status = 404


class OperationExpired(RequestRefused):
    """This operation is past its retention, and its answer is no longer kept."""

    slug = "operation-expired"
    title = "Operation expired"
    status = 410


class Abandoned(RequestRefused):
    """Nobody finished this operation within its retention, and it may have taken effect in part. It is given up."""

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
    """The operation took effect, but its answer could not be kept (too large, or a stream). It was not run again."""

    slug = "response-not-replayable"
    title = "Completed, answer not kept"
    status = 409
    stripe_type = "idempotency_error"


class OutcomeUnknown(RequestRefused):
    """An earlier attempt stopped half-way and what it did is not known. It was not run again; ask before you retry."""

    slug = "outcome-unknown"
    title = "Outcome unknown"
    status = 409
    stripe_type = "idempotency_error"


class KeyExpired(RequestRefused):
    """This key is past its retention, so what became of it can't be told. Use a new key for a new operation."""

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
    """A row is stored under this key, and it is not the one that was given now. Nothing was written."""

    slug = "natural-key-reused"
    title = "Natural key reused"
    status = 422
    stripe_type = "idempotency_error"
    stripe_status = 400

    def __init__(self, message: str | None = None, *, got: Any = None) -> None:
        """Bring the stored row along: *got* has it, and where it differs."""
        super().__init__(message)
        self.got = got

    @property
    def detail(self) -> str:
        """What the client is told: nothing of tables and columns, which are for the log."""
        return "This was sent before with other content, and that is what is stored. Nothing was changed."


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
    # Not 500: clients and their libraries come back after a 503, and heed its Retry-After.
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


class StoreError(Refusal):
    """The store can't do what was asked."""

    slug = "store-unavailable"
    title = "Idempotency store unavailable"
    status = 503
    retryable = True
    stripe_type = "api_error"

    @property
    def detail(self) -> str:
        """What the client is told: nothing of servers and tables, which are for the log."""
        return "This request can't be guarded against running twice just now, so it was not run. Send it again."


class StoreUnavailable(StoreError):
    """The store can't be reached."""

    def __init__(self, message: str | None = None, *, was_sent: bool = False) -> None:
        """Say whether the statement *was sent*: then it may have been carried out all the same."""
        super().__init__(message)
        self.was_sent = was_sent
        #: Whether the store cut it short, because it took longer than it may: the same would, again.
        self.was_too_slow = False


class CommitUnknown(StoreUnavailable):
    """The reply to a COMMIT was lost: it was carried out, or it was not."""

    def __init__(self, message: str | None = None) -> None:
        """A COMMIT that was not sent is no question."""
        super().__init__(message, was_sent=True)


class Overtaken(StoreUnavailable):
    """Another transaction was in the way, and all of this one would have to be run again."""


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
    """The store has no table of Semel's yet. Run: semel migrate URL."""


class StoreNotPermitted(StoreNotReady):
    """The role of this connection lacks a privilege on Semel's tables. Grant it."""


class StoreReadOnly(StoreError):
    """This server takes no writes: it is a replica, or was made read-only. Give the address of the primary."""


class ShuttingDown(Refusal):
    """This server is about to stop and takes on nothing new. Nothing was run; send the same request again."""

    slug = "shutting-down"
    title = "Shutting down"
    status = 503
    retryable = True
    stripe_type = "api_error"


class ConfigurationError(SemelError, ValueError):
    """Semel is set up wrongly."""


class NotGuarded(ConfigurationError, LookupError):
    """This code runs for no guarded request: it had no idempotency key, or no middleware of Semel's is around it."""


class UnknownField(ConfigurationError, TypeError):
    """There is no setting of this name."""


class NoConnection(ConfigurationError):
    """There is no open transaction here: use policy mode="atomic", or the connection that a phase is given."""


class NoDatabase(ConfigurationError, AttributeError):
    """There is no database behind memory://, so there is no connection. Test what writes to one with sqlite:/// or
    with the store that you run.
    """


class StepError(ConfigurationError):
    """This phase or effect can't be right."""


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
    """A step was begun before the one around it had ended. A call to others inside a phase would hold a transaction
    open meanwhile, and would be made again if it were rolled back: make it an effect after the phase.
    """

    def __init__(self, inner: str, outer: str) -> None:
        """Say which step began inside which."""
        super().__init__(f"{inner!r} was begun inside {outer!r}. {_said(type(self))}")


class StepUnfinished(StepError):
    """This step has not come to its end, or nobody knows what it did, so the handler may not go on or end as if it had.
    Await each step before the next. A failure that is an outcome, such as a declined card, is for the effect's function
    to catch and to return.
    """

    def __init__(self, name: str) -> None:
        """Say which step it was."""
        super().__init__(f"{name!r}: {_said(type(self))}")


class HandlerIsOver(StepError):
    """A step was begun after its handler had answered: in a task that was not awaited, or in a background task."""


class ResultNotJSON(StepError):
    """What is returned must be what JSON can hold, for a retry gets it again: dicts, lists, strings, numbers, None."""

    def __init__(self, name: str, result: object) -> None:
        """Say what kind of *result* it was; not which, for it may be a secret."""
        super().__init__(f"{name!r} returned {type(result).__name__}. {_said(type(self))}")


class RecoveryPointLost(StepError):
    """The stored steps of this operation are not those that the code takes now. Nothing was run. Put the old steps back
    until the operations that took them are finished, or free the key by hand.
    """

    def __init__(self, stored: tuple[str, ...], code: tuple[str, ...]) -> None:
        """Show both lists."""
        super().__init__(f"{_said(type(self))} Stored: {', '.join(stored)}. In the code: {', '.join(code) or 'none'}.")


class RowNotSeen(SemelError):
    """The database neither inserts this row nor shows the one that is in its way."""


class FailedBefore(SemelError):
    """The first call with this key failed, and that is its outcome: nothing was run. Use a new key to try anew."""

    #: What was raised then: the name of its type, and its words.
    error: str = ""
    words: str = ""

    @classmethod
    def of(cls, error: str, words: str) -> Self:
        """Say what was raised."""
        failed = cls(f"{_said(cls)} It was {error}: {words}")
        failed.error, failed.words = error, words
        return failed


class LeaseLost(SemelError):
    """This worker was silent for longer than its lease, and another has the operation now. Nothing more may be done."""


class Interrupted(SemelError):
    """Whoever ran this flow has gone: say the last words and end."""


def _said(cls: type[SemelError]) -> str:
    return " ".join((cls.__doc__ or "").split())
