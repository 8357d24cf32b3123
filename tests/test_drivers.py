"""Who runs a flow, in a thread and on a loop, and what becomes of it when its caller goes away."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from semel.drivers import aresume, arun, resume, run, run_until

from semel import drivers
from semel.core.commands import Command, Release, Verdict
from semel.core.handler import Answered, RunHandler
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.errors import StoreUnavailable
from semel.flows.reply import Reply, Send
from semel.flows.serve import serve
from semel.stores.step import Step
from tests.kit.ports import Flow, NameScope, ReadBody

TOKEN = b"t" * 16
HOLD = Hold("alice", "key", 1, TOKEN)
ANSWERED = Answered(Answer(200, (), b"done"))
BY_TOKEN = Release(Hold("alice", "key", 0, TOKEN))


def request() -> Flow[Reply]:
    return serve(Head("POST", "/", b"", ((b"idempotency-key", b"key"),)), Policy(), TOKEN)


class World:
    """Answers every command of a request; some of them in another way."""

    def __init__(self, **answers: Callable[[], Any]) -> None:
        self.answers: dict[str, Callable[[], Any]] = {
            "NameScope": lambda: "alice",
            "ReadBody": lambda: b"{}",
            "Claim": lambda: HOLD,
            "RunHandler": lambda: ANSWERED,
            "Complete": lambda: Verdict.DONE,
            "Release": lambda: Verdict.DONE,
            "Pause": lambda: None,
            "Tell": lambda: None,
        } | answers
        self.commands: list[Command[Any]] = []

    def perform(self, command: Command[Any]) -> Any:
        self.commands.append(command)
        return self.answers[type(command).__name__]()

    @property
    def names(self) -> list[str]:
        return [type(command).__name__ for command in self.commands]


def raising(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def in_turn(*answers: Callable[[], Any]) -> Callable[[], Any]:
    left = iter(answers)
    return lambda: next(left)()  # noqa: PLW0108 - not the same: `next(left)` is for later


def talk() -> Flow[list[Any]]:
    """Ask twice; say what came of it."""
    said: list[Any] = []
    for command in (NameScope(), ReadBody(1)):
        try:
            said.append((yield from command))
        except OSError as error:
            said.append(error)
    return said


def idle() -> Flow[str]:
    """Ask for nothing."""
    yield from ()
    return "nothing"


# In a thread


def test_run_answers() -> None:
    """Every answer comes back where it was asked for, and the flow's own is returned."""
    assert run(talk(), World().perform) == ["alice", b"{}"]
    assert run(idle(), World().perform) == "nothing"


def test_run_raises_into_the_flow() -> None:
    """What goes wrong is raised where it was asked for; what the flow does not catch, out of it."""
    error = OSError()
    assert run(talk(), World(NameScope=raising(error)).perform) == [error, b"{}"]
    with pytest.raises(ZeroDivisionError):
        run(talk(), World(NameScope=raising(ZeroDivisionError())).perform)


@pytest.mark.parametrize("kill", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "at, after", [("NameScope", []), ("ReadBody", []), ("Claim", ["Release"]), ("RunHandler", []), ("Complete", [])]
)
def test_run_is_killed(kill: type[BaseException], at: str, after: list[str]) -> None:
    """A thread that is killed frees the key it was claiming. One that ran a handler leaves the key to its lease."""
    world = World(**{at: raising(kill())})
    with pytest.raises(kill):
        run(request(), world.perform)
    assert world.names[-1 - len(after) :] == [at, *after]
    if after:
        assert world.commands[-1] == BY_TOKEN


def test_run_is_killed_and_the_store_is_gone() -> None:
    """If freeing the key fails, it is still the killing that is raised."""
    world = World(Claim=raising(KeyboardInterrupt()), Release=raising(StoreUnavailable()))
    with pytest.raises(KeyboardInterrupt):
        run(request(), world.perform)
    assert world.commands[-1] == BY_TOKEN


# On a loop


def resolved(value: Any) -> Step[Any]:
    step = Step[Any]()
    step.settle(value)
    return step


