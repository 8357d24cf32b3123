"""Pays invoices at a guarded API: killed at any moment and started again, it pays each of them once."""

import os
import sys

import httpx2

from semel.client import Journal, RequestOutcomeUnknown
from semel.client.httpx import IdempotentTransport

API = os.environ.get("PAYMENTS_API", "http://127.0.0.1:8000")


def pay(client: httpx2.Client, invoice: int) -> str:
    try:
        answer = client.post(
            "/payments",
            json={"invoice": invoice, "amount": 5},
            extensions={"semel.intent": f"invoice {invoice}"},  # on the disk before the first byte leaves
        )
    except RequestOutcomeUnknown as unknown:
        return f"invoice {invoice}: not known yet, key {unknown.key}"
    return f"invoice {invoice}: {answer.status_code}"


def main(invoices: list[int]) -> None:
    journal = Journal("payments.journal")
    transport = IdempotentTransport(httpx2.HTTPTransport(), journal=journal)
    with httpx2.Client(transport=transport, base_url=API) as client:
        journal.resume(client)  # what an earlier run has left behind
        for invoice in invoices:
            print(pay(client, invoice))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
