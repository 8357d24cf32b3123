"""``crash_everywhere``: sends a request to your application, lets the process die at one place after the other, and
retries each time as a client would, until there is a final answer. It counts what took effect.

    report = crash_everywhere(app, Request("POST", "/rides", json={"to": "Mars"}), clock=clock, effects=count_charges)
    report.assert_once()

The process does not really die: its work is dropped at that place, and nothing after it is done.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

from semel.errors import ConfigurationError
from semel.testing.clients import Answer, Application, Request, application
from semel.testing.clock import Clock
from semel.testing.mortal import Process, mortal

__all__ = ["Answer", "CrashReport", "Point", "Request", "acrash_everywhere", "crash_everywhere"]

T = TypeVar("T")

Effects = int | Mapping[str, int]
Count = Callable[[], Effects | Awaitable[Effects]]
Requests = Request | Callable[[], Request | Awaitable[Request]]

#: How often a client tries again before the operation counts as one that never ends.
TRIES = 8
#: A request that passes more places than this never ends.
MAX_POINTS = 2_000
#: Time is moved by a little more than a lease: the clocks of stores count in milliseconds.
MOMENT = timedelta(seconds=1)

_CLIENT_ERROR = 400


@dataclass(frozen=True, slots=True)
class Point:
    """One place where the process died, and the result."""

    #: Where, in words: "after calling the effect 'card_charged'".
    name: str
    #: The answer to each try afterwards, in order; the last try repeats the request after its final answer.
    answers: tuple[Answer, ...]
    #: How often each effect happened, from before the crash to after the last answer.
    effects: Mapping[str, int]
    #: Whether there was a final answer.
    has_ended: bool
    #: Whether it was parked: the outcome of an effect is unknown.
    is_parked: bool

    def wrong(self, expected: Mapping[str, int], status: int, *, allow_parked: bool) -> str | None:
        """Return what is wrong here; None: nothing is."""
        if twice := [name for name, count in self.effects.items() if count > expected.get(name, 0)]:
            return f"{self._counts(twice, expected)}: done more than once"
        if self.is_parked:
            return None if allow_parked else "parked for an operator, with an unknown outcome"
        if not self.has_ended:
            return f"no final answer after {len(self.answers)} tries, the last one was {self.answers[-1].status}"
        if lost := [name for name, count in expected.items() if self.effects.get(name, 0) < count]:
            return f"{self._counts(lost, expected)}: lost"
        return self._wrong_answer(status)

    def _wrong_answer(self, status: int) -> str | None:
        given, again = self.answers[-2:]
        if given.status != status:
            return f"answered {given.status}, and {status} without a crash: {given.body[:200]!r}"
        if (given.status, given.body) != (again.status, again.body):
            return f"a retry of the final answer ({given.status}) got another one ({again.status})"
        return None

    def _counts(self, names: Sequence[str], expected: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {self.effects.get(name, 0)} instead of {expected.get(name, 0)}" for name in names)


@dataclass(frozen=True, slots=True)
class CrashReport:
    """The results of all places where the process died."""

    #: The effects and the answer without a crash.
    expected: Mapping[str, int]
    answer: Answer
    points: tuple[Point, ...] = field(repr=False)

    def wrong(self, *, allow_parked: bool = False) -> list[str]:
        """Return what is wrong, one line for each place; empty: all is well."""
        if nothing := self._proves_nothing():
            return [nothing]
        judged = (
            (each, each.wrong(self.expected, self.answer.status, allow_parked=allow_parked)) for each in self.points
        )
        return [f"{point.name}: {wrong}" for point, wrong in judged if wrong]

    def assert_once(self, *, allow_parked: bool = False) -> None:
        """Raise an ``AssertionError`` that says where an effect happened twice, was lost, or the operation never ended.

        A parked operation (``on_unknown="park"``, ``on_crash="refuse"``) counts as not ended, unless *allow_parked* is
        set.
        """
        if nothing := self._proves_nothing():
            raise AssertionError(nothing)
        wrong = self.wrong(allow_parked=allow_parked)
        if wrong:
            raise AssertionError(
                f"{len(wrong)} of {len(self.points)} crashes have a wrong result. If the process dies …\n  "
                + "\n  ".join(wrong)
            )

    def _proves_nothing(self) -> str | None:
        """Return why the walk as a whole proves nothing; None if it does."""
        if self.answer.status >= _CLIENT_ERROR:
            return f"without a crash the answer is {self.answer.status}: {self.answer.body[:200]!r}"
        if not self.points:
            return "nothing was crashed: the request is not guarded. Does its route have a guard, for this method?"
        if not any(self.expected.values()):
            return "without a crash nothing takes effect: does effects= count what this request does?"
        return None

    def __str__(self) -> str:
        """One line for each place."""
        lines = [f"{len(self.points)} crashes; without one: {self.answer.status}, {dict(self.expected)}"]
        lines += [
            f"{point.name}: {' '.join(str(each.status) for each in point.answers)}, {dict(point.effects)}"
            for point in self.points
        ]
        return "\n  ".join(lines)


def crash_everywhere(app: Any, request: Requests, *, clock: Clock, effects: Count) -> CrashReport:
    """Crash *app*, of ASGI or WSGI, at every step of *request*, and retry; *clock* is that of its store.

    *effects* counts what has taken effect so far: a number, or several by name. With every crash, the effects must be
    those of a request without one. Each crash uses a new key; if the rest of the request must be new, too, give a
    function that makes it. For an ASGI app, both functions may be async, and send requests of their own to the app.
    """
    served = application(app)
    if served.is_async:
        return _run(_walk(served, request, clock, effects))
    return _run_here(_walk(served, request, clock, effects))


async def acrash_everywhere(app: Any, request: Requests, *, clock: Clock, effects: Count) -> CrashReport:
    """Do the same on the running event loop, for an ASGI app that belongs to it."""
    return await _walk(application(app), request, clock, effects)


def _run(walk: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner() as runner:
            return runner.run(walk)
    walk.close()
    raise ConfigurationError("An event loop is running here: write `await acrash_everywhere(…)`.")


def _run_here(walk: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits: in this thread, which has the application's connections."""
    try:
        walk.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # StopIteration is not generic
    walk.close()
    raise ConfigurationError("For a WSGI app, effects= and what makes the request must be plain functions.")


