"""Plain functions, run once for each key."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest

import semel
from semel import BodyHash, NoEffect, Policy
from semel.core.commands import Browse, Look
from semel.core.state import State
from semel.errors import (
    ConfigurationError,
    InProgress,
    KeyInvalid,
    KeyMissing,
    KeyReused,
    NotGuarded,
    NotReplayable,
    ResultNotJSON,
    ScopeMissing,
)
from semel.functions import FailedBefore, calls, decorator, idempotent, once
from semel.stores import Store
from semel.stores.memory import MemoryStore

HANG_SECONDS = 60


@dataclass(frozen=True)
class Order:
    id: int
    tenant: str = "acme"
    total: float = 1.0


class Text:
    """A codec that is not JSON."""

    def encode(self, result: Any, /) -> bytes:
        return repr(result).encode()

    def decode(self, stored: bytes, /) -> Any:
        return "decoded " + stored.decode()


def invoice(order: Order) -> str:
    return f"invoice-{order.id}"


def test_a_second_call_gets_the_first_result(keys: Store) -> None:
    """A function runs once for each key, and every later call gets its result."""
    sent: list[int] = []

    @idempotent(key=invoice, scope=lambda order: order.tenant, store=keys, name="send_invoice")
    def send_invoice(order: Order) -> dict[str, int]:
        sent.append(order.id)
        return {"number": len(sent)}

    assert [send_invoice(Order(7)), send_invoice(Order(7)), send_invoice(order=Order(7))] == [{"number": 1}] * 3
    assert send_invoice(Order(8)) == {"number": 2}
    assert send_invoice(Order(7, tenant="globex")) == {"number": 3}
    assert sent == [7, 8, 7]
    with pytest.raises(KeyReused):
        send_invoice(Order(7, total=2.0))


def test_a_record_is_kept_under_tenant_and_function(memory: MemoryStore) -> None:
    """The scope is the tenant and the function's name, as an operator sees it."""

    @idempotent(key="order_id", scope="acme", store=memory, name="jobs.send")
    def send(order_id: int) -> None:
        pass

    send(7)
    record = memory.perform(Look("acme\tCALL jobs.send", "7"))
    assert record is not None
    assert record.state is State.COMPLETE
    assert record.answer is not None
    assert (record.answer.status, record.answer.body) == (200, b"null")
    # A queue's retries come later than an HTTP client's.
    assert record.retention_left > timedelta(days=29)


def test_two_functions_with_one_key_never_meet(memory: MemoryStore) -> None:
    """By default a key belongs to its function; under one name, two functions share it."""

    @idempotent(key="number", store=memory)
    def send(number: int) -> str:
        return "sent"

    @idempotent(key="number", store=memory)
    def archive(number: int) -> str:
        return "archived"

    @idempotent(key="number", store=memory, name=f"{__name__}.{send.__qualname__}")
    def send_again(number: int) -> str:
        return "sent again"

    assert (send(1), archive(1), send_again(1)) == ("sent", "archived", "sent")


def test_the_first_caller_gets_what_later_ones_get(memory: MemoryStore) -> None:
    """A tuple comes back as a list and a number's name as text, the first time too."""

    @idempotent(key="number", store=memory, name="measure")
    def measure(number: int) -> Any:
        return {1: ("é", None)}

    assert measure(1) == measure(1) == {"1": ["é", None]}


def test_a_result_that_would_be_lost_is_told_before_the_run(memory: MemoryStore) -> None:
    """A function whose annotation says that JSON can't bring its result back is refused before it runs."""

    def count(number: int) -> dict[int, str]:
        raise AssertionError("It must not run.")

    for guard in (idempotent(key="number", store=memory), lambda function: once("1", function, 1, store=memory)):
        with pytest.raises(ConfigurationError, match=r"annotated to return dict\[int, str\].* codec="):
            guard(count)
    idempotent(key="number", store=memory, codec=Text())(count)


def test_an_effect_whose_result_would_be_lost_is_not_called(memory: MemoryStore) -> None:
    """An effect that is annotated to return what JSON has no form for is refused before the provider is called."""
    charged: list[str] = []

    def charge(*, idempotency_key: str) -> Decimal:
        charged.append(idempotency_key)
        return Decimal("1.10")

    @idempotent(key="number", store=memory, name="pay")
    def pay(number: int) -> Any:
        return semel.current().effect("charged", charge)

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="'charged': its function is annotated to return Decimal"):
            pay(1)
    assert charged == []


