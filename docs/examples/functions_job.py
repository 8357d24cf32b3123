"""A nightly job: however often it is started, killed and started again, every invoice is sent once."""

import sys
from dataclasses import dataclass
from pathlib import Path

import semel
from semel.functions import FailedBefore, idempotent, once

STORE = "sqlite:///jobs.db"


@dataclass(frozen=True)
class Invoice:
    number: int
    tenant: str
    total: str


class NoAddressError(Exception):
    """An outcome, not an accident: trying again would not help."""


def mail(invoice: Invoice, *, idempotency_key: str) -> str:
    with Path("outbox.txt").open("a") as outbox:
        outbox.write(f"{invoice.tenant}: {invoice.total}\n")
    return f"message-{idempotency_key[:8]}"


@idempotent(
    key=lambda invoice: f"invoice-{invoice.number}",
    scope=lambda invoice: invoice.tenant,
    store=STORE,
    keep=NoAddressError,
)
def send(invoice: Invoice) -> dict[str, str]:
    if invoice.tenant == "nobody":
        raise NoAddressError(f"{invoice.tenant} has no address.")
    return {"message": semel.current().effect("mailed", mail, invoice)}


def import_invoices(month: str) -> list[list[str]]:
    return [["7", "acme", "100.00"], ["8", "nobody", "5.00"], ["9", "globex", f"{month[-2:]}.50"]]


def main(month: str) -> None:
    for number, tenant, total in once(f"import-{month}", import_invoices, month, store=STORE):
        try:
            print(number, send(Invoice(int(number), tenant, total))["message"])
        except (NoAddressError, FailedBefore) as error:
            print(number, error)


if __name__ == "__main__":
    main(sys.argv[1])
