"""With SQLAlchemy: a session's transaction, or a connection's. With async ones, `add` is awaited."""

import os

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from semel.outbox import Outbox

engine = create_engine(os.environ["DATABASE_URL"])
sessions = sessionmaker(engine)
outbox = Outbox(engine)


def pay(session: Session, order: int) -> str:
    session.execute(text("INSERT INTO orders (number) VALUES (:order)"), {"order": order})
    message_id: str = outbox.add(session, "order.paid", {"order": order}, key=f"order-{order}")
    return message_id


if __name__ == "__main__":
    with sessions.begin() as session:
        print(pay(session, 17))
