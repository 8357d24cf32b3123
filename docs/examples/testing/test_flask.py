"""Tests of a Flask view: a right one, and one that charges where no step knows of it."""

from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest
from flask import Flask, request

import semel
from semel.flask import Semel, idempotent
from semel.testing import Clock, Request, crash_everywhere

charges: list[int] = []  # stands in for a payment provider that knows no keys, but can be asked
numbers = count()


def charge_card(order: int, **_: str) -> int:
    charges.append(order)
    return len(charges)


def was_charged(order: int, **_: str) -> object:
    return semel.Applied(charges.index(order) + 1) if order in charges else semel.NOT_APPLIED


@pytest.fixture
def app(semel_store: str) -> Iterator[Flask]:
    app = Flask(__name__)
    Semel(app, store=semel_store, scope=semel.SINGLE_TENANT)

    @app.post("/right")
    @idempotent
    def right() -> tuple[dict[str, int], int]:
        order = request.get_json()["order"]
        return {"charge": semel.current().effect("charged", charge_card, order, verify=was_charged)}, 201

    @app.post("/wrong")
    @idempotent
    def wrong() -> tuple[dict[str, int], int]:
        return {"charge": charge_card(request.get_json()["order"])}, 201

    with closing(app.extensions["semel"]):
        yield app


def test_a_crash_anywhere(app: Flask, semel_clock: Clock) -> None:
    order = lambda: Request("POST", "/right", json={"order": next(numbers)})  # noqa: E731 - a new order for each crash
    crash_everywhere(app, order, clock=semel_clock, effects=lambda: len(charges)).assert_once()


def test_what_goes_wrong_is_told(app: Flask, semel_clock: Clock) -> None:
    order = lambda: Request("POST", "/wrong", json={"order": next(numbers)})  # noqa: E731 - as above
    report = crash_everywhere(app, order, clock=semel_clock, effects=lambda: len(charges))
    with pytest.raises(AssertionError, match="after running the handler: effects 2 instead of 1: done more than once"):
        report.assert_once()
