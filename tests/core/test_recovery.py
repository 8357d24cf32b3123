"""How far an operation has come: what is stored of its steps, and what the code may take next."""

import json
import math
import re
from decimal import Decimal
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core.recovery import (
    MAX_DEPTH,
    MAX_NAME_LENGTH,
    Begun,
    Done,
    Kind,
    Progress,
    Step,
    as_json,
    change,
    check_end,
    next_step,
    read_back,
    written,
)
from semel.errors import RecoveryPointLost, ResultNotJSON, StepNameInvalid, StepRepeated

RIDE = Done("phase", "ride_created", {"id": 7})
CHARGE = Done("effect", "charge_created", "ch_1")
CHARGING = Begun("charge_created")
RECEIPT = Done("phase", "receipt_sent", None)

WHOLE = Progress((RIDE, CHARGE, RECEIPT))
HALF = Progress((RIDE, CHARGING))

names = st.from_regex(r"[A-Za-z0-9_.:-]{1,100}", fullmatch=True)
# A float that is not a number is no JSON; a lone surrogate is no text.
texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
kinds: st.SearchStrategy[Kind] = st.sampled_from(["phase", "effect"])
progresses = st.builds(
    lambda done, begun: Progress((*done, *begun)),
    st.lists(st.builds(Done, kinds, names, values), max_size=4),
    st.lists(st.builds(Begun, names), max_size=1),
)


# What is stored


def test_people_can_read_it() -> None:
    """Steps are stored as JSON, in their order, with what they returned; of a begun effect that is left out."""
    assert written(HALF) == '[{"phase":"ride_created","result":{"id":7}},{"effect":"charge_created"}]'
    assert written(Progress((Done("phase", "grüße", "ß"),))) == '[{"phase":"grüße","result":"ß"}]'


def test_nothing_is_stored_of_no_steps() -> None:
    """Before its first step an operation stores nothing."""
    assert written(Progress()) is None
    assert read_back(None) == Progress()


@given(progresses)
def test_round_trip(progress: Progress) -> None:
    """What was stored is read back as it was."""
    assert read_back(written(progress)) == progress


def test_result_of_none_is_a_result() -> None:
    """A step that returned None is done, and not merely begun."""
    back = read_back(written(Progress((Done("effect", "mailed", None),))))
    assert back.unknown is None
    assert back.recovery_point == "mailed"


# Where it is


@pytest.mark.parametrize(
    "progress, point, unknown",
    [
        (Progress(), None, None),
        (Progress((CHARGING,)), None, CHARGING),
        (Progress((RIDE,)), "ride_created", None),
        (HALF, "ride_created", CHARGING),
        (WHOLE, "receipt_sent", None),
    ],
)
def test_recovery_point(progress: Progress, point: str | None, unknown: Begun | None) -> None:
    """The recovery point is the last step that is done; an effect that was begun is no point to go on from."""
    assert (progress.recovery_point, progress.unknown) == (point, unknown)


def test_result_takes_the_place_of_what_was_begun() -> None:
    """An effect is stored once: as begun, then as done. One that did nothing is as if it had not been begun."""
    assert Progress((RIDE,)).plus(CHARGING) == HALF
    assert HALF.plus(CHARGE) == Progress((RIDE, CHARGE))
    assert HALF.without_unknown() == Progress((RIDE,))
    assert WHOLE.without_unknown() is WHOLE
    assert HALF.names == ("ride_created", "charge_created")


# What the code takes next


@pytest.mark.parametrize(
    "taken, kind, name, stored",
    [
        ((), "phase", "ride_created", RIDE),
        (("ride_created",), "effect", "charge_created", CHARGE),
        (("ride_created", "charge_created"), "phase", "receipt_sent", RECEIPT),
        (("ride_created", "charge_created", "receipt_sent"), "phase", "and_more", None),
    ],
)
def test_the_code_goes_the_way_of_the_record(
    taken: tuple[str, ...], kind: Kind, name: str, stored: Step | None
) -> None:
    """Step by step the code gets what is stored; past the last stored step, the step is to be taken now."""
    assert next_step(WHOLE, taken, kind, name) == stored


@pytest.mark.parametrize(
    "taken, kind, name",
    [
        ((), "phase", "order_created"),
        ((), "effect", "ride_created"),
        (("ride_created",), "phase", "receipt_sent"),
        (("ride_created",), "phase", "charge_created"),
    ],
    ids=["renamed", "another kind", "left out", "no longer an effect"],
)
def test_lost_recovery_point(taken: tuple[str, ...], kind: Kind, name: str) -> None:
    """A step that is stored and that the code does not take is a loud error that shows both lists."""
    with pytest.raises(RecoveryPointLost) as lost:
        next_step(WHOLE, taken, kind, name)
    said = str(lost.value)
    assert "Stored: ride_created, charge_created, receipt_sent." in said
    assert f"In the code: {', '.join((*taken, name))}." in said