def test_a_codec_writes_what_json_can_not(keys: Store) -> None:
    """With a codec, a result is what the codec reads back; older results, and an operator's, stay JSON."""

    @idempotent(key="number", store=keys, codec=Text(), name="measure")
    def measure(number: int) -> Any:
        return {number}

    @idempotent(key="number", store=keys, name="measure")
    def measure_as_before(number: int) -> int:
        return number

    assert measure(1) == measure(1) == "decoded {1}"
    assert (measure_as_before(2), measure(2)) == (2, 2)


def test_a_result_that_can_not_be_kept_is_not_run_again(keys: Store) -> None:
    """A result that is no JSON is an error at once, and a retry is told that the function has run."""
    runs: list[int] = []

    @idempotent(key="number", store=keys, name="measure")
    def measure(number: int) -> Any:
        runs.append(number)
        return {number}

    with pytest.raises(ResultNotJSON, match="measure' returned set"):
        measure(1)
    with pytest.raises(NotReplayable, match="of measure took effect, but its result was not kept"):
        measure(1)
    assert runs == [1]


def test_a_result_over_the_limit_is_returned_once(memory: MemoryStore) -> None:
    """A result over the limit goes to the first caller, and is not kept."""

    @idempotent(key="number", store=memory, policy=Policy(max_response_body=10), name="measure")
    def measure(number: int) -> str:
        return "x" * number

    assert measure(20) == "x" * 20
    with pytest.raises(NotReplayable):
        measure(20)
    assert measure(5) == measure(5) == "xxxxx"


def test_a_codec_must_return_bytes(memory: MemoryStore) -> None:
    """A codec that returns text is a mistake, and says so."""

    class Wrong(Text):
        def encode(self, result: Any, /) -> Any:
            return "text"

    @idempotent(key="number", store=memory, codec=Wrong(), name="measure")
    def measure(number: int) -> None: ...

    with pytest.raises(ConfigurationError, match="encode must return bytes, not str"):
        measure(1)


def test_a_refused_call_is_told_in_words_of_its_own(memory: MemoryStore) -> None:
    """What refuses a call speaks of the function, not of a request, and has no traceback through the guard's inside."""
    guards = {Path(module.__file__ or "") for module in (decorator, calls)}

    @idempotent(key="day", store=memory, name="nightly.close")
    def close(day: str, *, is_again: bool = False) -> None:
        if not is_again:
            with pytest.raises(InProgress, match=r"^Another call of nightly.close with this key is under way") as busy:
                close(day)
            assert {entry.path for entry in busy.traceback} == {Path(__file__), *guards}

    close("Monday")
    with pytest.raises(KeyReused, match=r"^This key was used for a call with other arguments"):
        close("Monday", is_again=True)


def test_an_exception_frees_the_key(keys: Store) -> None:
    """A function that raises is run again by the next call; NoEffect says the same aloud."""
    faults: list[Exception] = [OSError("away"), NoEffect("not yet"), ValueError("odd")]

    @idempotent(key="number", store=keys, keep=(), name="send")
    def send(number: int) -> str:
        if faults:
            raise faults.pop(0)
        return "sent"

    with pytest.raises(OSError, match="away"):
        send(1)
    with pytest.raises(NoEffect, match="not yet"):
        send(1)
    with pytest.raises(ValueError, match="odd"):
        send(1)
    assert send(1) == send(1) == "sent"


class DeclinedError(Exception):
    """A failure that is an outcome."""


def test_a_kept_exception_is_the_outcome(keys: Store) -> None:
    """An exception that is to be kept is raised once; a retry is told what it was, and runs nothing."""
    runs: list[int] = []

    @idempotent(key="number", store=keys, keep=(DeclinedError, LookupError), name="charge")
    def charge(number: int) -> None:
        runs.append(number)
        raise DeclinedError("No funds \ud800")

    with pytest.raises(DeclinedError):
        charge(1)
    with pytest.raises(FailedBefore) as failed:
        charge(1)
    assert (failed.value.error, failed.value.words) == (f"{__name__}.DeclinedError", "No funds \ud800")
    assert "Use a new key" in str(failed.value)
    assert runs == [1]


