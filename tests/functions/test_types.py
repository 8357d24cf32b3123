"""What mypy knows of a decorated function. These tests do little; that they are accepted is the fact."""

from collections.abc import Coroutine
from typing import Any, assert_type

import pytest

from semel.functions import idempotent, once
from semel.stores.memory import AsyncMemoryStore, MemoryStore


@idempotent(key="number", store=MemoryStore())
def send(number: int, how: str = "mail") -> str:
    return how


@idempotent(key="number", store=AsyncMemoryStore())
async def send_async(number: int) -> str:
    return "sent"


class Shop:
    @idempotent(key="number", store=MemoryStore())
    def sell(self, number: int) -> int:
        return number


async def test_a_decorator_keeps_the_signature() -> None:
    """Arguments and result of a decorated function are those of the function."""
    assert_type(send(1, how="fax"), str)
    assert_type(send_async(1), Coroutine[Any, Any, str]).close()
    assert_type(await send_async(1), str)
    assert_type(Shop().sell(1), int)
    with pytest.raises(TypeError):
        send(1, why="haste")  # type: ignore[call-arg]  # there is no such parameter


async def test_once_returns_what_the_function_returns() -> None:
    """The result of a one-off has its function's type, to be awaited where the function is async."""

    def plain(number: int) -> int:
        return number

    async def awaited() -> str:
        return "done"

    assert_type(once("a", plain, 1, store=MemoryStore()), int)
    assert_type(await once("a", awaited, store=AsyncMemoryStore()), str)


def test_once_knows_the_arguments() -> None:
    """The arguments of a one-off are checked against its function, of which some may be left out."""

    def plain(number: int, how: str = "mail") -> str:
        return how * number

    assert_type(once("a", plain, 1, store=MemoryStore(), name="plain"), str)
    assert_type(once("a", plain, 1, "fax", store=MemoryStore(), name="plain"), str)
    once("a", plain, "one", 2, store=MemoryStore(), name="plain")  # type: ignore[arg-type]  # the mistake
