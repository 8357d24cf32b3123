"""Atomic mode on SQLAlchemy: the handler's session is part of the transaction that stores its answer."""

import os

from flask import Flask, request
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import semel
from semel.wsgi import IdempotencyMiddleware


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"

    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]


sessions = sessionmaker(create_engine(os.environ["DATABASE_URL"]))  # such as postgresql+psycopg://user@host/database
app = Flask(__name__)


@app.post("/transfers")
def transfer() -> tuple[dict[str, object], int]:
    amount = request.get_json()["amount"]
    session: Session = semel.current().connection  # made by `sessions`
    alice = session.get_one(Account, "alice", with_for_update=True)
    if alice.balance < amount:
        return {"error": "not enough money"}, 402
    alice.balance -= amount
    session.get_one(Account, "bob", with_for_update=True).balance += amount
    session.commit()  # ends a savepoint: the transaction around it is Semel's to end
    return {"moved": amount, "left": alice.balance}, 201


app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]  # Flask's own way to add WSGI middleware
    app.wsgi_app,
    store=sessions,
    scope=semel.SINGLE_TENANT,
    policy=semel.Policy.ietf(mode="atomic", required=True),
)