class SpeechlessError(Exception):
    """A failure that can't be put into words."""

    def __str__(self) -> str:
        raise RuntimeError("as told")


def test_a_kept_exception_without_words_is_kept(keys: Store) -> None:
    """An exception that can't say what it is is the outcome like any other, and is known by its kind."""
    runs: list[int] = []

    @idempotent(key="number", store=keys, keep=SpeechlessError, name="charge")
    def charge(number: int) -> None:
        runs.append(number)
        raise SpeechlessError

    with pytest.raises(SpeechlessError):
        charge(1)
    with pytest.raises(FailedBefore) as failed:
        charge(1)
    assert (failed.value.error, failed.value.words) == (f"{__name__}.SpeechlessError", "")
    assert runs == [1]


def test_what_says_that_nothing_happened_is_never_kept(memory: MemoryStore) -> None:
    """NoEffect, and an operation that says so, free the key whatever is to be kept."""
    runs: list[str] = []

    @idempotent(key="how", store=memory, keep=Exception, name="charge")
    def charge(how: str) -> None:
        runs.append(how)
        if how == "raise":
            raise NoEffect
        semel.current().no_effect()
        raise DeclinedError

    for how, error in (("raise", NoEffect), ("say", DeclinedError)):
        for _ in range(2):
            with pytest.raises(error):
                charge(how)
    assert runs == ["raise", "raise", "say", "say"]


def test_a_function_knows_its_operation(memory: MemoryStore) -> None:
    """Inside, current() is the innermost operation; outside, it is what it was before."""

    @idempotent(key="number", store=memory, scope="inner")
    def inner(number: int) -> list[str]:
        return [semel.current().scope, semel.current().key]

    @idempotent(key="number", store=memory, scope="outer", name="outer")
    def outer(number: int) -> list[Any]:
        before = semel.current()
        within = inner(number + 1)
        assert semel.current() is before
        return [before.scope, before.key, before.attempt, within]

    assert outer(1) == ["outer\tCALL outer", "1", 1, [f"inner\tCALL {__name__}.{inner.__qualname__}", "2"]]
    with pytest.raises(NotGuarded):
        semel.current()


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name
        self.sold: list[str] = []

    @idempotent(key=lambda self, item: f"{self.name}-{item}", store=MemoryStore())
    def sell(self, item: str) -> str:
        self.sold.append(item)
        return f"{item} of {self.name}"

    @classmethod
    @idempotent(key="number", store=MemoryStore())
    def close(cls, number: int) -> str:
        return cls.__name__

    @staticmethod
    @idempotent(key="number", store=MemoryStore())
    def count(number: int) -> int:
        return number


def test_methods() -> None:
    """A method is guarded like a function; the object it belongs to is for the key, and is not compared."""
    shop = Shop("Alice")
    assert (shop.sell("tea"), Shop("Alice").sell("tea")) == ("tea of Alice", "tea of Alice")
    assert Shop("Bob").sell("tea") == "tea of Bob"
    assert shop.sold == ["tea"]
    assert (Shop.close(1), shop.close(1), Shop.count(1), shop.count(1)) == ("Shop", "Shop", 1, 1)


@pytest.mark.parametrize(
    "key, error, words",
    [
        (None, KeyMissing, "is None"),
        ("", KeyMissing, "is ''"),
        ("  ", KeyInvalid, "empty"),
        ("a\nb", KeyInvalid, "not printable"),
        ("é", KeyInvalid, "not printable ASCII"),
        ("x" * 256, KeyInvalid, "256 characters, and at most 255"),
        (True, ConfigurationError, "must be a string, not bool"),
        (1.5, ConfigurationError, "must be a string, not float"),
    ],
)
def test_keys_that_are_refused(key: Any, error: type[Exception], words: str, memory: MemoryStore) -> None:
    """A key that is none, empty, too long or unprintable is refused before anything runs, in clear words."""

    @idempotent(key=lambda: key, store=memory, name="send")
    def send() -> None:
        raise AssertionError

    with pytest.raises(error, match=words):
        send()


