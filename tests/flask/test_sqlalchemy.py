"""Atomic mode with Flask-SQLAlchemy: a view writes through ``db.session`` as it always did, and commits with its
answer.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flask
import psycopg
import pytest
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import ForeignKey, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from werkzeug.test import TestResponse

import semel
from semel import NoEffect, Policy
from semel.core.commands import Browse
from semel.core.record import Record
from semel.errors import ConfigurationError
from semel.flask import Semel, idempotent
from tests.web.lenders import CROWD, Gates

HANG_SECONDS = 60
KEY = {"Idempotency-Key": "key-1"}


class Base(DeclarativeBase):
    pass


class Bank:
    """An app with users who pay, and a view that does what the test says."""

    def __init__(self, url: str, given: str, **settings: Any) -> None:
        self.app = flask.Flask("bank")
        self.app.config["SQLALCHEMY_DATABASE_URI"] = url.replace("postgresql://", "postgresql+psycopg://")
        self.app.config["SQLALCHEMY_ENGINE_OPTIONS"] = settings.pop("engine", {})
        self.db = db = SQLAlchemy(model_class=type("Base", (DeclarativeBase,), {}))
        db.init_app(self.app)

        class User(db.Model):  # type: ignore[misc, name-defined]  # as Flask-SQLAlchemy has it
            __tablename__ = "users"
            name: Mapped[str] = mapped_column(primary_key=True)
            payments: Mapped[list["Payment"]] = relationship(back_populates="user")

        class Payment(db.Model):  # type: ignore[misc, name-defined]  # the same
            __tablename__ = "payments"
            id: Mapped[int] = mapped_column(primary_key=True)
            note: Mapped[str] = mapped_column(unique=True)
            user_name: Mapped[str] = mapped_column(ForeignKey("users.name"))
            user: Mapped[User] = relationship(back_populates="payments")

        self.User, self.Payment = User, Payment
        with self.app.app_context():
            db.create_all()
            db.session.add(User(name="alice"))
            db.session.commit()
            store = db if given == "db" else db.engine
        policy = Policy.ietf(**{"mode": "atomic", **settings})
        Semel(self.app, store=store, scope=lambda: flask.g.user.name, policy=policy)
        self.store = self.app.extensions["semel"].store
        self.store.migrate()
        self.runs = 0
        self.behave: Callable[[], Any] = self.pay
        self.app.before_request(self.log_in)
        self.app.add_url_rule("/pay", view_func=idempotent(self.view), methods=["POST"])

    def log_in(self) -> None:
        """Load the user with the session that the view will use, as any login does."""
        flask.g.user = self.db.session.get(self.User, "alice")

    def view(self) -> Any:
        self.runs += 1
        return self.behave()

    def pay(self) -> Any:
        payment = self.Payment(note=f"note {self.runs}", user=flask.g.user)
        self.db.session.add(payment)
        self.db.session.commit()
        return {"payment": payment.note, "of": flask.g.user.name}, 201

    def post(self, key: str = "key-1") -> TestResponse:
        return self.app.test_client().post("/pay", headers={"Idempotency-Key": key}, buffered=True)

    @property
    def notes(self) -> list[str]:
        """What is committed, as another connection sees it."""
        with self.app.app_context(), self.db.engine.connect() as connection:
            return list(connection.scalars(text("SELECT note FROM payments ORDER BY note")))

    @property
    def records(self) -> tuple[Record, ...]:
        found: tuple[Record, ...] = self.store.perform(Browse(limit=9))
        return found

    def close(self) -> None:
        self.app.extensions["semel"].close()
        with self.app.app_context():
            self.db.engine.dispose()


Open = Callable[..., Bank]


@pytest.fixture(params=["sqlite", "postgres"])
def open_bank(request: pytest.FixtureRequest) -> Iterator[Open]:
    banks: list[Bank] = []

    def make(given: str = "db", **settings: Any) -> Bank:
        banks.append(Bank(request.getfixturevalue(f"{request.param}_url"), given, **settings))
        return banks[-1]

    yield make
    for bank in banks:
        bank.close()


@pytest.fixture
def bank(open_bank: Open) -> Bank:
    return open_bank()


def is_replay(response: TestResponse) -> bool:
    return response.headers.get("Idempotent-Replayed") == "true"


@pytest.mark.parametrize("given", ["db", "engine"])
def test_the_row_and_the_answer_commit_together(open_bank: Open, given: str) -> None:
    """Though the view calls commit(), before its answer is stored neither is there, and then both are; db and
    db.engine are as good.
    """
    bank = open_bank(given)
    seen: list[Any] = []

    def behave() -> Any:
        answer = bank.pay()
        with ThreadPoolExecutor(1) as elsewhere:
            seen.append(elsewhere.submit(lambda: bank.notes).result(HANG_SECONDS))
        return answer

    bank.behave = behave
    first, again = bank.post(), bank.post()
    assert seen == [[]]
    assert bank.notes == ["note 1"]
    assert first.get_json() == again.get_json() == {"payment": "note 1", "of": "alice"}
    assert (first.status_code, is_replay(first), is_replay(again)) == (201, False, True)
    assert bank.runs == 1


@pytest.mark.parametrize("how", ["raise", "500", "abort", "NoEffect"])
def test_an_error_undoes_what_the_view_had_committed(bank: Bank, how: str) -> None:
    """An exception or a 5xx leaves no row and no record, though the view called commit(); a retry runs anew."""

    def behave() -> Any:
        bank.pay()
        if how == "abort":
            flask.abort(503)
        if how == "raise":
            raise RuntimeError("The view broke.")
        if how == "NoEffect":
            raise NoEffect
        return "oops", 500

    bank.behave = behave
    assert bank.post().status_code >= 500
    assert bank.notes == []
    assert bank.records == ()
    bank.behave = bank.pay
    assert bank.post().status_code == 201
    assert bank.notes == ["note 2"]


def test_a_kept_server_error_keeps_no_rows(open_bank: Open) -> None:
    """With server_errors="keep" the 500 is repeated, and what the view wrote before it is undone."""
    bank = open_bank(server_errors="keep")
    bank.behave = lambda: (str(bank.pay()), 500)
    assert [bank.post().status_code for _ in range(2)] == [500, 500]
    assert (bank.notes, bank.runs) == ([], 1)


def test_a_view_may_roll_back_and_go_on(bank: Bank) -> None:
    """rollback() undoes what was not committed, as it always did, and the view goes on to its answer."""

    def behave() -> Any:
        session = bank.db.session
        session.add(bank.Payment(note="kept", user=flask.g.user))
        session.commit()
        session.add(bank.Payment(note="kept", user=flask.g.user))
        try:
            session.commit()
        except IntegrityError:
            session.rollback()
        with session.begin_nested():
            session.add(bank.Payment(note="nested", user=flask.g.user))
        session.commit()
        return {"notes": [each.note for each in flask.g.user.payments]}, 409

    bank.behave = behave
    assert bank.post().get_json() == {"notes": ["kept", "nested"]}
    assert bank.notes == ["kept", "nested"]
    assert is_replay(bank.post())


def test_an_exception_that_a_handler_answers_undoes_what_was_not_committed(bank: Bank) -> None:
    """Where an error handler answers below 500, what the view had committed stays, and what it had not is gone."""
    bank.app.register_error_handler(IntegrityError, lambda _: ("twice", 409))

    def behave() -> Any:
        bank.db.session.add(bank.Payment(note="committed", user=flask.g.user))
        bank.db.session.commit()
        bank.db.session.add(bank.Payment(note="flushed", user=flask.g.user))
        bank.db.session.flush()
        bank.db.session.add(bank.Payment(note="committed", user=flask.g.user))
        bank.db.session.commit()

    bank.behave = behave
    first, again = bank.post(), bank.post()
    assert (first.status_code, again.status_code, is_replay(again)) == (409, 409, True)
    assert bank.notes == ["committed"]
    assert bank.runs == 1


def test_what_is_in_the_session_at_the_end_is_committed(bank: Bank) -> None:
    """A view that returns without commit() has its writes committed with its answer."""

    def behave() -> Any:
        bank.db.session.add(bank.Payment(note="left", user=flask.g.user))
        return "made", 201

    bank.behave = behave
    assert bank.post().status_code == 201
    assert bank.notes == ["left"]


def test_a_constraint_that_fails_at_the_end_is_the_views_error(bank: Bank) -> None:
    """What the database says no to when the answer is about to be stored is raised, and nothing is left."""
    bank.app.testing = True

    def behave() -> Any:
        bank.pay()
        bank.db.session.add(bank.Payment(note=f"note {bank.runs}", user=flask.g.user))
        return "made", 201

    bank.behave = behave
    with pytest.raises(IntegrityError):
        bank.post()
    assert (bank.notes, bank.records) == ([], ())


def test_what_the_login_loaded_stays_usable(bank: Bank) -> None:
    """The user whom the login loaded is of the same session: in the view, and after it, on a replay as well."""
    names: list[str] = []

    def note(response: flask.Response) -> flask.Response:
        names.append(flask.g.user.name + str(len(flask.g.user.payments)))
        return response

    bank.app.after_request(note)
    assert [bank.post().status_code for _ in range(2)] == [201, 201]
    assert names == ["alice1", "alice1"]


def test_what_was_written_before_the_view_is_not_part_of_it(bank: Bank) -> None:
    """A row that a before_request function adds is committed before the view begins, whatever comes of the view."""

    def seen() -> None:
        bank.db.session.add(bank.Payment(note=f"seen {bank.runs}", user=flask.g.user))

    bank.app.before_request(seen)
    bank.behave = lambda: (str(bank.pay()), 500)
    assert bank.post().status_code == 500
    assert bank.notes == ["seen 0"]


def test_a_session_is_as_it_was_for_the_next_request(bank: Bank) -> None:
    """After a guarded request, an unguarded one commits for itself."""
    bank.post()
    assert bank.app.test_client().post("/pay").status_code == 201
    assert bank.notes == ["note 1", "note 2"]


def test_no_second_session_writes_beside(bank: Bank) -> None:
    """db.session.remove() in a view would let the next session write outside: that is refused, and all is undone."""
    bank.app.testing = True

    def behave() -> Any:
        bank.pay()
        bank.db.session.remove()
        bank.db.session.execute(text("DELETE FROM users"))

    bank.behave = behave
    with pytest.raises(ConfigurationError, match="remove"):
        bank.post()
    assert (bank.notes, bank.records) == ([], ())

    def pay_and_remove() -> Any:
        answer = bank.pay()
        bank.db.session.remove()
        return answer

    bank.behave = pay_and_remove
    assert bank.post().status_code == 201
    assert bank.notes == ["note 2"]


def test_the_operations_connection_is_the_session(bank: Bank) -> None:
    """operation.connection is db.session itself."""
    bank.behave = lambda: str(semel.current().connection is bank.db.session())
    assert bank.post().data == b"True"


def test_phases_lend_the_session_too(open_bank: Open) -> None:
    """In a phase db.session is in the phase's transaction, which a crash later in the view does not undo."""
    bank = open_bank(mode="guard", server_errors="release")

    def write(session: Any, note: str) -> str:
        assert session is bank.db.session()
        bank.db.session.add(bank.Payment(note=note, user=bank.db.session.get(bank.User, "alice")))
        bank.db.session.commit()
        return note

    def behave() -> Any:
        note = semel.current().phase("written", write, f"note {bank.runs}")
        if bank.runs == 1:
            raise RuntimeError("after the phase")
        return note, 201

    bank.behave = behave
    answers = [bank.post() for _ in range(3)]
    assert [each.status_code for each in answers] == [503, 201, 201]
    assert answers[1].data == answers[2].data == b"note 1"
    assert bank.notes == ["note 1"]


