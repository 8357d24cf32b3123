"""Guarantee 6: what was stored comes back byte for byte."""
# ruff: noqa: S101 - a suite of tests asserts

from __future__ import annotations

from http import HTTPStatus

import pytest

from semel.core.commands import Complete
from semel.core.message import Answer
from semel.core.record import Found
from semel.core.state import Event
from semel.testing.conformance.base import Suite, claim_on, completed, held, record
from semel.testing.conformance.handles import Handle

MEBIBYTE = 1024 * 1024

ANSWERS = {
    "empty": Answer(204),
    "no headers": Answer(200, (), b"{}"),
    "every byte": Answer(200, ((b"content-type", b"application/octet-stream"),), bytes(range(256)) * 16),
    "nul": Answer(200, (), b"\x00"),
    "not utf-8": Answer(200, ((b"content-type", b"text/plain; charset=latin-1"),), "Grüße".encode("latin-1")),
    "1 MiB": Answer(200, (), bytes(range(256)) * (MEBIBYTE // 256)),
    "sql": Answer(200, ((b"x-sql", b"'; -- $1 :name %s \\"),), b"'; DROP TABLE semel_keys; -- $1 :name %s \\x41"),
    "repeated headers": Answer(200, ((b"link", b"<b>"), (b"etag", b'"1"'), (b"link", b"<a>"), (b"link", b"<b>")), b""),
    "latin-1 header": Answer(200, ((b"content-disposition", "attachment; filename=Grüße.txt".encode("latin-1")),), b""),
    "every header byte": Answer(200, ((b"x-odd", bytes(byte for byte in range(256) if byte not in b"\r\n\x00")),), b""),
    "empty header": Answer(200, ((b"x-empty", b""),), b""),
    "commas and quotes": Answer(200, ((b"x", b'a, "b\\"", c'), (b"y", b"{1,2}"), (b"z", b"[]")), b""),
    "many headers": Answer(200, tuple((b"x-%d" % number, b"v" * number) for number in range(100)), b""),
    "redirect": Answer(303, ((b"location", b"/elsewhere?a=%20"),), b""),
    "odd status": Answer(299, (), b"odd"),
    "teapot": Answer(418, (), b"short and stout"),
    "named status": Answer(HTTPStatus.CREATED, (), b"made"),
    "last status": Answer(599, (), b""),
    "tombstone": Answer(200, ((b"content-type", b"text/event-stream"),), None),
    "bare tombstone": Answer(200, (), None),
}


class Answers(Suite):
    """Answers."""

    @pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
    def test_byte_for_byte(self, store: Handle, rival: Handle, scope: str, answer: Answer) -> None:
        """An answer comes back as it was, to claims and to lookers, on this connection and another."""
        completed(store, claim_on(scope), answer)
        for each in (store, rival):
            found = each.perform(claim_on(scope))
            assert isinstance(found, Found)
            assert found.answer == answer
            assert record(each, scope).answer == answer

    def test_all_in_one_batch(self, store: Handle, scope: str) -> None:
        """Answers that are stored and read together are not mixed up, tombstones and empty ones included."""
        holds = {name: held(store, claim_on(scope, name)) for name in ANSWERS}
        store.perform_all([Complete(hold, Event.COMPLETE, ANSWERS[name]) for name, hold in holds.items()])
        got = store.perform_all([claim_on(scope, name) for name in ANSWERS])
        assert [each.answer for each in got if isinstance(each, Found)] == list(ANSWERS.values())

    def test_empty_body_is_no_tombstone(self, store: Handle, scope: str) -> None:
        """An empty body was kept; a tombstone says that there was one which was not."""
        completed(store, claim_on(scope, "empty"), Answer(200, (), b""))
        completed(store, claim_on(scope, "tombstone"), Answer(200, (), None))
        empty, tombstone = record(store, scope, "empty").answer, record(store, scope, "tombstone").answer
        assert empty is not None
        assert tombstone is not None
        assert (empty.is_tombstone, tombstone.is_tombstone) == (False, True)
