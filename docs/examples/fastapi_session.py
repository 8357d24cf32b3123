"""FastAPI: a session of SQLAlchemy on the operation's connection, in atomic mode."""

from typing import Annotated, cast

from fastapi import Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from semel import SINGLE_TENANT, Operation, Policy
from semel.fastapi import Idempotent, install

sessions = async_sessionmaker(create_async_engine("postgresql+asyncpg://localhost/shop"))
app = FastAPI()
install(app, store=sessions, policy=Policy.ietf(mode="atomic", required=True))


def session(operation: Annotated[Operation, Depends(Idempotent(scope=SINGLE_TENANT))]) -> AsyncSession:
    return cast("AsyncSession", operation.connection)  # it is in the store's own type, which no checker knows


@app.post("/payments")
async def pay(session: Annotated[AsyncSession, Depends(session)]) -> None: ...
