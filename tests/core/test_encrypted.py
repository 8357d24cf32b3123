"""How an encrypted value is recognised where there is no secret for it."""

from typing import Any

import pytest

from semel.core.encrypted import HEADER, MARK, is_marked_result, refuse_marked
from semel.core.message import Answer, Headers
from semel.core.policy import Policy
from semel.core.replay import replayed, retold
from semel.errors import SecretMissing

MARKED = ((HEADER, b"AQ=="),)


@pytest.mark.parametrize("body", [b"\x01", None])
def test_an_encrypted_answer_is_sent_to_no_client(body: bytes | None) -> None:
    """An answer that this process can't read is refused, and not sent as it is; so is its tombstone's location."""
    answer = Answer(201, MARKED, body)
    for tell in (replayed, retold):
        with pytest.raises(SecretMissing, match=r"Give \?encrypt="):
            tell(answer, Policy())


@pytest.mark.parametrize("headers", [(), (*MARKED, (b"location", b"/")), ((b"content-type", b"text/plain"),)])
def test_other_headers(headers: Headers) -> None:
    """An answer that has other headers is an ordinary one, whatever their names."""
    refuse_marked(headers)
    assert replayed(Answer(200, headers, b""), Policy()).body == b""


@pytest.mark.parametrize(
    "result, is_marked", [({MARK: "AQ=="}, True), ({MARK: "AQ==", "id": 7}, False), ({}, False), (MARK, False)]
)
def test_results(result: Any, is_marked: bool) -> None:
    """A step's result is encrypted if the mark is all that it has."""
    assert is_marked_result(result) is is_marked
