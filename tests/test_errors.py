"""Every exception says what to do, and by whose fault it is."""

from typing import Any

import pytest

from semel import errors
from semel.errors import (
    AnswerNotStored,
    ConfigurationError,
    InProgress,
    RecoveryPointLost,
    Refusal,
    ResultNotJSON,
    SemelError,
    StepError,
    StepInsideStep,
    StepNameInvalid,
    StepRepeated,
    StepUnfinished,
    StoreError,
    StoreUnavailable,
    UnknownField,
)

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SemelError)]
REFUSALS = [each for each in KINDS if issubclass(each, Refusal)]
#: Groups are raised by nobody; their children are.
LEAVES = [each for each in REFUSALS if not each.__subclasses__()]
#: One problem to the client, whatever is the matter with the store; the log tells them apart.
STORE_FAULTS = {each for each in LEAVES if issubclass(each, StoreError)} - {AnswerNotStored}


#: These say which step they are about.
STEP_ERRORS: dict[type[StepError], tuple[Any, ...]] = {
    StepNameInvalid: ("a step",),
    StepRepeated: ("charged",),
    StepInsideStep: ("charged", "ride_created"),
    StepUnfinished: ("charged",),
    ResultNotJSON: ("charged", {1, 2}),
    RecoveryPointLost: (("ride_created", "charged"), ("trip_created",)),
}


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in STEP_ERRORS])
def test_docstring_is_the_message(kind: type[SemelError]) -> None:
    """An exception without words of its own says its docstring, on one line."""
    message = str(kind())
    assert message == " ".join((kind.__doc__ or "").split())
    assert message.endswith(".")
    assert "\n" not in message
    assert str(kind("Other words.")) == "Other words."


@pytest.mark.parametrize("kind", STEP_ERRORS)
def test_step_errors_name_their_step(kind: type[StepError]) -> None:
    """An error about a step says which, on one line, and what to do about it."""
    told = STEP_ERRORS[kind]
    message = str(kind(*told))
    assert " ".join((kind.__doc__ or "").split()) in message
    assert "\n" not in message
    for name in (name for each in told for name in ([each] if isinstance(each, str) else each)):
        assert str(name) in message or kind is ResultNotJSON


def test_slugs_are_distinct() -> None:
    """A client tells refusals apart by their slugs."""
    slugs = [each.slug for each in LEAVES if each not in STORE_FAULTS]
    assert len(set(slugs)) == len(slugs)
    assert {each.slug for each in STORE_FAULTS} == {"store-unavailable"}
    assert "store-unavailable" not in slugs


@pytest.mark.parametrize("kind", LEAVES)
def test_refusals_are_complete(kind: type[Refusal]) -> None:
    """Every refusal that is raised has a slug and a title of its own, and an error status."""
    assert kind.slug != Refusal.slug
    assert kind.title != Refusal.title
    assert 400 <= kind.status < 600
    assert kind.stripe_type in {"invalid_request_error", "idempotency_error", "api_error"}


@pytest.mark.parametrize("kind", [each for each in LEAVES if each.status == 503])
def test_503_may_be_sent_again(kind: type[Refusal]) -> None:
    """503 means that sending it again may help."""
    assert kind.retryable


def test_retry_after() -> None:
    """A refusal may say when to come back."""
    assert InProgress().retry_after is None
    assert InProgress(retry_after=3).retry_after == 3


def test_detail() -> None:
    """A client is told the message; of the store it is told no more than it can use."""
    assert InProgress("Wait.").detail == "Wait."
    assert "db7" not in StoreUnavailable("db7 is down").detail
    assert AnswerNotStored().detail != StoreUnavailable().detail


def test_was_sent() -> None:
    """A store that can't be reached says whether the statement was on its way."""
    assert not StoreUnavailable().was_sent
    assert StoreUnavailable(was_sent=True).was_sent


def test_developers_mistakes_are_python_errors_too() -> None:
    """Whoever catches ValueError or TypeError catches ours."""
    assert issubclass(ConfigurationError, ValueError)
    assert issubclass(UnknownField, TypeError)


def test_tree_in_the_docstring() -> None:
    """The tree in the module's docstring names every exception, with its status."""
    tree = errors.__doc__ or ""
    for kind in KINDS:
        assert kind.__name__ in tree
    for leaf in LEAVES:
        (line,) = [line for line in tree.splitlines() if leaf.__name__ in line.split()]
        assert str(leaf.status) in line