async def _walk(app: Application, request: Requests, clock: Clock, effects: Count) -> CrashReport:
    with mortal():
        async with app.started():
            client = _Client(app, request, clock, effects)
            answer, expected = await client.undisturbed()
            points: list[Point] = []
            for place in range(MAX_POINTS):
                point = await client.crashed_at(place)
                if point is None:
                    return CrashReport(expected, answer, tuple(points))
                points.append(point)
    raise ConfigurationError(f"The request has passed {MAX_POINTS} places and goes on: does its handler ever end?")


class _Client:
    def __init__(self, app: Application, request: Requests, clock: Clock, effects: Count) -> None:
        self._app = app
        self._request = request
        self._clock = clock
        self._effects = effects

    async def undisturbed(self) -> tuple[Answer, Mapping[str, int]]:
        """Send the request without a crash."""
        request, before = await self._new_request(), await self._count()
        answer = await self._app.send(request, Process(None))
        if answer is None:  # pragma: no cover - such a process lives
            raise AssertionError
        return answer, _between(before, await self._count())

    async def crashed_at(self, place: int) -> Point | None:
        """Let the process die at one place, and retry; None: the request ended before that place."""
        request, before = await self._new_request(), await self._count()
        process = Process(place)
        await self._app.send(request, process)
        if process.died_at is None:
            return None
        answers = await self._tries(request, process)
        has_ended = answers[-1].is_final
        if has_ended:
            answers.append(await self._send(request))
        effects = _between(before, await self._count())
        return Point(process.died_at, tuple(answers), effects, has_ended, answers[-1].is_parked)

    async def _tries(self, request: Request, process: Process) -> list[Answer]:
        answers: list[Answer] = []
        await self._pass_time(process.lease)  # The lease of the dead process; a living one frees its key.
        for _ in range(TRIES):
            await self._pass_time(MOMENT)
            answers.append(await self._send(request))
            if answers[-1].is_final:
                break
        return answers

    async def _send(self, request: Request) -> Answer:
        answer = await self._app.send(request, Process(None))
        if answer is None:  # pragma: no cover - such a process lives
            raise AssertionError
        return answer

    async def _pass_time(self, duration: timedelta) -> None:
        if self._app.is_async:
            await self._clock.aadvance(duration)
        else:
            self._clock.advance(duration)

    async def _count(self) -> Mapping[str, int]:
        counted = self._effects()
        if inspect.isawaitable(counted):
            counted = await counted
        return dict(counted) if isinstance(counted, Mapping) else {"effects": counted}

    async def _new_request(self) -> Request:
        made = self._request() if callable(self._request) else self._request
        request = await made if inspect.isawaitable(made) else made
        return request.with_key(f"crash-{uuid4().hex}")


def _between(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: after.get(name, 0) - before.get(name, 0) for name in _names(before, after)}


def _names(*counts: Mapping[str, int]) -> Iterator[str]:
    yield from dict.fromkeys(name for each in counts for name in each)
