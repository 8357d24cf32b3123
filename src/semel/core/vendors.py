"""The header and the key length of well-known APIs. Nothing else of them is here: what a key means is as in any other
policy.

For an API that must accept clients written for one of these.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from semel.core.key import DEFAULT_MAX_LENGTH
from semel.errors import ConfigurationError

#: Characters of a UUID in its usual spelling.
_UUID_LENGTH = 36


@dataclass(frozen=True, slots=True)
class Vendor:
    """How one vendor's clients send a key."""

    header: str
    #: As documented by the vendor, or else the usual limit.
    max_key_length: int = DEFAULT_MAX_LENGTH


VendorName = Literal[
    "adyen",
    "amazon_pay",
    "chargebee",
    "checkout",
    "klarna",
    "mercadopago",
    "openbanking_uk",
    "paypal",
    "qonto",
    "razorpay_payout",
    "wise",
]

VENDORS: dict[VendorName, Vendor] = {
    "adyen": Vendor("Idempotency-Key", 64),
    "amazon_pay": Vendor("x-amz-pay-idempotency-key", 32),
    "chargebee": Vendor("chargebee-idempotency-key"),
    "checkout": Vendor("Cko-Idempotency-Key"),
    "klarna": Vendor("Klarna-Idempotency-Key", _UUID_LENGTH),
    "mercadopago": Vendor("X-Idempotency-Key"),
    "openbanking_uk": Vendor("x-idempotency-key", 40),
    "paypal": Vendor("PayPal-Request-Id", 108),
    "qonto": Vendor("X-Qonto-Idempotency-Key"),
    "razorpay_payout": Vendor("X-Payout-Idempotency", _UUID_LENGTH),
    "wise": Vendor("X-idempotence-uuid", _UUID_LENGTH),
}


def vendor(name: VendorName) -> Vendor:
    """Return the vendor of this *name*."""
    try:
        return VENDORS[name]
    except (KeyError, TypeError):
        close = difflib.get_close_matches(str(name), VENDORS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"There are: {', '.join(VENDORS)}."
        raise ConfigurationError(f"There is no vendor {name!r}. {hint}") from None