def test_code_that_ends_early() -> None:
    """So is a handler that ends without having taken every step that is stored."""
    with pytest.raises(RecoveryPointLost, match=r"Stored: ride_created, charge_created\. In the code: ride_created\."):
        check_end(HALF, ("ride_created",))
    with pytest.raises(RecoveryPointLost, match="In the code: none"):
        check_end(HALF, ())
    check_end(HALF, HALF.names)
    check_end(HALF, (*HALF.names, "and_more"))


def test_repeated_name() -> None:
    """A name stands for one step: the second of the same name is refused, stored or not."""
    for progress in (Progress(), WHOLE):
        with pytest.raises(StepRepeated, match="'ride_created'"):
            next_step(progress, ("ride_created",), "phase", "ride_created")


@pytest.mark.parametrize("name", ["ride_created", "a", "Charge-2:eu.west", "0" * MAX_NAME_LENGTH])
def test_good_names(name: str) -> None:
    """Letters, digits and a few marks, up to a hundred."""
    assert next_step(Progress(), (), "phase", name) is None


@pytest.mark.parametrize("name", ["", " ", "ride created", "größe", "a\n", "0" * (MAX_NAME_LENGTH + 1), None, 7, b"a"])
def test_bad_names(name: Any) -> None:
    """Anything else is refused before anything is done, and the message shows it."""
    with pytest.raises(StepNameInvalid) as invalid:
        next_step(Progress(), (), "phase", name)
    assert repr(name) in str(invalid.value)


# What a step may return


@given(values)
def test_json_stays_as_it_is(value: object) -> None:
    """What JSON can hold is returned as a retry will get it, the first time too."""
    assert as_json("a", value) == value
    assert json.loads(json.dumps(as_json("a", value))) == value


def test_what_json_makes_of_it() -> None:
    """Tuples are lists and keys are text from the first run on, not only after a crash."""
    assert as_json("a", {1: (2, 3)}) == {"1": [2, 3]}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", object(), math.nan, [math.inf], {(1, 2): 3}, nested(10_000), 10**5000],
    ids=["set", "bytes", "object", "nan", "infinity", "tuple as key", "too deep", "too long"],
)
def test_not_json(value: object) -> None:
    """What JSON can't hold is refused. The message says what kind it was and not what was in it."""
    with pytest.raises(ResultNotJSON) as refused:
        as_json("charge_created", value)
    assert re.match(rf"'charge_created' returned {type(value).__name__}[.:] ", str(refused.value))


@pytest.mark.parametrize(
    "value, words",
    [
        ({"items": [{"price": 1}, {"price": Decimal(1)}]}, "result.items[1].price is a Decimal"),
        ([{"unit price": [{1}]}], "result[0]['unit price'][0] is a set"),
        ({"rate": (1.0, math.inf)}, "result.rate[1] is inf"),
        ({"by": {(1, 2): 3}}, "result.by has a name that is a tuple"),
        ({"id": uuid4()}, "result.id is a UUID"),
    ],
)
def test_where_it_is_not_json(value: object, words: str) -> None:
    """The message says where the value is that JSON can't hold."""
    with pytest.raises(ResultNotJSON, match=re.escape(f"returned {type(value).__name__}: {words}. ")):
        as_json("charge_created", value)


def test_half_of_a_surrogate_pair() -> None:
    """Half of a surrogate pair, as a provider sends it with a cut emoji, is stored, in letters that UTF-8 has."""
    result = {"name": "Ann \ud83d", "note": "caf\xe9"}
    progress = Progress((Done("effect", "charged", as_json("charged", result)),))
    text = written(progress)
    assert text is not None
    assert (read_back(text), text.encode().decode()) == (progress, text)
    assert read_back(text).steps == (Done("effect", "charged", result),)


def test_a_cycle_is_not_json() -> None:
    """A value that holds itself has no end, and is refused."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ResultNotJSON):
        as_json("a", value)


def test_depth_has_one_limit() -> None:
    """How deep a result may be does not depend on who asks: what was stored can be read by whoever goes on."""
    assert as_json("a", nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(ResultNotJSON):
        as_json("a", nested(MAX_DEPTH + 1))
    with pytest.raises(ResultNotJSON):
        as_json("a", {"a": nested(MAX_DEPTH)})


def test_what_the_trail_says_of_a_change() -> None:
    """A phase is done; an effect is begun, or done, or had no effect after all; nothing of nothing."""
    created, begun = Done("phase", "created", 1), Begun("charged")
    one = Progress((created,))
    assert change(Progress(), one) == "phase created done"
    assert change(one, one.plus(begun)) == "effect charged begun"
    assert change(one.plus(begun), one) == "effect charged had no effect"
    assert change(one.plus(begun), one.plus(Done("effect", "charged", None))) == "effect charged done"
    assert change(one, one) == "phase created done"
    assert change(Progress(), Progress()) is None
