"""Endpoints of webhooks in Django's own database, through its own connection."""

import pytest

from semel.errors import EndpointUnknown
from semel.stores.django import DjangoStore
from semel.webhooks import Endpoints


def test_endpoints(database: str) -> None:
    """An endpoint is added, listed, turned off and removed on the connection that Django has."""
    endpoints = Endpoints(DjangoStore())
    endpoints.add("acme", "https://acme.example/hooks?a=%20", secrets=["env:A", "file:/run/b"])
    assert endpoints.disable("acme", "100% wrong").reason == "100% wrong"
    (listed,) = endpoints.list()
    assert (listed.url, listed.secrets) == ("https://acme.example/hooks?a=%20", ("env:A", "file:/run/b"))
    assert not listed.is_on
    endpoints.remove("acme")
    with pytest.raises(EndpointUnknown):
        endpoints.enable("acme")
