"""The fragments of OpenAPI that every framework's schema is told of a policy."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from semel import BodyHash, Fingerprinter, Policy
from semel.openapi import described, extension, is_stored, iso_duration, parameters, responses, schemas


@pytest.mark.parametrize(
    "duration, spelled",
    [
        (timedelta(hours=24), "PT24H"),
        (timedelta(days=7), "PT168H"),
        (timedelta(minutes=90), "PT1H30M"),
        (timedelta(seconds=5), "PT5S"),
        (timedelta(milliseconds=1500), "PT1.5S"),
        (timedelta(microseconds=1), "PT0.000001S"),
    ],
)
def test_durations(duration: timedelta, spelled: str) -> None:
    """A duration is spelled in hours, minutes and seconds."""
    assert iso_duration(duration) == spelled


def test_the_parameter_is_spelled_as_the_dialect_has_it() -> None:
    """The example is quoted where the IETF's draft is followed, and bare for Stripe's clients."""
    (ietf,), (stripe,) = parameters(Policy.ietf()), parameters(Policy.stripe(required=True))
    assert (ietf["required"], ietf["example"][0], ietf["schema"]["maxLength"]) == (False, '"', 255)
    assert (stripe["required"], stripe["example"][0]) == (True, "8")
    (strict,) = parameters(Policy.ietf(strict=True, max_key_length=10))
    assert (strict["schema"]["minLength"], strict["schema"]["maxLength"]) == (3, 12)


def test_several_names_are_none_of_them_required() -> None:
    """OpenAPI can't ask for one of two headers, so neither is required by itself, and the description says it."""
    first, other = parameters(Policy.ietf(required=True, header=("Idempotency-Key", "X-Key")))
    assert (first["required"], other["required"]) == (False, False)
    assert "One of `Idempotency-Key`, `X-Key` is required" in first["description"]
    assert extension(Policy.ietf(required=True, header=("Idempotency-Key", "X-Key")))["required"] is True


def test_where_a_key_is_made_of_the_body_no_header_is_required() -> None:
    """A client may leave the header out, whatever the policy requires, and is refused where no key can be made."""
    by_body = Policy.ietf(required=True, key_from=BodyHash(fields=["amount"], window=timedelta(minutes=10)))
    (header,) = parameters(by_body)
    assert (header["required"], extension(by_body)["required"]) == (False, False)
    for policy in (by_body, replace(by_body, required=False)):
        examples = responses(policy)["400"]["content"]["application/problem+json"]["examples"]
        assert set(examples) == {"idempotency-key-missing", "idempotency-key-invalid"}


def test_refusals_follow_the_policy() -> None:
    """Stripe's clients see no 422, and 410 is there where late retries are refused."""
    assert list(responses(Policy.ietf())) == ["400", "409", "422"]
    assert list(responses(Policy.ietf(late="refuse"))) == ["400", "409", "410", "422"]
    assert list(responses(Policy.stripe())) == ["400", "409"]
    assert list(schemas(Policy.ietf())) == ["IdempotencyProblem"]
    assert list(schemas(Policy.stripe())) == ["IdempotencyError"]


def test_what_makes_a_retry_the_same() -> None:
    """The extension says what is compared; nothing where the key alone decides."""
    assert extension(Policy.ietf(fingerprint=None))["fingerprint"] == []
    counted = extension(Policy.ietf(fingerprint=Fingerprinter(headers=("API-Version",))))["fingerprint"]
    assert counted[-1] == "header api-version"


@pytest.mark.parametrize(
    "status, policy, expected",
    [
        ("201", {}, True),
        ("429", {}, False),
        ("2XX", {}, True),
        ("default", {}, True),
        ("503", {}, True),
        ("503", {"server_errors": "release"}, False),
        ("4XX", {"keep": range(200, 300)}, False),
    ],
)
def test_which_answers_may_be_replays(status: str, policy: dict[str, Any], expected: bool) -> None:
    """The marker is shown on the answers that the policy keeps."""
    assert is_stored(status, Policy.ietf(**policy)) is expected


def test_an_operation_keeps_what_it_says() -> None:
    """What an operation says already stays: its parameters, its answers, and those that are defined elsewhere."""
    own = {
        "parameters": [{"in": "header", "name": "idempotency-key", "description": "mine"}],
        "responses": {
            "200": {"description": "Done."},
            "400": {"description": "Bad.", "content": {"application/json": {"schema": {"type": "string"}}}},
            "409": {"$ref": "#/components/responses/Conflict"},
        },
    }
    told = described(own, Policy.stripe())
    assert told["parameters"] == own["parameters"]
    assert told["responses"]["409"] == {"$ref": "#/components/responses/Conflict"}
    either = told["responses"]["400"]["content"]["application/json"]["schema"]["anyOf"]
    assert either == [{"type": "string"}, {"$ref": "#/components/schemas/IdempotencyError"}]
    assert "Idempotent-Replayed" in told["responses"]["200"]["headers"]
    assert "headers" not in own["responses"]["200"]  # type: ignore[index]  # the given operation is not changed
