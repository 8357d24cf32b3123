"""Which addresses a webhook may be sent to."""

import ipaddress

import pytest

from semel.core.addresses import forbidden


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::8.8.8.8"]
)
def test_public(address: str) -> None:
    """The public internet may be sent to, also through a translator of an IPv6 network."""
    assert forbidden(address) is None


@pytest.mark.parametrize(
    "address, why",
    [
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("10.1.2.3", "private"),
        ("100.64.0.1", "CGNAT"),
        ("100.100.100.200", "CGNAT"),
        ("127.0.0.1", "loopback"),
        ("127.8.8.8", "loopback"),
        ("169.254.169.254", "metadata"),
        ("172.31.255.255", "private"),
        ("192.0.0.192", "protocols"),
        ("192.168.1.1", "private"),
        ("198.18.0.1", "benchmarks"),
        ("203.0.113.5", "documentation"),
        ("168.63.129.16", "Azure"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "disguise"),
        ("::ffff:8.8.8.8", "disguise"),
        ("::ffff:0:10.0.0.1", "disguise"),
        ("::10.0.0.1", "disguise"),
        ("64:ff9b::10.0.0.1", "private"),
        ("64:ff9b::169.254.169.254", "metadata"),
        ("64:ff9b:1::1", "NAT64"),
        ("100::1", "discarding"),
        ("2001::1", "protocols"),
        ("2001:db8::1", "documentation"),
        ("2002:7f00:1::", "6to4"),
        ("fd00:ec2::254", "private"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("fec0::1", "private"),
        ("ff02::1", "multicast"),
    ],
)
def test_forbidden(address: str, why: str) -> None:
    """What is not of the public internet is refused, and the reason says what it is."""
    assert why in (forbidden(address) or "")


def test_what_the_table_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table leaves out and Python knows not to be public is refused, too."""
    monkeypatch.setattr("semel.core.addresses._NETWORKS", ())
    assert forbidden("10.0.0.1") == "not of the public internet"


def test_every_kind_that_python_knows() -> None:
    """Whatever Python calls private, loopback, link-local, multicast, reserved or unspecified is refused."""
    odd = [
        address for number in range(0, 2**32, 2**16 + 257) if not (address := ipaddress.IPv4Address(number)).is_global
    ]
    assert odd
    assert all(forbidden(str(address)) for address in odd)
