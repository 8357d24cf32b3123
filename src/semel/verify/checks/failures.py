"""Checks of what goes wrong: a client that hangs up, a request that is not valid, a handler that fails, a server that
is killed. Whether two at once are told apart is not here.
"""

from __future__ import annotations

import asyncio

from semel.verify.checks.base import DRAFT, STRIPE, Experiment, given, is_refusal, is_replay_of, is_server_error, said
from semel.verify.lab import BUSY, Lab
from semel.verify.message import Answer, NoAnswer, Outcome, Request
from semel.verify.model import Check, Undecided
from semel.verify.restarting import restart
from semel.verify.telling import Step
from semel.verify.variants import broken

#: Requests that are sent one after the other while the server is killed, so that one of them is under way; and how many
#: such lines there are.
STREAM = 16
STREAMS = 2
#: The status of a gateway while its server is away.
AWAY = 503
#: How long the first of them is under way before the command is run.
HEAD_START = 0.05

HUNG_UP = Check(
    "client-hangs-up",
    f"A client that hangs up before the answer, and retries, finds one effect ({DRAFT}, 1)",
    "It is the case that keys are made for: the answer is lost, and the operation may have taken place.",
)
HALF = Check(
    "half-a-request",
    f"A request that breaks off before its last byte does not use up its key ({DRAFT}, 2.6)",
    "A guard that claims the key before the body has come leaves it in progress for ever.",
)
FREED = Check(
    "invalid-frees-key",
    f"A request that is refused before it runs does not use up its key ({STRIPE})",
    "The developer mends the body and sends it again, with the same key. Nothing had been done under it.",
)
INVALID = Check(
    "invalid-twice",
    f"A request that is not valid is refused each time, without effect and without a server error ({DRAFT}, 2.7)",
    "A guard that stores or reads what the framework refused may break where the API alone did not.",
)
ERROR = Check(
    "error-replayed",
    f"An error of the handler is kept as any other answer ({STRIPE}: server errors too), its effect not repeated",
    "An operation that failed half-way may have had its effect. A retry must not have it again.",
)
DURABLE = Check(
    "restart-keeps-answers",
    f"A stored answer outlives the server process ({DRAFT}, 2.6)",
    "A deploy restarts every process. Keys that are kept in memory are forgotten, and every retry runs again.",
)
KILLED = Check(
    "kill-in-flight",
    f"A request that loses its server to a crash takes effect once after a retry, or is finally refused ({DRAFT}, 2.6)",
    "A crash between the effect and its record is where operations are doubled, lost, or in progress for ever.",
)
TAKEN_OVER = Check(
    "other-body-after-crash",
    f"Another body does not take over the key of a request that lost its server to a crash ({DRAFT}, 2.7)",
    "The first may have taken effect. A key that is compared only with finished operations is then one for two.",
)


async def _hang_up(lab: Lab) -> None:
    request, watch = lab.keyed(lab.new_key()), await lab.watch()
    await lab.leave(request, is_whole=True)
    again = await lab.finished(request, lab.settings.patience)
    if _is_stuck(again):
        lab.failed(HUNG_UP, f"After {lab.settings.patience:g} s the retry still gets {said(again)}.")
        return
    if isinstance(again, NoAnswer) or not again.is_success:
        lab.failed(HUNG_UP, f"The retry gets {said(again)}.")
        return
    if not lab.has_counter:
        raise Undecided(
            "The answer to the first was not read; whether it took effect too, only a counter shows: --count."
        )
    runs = await lab.runs(watch, [again], 1)
    bad = f"It took effect {runs.count} times: {runs.how}."
    lab.judge(HUNG_UP, ok=runs.count == 1, good=f"The retry gets {said(again)}; {runs.how}.", bad=bad)


async def _half(lab: Lab) -> None:
    request, watch = lab.keyed(lab.new_key()), await lab.watch()
    await lab.leave(request, is_whole=False)
    again = await lab.finished(request, lab.settings.patience)
    if isinstance(again, NoAnswer) or not again.is_success:
        lab.failed(HALF, f"The whole request then gets {said(again)}.")
    elif not lab.has_counter:
        lab.passed(HALF, f"The whole request then gets {said(again)}.")
    else:
        runs = await lab.runs(watch, [again], 1)
        bad = f"It took effect {runs.count} times: {runs.how}."
        lab.judge(HALF, ok=runs.count == 1, good=f"The whole request then runs; {runs.how}.", bad=bad)


