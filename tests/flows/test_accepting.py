"""A request that is accepted, to be run later: what is stored, what its client is told, what a worker makes of it."""

from dataclasses import replace

import pytest

from semel.core.commands import Again, Claim, Command, Complete, Look, Now, Release, TakeOver, Verdict
from semel.core.handler import Answered, RunHandler
from semel.core.message import Answer, Head
from semel.core.policy import Policy
from semel.core.record import Found, Hold, Record, Stuck
from semel.core.state import State
from semel.flows.finish import finish
from semel.flows.reply import Reply, Send
from semel.flows.serve import serve
from tests.flows.test_serve import (
    BEGIN,
    CREATED,
    CUT_OFF,
    HEIR,
    HOLD,
    KEPT,
    KEY,
    NOW,
    SEEN,
    TAKE_OVER,
    TOKEN,
    found,
    head,
    record,
    refusal,
    sent,
)
from tests.kit.ports import PORTS, Tell
from tests.kit.script import Line, Played, play

ACCEPT = Policy(in_progress="accept")
MAY = Policy(preferences={"respond-async"})
PATH = "/jobs"


def pending(hold: Hold = HOLD) -> Record:
    return replace(record(hold), state=State.PENDING, lease_expires_at=None, lease_left=None, is_accepted=True)


def accepted(state: State = State.PENDING, **more: object) -> Found:
    return replace(found(state), is_accepted=True, **more)  # type: ignore[arg-type]


def ask(
    script: list[Line], policy: Policy = ACCEPT, prefer: bytes | None = None, path: str | None = PATH
) -> Played[Reply]:
    headers = head().headers if prefer is None else (*head().headers, (b"prefer", prefer))
    asked = Head("POST", "/charges", b"", headers, "/api")
    return play(serve(PORTS, asked, policy, TOKEN, status_path=path), [*BEGIN, *script])


def claim_of(commands: tuple[Command[object], ...]) -> Claim:
    (claim,) = [each for each in commands if isinstance(each, Claim)]
    return claim


def test_stored_with_its_request_and_told_where() -> None:
    """The claim stores the whole request as pending, and nothing is run. The answer is 202 and an address."""
    played = ask([(Claim, HOLD), (Look, pending())])
    claim = claim_of(played.commands)
    assert claim.is_accepted
    assert claim.request is not None
    assert (claim.request.principal, claim.request.head.mount) == ("alice", "/api")
    answer = sent(played.result)
    headers = dict(answer.headers)
    assert answer.status == 202
    assert headers[b"location"].startswith(b"/jobs/")
    assert b"preference-applied" not in headers


@pytest.mark.parametrize("state", [State.PENDING, State.PROCESSING])
def test_a_duplicate_is_told_the_same(state: State) -> None:
    """While it waits or runs, a duplicate gets the same address, whether or not a lease is over."""
    first = sent(ask([(Claim, HOLD), (Look, pending())]).result)
    for is_over in (True, False):
        again = sent(ask([(Claim, accepted(state, lease_is_over=is_over)), (Look, pending())]).result)
        assert (again.status, dict(again.headers)[b"location"]) == (202, dict(first.headers)[b"location"])


def test_the_reply_to_the_claim_was_lost() -> None:
    """A claim that got through without our knowing bears our token, and is as good as any."""
    script: list[Line] = [(Claim, accepted(token=TOKEN)), (Look, pending())]
    assert sent(ask(script).result).status == 202


def test_ended() -> None:
    """Once it has ended, a duplicate gets the answer itself, as a replay."""
    answer = sent(ask([(Claim, accepted(State.COMPLETE, answer=KEPT, lease_is_over=True))]).result)
    assert (answer.status, dict(answer.headers)[b"idempotent-replayed"]) == (201, b"true")


def test_the_store_is_cut_off() -> None:
    """A claim whose fate is unknown is taken back: the client is told to send it again."""
    code = refusal(ask([(Claim, CUT_OFF), (Tell, None), (Release, Verdict.DONE)]).result)[1]
    assert code == "store-unavailable"


def test_discarded_meanwhile() -> None:
    """One that an operator has discarded in this very moment is to be sent again."""
    assert refusal(ask([(Claim, HOLD), (Look, None)]).result)[1] == "idempotency-key-in-progress"


def test_too_late() -> None:
    """A key that tells its own age is refused past retention, and what was stored for it is taken back."""
    key = "01890a5d-ac96-774b-bcce-b302099a8057"
    hold = replace(HOLD, key=key)
    late = Policy(in_progress="accept", late="refuse")
    flow = serve(PORTS, head(key), late, TOKEN, status_path=PATH)
    reply = play(flow, [*BEGIN, (Claim, hold), (Now, NOW), (Release, Verdict.DONE)]).result
    assert refusal(reply)[1] == "idempotency-key-expired"


