"""One payment API in atomic mode, for real servers that are killed: a row, a file that says so, and then the wait.

What it is to do, the environment says. It is two apps: a FastAPI app whose route is guarded, and a Litestar app that
is guarded as a whole.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated, cast

from fastapi import Depends, FastAPI
from litestar import Litestar, get, post
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import semel
from semel import SINGLE_TENANT, Operation, Policy
from semel.asgi import IdempotencyMiddleware
from semel.asgi.protocol import ASGIApp
from semel.fastapi import Idempotent, install

POLL_SECONDS = 0.02

STORE = os.environ["SEMEL_TEST_STORE"]
WRITTEN = Path(os.environ["SEMEL_TEST_EFFECTS"])
GO = WRITTEN.with_suffix(".go")
POLICY = Policy.ietf(mode="atomic", required=True)

sessions = async_sessionmaker(create_async_engine(STORE))


async def pay(session: AsyncSession) -> None:
    """Write a row, say so to whoever wants to kill this process, and wait until it has."""
    await session.execute(text("INSERT INTO payments (amount) VALUES (5)"))
    await session.flush()
    with WRITTEN.open("a") as file:  # noqa: ASYNC230 - a line, in a server of one request
        file.write(f"{os.getpid()} {semel.current().key} {semel.current().attempt}\n")
    while not GO.exists():  # noqa: ASYNC110 - a file is the only event that another process can make
        await asyncio.sleep(POLL_SECONDS)


fastapi_app = FastAPI()
install(fastapi_app, store=sessions, policy=POLICY)
guard = Idempotent(scope=SINGLE_TENANT)


async def session_of(operation: Annotated[Operation, Depends(guard)]) -> AsyncSession:
    session: AsyncSession = operation.connection
    return session


@fastapi_app.post("/pay", status_code=201)
async def fastapi_pay(session: Annotated[AsyncSession, Depends(session_of)]) -> dict[str, int]:
    await pay(session)
    return {"paid": 5}


@fastapi_app.get("/health", status_code=201)
async def fastapi_health() -> str:
    return "fine"


@post("/pay")
async def litestar_pay() -> dict[str, int]:
    await pay(semel.current().connection)
    return {"paid": 5}


@get("/health", status_code=201)
async def litestar_health() -> str:
    return "fine"


litestar_app = IdempotencyMiddleware(
    cast("ASGIApp", Litestar([litestar_pay, litestar_health])), store=sessions, scope=SINGLE_TENANT, policy=POLICY
)