async def _invalid(lab: Lab) -> None:
    request = given(broken(lab.request))
    key, watch = lab.new_key(), await lab.watch()
    first, again = await lab.answered(lab.keyed(key, request)), await lab.answered(lab.keyed(key, request))
    statuses = f"{first.status}, then {again.status}"
    if first.is_success:
        lab.skipped(INVALID, "The API accepts JSON that ends too early.")
        lab.skipped(FREED, "The API accepts JSON that ends too early.")
        return
    is_fine = is_refusal(first) and is_refusal(again)
    if is_fine and lab.has_counter and (runs := await lab.runs(watch, [], 0)).count:
        lab.failed(INVALID, f"It is refused ({statuses}), and took effect: {runs.how}.")
    elif is_server_error(first):
        raise Undecided(f"The API answers JSON that ends too early with {first.status}, by itself or by its guard.")
    else:
        lab.judge(INVALID, ok=is_fine, good=f"It is refused: {statuses}.", bad=f"It is answered with {statuses}.")
    whole = await lab.answered(lab.keyed(key))
    if whole.is_success:
        lab.passed(FREED, f"The whole request with the same key then gets {whole.status}.")
    elif is_server_error(whole) or whole.status == BUSY:
        lab.failed(FREED, f"The whole request with the same key then gets {whole.status}.")
    elif lab.profile.keeps_errors:
        lab.failed(FREED, f"The whole request gets {whole.status}: the key was used up by one that never ran.")
    else:
        raise Undecided(
            f"The whole request gets {whole.status}: the refusal is kept. That is right if the handler itself refused, "
            "which can't be seen from outside."
        )


async def _error(lab: Lab) -> None:
    failing = given(lab.settings.failing)
    request, watch = lab.keyed(lab.new_key(), failing), await lab.watch()
    first, again = await lab.answered(request), await lab.answered(request)
    if first.is_success:
        raise Undecided(f"The failing request succeeds: {first.status}.")
    if lab.has_counter and (runs := await lab.runs(watch, [], 0)).count > 1:
        lab.failed(ERROR, f"It fails with {first.status}, and each try had its effect: {runs.how}.")
    elif is_replay_of(first, again):
        lab.passed(ERROR, f"The retry gets the same {first.status}.")
    elif lab.profile.keeps_errors or not is_server_error(first):
        lab.failed(ERROR, f"The first try gets {first.status}, the retry another answer, {again.status}.")
    elif not lab.has_counter:
        raise Undecided("The retry gets another answer; whether the effect was repeated, only --count shows.")
    else:
        lab.passed(ERROR, f"The first try gets {first.status}, the retry {again.status}, and no effect was repeated.")


async def _durable(lab: Lab) -> None:
    command = given(lab.settings.restart_cmd)
    request, watch = lab.keyed(lab.new_key()), await lab.watch()
    first = await lab.first(request)
    await _restart(lab, command)
    again = await lab.finished(request, lab.settings.patience)
    if lab.has_counter:
        try:
            runs = await lab.runs(watch, [first], 1)
        except Undecided:
            if is_replay_of(first, again):
                raise
            lab.failed(DURABLE, f"After the restart the retry gets another answer, {said(again)}.")
            return
        if runs.count > 1:
            lab.failed(DURABLE, f"After the restart the retry ran again: {runs.how}.")
            return
    elif isinstance(again, Answer) and lab.is_same(first, again) is None:
        raise Undecided("Answers do not vary, so they do not show whether it ran again.")
    bad = f"After the restart the retry gets another answer, {said(again)}."
    lab.judge(
        DURABLE, ok=is_replay_of(first, again), good="After the restart the retry gets the first answer.", bad=bad
    )


async def _restart(lab: Lab, command: str) -> None:
    probe = Request("GET", lab.request.target, lab.request.headers).lacking("content-type")
    done = await restart(lab.client, command, probe=probe if lab.settings.is_behind_gateway else None)
    lab.note(f"the server was restarted in {done.seconds:.1f} s")


async def _killed(lab: Lab) -> None:
    command = given(lab.settings.restart_cmd)
    watch = await lab.watch()
    cut, refused, answered = await _while_restarting(lab, command)
    if not cut:
        raise Undecided("No request was under way when the server was killed. A slower request would show it.")
    lost = cut + refused
    lab.record(
        Step(tuple(lost), tuple(NoAnswer("the server was killed") for _ in lost), note="while the server was killed")
    )
    endings = await asyncio.gather(*(lab.finished(each, lab.settings.recovery) for each in lost))
    stuck = [each for each in endings if _is_stuck(each)]
    if stuck:
        time = f"{lab.settings.recovery:g} s"
        lab.failed(KILLED, f"{time} after the crash {len(stuck)} of {len(lost)} retries still get {said(stuck[0])}.")
        return
    done = [each for each in endings if isinstance(each, Answer) and each.is_success]
    wrong = [each for each in endings if each not in done and not is_refusal(each)]
    if wrong:
        lab.failed(KILLED, f"After the crash a retry gets {said(wrong[0])}.")
    elif not lab.has_counter:
        raise Undecided("All retries ended; whether one took effect twice, only a counter shows: --count.")
    else:
        runs = await lab.runs(watch, [], len(answered) + len(done))
        most = len(answered) + len(lost)
        ok = len(answered) + len(done) <= runs.count <= most
        bad = f"{most} operations, and {runs.how}; {len(cut)} were under way when the server was killed."
        retried = f"{len(done)} of {len(lost)} retries ended with a success"
        good = f"{len(cut)} were under way when the server was killed; {retried}; {runs.how}."
        lab.judge(KILLED, ok=ok, good=good, bad=bad)


