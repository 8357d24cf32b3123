"""Django: models, inside whatever transaction is open, on PostgreSQL and on SQLite."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from django.contrib.postgres.fields import ArrayField, BigIntegerRangeField
from django.db import connection, connections, models, transaction
from django.db.models import F, Q
from django.db.models.signals import post_save, pre_save
from django.test.utils import CaptureQueriesContext

from semel.errors import ConfigurationError
from semel.natural import Got, RowDiffers, insert_or_get
from tests.django import project
from tests.natural.models import BigOrder, Merchant, Order, SeenOrder

KEY = ("merchant", "number")
PATIENCE = 30  # Seconds, for what takes milliseconds.
RIVALS = 20


@pytest.fixture(params=["postgres_url", "sqlite_url"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    url: str = request.getfixturevalue(request.param)
    options = {"timeout": 60, "transaction_mode": "IMMEDIATE"} if url.startswith("sqlite") else {}
    with project.databases(default=project.settings_of(url, **options)):
        if url.startswith("sqlite"):
            connection.cursor().execute("PRAGMA journal_mode = WAL").close()
        with connection.schema_editor() as editor:
            for model in (Merchant, Order):
                editor.create_model(model)
        yield url


@pytest.fixture
def merchant(database: str) -> Merchant:
    made = Merchant(name="tea shop")
    made.save()
    return made


def ask(merchant: Merchant, /, **more: Any) -> Got[Any]:
    settings = {name: more.pop(name) for name in ("same", "where", "unique") if name in more}
    values = {"merchant": merchant, "number": "A-17", **more}
    got: Got[Any] = insert_or_get(connection, Order, values, **{"unique": KEY, **settings})
    return got


def test_new_then_stored(merchant: Merchant) -> None:
    """Both calls bring an instance as a query would, made with the model's defaults; the first says that it is new."""
    given = {"total": "19.99", "lines": {"tea": [2, None]}, "secret": b"\0\1", "receipt": uuid.UUID(int=1)}
    first, again = (ask(merchant, **given) for _ in range(2))
    assert (first.is_new, again.is_new) == (True, False)
    for order in (first.row, again.row, Order.objects.get()):
        assert type(order) is Order
        assert (order.pk, order.merchant, order.number, order.total) == (1, merchant, "A-17", Decimal("19.99"))
        assert (order.lines, bytes(order.secret), order.receipt) == ({"tea": [2, None]}, b"\0\1", uuid.UUID(int=1))
        assert (order.status, order.place, order.shout) == ("new", "here", "NEW")
        assert order.made_at.tzinfo is not None
        assert (order.made_at, order.noted_at) == (first.row.made_at, first.row.noted_at)
        assert (order._state.adding, order._state.db) == (False, "default")


def test_the_instance_is_whole(merchant: Merchant) -> None:
    """Nothing is deferred, and no more is there than a query would bring."""
    for got in (ask(merchant), ask(merchant)):
        assert got.row.get_deferred_fields() == set()
        # The merchant was given, and is not part of the row; a query would not bring it either.
        assert vars(got.row).keys() == vars(Order.objects.get()).keys()


def test_no_save_no_signals(merchant: Merchant) -> None:
    """Neither save() nor its signals run: whoever needs them does it when `is_new` says so."""
    heard: list[Any] = []

    def hear(**told: Any) -> None:
        heard.append(told)

    for signal in (pre_save, post_save):
        signal.connect(hear, sender=Order)
    try:
        assert ask(merchant).is_new
    finally:
        for signal in (pre_save, post_save):
            signal.disconnect(hear, sender=Order)
    assert heard == []


