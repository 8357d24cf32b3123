"""Under which name a function keeps its keys: two functions that do different things never share one by chance."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigurationError
from semel.functions import idempotent, once
from semel.stores.memory import MemoryStore


def make(region: str, store: MemoryStore, name: str | None = None) -> Callable[[int], str]:
    @idempotent(key="order", store=store, name=name)
    def pay(order: int) -> str:
        return region

    return pay


def make_with_default(region: str) -> Callable[..., str]:
    def pay(order: int, region: str = region) -> str:
        return region

    return pay


def make_class(region: str) -> type[Any]:
    class Payments:
        def pay(self, order: int) -> str:
            return region

    return Payments


def test_functions_of_a_factory_need_names(memory: MemoryStore) -> None:
    """Functions that a factory makes have one name: without names of their own they are refused, and not run once."""
    with pytest.raises(ConfigurationError, match=r'pay is made anew by each call .* name="pay"'):
        make("eu", memory)
    assert [make(region, memory, f"pay-{region}")(1) for region in ("eu", "us")] == ["eu", "us"]


class Paying:
    def __init__(self, region: str) -> None:
        self.region = region

    def __call__(self, order: int) -> str:
        return self.region


@pytest.mark.parametrize(
    "function",
    [
        Paying("eu"),
        make_with_default("eu"),
        make_class("eu").pay,
        make_class("eu")().pay,
        partial(make_with_default("eu"), region="us"),
        lambda order: order,
    ],
)
def test_what_has_no_name_of_its_own(function: Callable[..., Any], memory: MemoryStore) -> None:
    """A partial, a lambda, and what has attributes, or is made with a factory's defaults or class, need a name."""
    with pytest.raises(ConfigurationError, match="name="):
        idempotent(key="order", store=memory)(function)
    guarded = idempotent(key=lambda *args, **_: str(args[-1]), store=memory, name="pay", compare=None)(function)
    assert callable(guarded)


def test_a_wrapper_that_hides_its_function(memory: MemoryStore) -> None:
    """A decorator that does not take over the name of its function gives all of them one name, and is refused."""

    def retried(function: Callable[[int], str]) -> Callable[[int], str]:
        def wrapper(order: int) -> str:
            return function(order)

        return wrapper

    with pytest.raises(ConfigurationError, match="wrapper"):
        once("1", retried(lambda order: "paid"), 1, store=memory)


class Payments:
    store = MemoryStore()

    @idempotent(key="order", store=store)
    def pay(self, order: int) -> str:
        return self.region()

    @classmethod
    @idempotent(key="order", store=store)
    def refund(cls, order: int) -> str:
        return cls.region()

    @classmethod
    def region(cls) -> str:
        return "none"


class Europe(Payments):
    @classmethod
    def region(cls) -> str:
        return "eu"


class America(Payments):
    @idempotent(key="order", store=Payments.store)
    def pay(self, order: int) -> str:
        return "us, then " + super().pay(order)

    @classmethod
    def region(cls) -> str:
        return "us"


def test_a_method_of_a_base_class_has_keys_for_each_subclass() -> None:
    """One key on two subclasses is two operations, also where a method calls that of its base class."""
    for _ in range(2):
        assert [kind().pay(1) for kind in (Payments, Europe, America)] == ["none", "eu", "us, then us"]
        assert [kind.refund(1) for kind in (Payments, Europe, America)] == ["none", "eu", "us"]


def test_a_method_of_a_local_subclass(memory: MemoryStore) -> None:
    """A subclass that a function makes can't be told from the next one, so its calls are refused."""

    class Local(Payments):
        pass

    with pytest.raises(ConfigurationError, match="Local is made anew"):
        Local().pay(1)


MODULE = """
from semel.functions import idempotent
from semel.stores.memory import MemoryStore

store = MemoryStore()
handlers = {}

def handles(kind):
    return lambda function: handlers.setdefault(kind, function)
"""

HANDLER = """
@handles("%s")
@idempotent(key="id", store=store)
def _(id: int) -> str:
    return "%s"
"""


def test_two_functions_of_one_name_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two handlers that are called ``_`` would share their keys: the second is refused. A module may be loaded anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "semel_handlers.py"
    file.write_text(MODULE + HANDLER % ("paid", "paid"))
    module = importlib.import_module("semel_handlers")
    file.write_text(MODULE + "\n" + HANDLER % ("paid", "paid again"))
    assert importlib.reload(module).handlers["paid"](1) == "paid again"
    del sys.modules["semel_handlers"]
    file.write_text(MODULE + HANDLER % ("paid", "paid") + HANDLER % ("sent", "sent"))
    importlib.invalidate_caches()
    with pytest.raises(ConfigurationError, match=r"Two functions are called semel_handlers\._ "):
        importlib.import_module("semel_handlers")


WRAPPED = """
from functools import wraps

def traced(function):
    @wraps(function)
    def inner(id):
        return function(id)
    return inner
"""


def test_two_functions_of_one_name_in_a_decorator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two handlers of one name are told apart through a decorator that both have, too."""
    monkeypatch.syspath_prepend(tmp_path)
    handlers = [(HANDLER % (kind, kind)).replace("def", "@traced\ndef") for kind in ("paid", "sent")]
    (tmp_path / "semel_traced.py").write_text(MODULE + WRAPPED + "".join(handlers))
    with pytest.raises(ConfigurationError, match=r"Two functions are called semel_traced\._ "):
        importlib.import_module("semel_traced")


def make_one_of_two(region: str, store: MemoryStore) -> Callable[[int], str]:
    if region == "eu":

        @idempotent(key="order", store=store)
        def pay(order: int) -> str:
            return "eu"
    else:

        @idempotent(key="order", store=store)
        def pay(order: int) -> str:
            return "us"

    return pay


def test_two_functions_of_one_name_in_a_factory(memory: MemoryStore) -> None:
    """A factory that makes one of two functions of one name, while the app runs, is refused the second."""
    assert [make_one_of_two("eu", memory)(1) for _ in range(2)] == ["eu", "eu"]
    with pytest.raises(ConfigurationError, match=r"Two functions are called .*make_one_of_two.<locals>.pay "):
        make_one_of_two("us", memory)


def test_a_function_that_is_guarded_twice(memory: MemoryStore) -> None:
    """A guard around a guard of the same name would wait for itself, and is refused; one of another name is not."""
    pay = make("eu", memory, "pay-twice")
    with pytest.raises(ConfigurationError, match="pay-twice is guarded already"):
        idempotent(key="order", store=memory, name="pay-twice")(pay)
    assert once("1", pay, 1, store=memory, name="once") == "eu"


def test_a_static_method(memory: MemoryStore) -> None:
    """The guard is under @staticmethod: above it the method would get its object as an argument."""
    with pytest.raises(ConfigurationError, match="put @idempotent under @classmethod and @staticmethod"):
        idempotent(key="order", store=memory)(staticmethod(make_one_of_two))