async def _while_restarting(lab: Lab, command: str) -> tuple[list[Request], list[Request], list[Request]]:
    """Send requests until the server dies. Return those that were cut off, those refused by 503, which have not reached
    it, and those that were answered.
    """
    cut: list[Request] = []
    refused: list[Request] = []
    answered: list[Request] = []

    is_over = asyncio.Event()

    async def stream() -> None:
        for _ in range(STREAM):
            if is_over.is_set():
                return
            request = lab.keyed(lab.new_key())
            outcome = await lab.client.send(request)
            if isinstance(outcome, Answer):
                (answered if outcome.is_success else refused if outcome.status == AWAY else cut).append(request)
            else:
                if not outcome.is_unsent:
                    cut.append(request)
                return

    streams = [asyncio.ensure_future(stream()) for _ in range(STREAMS)]
    await asyncio.sleep(min(HEAD_START, lab.latency / 3))
    try:
        await _restart(lab, command)
    finally:
        is_over.set()
        await asyncio.gather(*streams)
    return cut, refused, answered


async def _taken_over(lab: Lab) -> None:
    command, other = given(lab.settings.restart_cmd), await lab.other()
    key, watch = lab.new_key(), await lab.watch()
    request = lab.keyed(key)
    sending = asyncio.ensure_future(lab.client.send(request))
    await asyncio.sleep(min(HEAD_START, lab.latency / 3))
    try:
        await _restart(lab, command)
    finally:
        lost = await sending
    if isinstance(lost, Answer) and lost.is_success:
        raise Undecided("The request was answered before the server was killed. A slower request would show it.")
    lab.record(Step((request,), (lost,), note="while the server was killed"))
    answer = await lab.finished(lab.keyed(key, other), lab.settings.recovery)
    if is_refusal(answer) and not _is_stuck(answer):
        lab.passed(TAKEN_OVER, f"Another body under its key is refused with {said(answer)}.")
    elif not (isinstance(answer, Answer) and answer.is_success):
        raise Undecided(f"Another body under its key gets {said(answer)}.")
    elif lab.has_counter and (runs := await lab.runs(watch, [], 1)).count > 1:
        lab.failed(TAKEN_OVER, f"Another body under its key was accepted, and both took effect: {runs.how}.")
    else:
        raise Undecided("Another body under its key was accepted. The first may not have come to use it.")


def _is_stuck(outcome: Outcome) -> bool:
    """Whether it is told, or its answer says, that it is still in progress."""
    if isinstance(outcome, NoAnswer) or outcome.status != BUSY:
        return False
    problem = outcome.json()
    is_final = isinstance(problem, dict) and problem.get("retryable") is False
    return not is_final and outcome.header("stripe-should-retry") != "false"


def _not_json(lab: Lab) -> str | None:
    return None if broken(lab.request) else "The body is not JSON."


def _no_failing(lab: Lab) -> str | None:
    return None if lab.settings.failing else "There is no request that fails. Give --failing-request."


def _no_command(lab: Lab) -> str | None:
    return None if lab.settings.restart_cmd else "The server can't be killed. Give --restart-cmd."


EXPERIMENTS = (
    Experiment(_hang_up, (HUNG_UP,), creates=1, sends=4),
    Experiment(_half, (HALF,), creates=1, sends=2),
    Experiment(_invalid, (INVALID, FREED), creates=1, sends=3, reason_against=_not_json),
    Experiment(_error, (ERROR,), creates=1, sends=2, reason_against=_no_failing),
    Experiment(_durable, (DURABLE,), creates=1, sends=2, reason_against=_no_command),
    Experiment(_killed, (KILLED,), creates=STREAM * STREAMS, sends=2 * STREAM * STREAMS, reason_against=_no_command),
    Experiment(_taken_over, (TAKEN_OVER,), creates=2, sends=2, reason_against=_no_command),
)
