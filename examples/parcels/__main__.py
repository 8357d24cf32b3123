"""The story: customers order and retry, while the API, the relay and the consumer are killed at random.

    python -m examples.parcels [--kills 9] [--seed 1] [--broker rabbitmq|redis]

It ends with a count, made from the two databases: each order has one parcel, and each parcel its order.
"""

import argparse
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import httpx
from rich.console import Console

from examples.parcels.processes import World, world

CUSTOMERS = ("Ada", "Bob", "Cleo", "Dan")
#: A kill comes at a moment within so many seconds, once its victim is at work.
MAX_PAUSE_SECONDS = 0.6
#: After the last kill: far longer than leases and restarts take.
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.05
RETRY_SECONDS = 0.2

INTRODUCTION = """\
[bold]From order to parcel[/bold]: three programs that are killed again and again

The API writes an order and its message in one commit. A relay sends the message to {broker}. A consumer packs one \
parcel for each, and its inbox knows what it has seen. Customers send an order again until it is answered, with the \
same key. At the end both databases are counted: each order must have one parcel.
"""

console = Console(highlight=False)


class Customers:
    """Clients that order one thing after the other, and insist on an answer to each."""

    def __init__(self, url: str) -> None:
        """Order at *url*."""
        self._url = url
        self._counts = threading.Lock()
        #: The numbers of the orders that were answered with 201.
        self.answered: list[int] = []
        self.requests = 0
        self.replays = 0
        self.is_over = False

    def shop(self, customer: str) -> None:
        """Order until it is over."""
        with httpx.Client(base_url=self._url, timeout=10) as client:
            while not self.is_over:
                self.order(client, customer)
                time.sleep(POLL_SECONDS)  # Customers think, and the other programs share this machine.

    def order(self, client: httpx.Client, customer: str) -> int:
        """Order one thing; return the order's number."""
        item, headers = uuid4().hex[:8], {"X-Customer": customer, "Idempotency-Key": str(uuid4())}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            pause = RETRY_SECONDS
            try:
                # Safe to send again for as long as there is no answer: the key is the same.
                answer = client.post("/orders", json={"item": item}, headers=headers)
            except httpx.TransportError:
                answer = None
            with self._counts:
                self.requests += 1
                if answer is not None and answer.status_code == httpx.codes.CREATED:
                    self.replays += "idempotent-replayed" in answer.headers
                    self.answered.append(answer.json()["order"])
                    return self.answered[-1]
            if answer is not None:
                pause = float(answer.headers.get("retry-after", pause))
            time.sleep(pause)
        raise SystemExit("An order gets no answer: something is wrong.")


def kill_at_random(here: World, kills: int, chance: random.Random) -> None:
    """Kill one of the three while it works, and start it again, until each was killed as often."""
    began = time.monotonic()
    for victim in chance.sample(here.programs * -(-kills // 3), kills):
        victim.until_at_work()
        time.sleep(chance.uniform(0, MAX_PAUSE_SECONDS))  # Where it strikes is what is drawn here.
        number = victim.kill()
        orders, parcels = count(here, "shop"), count(here, "shipping")
        victim.start()
        console.print(
            f"{time.monotonic() - began:5.1f} s  [red]kill -9[/red] {victim.name:<8} [dim](process {number})[/dim]"
            f"  {orders:>5} orders {parcels:>5} parcels",
            soft_wrap=True,
        )


def count(here: World, where: str) -> int:
    """Count the orders, or the parcels."""
    store, table = (here.shop, "orders") if where == "shop" else (here.shipping, "parcels")
    return int(here.ask(store, f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608 - of two literals


def wait(here: World, is_so: Callable[[], bool]) -> None:
    """Wait until something is so, with all three alive."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{each.name}: {each.log.read_text()[-3000:]}" for each in here.programs)
            raise SystemExit(f"It takes too long: something is wrong. What the programs wrote:\n{logs}")
        time.sleep(POLL_SECONDS)


def settle(here: World, customers: Customers) -> None:
    """Wait until nothing is under way: a last order is behind all that was sent before it."""
    wait(here, lambda: not here.ask(here.shop, "SELECT 1 FROM semel_outbox LIMIT 1"))
    with httpx.Client(base_url=here.url, timeout=10) as client:
        last = customers.order(client, CUSTOMERS[0])
    sql = f"SELECT 1 FROM parcels WHERE order_id = {last}"  # noqa: S608 - a number
    wait(here, lambda: bool(here.ask(here.shipping, sql)))
    for each in here.programs:
        each.end()


def judge(here: World, customers: Customers) -> int:
    """Compare the two databases; return how many things are not as they should be."""
    orders = Counter(number for (number,) in here.ask(here.shop, "SELECT id FROM orders"))
    items = Counter(item for (item,) in here.ask(here.shop, "SELECT item FROM orders"))
    parcels = Counter(number for (number,) in here.ask(here.shipping, "SELECT order_id FROM parcels"))
    came = Counter(line.partition(" ")[0] for line in here.consumer.log.read_text().splitlines())
    faults = {
        "orders without a parcel": len(orders.keys() - parcels.keys()),
        "orders with two parcels": sum(number > 1 for number in parcels.values()),
        "parcels without an order": len(parcels.keys() - orders.keys()),
        "orders written twice": sum(number > 1 for number in items.values()),
        "answered orders that are not there": len(set(customers.answered) - orders.keys()),
    }
    kills = ", ".join(f"{each.name} {each.kills}" for each in here.programs)
    rows: dict[str, object] = {
        "kills": f"{sum(each.kills for each in here.programs)} ({kills})",
        "requests sent": f"{customers.requests}, of which {customers.requests - len(customers.answered)} were retried",
        "answers replayed": customers.replays,
        "orders committed": orders.total(),
        "parcels packed": parcels.total(),
        "redelivered by the broker": came["redelivered"],
        "duplicates dropped by the inbox": came["Duplicate"],
        **faults,
    }
    print()
    for name, value in rows.items():
        is_bad = bool(faults.get(name))
        console.print(f"{name:<36}{value}", style="bold red" if is_bad else None, soft_wrap=True)
    return sum(faults.values()) + (orders.total() != parcels.total())


def main() -> int:
    """Tell the story; 0 when each order has one parcel."""
    parser = argparse.ArgumentParser(description="From order to parcel, killed everywhere.")
    parser.add_argument("--kills", type=int, default=9, help="how many, of the three in equal shares")
    parser.add_argument("--seed", type=int, help="of what is killed when; chosen by itself if not given")
    parser.add_argument("--broker", choices=("rabbitmq", "redis"), help="RabbitMQ if it is installed")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes are ended too
    with world(asked.broker) as here, ThreadPoolExecutor(len(CUSTOMERS)) as threads:
        broker = "RabbitMQ" if here.broker.startswith("amqp") else "a stream of Redis"
        console.print(INTRODUCTION.format(broker=broker), width=min(console.width, 98))
        customers = Customers(here.url)
        shopping = [threads.submit(customers.shop, name) for name in CUSTOMERS]
        try:
            kill_at_random(here, asked.kills, random.Random(asked.seed))  # noqa: S311 - a run can be repeated
        finally:
            customers.is_over = True
        for each in shopping:
            each.result()
        settle(here, customers)
        faults = judge(here, customers)
    if faults:
        console.print("\nSomething is not as it should be.", style="bold red")
        return 1
    console.print("\nEach order has one parcel, and each parcel its order.", style="bold green")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
