"""A retry of an operation that was erased: it is refused, it has no content, and nothing runs."""

from semel import Policy
from semel.core.commands import Erase
from tests.web.harness import Api, AsgiWorld, WsgiWorld


def test_a_retry_runs_nothing_and_has_no_body(api: Api) -> None:
    """After an erasure, a retry gets 409 without the answer's body or headers; another body is still refused."""
    first = api.send()
    assert (first.status, api.send().is_replay) == (201, True)
    assert api.world.perform(Erase(f"{api.tenant}/alice/live", 100)).count == 1
    retry = api.send()
    assert retry.status == 409
    assert b"response-not-replayable" in retry.body
    assert first.body not in retry.body
    assert retry.header("location") is None
    assert api.send(body=b'{"amount": 6}').status == 422
    assert api.runs == 1
    assert api.send(lines=[("X-Account", "bob")]).status == 201


def test_scopes_by_operation(world: AsgiWorld | WsgiWorld) -> None:
    """Where a scope names the operation, too, an erasure of the principal reaches it."""
    api = Api(world, Policy.ietf(scope_by="operation"))
    api.send()
    assert world.perform(Erase(f"{api.tenant}/alice/live", 100)).count == 1
    assert api.send().status == 409
    assert api.runs == 1