def test_differs(merchant: Merchant) -> None:
    """Differences go by the fields' names as they were given; the database compares."""
    other = Merchant(name="other")
    other.save()
    ask(merchant, total=Decimal("19.99"), lines={"a": 1, "b": 2})
    assert ask(merchant, total="19.990").differs == ()
    got = ask(merchant, total=20, lines={"a": 1}, status="new", same=("status",))
    assert (got.is_new, got.differs) == (False, ("total", "lines"))
    with pytest.raises(RowDiffers, match=r"^Order: .* \(merchant, number\) differs .* in total\."):
        ask(merchant, total=20)
    got = insert_or_get(connection, Order, {"id": 1, "merchant_id": other.pk, "number": "B"}, unique="id", same=())
    assert got.differs == ("merchant_id", "number")


def test_json_is_compared_as_a_value(merchant: Merchant) -> None:
    """On PostgreSQL the order of keys means nothing in JSON; SQLite has it as text, where it does."""
    ask(merchant, lines={"a": 1, "b": 2})
    differs = ask(merchant, lines={"b": 2, "a": 1}, same=()).differs
    assert differs == (() if connection.vendor == "postgresql" else ("lines",))


def test_atomic(merchant: Merchant) -> None:
    """It joins the transaction that is open, and a stored row does not break it; no savepoint is made."""
    with transaction.atomic():
        assert ask(merchant).is_new
        transaction.set_rollback(rollback=True)
    assert not Order.objects.exists()
    with transaction.atomic():
        assert ask(merchant).is_new
        with CaptureQueriesContext(connection) as asked:
            assert not ask(merchant).is_new
            with pytest.raises(RowDiffers):
                ask(merchant, status="paid")
        assert not [each for each in asked.captured_queries if "SAVEPOINT" in each["sql"]]
        Merchant(name="still working").save()
    assert Merchant.objects.count() == 2


def test_one_creator(merchant: Merchant) -> None:
    """Of twenty threads, each in a transaction of its own, one inserts and all get its row."""
    ready = threading.Barrier(RIVALS)

    def click(amount: int) -> tuple[bool, int]:
        ready.wait(PATIENCE)
        try:
            with transaction.atomic():
                got = ask(merchant, total=amount, same=())
                return got.is_new, got.row.pk
        finally:
            connection.close()

    with ThreadPoolExecutor(RIVALS) as pool:
        got = list(pool.map(click, range(RIVALS)))
    assert sum(is_new for is_new, _ in got) == 1
    assert len({key for _, key in got}) == 1


@pytest.mark.parametrize("database", ["postgres_url"], indirect=True)  # SQLite has one writer, who waits at BEGIN.
def test_waits_for_a_rival(merchant: Merchant, database: str) -> None:
    """Whoever comes second waits for the first to end; if that rolls back, it is the one that inserts."""

    def second() -> bool:
        try:
            with transaction.atomic():
                return ask(merchant, total=600).is_new
        finally:
            connection.close()

    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database, autocommit=True) as watcher:
        with transaction.atomic():
            assert ask(merchant, total=500).is_new
            answer = pool.submit(second)
            while watcher.execute(waiting).fetchone() is None:
                assert not answer.done()
                time.sleep(0.01)
            transaction.set_rollback(rollback=True)
        assert answer.result(PATIENCE)
    assert Order.objects.get().total == 600


def test_predicate(merchant: Merchant) -> None:
    """The condition of a constraint is given as it was declared, as a Q, or as SQL."""
    condition = Q(status="100% open's")
    ask(merchant, status="closed")
    other = Merchant(name="other")
    other.save()
    first = ask(other, status="100% open's", unique="number", where=condition)
    again = ask(merchant, status="100% open's", unique="number", where=condition, same=())
    third = ask(merchant, status="100% open's", unique="number", where="status = '100% open''s'", same=())
    assert (first.is_new, again.is_new, third.is_new) == (True, False, False)
    assert again.row.merchant == third.row.merchant == other
    with pytest.raises(ConfigurationError, match="partial index needs where="):
        ask(merchant, unique="number")


def test_proxy(merchant: Merchant) -> None:
    """A proxy brings its own kind."""
    values = {"merchant": merchant, "number": "A-17"}
    assert type(insert_or_get(connection, SeenOrder, values, unique=KEY).row) is SeenOrder