def test_numbers_and_uuids_are_keys(memory: MemoryStore) -> None:
    """A whole number or a UUID is its own text; a parameter's default may be the key."""

    @idempotent(key="number", store=memory, name="send")
    def send(number: Any = 5) -> str:
        return semel.current().key

    uuid = "0190d2c4-7e5e-7f3b-9d5a-5d3c1d7b9f00"
    assert (send(7), send(UUID(uuid)), send()) == ("7", uuid, "5")


@pytest.mark.parametrize("tenant, scope", [(7, "7"), (0, "0"), (("acme", 7), "acme/7")])
def test_numbers_are_tenants(memory: MemoryStore, tenant: object, scope: str) -> None:
    """A tenant is named by what names an owner everywhere else: 0 is a number like any other."""

    @idempotent(key="number", store=memory, scope=lambda number: tenant, name="send")
    def send(number: int) -> str:
        return semel.current().scope.partition("\t")[0]

    assert send(1) == scope


@pytest.mark.parametrize("scope, error", [(lambda: None, ScopeMissing), (lambda: 7.5, ConfigurationError)])
def test_scopes_that_are_refused(scope: Any, error: type[Exception], memory: MemoryStore) -> None:
    """A key is somebody's."""

    @idempotent(key=lambda: "k", scope=scope, store=memory, name="send")
    def send() -> None:
        raise AssertionError

    with pytest.raises(error, match="scope"):
        send()


def test_arguments_count(memory: MemoryStore) -> None:
    """Every argument counts, however it is passed; what is left at its default does not."""

    @idempotent(key="number", store=memory, name="send")
    def send(number: int, *more: str, how: str = "mail", **rest: object) -> int:
        return number

    assert send(1) == send(1, how="mail") == send(number=1)
    for other in (partial(send, 1, "x"), partial(send, 1, how="fax"), partial(send, 1, copies=2)):
        with pytest.raises(KeyReused):
            other()
    with pytest.raises(TypeError, match="missing a required argument: 'number'"):
        send()  # type: ignore[call-arg]  # what Python itself would refuse


def test_what_counts_can_be_chosen(memory: MemoryStore) -> None:
    """With compare, what it returns must be the same; with None, nothing but the key."""
    connection = object()

    @idempotent(key="number", store=memory, name="strict")
    def strict(number: int, connection: object) -> None: ...

    @idempotent(key="number", store=memory, compare=lambda number, connection, amount: amount, name="chosen")
    def chosen(number: int, connection: object, amount: int) -> str:
        return "chosen"

    @idempotent(key="number", store=memory, compare=None, name="lax")
    def lax(number: int, connection: object) -> str:
        return "lax"

    with pytest.raises(ConfigurationError, match=r"argument 'connection' holds a object, .* Give compare="):
        strict(1, connection)
    assert chosen(1, connection, 5) == chosen(1, object(), 5)
    with pytest.raises(KeyReused):
        chosen(1, connection, 6)
    assert lax(1, connection) == lax(1, object()) == "lax"


def test_twenty_threads_one_run(keys: Store) -> None:
    """Of twenty calls at once with one key one runs, and the others are told to come back."""
    go, runs = threading.Event(), []

    @idempotent(key="number", store=keys, name="send")
    def send(number: int) -> str:
        runs.append(number)
        assert go.wait(HANG_SECONDS)
        return "sent"

    def call() -> str:
        try:
            return send(1)
        except InProgress as busy:
            return f"come back in {busy.retry_after} s"

    with ThreadPoolExecutor(20) as threads:
        calls = [threads.submit(call) for _ in range(20)]
        done = 0
        while done < 19:  # The twentieth is the one that runs, and it waits for us.
            done = sum(each.done() for each in calls)
            threading.Event().wait(0.01)
        go.set()
        said = sorted(each.result(HANG_SECONDS) for each in calls)
    assert said == ["come back in 1 s"] * 19 + ["sent"]
    assert send(1) == "sent"
    assert runs == [1]