def test_a_entry_without_addresses() -> None:
    """Where nobody could ask, nothing is accepted; what another entry point has accepted is in progress."""
    ran = ask([(Claim, HOLD), (RunHandler, Answered(CREATED)), (Complete, Verdict.DONE)], path=None)
    assert not claim_of(ran.commands).is_accepted
    assert refusal(ask([(Claim, accepted())], path=None).result)[1] == "idempotency-key-in-progress"


def test_respond_async() -> None:
    """A client that prefers it is accepted where the policy allows, and is told that its wish was met."""
    played = ask([(Claim, HOLD), (Look, pending())], MAY, b"respond-async")
    assert claim_of(played.commands).is_accepted
    assert dict(sent(played.result).headers)[b"preference-applied"] == b"respond-async"


def test_respond_async_while_the_first_runs() -> None:
    """A duplicate that prefers it is told where to ask for an ordinary request that still runs."""
    answer = sent(ask([(Claim, found()), (Look, record(SEEN))], MAY, b"respond-async").result)
    assert answer.status == 202


@pytest.mark.parametrize("policy, prefer", [(MAY, None), (Policy(), b"respond-async")])
def test_run_at_once(policy: Policy, prefer: bytes | None) -> None:
    """Who does not prefer it, or may not, has it run at once."""
    played = ask([(Claim, HOLD), (RunHandler, Answered(CREATED)), (Complete, Verdict.DONE)], policy, prefer)
    assert not claim_of(played.commands).is_accepted
    assert sent(played.result).status == 201


def test_what_an_ordinary_request_has_begun() -> None:
    """What was begun by a request that died is gone on with here and now: no worker has its request."""
    script: list[Line] = [(Claim, found(lease_is_over=True)), *TAKE_OVER]
    played = ask([*script, (RunHandler, Answered(CREATED)), (Complete, Verdict.DONE)])
    (take_over,) = [each for each in played.commands if isinstance(each, TakeOver)]
    assert not take_over.claim.is_accepted
    assert sent(played.result).status == 201


def test_it_expires_while_it_is_taken_over() -> None:
    """What an ordinary request has begun, and expires just before it is taken over, is new and run here all the same:
    it does not wait for a worker.
    """
    ended = replace(found(), lease_is_over=True)
    anew = replace(HEIR, attempt=1)
    ran: list[Line] = [(RunHandler, Answered(CREATED)), (Complete, Verdict.DONE)]
    assert sent(ask([(Claim, ended), (TakeOver, anew), *ran]).result) == CREATED
    lost: Line = (TakeOver, Again.AGAIN)  # its reply, that is
    assert sent(ask([(Claim, ended), lost, (Claim, found(token=TOKEN)), *ran]).result) == CREATED


def test_expired_and_accepted_again() -> None:
    """In place of one that expired, a new one is stored as pending."""
    old = found(State.COMPLETE, answer=KEPT, lease_is_over=True, is_expired=True)
    played = ask([(Claim, old), (TakeOver, HOLD), (Look, pending())])
    (take_over,) = [each for each in played.commands if isinstance(each, TakeOver)]
    assert take_over.claim.is_accepted
    assert sent(played.result).status == 202


def worked(answer: Answer, *, reached_handler: bool = True) -> Played[Reply | None]:
    stuck = Stuck(SEEN, "rerun", None, has_request=True, silent_for=NOW - NOW, is_accepted=True)
    is_kept = answer.status not in {401, 403, 407, 408, 421, 425, 429}
    ended: Line = (Complete if is_kept else Release, Verdict.DONE)
    told: list[Line] = [(Tell, None)] if answer.status in {401, 403, 407} else []
    script: list[Line] = [(TakeOver, HOLD), (RunHandler, Answered(answer, reached_handler)), *told, ended]
    return play(finish(PORTS, stuck, ACCEPT, TOKEN), script)


@pytest.mark.parametrize("status", [200, 206, 304, 400, 404, 405, 413, 415, 416, 429, 401, 403, 407, 408, 421, 425])
def test_what_a_worker_ends_it_with(status: int) -> None:
    """All that says more than "not now" and "not you" ends it; only a refused login is told of."""
    played = worked(Answer(status))
    assert isinstance(played.result, Send)
    assert played.result.answer.status == status


def test_the_router_answers() -> None:
    """What the router answers by itself is its end, too: no retry of a client's will bring another."""
    (_, _, complete) = worked(Answer(404), reached_handler=False).commands
    assert isinstance(complete, Complete)
    assert complete.wakes


def test_a_worker_that_comes_second_attempts_no_first() -> None:
    """What is taken over from a dead worker is another attempt, which is told."""
    stuck = Stuck(SEEN, "rerun", None, has_request=True, silent_for=NOW - NOW, tries=1, is_accepted=True)
    script: list[Line] = [*TAKE_OVER, (RunHandler, Answered(CREATED)), (Complete, Verdict.DONE)]
    played = play(finish(PORTS, stuck, ACCEPT, TOKEN), script)
    assert isinstance(played.commands[0], TakeOver)
    assert (played.commands[0].is_abandoned, HEIR.key) == (True, KEY)
