"""What runs a flow, in a thread and on a loop, and what becomes of the flow when its caller goes away."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from semel.core.commands import Claim, Command, Release, Verdict
from semel.core.events import Happening
from semel.core.handler import Answered, Ending, RunHandler
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Hold
from semel.errors import Interrupted, StoreUnavailable
from semel.flows.reply import Reply, Send
from semel.flows.serve import serve
from semel.guard import running
from semel.guard.running import (
    Handover,
    Split,
    arun,
    callers_gone,
    interrupted_by_death,
    interruptible,
    pause,
    run,
    settled,
)
from semel.stores.step import Step

TOKEN = b"t" * 16
HOLD = Hold("alice", "key", 1, TOKEN)
ANSWERED = Answered(Answer(200, (), b"done"))
BY_TOKEN = Release(Hold("alice", "key", 0, TOKEN))
HEAD = Head("POST", "/", b"", ((b"idempotency-key", b"key"),))


async def request(ports: Any) -> Reply:
    return await serve(ports, HEAD, Policy(), TOKEN)


async def reported(ports: Any) -> Reply:
    return await serve(ports, HEAD, Policy(enforcement="report"), TOKEN)


class World:
    """The ports of a request, by which every call is written down and answered; some of them in another way."""

    def __init__(self, **answers: Callable[[], Any]) -> None:
        self.answers: dict[str, Callable[[], Any]] = {
            "principal": lambda: "alice",
            "read_body": lambda: b"{}",
            "Claim": lambda: HOLD,
            "run_handler": lambda: ANSWERED,
            "Complete": lambda: Verdict.DONE,
            "Release": lambda: Verdict.DONE,
            "pause": lambda: None,
        } | answers
        self.names: list[str] = []
        self.last: Command[Any] | None = None
        self.is_interruptible = True

    def call(self, name: str) -> Any:
        """Answer a call."""
        raise NotImplementedError

    def ask(self, command: Command[Any]) -> Any:
        self.last = command
        return self.call(type(command).__name__)

    def claim(self, claim: Claim) -> Any:
        return self.ask(claim)

    def principal(self) -> Any:
        return self.call("principal")

    def read_body(self, limit: int) -> Any:
        return self.call("read_body")

    def run_handler(self, run: RunHandler) -> Awaitable[Ending]:
        self.is_interruptible = False
        return self.call("run_handler")  # type: ignore[no-any-return]

    def run_unguarded(self, hold: Hold | None, lease: timedelta | None) -> Any:
        return self.call("run_unguarded")

    def pause(self, duration: timedelta) -> Any:
        return self.call("pause")

    def saw_outage(self) -> None:
        self.names.append("saw_outage")

    def tell(self, happening: Happening) -> None:
        self.names.append("tell")


class Thread(World):
    """Ports that answer at once."""

    async def call(self, name: str) -> Any:
        self.names.append(name)
        if not self.is_interruptible:
            return self.answers[name]()
        with interrupted_by_death():
            return self.answers[name]()


class Loop(World):
    """Ports that answer by a step, or by a coroutine, which is cancelled with the caller."""

    def call(self, name: str) -> Any:
        self.names.append(name)
        try:
            answer = self.answers[name]()
        except Exception as error:  # noqa: BLE001 - it is the flow's to judge
            answer = error
        if isinstance(answer, Step):
            return answer
        return interruptible(answer if asyncio.iscoroutine(answer) else coroutine(answer))


def raising(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


def in_turn(*answers: Callable[[], Any]) -> Callable[[], Any]:
    left = iter(answers)
    return lambda: next(left)()  # noqa: PLW0108 - not the same: `next(left)` is for later


async def talk(ports: Any) -> list[Any]:
    """Ask twice; say what came of it."""
    said: list[Any] = []
    for call in (ports.principal, lambda: ports.read_body(1)):
        try:
            said.append(await call())
        except OSError as error:
            said.append(error)
    return said


async def idle(ports: Any) -> str:
    """Ask for nothing."""
    return "nothing"


# In a thread


def test_run_answers() -> None:
    """Every answer comes back where it was asked for, and the flow's own is returned."""
    assert run(talk, Thread()) == ["alice", b"{}"]
    assert run(idle, Thread()) == "nothing"


