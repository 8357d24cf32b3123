"""A type checker knows what comes back: it reads this file, and running it only proves that it is a program."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any, assert_type

from sqlalchemy import Connection, Table
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Session

from semel.natural import Got, insert_or_get

if TYPE_CHECKING:
    import asyncpg
    import psycopg


class Base(DeclarativeBase):
    pass


def in_threads(
    plain: sqlite3.Connection, postgres: psycopg.Connection[Any], core: Connection, orm: Session, table: Table
) -> None:
    assert_type(insert_or_get(plain, "orders", {}, unique="id"), Got[dict[str, Any]])
    assert_type(insert_or_get(postgres, "orders", {}, unique="id"), Got[dict[str, Any]])
    assert_type(insert_or_get(core, table, {}, unique="id"), Got[dict[str, Any]])
    assert_type(insert_or_get(orm, table, {}, unique="id"), Got[dict[str, Any]])
    assert_type(insert_or_get(orm, Base, {}, unique="id"), Got[Base])


async def on_a_loop(
    postgres: psycopg.AsyncConnection[Any],
    other: asyncpg.Connection[Any],
    core: AsyncConnection,
    orm: AsyncSession,
    table: Table,
) -> None:
    assert_type(await insert_or_get(postgres, "orders", {}, unique="id"), Got[dict[str, Any]])
    assert_type(await insert_or_get(other, "orders", {}, unique="id"), Got[dict[str, Any]])
    assert_type(await insert_or_get(core, table, {}, unique="id"), Got[dict[str, Any]])
    assert_type(await insert_or_get(orm, Base, {}, unique="id"), Got[Base])


def test_annotations() -> None:
    """With a connection that is awaited the call is awaited, and a model brings its own type."""
    assert all(map(callable, (in_threads, on_a_loop)))