def test_once(keys: Store) -> None:
    """A one-off is done once for its key, and its result is there for good."""
    runs: list[str] = []

    def do_import(file: str, *, dry: bool = False) -> int:
        runs.append(file)
        return len(runs)

    assert (
        once("2026-11", do_import, "a.csv", store=keys, name="import")
        == once("2026-11", do_import, "a.csv", store=keys, name="import")
        == 1
    )
    with pytest.raises(KeyReused):
        once("2026-11", partial(do_import, "a.csv", dry=True), store=keys, name="import")
    assert once("2026-12", partial(do_import, dry=True), "b.csv", store=keys, name="import") == 2
    assert once("2026-12", lambda: 3, store=keys, name="other") == 3
    assert runs == ["a.csv", "b.csv"]
    record = keys.perform(Browse(1))[0]
    assert record.retention_left > timedelta(days=3600)


def test_once_by_url(sqlite_url: str) -> None:
    """A one-off may name its store by URL, and may be a function that does not say what it takes."""
    assert once("a", int, store=sqlite_url) == once("a", int, store=sqlite_url) == 0
    with pytest.raises(KeyMissing):
        once("", int, store=sqlite_url)


def test_a_coroutine_that_nobody_would_await(memory: MemoryStore) -> None:
    """A plain function that returns a coroutine is a mistake: it has done nothing, and the key is free."""

    async def work() -> None: ...

    with pytest.raises(ConfigurationError, match="returned a coroutine"):
        once("a", cast("Any", lambda: work()), store=memory, name="work")  # noqa: PLW0108 - the mistake itself
    assert once("a", lambda: 1, store=memory, name="work") == 1


async def _async_key(number: int) -> str:
    return "k"


def _generator() -> Any:
    yield 1


async def _async_generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"key": 5}, "key must be the name of a parameter"),
        ({"key": "amount"}, "has no parameter 'amount'. Name one"),
        ({"key": "numbr"}, "has no parameter 'numbr'. Did you mean 'number'"),
        ({"scope": 5}, "scope must be a string"),
        ({"compare": "amount"}, "compare must be"),
        ({"keep": (int,)}, "keep must be exceptions"),
        ({"keep": (KeyboardInterrupt,)}, "keep must be exceptions"),
        ({"codec": object()}, "codec must have encode"),
        ({"policy": "atomic"}, "policy must be a Policy"),
        ({"policy": Policy(store_request=True)}, "Policy.store_request can't be True for a function"),
        ({"policy": Policy(in_progress="accept")}, "Policy.in_progress can't be 'accept' for a function"),
        ({"policy": Policy(preferences={"respond-async"})}, "respond-async"),
        ({"policy": Policy(enforcement="report")}, "Policy.enforcement can't be 'report' for a function"),
        ({"policy": Policy(key_from=BodyHash(fields=["a"], window=timedelta(hours=1)))}, "Policy.key_from can't be"),
        ({"retention": timedelta(seconds=1)}, "lease"),
        ({"compare": ["amount"]}, "compare must be"),
        ({"key": _async_key}, "key must be a plain function"),
        ({"name": 5}, "name must be"),
        ({"name": ""}, "name must be"),
        ({"name": "a\nb"}, "name must be"),
    ],
)
def test_settings_that_can_not_be_right(settings: dict[str, Any], words: str, memory: MemoryStore) -> None:
    """A mistake shows when the function is decorated, and names its setting."""

    def send(number: int) -> None: ...

    with pytest.raises(ConfigurationError, match=words):
        idempotent(**{"key": "number", **settings, "store": memory})(send)


@pytest.mark.parametrize("function", [_generator, _async_generator, classmethod(lambda cls: None), lambda: None])
def test_functions_that_can_not_be_guarded(function: Any, memory: MemoryStore) -> None:
    """A generator has no result to keep, and a lambda no name to keep it under."""
    with pytest.raises(ConfigurationError, match=r"generator|not a function|lambda"):
        idempotent(key=lambda: "k", store=memory)(function)


def test_a_decorated_function_is_still_itself(memory: MemoryStore) -> None:
    """Name, documentation and the bare function are where they were."""

    @idempotent(key="number", store=memory, name="send")
    def send(number: int) -> int:
        """Send it."""
        return number

    assert (send.__name__, send.__doc__) == ("send", "Send it.")
    assert send.__wrapped__(5) == 5  # type: ignore[attr-defined]  # put there by functools
