"""Flask: a view that is guarded after the app's own login, and commits its row together with its answer."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from flask import Flask, abort, g, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel import Policy
from semel.flask import Semel, idempotent

ACCOUNTS = {"token-of-alice": "alice", "token-of-bob": "bob"}


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
semel = Semel(store=db, scope=lambda: g.account, policy=Policy.ietf(mode="atomic", required=True))


class Payment(db.Model):  # type: ignore[misc, name-defined]  # Flask-SQLAlchemy makes this base as it goes
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]
    amount: Mapped[int]


def login_required(view: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(view)
    def checked(*args: Any, **kwargs: Any) -> Any:
        g.account = ACCOUNTS.get(request.headers.get("Authorization", "").removeprefix("Bearer "))
        return view(*args, **kwargs) if g.account else abort(401)

    return checked


app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{Path.cwd() / 'payments.db'}"
db.init_app(app)
semel.init_app(app)
with app.app_context():
    db.create_all()


@app.post("/payments")
@login_required
@idempotent
def pay() -> tuple[dict[str, object], int]:
    payment = Payment(account=g.account, amount=request.get_json()["amount"])
    db.session.add(payment)
    db.session.commit()
    return {"payment": payment.id, "account": payment.account, "amount": payment.amount}, 201
