"""How far an operation has come: the steps that are done, and the effect in doubt, if any. Nothing here runs a step.

Steps are stored as readable JSON, in the order in which they were taken::

    [{"phase": "ride_created", "result": {"id": 7}}, {"effect": "charge_created"}]

An effect without a result was begun, and whether it happened is not known.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import field
from typing import Any, Literal

from semel.core.value import value
from semel.errors import RecoveryPointLost, ResultNotJSON, StepNameInvalid, StepRepeated

Kind = Literal["phase", "effect"]

#: Characters. Names are stored with every operation; a column of the table has room for this many.
MAX_NAME_LENGTH = 100

#: Far more than any result needs. The depth to which JSON can be parsed depends on the free stack, so a result just
#: below that limit might not be readable for the next attempt.
MAX_DEPTH = 100
_TOO_DEEP = f"it is more than {MAX_DEPTH} levels deep, or holds itself"

# Made once: json.dumps makes an encoder for every call with options of its own.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


@value
class Done:
    """A step that is committed, and what it returned."""

    kind: Kind
    name: str
    result: Any
    #: The result in the form in which the record has it, where that is not the one in which it would be stored now: it
    #: was stored before there was encryption, or with another secret. Every write compares the steps of the record.
    kept: tuple[Any] | None = field(default=None, compare=False)


@value
class Begun:
    """An effect that was recorded before its call: its outcome is unknown."""

    name: str
    kind: Kind = "effect"


Step = Done | Begun


@value
class Progress:
    """The steps of one operation so far."""

    steps: tuple[Step, ...] = ()

    @property
    def recovery_point(self) -> str | None:
        """The last step that is done: a retry goes on after it."""
        for step in reversed(self.steps):
            if isinstance(step, Done):
                return step.name
        return None

    @property
    def unknown(self) -> Begun | None:
        """The effect with an unknown outcome, if there is one. It is always the last step."""
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Begun) else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the steps, in order."""
        return tuple(step.name for step in self.steps)

    def plus(self, step: Step) -> Progress:
        """Return this progress with *step* added; a result replaces the effect that was begun."""
        steps = self.steps
        return Progress((*(steps[:-1] if steps and isinstance(steps[-1], Begun) else steps), step))

    def without_unknown(self) -> Progress:
        """Return this progress without the effect in doubt."""
        return Progress(self.steps[:-1]) if self.unknown else self


def written(progress: Progress) -> str | None:
    """Return *progress* as it is stored."""
    if not progress.steps:
        return None
    return as_text([_written(step) for step in progress.steps])


def read_back(text: str | None) -> Progress:
    """Return stored progress."""
    return Progress(tuple(_read(step) for step in json.loads(text))) if text else Progress()


def change(before: Progress, now: Progress) -> str | None:
    """Return for the audit trail what changed from *before* to *now*: a step is begun, or done, or had no effect."""
    if len(now.steps) < len(before.steps):
        return f"effect {before.steps[-1].name} had no effect"
    if not now.steps:
        return None
    last = now.steps[-1]
    return f"{last.kind} {last.name} {'done' if isinstance(last, Done) else 'begun'}"


def next_step(progress: Progress, taken: tuple[str, ...], kind: Kind, name: str) -> Step | None:
    """Return what is stored of the step *name*, the next after *taken*; None if it has to be taken now.

    The code must take the steps of the record, in their order. Otherwise a stored step that the code no longer takes
    would be silently forgotten, or silently done again.
    """
    # A handler is not always checked for its types.
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):  # type: ignore[redundant-expr]  # see above
        raise StepNameInvalid(name)
    if name in taken:
        raise StepRepeated(name)
    if len(taken) == len(progress.steps):
        return None
    stored = progress.steps[len(taken)]
    if (stored.kind, stored.name) != (kind, name):
        raise RecoveryPointLost(progress.names, (*taken, name))
    return stored


def check_end(progress: Progress, taken: tuple[str, ...]) -> None:
    """Raise ``RecoveryPointLost`` when the code ended without taking all the steps that are stored."""
    if len(taken) < len(progress.steps):
        raise RecoveryPointLost(progress.names, taken)


def as_text(result: object) -> str:
    """Write *result* as JSON that every store can hold: half of a surrogate pair is escaped, and reads back the same.

    Another service may send one, such as the first half of a cut emoji. An effect is over by then: where its result was
    refused, each retry would call it again.
    """
    return _encode(result).encode("utf-8", "backslashreplace").decode()


def as_json(name: str, result: object) -> Any:
    """Return *result* as a resumed operation will get it: written as JSON, and read back."""
    try:
        back = json.loads(as_text(result))
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultNotJSON(name, result, _misfit(result, "result")) from error
    if isinstance(back, (dict, list)) and _depth(back) > MAX_DEPTH:
        raise ResultNotJSON(name, result, _TOO_DEEP)
    return back


def _misfit(value: object, path: str, depth: int = 0) -> str | None:
    """Say where in a result the first value is that JSON can't hold, and of what type; None: the result itself."""
    if depth > MAX_DEPTH:
        return _TOO_DEEP
    if isinstance(value, dict):
        if odd := next((name for name in value if not (name is None or isinstance(name, (str, int, float)))), None):
            return f"{path} has a name that is a {type(odd).__name__}"
        inside = (
            (each, f"{path}.{name}" if str(name).isidentifier() else f"{path}[{name!r}]")
            for name, each in value.items()
        )
    elif isinstance(value, (list, tuple)):
        inside = ((each, f"{path}[{at}]") for at, each in enumerate(value))
    else:
        is_held = value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
        what = str(value) if isinstance(value, float) else f"a {type(value).__name__}"
        return None if is_held or depth == 0 else f"{path} is {what}"
    return next((said for each, where in inside if (said := _misfit(each, where, depth + 1))), None)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        nested = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _written(step: Step) -> dict[str, Any]:
    if not isinstance(step, Done):
        return {step.kind: step.name}
    said = {step.kind: step.name, "result": step.result}
    return said if step.kept is None else said | {"kept": step.kept}


def _read(step: dict[str, Any]) -> Step:
    kind: Kind = "phase" if "phase" in step else "effect"
    if "result" not in step:
        return Begun(step[kind])
    return Done(kind, step[kind], step["result"], (step["kept"][0],) if "kept" in step else None)