def test_a_key_that_is_chosen(merchant: Merchant) -> None:
    """A primary key may be given, and be the key."""
    values = {"id": 5, "merchant": merchant, "number": "A-17"}
    got = [insert_or_get(connection, Order, values, unique="id") for _ in range(2)]
    assert [(each.is_new, each.row.pk) for each in got] == [(True, 5), (False, 5)]


@pytest.mark.parametrize(
    "model, values, unique, message",
    [
        (Order, {"number": "A-17", "totl": 5}, "number", "Order has no field 'totl'"),
        (Merchant, {"id": 1, "order": 5}, "id", "Merchant has no field 'order' with a column that can be written"),
        (Order, {"number": "A-17", "shout": "HI"}, "number", "Order has no field 'shout' with a column"),
        (Order, {"number": "A-17", "status": F("number")}, "number", "'status' is given as an expression"),
        (Order, {"number": "A-17", "merchant": None}, KEY, "'merchant' is None"),
        (Order, {"number": "A-17", "merchant": Merchant()}, KEY, "'merchant' has no key yet"),
        (Order, {"number": "A-17", "id": None}, "number", "'id' is left to the database when it is None. Leave it out"),
        (BigOrder, {"number": "A-17"}, "number", "BigOrder is kept in more than one table"),
        ("orders", {"number": "A-17"}, "number", "Django needs a model, not 'orders'"),
        (dict, {"number": "A-17"}, "number", "Django needs a model, not 'dict'"),
    ],
)
def test_wrong_question(database: str, model: Any, values: dict[str, Any], unique: Any, message: str) -> None:
    """What can't be right is refused before anything is sent."""
    with CaptureQueriesContext(connection) as asked, pytest.raises(ConfigurationError, match=message):
        insert_or_get(connection, model, values, unique=unique)
    assert len(asked) == 0


def test_no_constraint(merchant: Merchant) -> None:
    """Fields that no unique constraint is on are refused, and it is said what to create."""
    with pytest.raises(ConfigurationError, match=r"no unique constraint is on exactly \(status\)"):
        ask(merchant, status="new", unique="status")


def test_other_databases(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that says it in other words is refused."""
    monkeypatch.setattr(connections["default"], "vendor", "mysql")
    with pytest.raises(ConfigurationError, match="and not on mysql"):
        insert_or_get(connection, Order, {"number": "A-17"}, unique="number")


class Loud(models.CharField):  # type: ignore[misc]  # Django ships no types.
    def get_placeholder(self, value: Any, compiler: Any, connection: Any) -> str:
        return "upper(%s)"


def test_fields_of_postgres(postgres_url: str) -> None:
    """Arrays and ranges are values like others, and a field that needs a placeholder of its own gets it."""

    class Shelf(models.Model):  # type: ignore[misc]  # Django ships no types.
        number = models.IntegerField(unique=True)
        name = Loud(max_length=10, default="tea")
        tags = ArrayField(models.CharField(max_length=10), default=list)
        span = BigIntegerRangeField(null=True)

        class Meta:
            app_label = "natural"

        def __str__(self) -> str:
            return str(self.number)

    settings = project.settings_of(postgres_url, server_side_binding=True)
    with project.databases(default=settings), ExitStack() as stack:
        with connection.schema_editor() as editor:
            editor.create_model(Shelf)
        stack.callback(models.options.apps.all_models["natural"].pop, "shelf")
        values = {"number": 1, "name": "milk", "tags": ["a", "b"], "span": (1, 5)}
        got = [insert_or_get(connection, Shelf, values, unique="number") for _ in range(2)]
        assert [(each.is_new, each.row.name, each.row.tags, each.row.span.upper) for each in got] == [
            (True, "MILK", ["a", "b"], 5),
            (False, "MILK", ["a", "b"], 5),
        ]
        other = insert_or_get(connection, Shelf, {"number": 1, "tags": []}, unique="number", same=())
        assert other.differs == ("tags",)
