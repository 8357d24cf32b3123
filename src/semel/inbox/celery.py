"""Celery tasks that have their effect once. Workers, queues and results are Celery's.

::

    inbox = Inbox("postgresql://…", consumer="billing")

    @once(app, inbox, name="shop.ship")
    def ship(connection, order):             # called by ship.delay("order-17")
        …

A task is known by its id, which is the same when Celery delivers it again and when it is retried; so a task that is
sent twice with an id of the application's own (``apply_async(task_id=…)``, as the outbox does) has one effect. It runs
with ``acks_late`` and ``reject_on_worker_lost``, so that its message is acked after COMMIT. What Celery is told, and
does:

* ``Ran``: the task succeeds with what the handler returned.
* ``Duplicate``: the delivery is ignored and acked. What the result backend has of the first one stays as it is.
* ``Busy``, an error of the handler or of the store, a COMMIT with an unknown outcome: the task is retried after
  *pause*, with the same id. How often is for the inbox to say, so Celery's own ``max_retries`` and ``autoretry_for``
  are off. Where a retry can't be sent, the message is put back.
* ``Parked``, and what can't be received: the message is rejected. RabbitMQ has it among its dead letters, if the queue
  has any; elsewhere it is gone, and ``semel inbox`` has what is known of it. The result backend is told nothing.
* A worker that dies, or is killed at its hard time limit: nothing is acked. Brokers with a visibility timeout (Redis,
  SQS) deliver it again after that, which is compared with the retention.
* What Celery would send after COMMIT (a chain, ``link``, ``link_error``, a chord) would be lost where the worker dies
  before: such a task is not run, and comes again. A result may be lost in the same way.
* Celery only logs what is raised while an app is set up, and ``task_annotations`` change a task after it was made. So
  what can't be used is found with each task, which is not run, and comes again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

from semel.core.inbox import Ran
from semel.errors import ConfigurationError, MessageRefused
from semel.inbox.brokers import Answer, answer_for, no_id, tell_failed, tell_refused
from semel.inbox.front import Inbox

try:
    from celery import Celery
    from celery.exceptions import Ignore, Reject
except ImportError as error:  # pragma: no cover - seen only where the extra is missing
    raise ImportError("Tasks need Celery. Run: pip install 'semel[celery]'") from error

#: After which a task that has to run again is delivered.
PAUSE = timedelta(seconds=1)
#: Under which nothing is acked that is not committed: neither what a worker that dies leaves, nor what is killed at its
#: hard time limit.
_SETTINGS = {"acks_late": True, "reject_on_worker_lost": True, "acks_on_failure_or_timeout": False}
#: How often a task is retried is for the inbox to say; and what it has parked is rejected, whatever Celery would retry.
_RETRYING: dict[str, Any] = {"max_retries": None, "autoretry_for": ()}
#: What Celery would do once a task has ended, as its request has it, and as it is written.
_FOLLOWING = {"chain": "chain", "callbacks": "link", "errbacks": "link_error", "chord": "chord"}
#: Kombu's own, where the transport has one and none is set.
_VISIBILITY = {"redis": timedelta(hours=1), "rediss": timedelta(hours=1), "sqs": timedelta(minutes=30)}


def once(app: Celery, inbox: Inbox, *, pause: timedelta = PAUSE, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a task of a function of a connection and the task's own arguments; *options* are those of ``app.task``."""
    app.on_after_finalize.connect(lambda **_: check(app, inbox), weak=False)
    if wrong := [name for name, value in _SETTINGS.items() if options.get(name, value) is not value]:
        raise ConfigurationError(
            f"{', '.join(wrong)}: a task is acked after COMMIT, or one whose worker dies is lost. Leave it out."
        )
    settings = {**_SETTINGS, **options, **_RETRYING, "bind": True}

    def decorate(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def run(task: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(task, inbox, function, args, kwargs, pause=pause)

        del run.__wrapped__  # Its signature has a connection more.
        return app.task(**settings)(run)

    return decorate


def check(app: Celery, inbox: Inbox) -> None:
    """Raise ``ConfigurationError`` if the broker delivers a task again after its receipt is gone."""
    scheme = str(app.conf.broker_url or "").partition(":")[0]
    longest = app.conf.broker_transport_options.get("visibility_timeout")
    found = timedelta(seconds=longest) if longest is not None else _VISIBILITY.get(scheme)
    if found is not None:
        inbox.check_redelivery(found, f"Celery's broker ({scheme})")


def _check_task(task: Any) -> None:
    """Raise where *task* was changed after it was made, or Celery would send something after COMMIT."""
    if wrong := [name for name, value in _SETTINGS.items() if getattr(task, name) is not value]:
        raise ConfigurationError(
            f"Task {task.name} has other settings than it was made with: {', '.join(wrong)}. A task is acked after "
            "COMMIT, or one whose worker dies is lost. Remove them from task_annotations."
        )
    if wrong := [f"{name} ({word})" for name, word in _FOLLOWING.items() if getattr(task.request, name)]:
        raise ConfigurationError(
            f"Task {task.name} was sent with {', '.join(wrong)}: Celery sends what follows after COMMIT, and a worker "
            "that dies between them has lost it. Send it without; what is to follow goes into an outbox, in the task: "
            "Outbox(...).add(connection, ...)."
        )


def _run(
    task: Any,
    inbox: Inbox,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    pause: timedelta,
) -> Any:
    if not task.request.id:
        raise no_id("Celery", "a task id (here it was called as a plain function)")
    try:
        check(task.app, inbox)
        _check_task(task)
    except ConfigurationError as trouble:
        tell_failed(inbox.consumer, trouble)
        raise trouble if task.request.is_eager else _again(task, pause, trouble) from trouble
    try:
        verdict = inbox.receive(task.request.id, function, *args, payload=_payload(args, kwargs), **kwargs)
    except MessageRefused as refused:
        tell_refused(inbox.consumer, refused)
        raise Reject(str(refused), requeue=False) from refused
    except Exception as error:  # whichever it was, nothing is committed
        raise _again(task, pause, error) from error
    if isinstance(verdict, Ran):
        return verdict.result
    match answer_for(verdict):
        case Answer.ACK:
            raise Ignore
        case Answer.AWAY:
            raise Reject(str(verdict), requeue=False)
        case Answer.AGAIN:
            raise _again(task, pause)


def _again(task: Any, pause: timedelta, trouble: Exception | None = None) -> Exception:
    """Return what tells Celery that the task has to run again."""
    try:
        retry: Exception = task.retry(
            exc=trouble, countdown=pause.total_seconds(), max_retries=sys.maxsize, throw=False
        )
    except Reject as rejected:
        # The copy could not be sent. Celery would throw the task away; its broker still has it, and keeps it.
        put_back: Exception = Reject(rejected.reason, requeue=True)
        return put_back
    return retry


def _payload(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    try:
        return json.dumps([args, kwargs], sort_keys=True)
    except (TypeError, ValueError):
        return None  # Sent by pickle: there is nothing to compare.