def test_run_raises_into_the_flow() -> None:
    """What goes wrong is raised where it was asked for; what the flow does not catch, out of it."""
    error = OSError()
    assert run(talk, Thread(principal=raising(error))) == [error, b"{}"]
    with pytest.raises(ZeroDivisionError):
        run(talk, Thread(principal=raising(ZeroDivisionError())))


@pytest.mark.parametrize("kill", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(
    "at, after", [("principal", []), ("read_body", []), ("Claim", ["Release"]), ("run_handler", []), ("Complete", [])]
)
def test_run_is_killed(kill: type[BaseException], at: str, after: list[str]) -> None:
    """A thread that is killed frees the key it was claiming. One that ran a handler leaves the key to its lease."""
    ports = Thread(**{at: raising(kill())})
    with pytest.raises(kill):
        run(request, ports)
    assert ports.names[-1 - len(after) :] == [at, *after]
    if after:
        assert ports.last == BY_TOKEN


def test_run_is_killed_and_the_store_is_gone() -> None:
    """If freeing the key fails, it is still the killing that is raised."""
    ports = Thread(Claim=raising(KeyboardInterrupt()), Release=raising(StoreUnavailable()))
    with pytest.raises(KeyboardInterrupt):
        run(request, ports)
    assert ports.last == BY_TOKEN


def test_run_is_interrupted_by_the_client() -> None:
    """A client that has gone interrupts the flow, and that is what its caller gets."""
    ports = Thread(read_body=raising(Interrupted()))
    with pytest.raises(Interrupted):
        run(request, ports)
    assert ports.names[-1] == "read_body"


def test_run_does_not_wait() -> None:
    """A port that waits in a thread would never be woken: it is a mistake, and it says so."""
    with pytest.raises(AssertionError, match="no loop to wake the flow"):
        run(waiting, Thread())
    with pytest.raises(AssertionError, match="no loop to wake the flow"):
        Split(waiting, Thread()).start()


async def waiting(ports: Any) -> None:
    await asyncio.sleep(0)


def test_ports_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports can be put in front of those of every flow in this process, for tests that stop flows in the middle."""
    others = Thread(principal=lambda: "bob")
    monkeypatch.setattr(running, "in_front", lambda ports: others)
    assert run(talk, Thread()) == ["bob", b"{}"]
    assert Split(talk, Thread()).start() == ["bob", b"{}"]
    assert asyncio.run(arun(talk, Thread()).rest()) == ["bob", b"{}"]


# In a thread, in two parts


class Parted(Thread):
    """Ports of a framework that runs the handler by itself."""

    async def run_handler(self, run: RunHandler) -> Ending:
        self.is_interruptible = False
        return await Handover()  # type: ignore[no-any-return]


def test_split_at_the_handler() -> None:
    """A flow can be left where the handler runs, and taken up with its ending."""
    ports = Parted()
    split = Split(request, ports)
    left = [split.is_left]
    assert split.start() is None
    left.append(split.is_left)
    assert ports.names == ["principal", "read_body", "Claim"]
    assert split.resume(ANSWERED) == Send(ANSWERED.answer)
    left.append(split.is_left)
    assert left == [False, True, False]
    assert ports.names[-1] == "Complete"


def test_split_ends_before() -> None:
    """A flow that never comes to its handler runs to its end."""
    split = Split(request, Parted(Claim=raising(StoreUnavailable())))
    assert isinstance(split.start(), Send)
    assert not split.is_left


def test_split_at_the_last_call() -> None:
    """A flow that has nothing left to ask for ends when it is taken up."""

    async def ask_once(ports: Any) -> str:
        return f"{await Handover()}!"

    split = Split(ask_once, Thread())
    assert split.start() is None
    assert split.resume("alice") == "alice!"


@pytest.mark.parametrize("kill", [KeyboardInterrupt, SystemExit])
def test_split_is_killed(kill: type[BaseException]) -> None:
    """A thread that is killed in the first part frees the key it was claiming; in the second, it leaves the key."""
    ports = Parted(Claim=raising(kill()))
    with pytest.raises(kill):
        Split(request, ports).start()
    assert ports.last == BY_TOKEN
    ports = Parted(Complete=raising(kill()))
    split = Split(request, ports)
    split.start()
    with pytest.raises(kill):
        split.resume(ANSWERED)
    assert ports.names[-1] == "Complete"


def test_split_is_interrupted_by_the_client() -> None:
    """A client that has gone interrupts the first part, as it would the whole."""
    with pytest.raises(Interrupted):
        Split(request, Parted(read_body=raising(Interrupted()))).start()


# On a loop


def resolved(value: Any) -> Step[Any]:
    step = Step[Any]()
    step.settle(value)
    return step


async def coroutine(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


async def leave_at(ports: World, at: str, step: Step[Any] | None = None) -> None:
    """Begin a request, and cancel its caller in the middle of *at*, which does not end by itself."""
    entered = asyncio.Event()
    usual = ports.answers[at]

    def answer() -> Any:
        entered.set()
        ports.answers[at] = usual
        return asyncio.Event().wait() if step is None else step

    ports.answers[at] = answer
    task = asyncio.create_task(arun(request, ports).rest())
    await entered.wait()
    await asyncio.sleep(0)  # it is set while the caller still runs; now it waits
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_arun_answers() -> None:
    """An answer may be a value, a coroutine or a step."""
    ports = Loop(principal=lambda: coroutine("alice"), read_body=lambda: resolved(b"{}"))
    assert await arun(talk, ports) == ["alice", b"{}"]
    assert await arun(talk, Loop()) == ["alice", b"{}"]
    assert await arun(idle, Loop()) == "nothing"


async def test_arun_waits_for_a_step() -> None:
    """A step that is under way is waited for, and its outcome comes back where it was asked for."""
    step, error = Step[Any](), OSError()
    ports = Loop(principal=lambda: step, read_body=lambda: pause(timedelta(0)))
    asyncio.get_running_loop().call_soon(step.settle, error)
    assert await arun(talk, ports) == [error, None]


async def test_arun_raises_into_the_flow() -> None:
    """What goes wrong, at once or later, is raised where it was asked for."""
    error = OSError()
    failed = resolved(error)
    assert await arun(talk, Loop(principal=raising(error), read_body=lambda: failed)) == [error, error]
    assert await arun(talk, Loop(principal=lambda: coroutine(error))) == [error, b"{}"]
    with pytest.raises(ZeroDivisionError):
        await arun(talk, Loop(principal=raising(ZeroDivisionError())))


@pytest.mark.parametrize("at", ["principal", "read_body"])
async def test_arun_leaves_before_the_claim(at: str) -> None:
    """A caller that goes before the claim leaves nothing behind."""
    ports = Loop()
    await leave_at(ports, at)
    await callers_gone()
    assert ports.names[-1] == at


@pytest.mark.parametrize("outcome", [HOLD, StoreUnavailable(was_sent=True)], ids=["claimed", "failed"])
async def test_arun_leaves_while_claiming(outcome: Any) -> None:
    """A caller that goes while the key is claimed leaves at once; when that is through, the key is freed behind."""
    ports = Loop()
    step = Step[Any]()
    await leave_at(ports, "Claim", step)
    assert ports.names[-1] == "Claim"
    step.settle(outcome)
    await callers_gone()
    assert ports.last == BY_TOKEN


async def test_arun_leaves_while_claiming_and_that_fails() -> None:
    """What a claim has failed with is of no interest behind a caller that has gone: nothing is said of it."""
    said: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    step = Step[Any]()
    await leave_at(Loop(), "Claim", step)
    step.settle(StoreUnavailable())
    await callers_gone()
    del step
    gc.collect()
    assert said == []


async def test_arun_leaves_a_claim_that_is_cancelled_with_it() -> None:
    """A claim that is a coroutine ends with its caller, who then leaves at once; the key is freed behind."""
    release = Step[Any]()
    ports = Loop(Release=lambda: release)
    await leave_at(ports, "Claim")
    assert ports.last == BY_TOKEN
    assert running._behind
    release.settle(Verdict.DONE)
    await callers_gone()
    assert ports.names[-2:] == ["Claim", "Release"]


async def test_arun_leaves_while_claiming_and_the_store_is_gone() -> None:
    """If freeing the key fails behind, that is the end of it: the lease will free it."""
    ports = Loop(Release=raising(StoreUnavailable()))
    step = Step[Any]()
    await leave_at(ports, "Claim", step)
    step.settle(HOLD)
    await callers_gone()
    assert ports.names[-1] == "Release"


async def test_arun_leaves_while_the_handler_runs() -> None:
    """A caller that goes while the handler runs leaves at once; the handler carries on, and its answer is stored."""
    ports = Loop(Complete=lambda: resolved(Verdict.DONE))
    step = Step[Any]()
    await leave_at(ports, "run_handler", step)
    assert ports.names[-1] == "run_handler"
    step.settle(ANSWERED)
    await callers_gone()
    assert ports.names[-2:] == ["run_handler", "Complete"]
    assert ports.names.count("run_handler") == 1


async def test_arun_leaves_while_the_answer_is_stored() -> None:
    """A caller that goes while the answer is stored does not stop it, nor the patience it takes."""
    ports = Loop(pause=lambda: coroutine(None))
    step = Step[Any]()
    await leave_at(ports, "Complete", step)
    step.settle(StoreUnavailable())
    await callers_gone()
    assert ports.names[-3:] == ["Complete", "pause", "Complete"]


async def test_arun_leaves_during_a_pause() -> None:
    """A pause goes on without its caller, and the answer is stored behind."""
    ports = Loop(Complete=in_turn(raising(StoreUnavailable()), lambda: resolved(Verdict.DONE)))
    step = Step[Any]()
    await leave_at(ports, "pause", step)
    step.settle(None)
    await callers_gone()
    assert ports.names[-3:] == ["Complete", "pause", "Complete"]


async def test_arun_leaves_in_the_turn_of_the_answer() -> None:
    """A caller that is cancelled just as the claim is answered still has the key freed behind it."""
    ports = Loop()
    step = Step[Any]()
    asked = asyncio.Event()

    def claim() -> Step[Any]:
        asked.set()
        return step

    ports.answers["Claim"] = claim
    task = asyncio.create_task(arun(request, ports).rest())
    await asked.wait()
    step.settle(HOLD)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await callers_gone()
    assert ports.last == BY_TOKEN


async def test_arun_leaves_in_the_turn_of_the_ending() -> None:
    """A caller that is cancelled just as its handler ends still has the answer stored behind it, once."""
    ports = Loop()
    step = Step[Any]()
    begun = asyncio.Event()

    def handle() -> Step[Any]:
        begun.set()
        return step

    ports.answers["run_handler"] = handle
    task = asyncio.create_task(arun(request, ports).rest())
    await begun.wait()
    step.settle(ANSWERED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await callers_gone()
    assert ports.names[-2:] == ["run_handler", "Complete"]


async def test_arun_step_is_abandoned() -> None:
    """When the step itself is given up, as when the loop ends, nothing more is asked for."""
    ports = Loop()
    step = Step[Any]()
    ports.answers["run_handler"] = lambda: step
    step.abandon()
    with pytest.raises(asyncio.CancelledError):
        await arun(request, ports)
    await callers_gone()
    assert ports.names[-1] == "run_handler"


@pytest.mark.parametrize("at", ["Claim", "run_handler"])
async def test_arun_step_is_abandoned_behind(at: str) -> None:
    """The same, when its caller has gone before: what is not known is left to the lease."""
    ports = Loop()
    step = Step[Any]()
    await leave_at(ports, at, step)
    step.abandon()
    await callers_gone()
    assert ports.names[-1] == at


def test_loop_ends_behind_a_caller() -> None:
    """A loop that ends cancels what runs behind its callers, and nothing more is asked for."""
    ports = Loop()

    async def leave() -> None:
        await leave_at(ports, "run_handler", Step[Any]())
        assert running._behind

    asyncio.run(leave())
    assert ports.names[-1] == "run_handler"
    assert not running._behind


async def test_time_limit_inside_of_a_port() -> None:
    """A port may have a time limit of its own, which cancels what it waits for: the flow's caller goes on."""
    step = Step[Any]()

    async def read() -> bytes:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            asyncio.get_running_loop().call_soon(step.settle, HOLD)
        return b"{}"

    ports = Loop(read_body=read, Claim=lambda: step)
    assert await arun(request, ports) == Send(ANSWERED.answer)


async def test_arun_leaves_nothing_behind() -> None:
    """A request that is not disturbed leaves nothing behind."""
    ports = Loop()
    assert await arun(request, ports) == Send(ANSWERED.answer)
    assert ports.names == ["principal", "read_body", "Claim", "run_handler", "Complete"]
    assert not running._behind


async def test_arun_stops_where_it_is_told() -> None:
    """A flow can be left at a step, and taken up again with its outcome: by another task, perhaps."""
    ports = Loop()
    step = Step[Any]()
    ports.answers["run_handler"] = lambda: step
    flow = arun(request, ports)
    flow.leaves_at = step
    await flow
    left = [flow.is_left]
    assert ports.names == ["principal", "read_body", "Claim", "run_handler"]
    rest = asyncio.create_task(flow.rest())
    step.settle(ANSWERED)
    assert await rest == Send(ANSWERED.answer)
    left.append(flow.is_left)
    assert left == [True, False]
    assert ports.names[-1] == "Complete"


async def test_rest_of_a_flow_is_cancelled() -> None:
    """A caller that goes in the rest of a flow leaves at once, too, and the answer is stored behind it."""
    ports = Loop()
    step = Step[Any]()
    ports.answers["run_handler"] = lambda: step
    flow = arun(request, ports)
    flow.leaves_at = step
    await flow
    rest = asyncio.create_task(flow.rest())
    await asyncio.sleep(0)
    rest.cancel()
    await asyncio.wait([rest])
    assert rest.cancelled()
    step.settle(ANSWERED)
    await callers_gone()
    assert ports.names[-2:] == ["run_handler", "Complete"]


async def test_unguarded_handler_is_cancelled() -> None:
    """In report mode a caller that goes away takes the handler along: it is not run again behind."""
    begun = asyncio.Event()
    ports = Loop()

    async def handle() -> None:
        begun.set()
        await asyncio.Event().wait()

    ports.answers["run_unguarded"] = handle
    task = asyncio.create_task(arun(reported, ports).rest())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await callers_gone()
    assert ports.names[-2:] == ["run_unguarded", "tell"]


async def test_settled_work_outlives_its_waiter() -> None:
    """Work that must end is done in a task of its own, and its outcome is raised or returned where it is awaited."""
    may_end = asyncio.Event()
    done: list[str] = []

    async def work() -> str:
        await may_end.wait()
        done.append("done")
        return "done"

    async def wait(ports: Any) -> str:
        outcome = await settled(work())
        done.append("heard")
        return outcome

    ports = Loop()
    ports.is_interruptible = False
    task = asyncio.create_task(arun(wait, ports).rest())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    may_end.set()
    await callers_gone()
    assert done == ["done", "heard"]
    with pytest.raises(OSError, match="broken"):
        await settled(coroutine(OSError("broken")))
