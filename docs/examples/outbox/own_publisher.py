"""A publisher of one's own, and a relay in one's own program: each message becomes a line of a file."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from semel.publishers import BROKER_SCHEDULE, Delivered, Message, Rejected, Verdict
from semel.stores import store
from semel.work import Relay

FILE = Path("events.txt")


class Lines:
    """A full disk is an OSError: then all of them wait, and it costs none of them a try."""

    schedule = BROKER_SCHEDULE

    async def open(self) -> None: ...

    async def publish(self, messages: Sequence[Message]) -> Sequence[Verdict]:
        return [self.write(message) for message in messages]

    def write(self, message: Message) -> Verdict:
        if message.content_type != "application/json":
            return Rejected(f"{message.content_type} is not JSON.")  # it never will be: a dead letter
        with FILE.open("a") as lines:
            lines.write(f"{message.id} {message.type} {message.payload.decode()}\n")
        return Delivered()

    async def close(self) -> None: ...


if __name__ == "__main__":
    with closing(store("sqlite:///shop.db")) as shop:
        relay = Relay(shop, "events", Lines())
        print(relay.run_once())
        relay.close()
