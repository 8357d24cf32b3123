"""The model in ``model/``: every promise holds in every state that it can get into, and each bug that is planted is
found, by the promise that is named here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit.servers.programs import JAVA, find
from tests.kit.tlc import explore

GUARD = {"Modes": '{"guard"}'}
ATOMIC = {"Modes": '{"atomic"}'}
REFUSE = {"OnCrash": '"refuse"'}
FAILS_OVER = {"FailsOver": "TRUE"}
ONE_OPERATION = {"Operations": "1"}
ONE_FAULT = {"Faults": "1"}
SMALL = GUARD | ONE_OPERATION | ONE_FAULT

#: What an asynchronous standby may cost, by docs/how-to/fail-over.md: a commit that was acknowledged, and with it a
#: claim, an answer, or the knowledge that a handler has run. Nothing else.
LOST_BY_FAIL_OVER = (
    "AtMostOneLiveClaim",
    "NothingInFlightIsReaped",
    "AnswerIsStoredFirst",
    "OneAnswer",
    "AtMostOnce",
    "AnswerIsFinal",
)

#: Actions that have no place in some worlds. TLC calls the arrival of a late statement by the name of what it is in.
LATE = {"Next"}
OF_TRANSACTIONS = {"Begin", "Finish", "EndLate", "Settle", "LoseCommitReply"}
OF_CLAIMS = {"Claim", "FindOwn", "Find", "TakeOver", "Renew", "Stop", "Complete", "FindCompleted", "Fenced", "Release"}
OF_GUARD = OF_CLAIMS | LATE | {"AskAgain", "LoseReply", "Sweep"}
OF_FAIL_OVER = {"Replicate", "FailOver", "FindUndone"}


@dataclass(frozen=True)
class World:
    """What is explored, how many states it has at least, and which actions are never taken in it."""

    module: str
    constants: Mapping[str, str]
    at_least: int
    never: set[str] = field(default_factory=set)


WORLDS = {
    "guard": World("Once", GUARD | ONE_FAULT, 13_000, OF_TRANSACTIONS | OF_FAIL_OVER | {"Resolve"}),
    "guard, refuse": World("Once", GUARD | REFUSE | ONE_FAULT, 9_000, OF_TRANSACTIONS | OF_FAIL_OVER),
    "atomic": World("Once", ATOMIC | {"Faults": "3"}, 3_500, OF_GUARD | OF_FAIL_OVER | {"Resolve"}),
    "both": World("Once", ONE_OPERATION | ONE_FAULT, 4_000, OF_FAIL_OVER | {"Reap", "Resolve"}),
    "messages": World("Messages", ONE_FAULT, 10_000),
}
FAILING_OVER = {
    "guard": World("Once", SMALL | FAILS_OVER, 8_000, OF_TRANSACTIONS | {"FindUndone", "Reap", "Resolve"}),
    "atomic": World("Once", ATOMIC | FAILS_OVER | ONE_FAULT, 5_000, OF_GUARD | {"Resolve"}),
}
#: With one fault more: minutes.
LARGE = {
    "guard": World("Once", GUARD, 300_000, WORLDS["guard"].never),
    "guard, refuse": World("Once", GUARD | REFUSE, 140_000, WORLDS["guard, refuse"].never),
    "both": World("Once", ONE_OPERATION, 70_000, WORLDS["both"].never),
    "both, refuse": World("Once", REFUSE | ONE_OPERATION, 15_000, OF_FAIL_OVER | {"Reap"}),
    "messages": World("Messages", {}, 80_000),
}


@dataclass(frozen=True)
class Bug:
    """One that is planted, and the promise that it breaks."""

    breaks: str
    patches: Mapping[str, str]
    constants: Mapping[str, str] = field(default_factory=dict)
    module: str = "Once"
    without: tuple[str, ...] = ()


NO_TOKEN = {
    "IsMine(w) == db.token = me[w].token /\\ db.attempt": "IsMine(w) == db.attempt",
}
BUGS = {
    "no fence": Bug(
        "FencedStoresNothing",
        {'me[w].pc = "complete" /\\ IsMine(w)\n': 'me[w].pc = "complete" /\\ db.state = "processing"\n'},
        SMALL,
    ),
    "the attempt's number without its token": Bug("FencedStoresNothing", NO_TOKEN, SMALL),
    "the number without the token, and a fail-over": Bug(
        "FencedStoresNothing", NO_TOKEN, SMALL | FAILS_OVER, without=LOST_BY_FAIL_OVER
    ),
    "the application's clock": Bug(
        "AtMostOneLiveClaim",
        {
            'IsOver == db.state # "processing" \\/ db.lease = 0': "IsOver == TRUE",
            'IF db.state = "processing" THEN db.lease = 0': 'IF db.state = "processing" THEN TRUE',
        },
        SMALL,
    ),
    "read, then insert": Bug(
        "AtMostOneLiveClaim",
        {
            'Asks(w, "guard") /\\ db.state # "none" /\\ IsOver': 'Asks(w, "guard") /\\ IsOver',
            "IF CanTakeOver(me[w].seen, me[w].token)\n       THEN db' = TakenOver(me[w].token)": (
                "IF me[w].seen = Nothing \\/ CanTakeOver(me[w].seen, me[w].token)\n       THEN "
                "db' = (IF me[w].seen = Nothing THEN Claimed(me[w].token) ELSE TakenOver(me[w].token))"
            ),
        },
        SMALL,
    ),
    "the own token, however old its lease": Bug("NoClaimNoRun", {"IsOwn(w) /\\ ~IsOver": "IsOwn(w)"}, SMALL),
    "anew under the own token": Bug(
        "AtMostOnce", {" /\\ (db.kept > 0 \\/ db.token # token)": ""}, GUARD | REFUSE | {"Faults": "2"}
    ),
    "the answer before it is stored": Bug(
        "AnswerIsStoredFirst",
        {'Set(w, [pc |-> "complete"])\n       ELSE': 'Set(w, [pc |-> "reply"])\n       ELSE'},
        SMALL,
    ),
    "freed where the answer can't be stored": Bug(
        "AtMostOnce", {'/\\ me[w].pc = "unsure"': '/\\ me[w].pc \\in {"unsure", "complete"}'}, SMALL | REFUSE
    ),
    "run again, though the policy refuses": Bug(
        "AtMostOnce", {'IF OnCrash = "rerun" THEN "run" ELSE "refuse"': '"run"'}, SMALL | REFUSE
    ),
    "release without the token": Bug(
        "NothingInFlightIsReaped",
        {"\\/ db.token # me[w].token \\/ me[w].attempt \\notin": "\\/ me[w].attempt \\notin"},
        SMALL | {"Faults": "2"},
    ),
    "reap in flight": Bug(
        "NothingInFlightIsReaped",
        {"Reap ==\n    /\\ IsExpired": 'Reap ==\n    /\\ db.state \\in {"processing", "complete"} /\\ db.kept = 0'},
        GUARD | ONE_FAULT,
    ),
    "complete after the commit of the effect": Bug(
        "AtomicOnce",
        {
            "IF CanFinish THEN db' = Finished": (
                "IF CanFinish THEN db' \\in {Finished, [db EXCEPT !.rows = @ \\union {lock.token}]}"
            )
        },
        ATOMIC,
    ),
    "finish over what came up meanwhile": Bug(
        "NothingInFlightIsReaped", {'IF lock.seen = Nothing THEN db.state = "none"': "IF lock.seen = Nothing THEN TRUE"}
    ),
    "a lost COMMIT taken for done": Bug(
        "AnswerIsStoredFirst", {'IF db.state = "complete" /\\ db.token = me[w].token THEN': "IF TRUE THEN"}, ATOMIC
    ),
    "the message after the commit": Bug(
        "MessageWithItsChange",
        {
            'outbox\' = [outbox EXCEPT ![m].state = "ready"]': (
                'outbox\' \\in {outbox, [outbox EXCEPT ![m].state = "ready"]}'
            )
        },
        module="Messages",
    ),
    "deleted without a confirmation": Bug(
        "NothingIsLost", {"IF m \\in relays[r].confirmed THEN": "IF TRUE THEN"}, module="Messages"
    ),
    "a relay without the token": Bug(
        "LateRelayChangesNothing",
        {"still == {m \\in relays[r].batch : outbox[m].token = relays[r].token}": "still == relays[r].batch"},
        module="Messages",
    ),
    "a relay that leaves an older one out": Bug(
        "OrderOfKey", {"\\A n \\in Ready : n <= m => IsFree(n)": "IsFree(m)"}, module="Messages"
    ),
    "a relay that goes on after a failure": Bug(
        "OrderOfKey",
        {
            'SetRelay(r, [pc |-> "settle"])\n    /\\ UNCHANGED <<changes, outbox>>': (
                "SetRelay(r, [batch |-> relays[r].batch \\ {First(Left(r))}])\n    /\\ UNCHANGED <<changes, outbox>>"
            )
        },
        module="Messages",
    ),
    "the receipt outside of the transaction": Bug(
        "HandledOnceInOrder",
        {"inbox' = inbox \\union {consumers[c].message}": "inbox' \\in {inbox, inbox \\union {consumers[c].message}}"},
        module="Messages",
    ),
    "no look at the receipt": Bug(
        "HandledOnceInOrder",
        {"IF consumers[c].message \\in inbox THEN locked'": "IF FALSE THEN locked'"},
        module="Messages",
    ),
    "ack before COMMIT": Bug(
        "NoAckBeforeCommit",
        {
            "message |-> Head(queue)])\n    /\\ UNCHANGED <<queue, sent,": (
                "message |-> Head(queue)])\n    /\\ queue' = Tail(queue) /\\ UNCHANGED <<sent,"
            )
        },
        module="Messages",
    ),
}

ANSWERED = World("Once", SMALL, 2_000)
ARRIVED = World("Messages", ONE_FAULT | {"Consumers": "{c}"}, 5_000)


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return find(JAVA, tmp_path_factory.mktemp("java")) / "java"


def keeps_its_promises(java: Path, folder: Path, world: World, *, without: tuple[str, ...] = ()) -> None:
    explored = explore(java, folder, world.module, world.constants, without=without)
    print(f"{world.module}: {explored.states} states")  # noqa: T201 - for a run with -s
    assert explored.broken is None
    assert explored.states >= world.at_least
    assert {action for action, times in explored.taken.items() if times == 0} == world.never


@pytest.mark.parametrize("name", WORLDS)
def test_promises_hold(java: Path, tmp_path: Path, name: str) -> None:
    """Whatever happens, every promise holds; and all happens that can: take-overs, fenced workers, late statements."""
    keeps_its_promises(java, tmp_path, WORLDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_promises_hold_in_large(java: Path, tmp_path: Path, name: str) -> None:
    """The same with more faults."""
    keeps_its_promises(java, tmp_path, LARGE[name])


@pytest.mark.parametrize("name", FAILING_OVER)
def test_fail_over(java: Path, tmp_path: Path, name: str) -> None:
    """A fail-over that loses commits costs what the documentation says, and nothing else: the fence holds, and in
    atomic mode there is no row without its record.
    """
    keeps_its_promises(java, tmp_path, FAILING_OVER[name], without=LOST_BY_FAIL_OVER)


@pytest.mark.slow
@pytest.mark.parametrize("lost", LOST_BY_FAIL_OVER)
def test_what_a_fail_over_costs(java: Path, tmp_path: Path, lost: str) -> None:
    """None of those promises is left out without need: each is broken by some fail-over."""
    others = tuple(name for name in LOST_BY_FAIL_OVER if name != lost)
    constants = SMALL | REFUSE | FAILS_OVER
    assert explore(java, tmp_path, "Once", constants, without=others).broken == lost


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(java: Path, tmp_path: Path, name: str) -> None:
    """Each bug that is planted breaks the promise that is there to forbid it."""
    bug = BUGS[name]
    explored = explore(java, tmp_path, bug.module, bug.constants, without=bug.without, patches=bug.patches)
    assert explored.broken == bug.breaks


@pytest.mark.parametrize("world, promise", [(ANSWERED, "Answered"), (ARRIVED, "Arrived")], ids=["once", "messages"])
def test_faults_that_stop(java: Path, tmp_path: Path, world: World, promise: str) -> None:
    """When faults stop, a client that retries gets its answer, and every message takes effect."""
    explored = explore(java, tmp_path, world.module, world.constants, liveness=promise)
    assert explored.broken is None
    assert explored.states >= world.at_least


@pytest.mark.parametrize(
    "world, promise, patches",
    [
        (
            ANSWERED,
            "Answered",
            {'IF db.state = "processing" THEN db.lease = 0': 'IF db.state = "processing" THEN FALSE'},
        ),
        (ARRIVED, "Arrived", {"IsFree(m) == outbox[m].lease = 0": "IsFree(m) == outbox[m].token = 0"}),
    ],
    ids=["once", "messages"],
)
def test_leases_that_never_end(
    java: Path, tmp_path: Path, world: World, promise: str, patches: Mapping[str, str]
) -> None:
    """Without an end of leases one crash is enough, and the client waits for ever."""
    assert explore(java, tmp_path, world.module, world.constants, liveness=promise, patches=patches).broken == promise