def test_a_connection_lost_in_the_view(postgres_url: str) -> None:
    """A server that ends the connection in mid-view: 503, nothing is written, and the next try runs on another."""
    bank = Bank(postgres_url, "db")

    def behave() -> Any:
        bank.pay()
        pid = bank.db.session.scalar(text("SELECT pg_backend_pid()"))
        with psycopg.connect(postgres_url, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        return "made", 201

    bank.behave = behave
    try:
        lost = bank.post()
        assert (lost.status_code, lost.get_json()["code"]) == (503, "store-unavailable")
        assert (bank.notes, bank.records) == ([], ())
        bank.behave = bank.pay
        assert bank.post().status_code == 201
        assert bank.notes == ["note 2"]
    finally:
        bank.close()


def test_two_at_once(bank: Bank) -> None:
    """Two at once: one runs, the other gets 409, and there is one row."""
    running, go = threading.Event(), threading.Event()

    def behave() -> Any:
        answer = bank.pay()
        running.set()
        assert go.wait(HANG_SECONDS)
        return answer

    bank.behave = behave
    with ThreadPoolExecutor(1) as elsewhere:
        first = elsewhere.submit(bank.post)
        assert running.wait(HANG_SECONDS)
        busy = bank.post()
        go.set()
        assert first.result(HANG_SECONDS).status_code == 201
    assert busy.get_json()["code"] == "idempotency-key-in-progress"
    assert bank.notes == ["note 1"]


def test_one_connection_for_each_request(open_bank: Open) -> None:
    """A request gives back what its login had open before it takes the view's connection: a pool of one will do."""
    bank = open_bank(engine={"pool_size": 1, "max_overflow": 0, "pool_timeout": HANG_SECONDS / 2})
    assert [bank.post().status_code for _ in range(2)] == [201, 201]
    bank.behave = lambda: (str(bank.pay()), 500)
    assert bank.post("key-2").status_code == 500
    assert bank.notes == ["note 1"]


def test_an_async_view(bank: Bank) -> None:
    """An async view writes in the transaction, too."""

    async def pay() -> Any:
        return bank.pay()

    bank.app.add_url_rule("/async", view_func=idempotent(pay), methods=["POST"])
    answers = [bank.app.test_client().post("/async", headers=KEY) for _ in range(2)]
    assert [each.status_code for each in answers] == [201, 201]
    assert is_replay(answers[1])
    assert bank.notes == ["note 0"]


def test_a_stream_ends_in_the_transaction_and_goes_on_after(open_bank: Open) -> None:
    """An answer too large to be kept may go on reading through db.session after the commit."""
    bank = open_bank(max_response_body=10)

    def behave() -> Any:
        bank.pay()

        def parts() -> Iterator[str]:
            yield "x" * 20
            yield bank.db.session.scalars(select(bank.Payment.note)).one()

        return flask.Response(flask.stream_with_context(parts()))

    bank.behave = behave
    assert bank.post().data == b"x" * 20 + b"note 1"
    assert bank.post().get_json()["code"] == "response-not-replayable"
    assert bank.notes == ["note 1"]


def test_db_must_know_the_app() -> None:
    """An extension that was not initialised for this app is refused when Semel is, and by name."""
    app = flask.Flask("other")
    with pytest.raises(RuntimeError, match="init_app"):
        Semel(app, store=SQLAlchemy(model_class=Base), scope=semel.SINGLE_TENANT)


def test_replays_at_once_are_all_answered(open_bank: Open) -> None:
    """Retries of a finished operation at the same time all get its answer."""
    bank = open_bank(engine={"max_overflow": CROWD})
    first = bank.post()
    assert first.status_code == 201
    with ThreadPoolExecutor(CROWD) as threads:
        answers = list(threads.map(lambda _: bank.post(), range(2 * CROWD)))
    assert {(each.status_code, each.data) for each in answers} == {(201, first.data)}
    assert bank.runs == 1


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_retry_in_the_moment_of_the_commit_runs_nothing(level: str, postgres_url: str) -> None:
    """A retry that began before the first one's commit, and gets the lock after it, is answered from the record."""
    gates = Gates(postgres_url)
    bank = Bank(postgres_url, "db", engine={"isolation_level": level})
    may_end, runs = threading.Event(), threading.Event()

    def wait() -> Any:
        runs.set()
        assert may_end.wait(HANG_SECONDS)
        return bank.pay()

    bank.behave = wait
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(bank.post)
        assert runs.wait(HANG_SECONDS)
        with gates.closed(Gates.BEFORE_THE_LOCK) as one_waits:
            retry = threads.submit(bank.post)
            one_waits()
            may_end.set()
            assert first.result(HANG_SECONDS).status_code == 201
        assert is_replay(retry.result(HANG_SECONDS))
    assert bank.runs == 1
    bank.close()
    gates.close()
