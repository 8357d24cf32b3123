"""Atomic mode on SQLAlchemy's AsyncSession."""

import os

from fastapi import FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import semel
from semel.asgi import IdempotencyMiddleware


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]


engine = create_async_engine(os.environ["DATABASE_URL"])  # such as postgresql+asyncpg://user@host/database
sessions = async_sessionmaker(engine, expire_on_commit=False)

app = FastAPI()
app.add_middleware(
    IdempotencyMiddleware,
    store=sessions,
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(mode="atomic", required=True),
)


@app.post("/transfers", status_code=201)
async def transfer(order: dict[str, int]) -> dict[str, int]:
    amount = order["amount"]
    session: AsyncSession = semel.current().connection  # made by `sessions`
    alice = await session.get_one(Account, "alice", with_for_update=True)
    if alice.balance < amount:
        raise HTTPException(402, "Not enough money.")
    alice.balance -= amount
    (await session.get_one(Account, "bob", with_for_update=True)).balance += amount
    return {"moved": amount, "left": alice.balance}
