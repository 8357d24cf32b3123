"""A Flask app with Flask-SQLAlchemy, for real servers. What it is to do, the environment says.

A payment is a row, and then a line in a file: *process id, key, attempt*. A body with "hold" in it makes the first
attempt wait between its row and its answer, for a file to appear.
"""

import os
import time
from pathlib import Path
from typing import Any

import flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import semel
from semel import Policy
from semel.flask import Semel, idempotent

POLL_SECONDS = 0.02

EFFECTS = Path(os.environ["SEMEL_TEST_EFFECTS"])
GO = EFFECTS.with_suffix(".go")


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)


class Payment(db.Model):  # type: ignore[misc, name-defined]  # as Flask-SQLAlchemy has it
    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]


MODE: Any = os.environ["SEMEL_TEST_MODE"]

app = flask.Flask("served")
app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SEMEL_TEST_STORE"].replace("postgresql://", "postgresql+psycopg://")
db.init_app(app)
Semel(app, store=db, scope=semel.SINGLE_TENANT, policy=Policy.ietf(mode=MODE), work=True)


@app.get("/health")
def health() -> tuple[str, int]:
    return "fine", 201


@app.post("/pay")
@idempotent
def pay() -> tuple[dict[str, int], int]:
    operation = semel.current()
    db.session.add(Payment(note=operation.key))
    db.session.commit()
    with EFFECTS.open("a") as file:
        file.write(f"{os.getpid()} {operation.key} {operation.attempt}\n")
    while b"hold" in flask.request.get_data() and not GO.exists():
        time.sleep(POLL_SECONDS)
    return {"pid": os.getpid()}, 201
