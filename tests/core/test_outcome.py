"""What report mode calls things."""

import inspect

import pytest

from semel import errors
from semel.core.outcome import ENDED, OUTCOMES, RETRY_REASONS, UNCHANGED, ended_by, outcome_of, route_of
from semel.core.retrying import Failure, reason_of
from semel.errors import (
    Abandoned,
    IdentityRefused,
    KeyReused,
    NotReplayable,
    OperationExpired,
    OperationNotFound,
    Refusal,
    RequestAmbiguous,
    RequestRefused,
    RowDiffers,
    ScopeMissing,
    ShuttingDown,
    StoreRefused,
    StoreUnavailable,
    Unauthenticated,
)


@pytest.mark.parametrize(
    "path, route",
    [
        ("/orders", "POST /orders"),
        ("/orders/17/lines/3", "POST /orders/*/lines/*"),
        ("/v1/orders/0b1c3d5e-0000-4000-8000-000000000000", "POST /v1/orders/*"),
        ("/customers/cus_8sJd72kd", "POST /customers/*"),
        ("/oauth2/token-exchange", "POST /oauth2/token-exchange"),
        ("/", "POST /"),
        ("", "POST "),
    ],
)
def test_routes(path: str, route: str) -> None:
    """What looks like an id is left out of an endpoint's name: each endpoint is counted once, not once per order."""
    assert route_of("POST", path) == route


def test_every_refusal_has_an_outcome() -> None:
    """Each refusal of a request that has not run yet is counted by a name of its own."""
    kinds = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, RequestRefused)]
    # A replay's, an operator's, one that a handler raises, and those of an address where nothing is run.
    of_addresses: set[type[Refusal]] = {OperationNotFound, OperationExpired}
    # The proxy's own: one is refused before any guard, the others are a user that is not accepted, as good as none.
    of_proxy: set[type[Refusal]] = {RequestAmbiguous, IdentityRefused, Unauthenticated}
    assert outcome_of(IdentityRefused()) == outcome_of(Unauthenticated()) == outcome_of(ScopeMissing())
    others: set[type[Refusal]] = {RequestRefused, Abandoned, NotReplayable, RowDiffers, *of_addresses, *of_proxy}
    before_running = {*kinds, ShuttingDown} - others
    outcomes = [outcome_of(kind()) for kind in before_running]
    assert len(set(outcomes)) == len(outcomes)
    assert "failed" not in outcomes
    assert set(OUTCOMES) == {*outcomes, *UNCHANGED, "replay", "rerun", "failed"}


@pytest.mark.parametrize("refusal", [StoreUnavailable(), StoreRefused()])
def test_the_stores_refusals(refusal: Refusal) -> None:
    """What the store could not do says nothing of the request."""
    assert outcome_of(refusal) == "failed"
    assert outcome_of(KeyReused()) == "mismatch"


@pytest.mark.parametrize(
    "error, outcome",
    [
        (KeyReused(), "mismatch"),
        (NotReplayable(), "not_replayable"),
        (ShuttingDown(), "shutting_down"),
        (StoreUnavailable(), "store_failed"),
        (errors.AnswerNotStored(), "not_stored"),
        (RequestAmbiguous(), "refused"),
        (errors.Interrupted(), "interrupted"),
        (RuntimeError(), "error"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_endings(error: Exception, outcome: str) -> None:
    """What refuses a request, or breaks it off, has a word in a closed list; the more particular one counts."""
    assert ended_by(error) == outcome
    assert outcome in ENDED


def test_reasons_of_a_client() -> None:
    """Why a client sends a request again is one of a few words."""
    seen = [reason_of(each) for each in (Failure.NOT_SENT, Failure.LOST, 409, 429, 503, 408)]
    assert seen == list(RETRY_REASONS)
