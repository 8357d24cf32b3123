"""The quality gates of the requirements that concern the request path, by their numbers.

Gate 4 (a killed worker) and 9 (a lost database) are in ``test_processes.py``; 6 and 8 are not about requests.
"""

from collections import Counter
from concurrent.futures import FIRST_COMPLETED, wait
from datetime import timedelta

import psycopg
import pytest

from semel import Policy
from semel.core.commands import Claim
from semel.stores.postgres.statements import Statements
from semel.stores.postgres.store import PostgresStore
from tests.web.harness import HANG_SECONDS, Api, AsgiWorld, Gate, WsgiWorld

AT_ONCE = 10


def test_gate_1_same_key_and_body_twice_one_effect_identical_answers(api: Api) -> None:
    """Same key and body twice: identical answers, one effect."""
    first, again = api.send(), api.send()
    assert (first.status, first.body, first.header("location")) == (again.status, again.body, again.header("location"))
    assert not first.is_replay
    assert again.is_replay
    assert api.runs == 1


@pytest.mark.parametrize("policy, status", [(Policy.ietf(), 422), (Policy.stripe(), 400)], ids=["ietf", "stripe"])
def test_gate_2_same_key_other_body_is_refused(world: AsgiWorld | WsgiWorld, policy: Policy, status: int) -> None:
    """Same key, other body: 422 (IETF) or 400 (Stripe), and nothing runs."""
    api = Api(world, policy)
    assert api.send().status == 201
    assert api.send(body=b'{"amount": 6}').status == status
    assert api.runs == 1


def test_gate_3_two_at_once_one_runs_the_other_gets_409(api: Api) -> None:
    """Two at once: exactly one runs, the other gets 409."""
    with Gate() as gate:
        api.shop.handler = gate
        both = [api.start(), api.start()]
        gate.wait()
        refused = wait(both, HANG_SECONDS, FIRST_COMPLETED).done
        assert [each.result().status for each in refused] == [409]
        gate.open()
        assert sorted(each.result(HANG_SECONDS).status for each in both) == [201, 409]
    assert api.runs == 1


def test_gate_3_many_at_once_one_runs_and_nobody_gets_an_error(api: Api) -> None:
    """However many come in the same moment, one runs; the others get 409 or its answer, never a 500."""
    for number in range(10):
        rivals = [api.start(key=f"key-{number}") for _ in range(AT_ONCE)]
        responses = [each.result(HANG_SECONDS) for each in rivals]
        assert api.runs == number + 1
        assert {response.status for response in responses} <= {201, 409}
        assert sum(response.status == 201 and not response.is_replay for response in responses) == 1
        assert len({response.body for response in responses if response.status == 201}) == 1


@pytest.mark.parametrize("rows", [0, 50_000])
def test_gate_5_the_claim_uses_the_unique_index(postgres_url: str, rows: int) -> None:
    """The claim finds a key through the unique index, in an empty table that was never analysed and in a full one."""
    store = PostgresStore(postgres_url)
    store.migrate()
    _fill(postgres_url, rows)
    claim = Claim("alice", "key-1", b"t" * 16, b"f", timedelta(seconds=30), timedelta(hours=24))
    statement = Statements(store.address.names).claim([claim])
    # The store's own session: what is set there decides the plan.
    connection = store._links[0]._connect()
    plan = connection.execute(f"EXPLAIN {statement.sql}".encode(), statement.parameters).fetchall()
    text = "\n".join(line for (line,) in plan)
    store.close()
    assert "Index Scan using semel_keys_pkey" in text
    assert "Seq Scan" not in text


def _fill(url: str, rows: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO semel_keys "
            "(scope, key, state, attempt, token, fingerprint, created_at, lease_expires_at, expires_at) "
            "SELECT 'bob', 'k' || n, 'processing', 1, decode(md5(n::text), 'hex'), '', now(), now(), now() "
            "FROM generate_series(1, %s) AS n",
            [rows],
        )


def test_gate_7_get_put_delete_need_no_header(world: AsgiWorld | WsgiWorld) -> None:
    """GET, PUT and DELETE need no header, where POST does."""
    api = Api(world, Policy.ietf(required=True))
    assert [api.send(method=method, key=None).status for method in ("GET", "PUT", "DELETE")] == [201, 201, 201]
    assert [api.send(method=method, key=None).status for method in ("POST", "PATCH")] == [400, 400]


def test_gate_10_a_script_that_sends_500_payments_with_one_key_is_stopped_at_the_second(api: Api) -> None:
    """500 payments with one fixed key, by mistake: the second gets 422, and so does every other."""
    sent = [api.send(key="fixed", body=b'{"payment": %d}' % number) for number in range(500)]
    assert Counter(response.status for response in sent) == {201: 1, 422: 499}
    assert sent[0].status == 201
    assert api.runs == 1