async def coroutine(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


async def the_rest() -> None:
    """Wait for flows whose callers have gone."""
    while drivers._behind:
        await asyncio.wait(drivers._behind)


async def leave_at(world: World, at: str, step: Step[Any] | None = None) -> "asyncio.Task[Reply]":
    """Begin a request, and cancel its caller in the middle of *at*, which does not end by itself."""
    entered = asyncio.Event()
    usual = world.answers[at]

    def answer() -> Any:
        entered.set()
        world.answers[at] = usual
        return asyncio.Event().wait() if step is None else step

    world.answers[at] = answer
    task = asyncio.ensure_future(arun(request(), world.perform))
    await entered.wait()
    await asyncio.sleep(0)  # it is set while the caller still runs; now it waits
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    return task


async def test_arun_answers() -> None:
    """An answer may be a value, a coroutine or a future."""
    world = World(NameScope=lambda: coroutine("alice"), ReadBody=lambda: resolved(b"{}"))
    assert await arun(talk(), world.perform) == ["alice", b"{}"]
    assert await arun(talk(), World().perform) == ["alice", b"{}"]
    assert await arun(idle(), World().perform) == "nothing"


async def test_arun_raises_into_the_flow() -> None:
    """What goes wrong, at once or later, is raised where it was asked for."""
    error = OSError()
    failed = resolved(error)
    assert await arun(talk(), World(NameScope=raising(error), ReadBody=lambda: failed).perform) == [error, error]
    assert await arun(talk(), World(NameScope=lambda: coroutine(error)).perform) == [error, b"{}"]
    with pytest.raises(ZeroDivisionError):
        await arun(talk(), World(NameScope=raising(ZeroDivisionError())).perform)


@pytest.mark.parametrize("at", ["NameScope", "ReadBody"])
async def test_arun_leaves_before_the_claim(at: str) -> None:
    """A caller that goes before the claim leaves nothing behind."""
    world = World()
    await leave_at(world, at)
    await the_rest()
    assert world.names[-1] == at


@pytest.mark.parametrize("outcome", [HOLD, StoreUnavailable(was_sent=True)], ids=["claimed", "failed"])
async def test_arun_leaves_while_claiming(outcome: Any) -> None:
    """A caller that goes while the key is claimed leaves at once; when that is through, the key is freed behind."""
    world = World()
    step = Step[Any]()
    await leave_at(world, "Claim", step)
    assert world.names[-1] == "Claim"
    step.settle(outcome)
    await the_rest()
    assert world.commands[-1] == BY_TOKEN


async def test_arun_leaves_while_claiming_and_the_store_is_gone() -> None:
    """If freeing the key fails behind, that is the end of it: the lease will free it."""
    world = World(Release=raising(StoreUnavailable()))
    step = Step[Any]()
    await leave_at(world, "Claim", step)
    step.settle(HOLD)
    await the_rest()
    assert world.names[-1] == "Release"


async def test_arun_leaves_while_the_handler_runs() -> None:
    """A caller that goes while the handler runs leaves at once; the handler carries on, and its answer is stored."""
    world = World(Complete=lambda: resolved(Verdict.DONE))
    step = Step[Any]()
    await leave_at(world, "RunHandler", step)
    assert world.names[-1] == "RunHandler"
    step.settle(ANSWERED)
    await the_rest()
    assert world.names[-2:] == ["RunHandler", "Complete"]
    assert world.names.count("RunHandler") == 1


async def test_arun_leaves_while_the_answer_is_stored() -> None:
    """A caller that goes while the answer is stored does not stop it, nor the patience it takes."""
    world = World(Pause=lambda: coroutine(None))
    step = Step[Any]()
    await leave_at(world, "Complete", step)
    step.settle(StoreUnavailable())
    await the_rest()
    assert world.names[-3:] == ["Complete", "Pause", "Complete"]


async def test_arun_leaves_during_a_pause() -> None:
    """A pause that is cut short by its caller's going is made again behind, and the answer is stored."""
    world = World(Complete=in_turn(raising(StoreUnavailable()), lambda: resolved(Verdict.DONE)))
    await leave_at(world, "Pause")
    await the_rest()
    assert world.names[-4:] == ["Complete", "Pause", "Pause", "Complete"]


async def test_arun_leaves_in_the_turn_of_the_answer() -> None:
    """A caller that is cancelled just as the claim is answered still has the key freed behind it."""
    world = World()
    step = Step[Any]()
    asked = asyncio.Event()

    def claim() -> Step[Any]:
        asked.set()
        return step

    world.answers["Claim"] = claim
    task = asyncio.create_task(arun(request(), world.perform))
    await asked.wait()
    step.settle(HOLD)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await the_rest()
    assert world.commands[-1] == BY_TOKEN


async def test_arun_step_is_abandoned() -> None:
    """When the step itself is given up, as when the loop ends, nothing more is asked for."""
    world = World()
    step = Step[Any]()
    world.answers["RunHandler"] = lambda: step
    step.abandon()
    with pytest.raises(asyncio.CancelledError):
        await arun(request(), world.perform)
    await the_rest()
    assert world.names[-1] == "RunHandler"


async def test_arun_stops_where_it_is_told() -> None:
    """A flow can be left at a command, unanswered, and taken up again with the answer: by another task, perhaps."""
    world = World()
    flow = request()
    stopped = await arun(flow, world.perform, until=RunHandler)
    assert isinstance(stopped, RunHandler)
    assert world.names == ["NameScope", "ReadBody", "Claim"]
    assert await aresume(flow, ANSWERED, world.perform) == Send(ANSWERED.answer)
    assert world.names == ["NameScope", "ReadBody", "Claim", "Complete"]


async def test_aresume_at_the_last_command() -> None:
    """A flow that was left at its last command ends with the answer to it."""
    flow = talk()
    await arun(flow, World().perform, until=ReadBody)
    assert await aresume(flow, b"", World().perform) == ["alice", b""]


async def test_arun_lets_nobody_wait_for_those_behind() -> None:
    """A request that is not disturbed leaves nothing behind."""
    world = World()
    assert await arun(request(), world.perform) == Send(ANSWERED.answer)
    assert world.names == ["NameScope", "ReadBody", "Claim", "RunHandler", "Complete"]
    assert not drivers._behind


# Left in the middle, and taken up again


def test_left_at_a_command_in_a_thread() -> None:
    """A flow can be left where the handler runs, and taken up with its ending."""
    world = World()
    flow = request()
    reached = run_until(flow, world.perform, RunHandler)
    assert isinstance(reached, RunHandler)
    assert world.names == ["NameScope", "ReadBody", "Claim"]
    assert resume(flow, ANSWERED, world.perform) == Send(ANSWERED.answer)
    assert world.names[-1] == "Complete"


def test_not_left_where_it_ends_before() -> None:
    """A flow that never comes there runs to its end; and one that has nothing left to ask for ends when taken up."""
    world = World(Claim=raising(StoreUnavailable()))
    assert isinstance(run_until(request(), world.perform, RunHandler), Send)

    def ask_once() -> Flow[str]:
        return f"{yield from NameScope()}!"

    flow = ask_once()
    assert isinstance(run_until(flow, world.perform, NameScope), NameScope)
    assert resume(flow, "alice", world.perform) == "alice!"


async def test_unguarded_handler_is_cancelled() -> None:
    """In report mode a caller that goes away takes the handler along: it is not run again behind."""
    begun = asyncio.Event()
    world = World()

    async def handle() -> None:
        begun.set()
        await asyncio.Event().wait()

    world.answers["RunUnguarded"] = handle
    head = Head("POST", "/", b"", ((b"idempotency-key", b"key"),))
    running = asyncio.ensure_future(arun(serve(head, Policy(enforcement="report"), TOKEN), world.perform))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while drivers._behind:
        await asyncio.wait(drivers._behind)
    assert world.names[-2:] == ["Tell", "RunUnguarded"]
