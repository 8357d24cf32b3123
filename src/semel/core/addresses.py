"""Which network addresses a webhook may be sent to, where others choose its URL. No name is resolved here.

An endpoint's URL often comes from a customer. Without a check it could name what only the sender's own network can
reach: a database, an admin page, the metadata service of a cloud, which hands out credentials.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address

#: The IANA registries of special addresses, and what clouds have put among ordinary ones. The first that fits is told.
_FORBIDDEN: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "of a carrier's network (CGNAT)"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local, as the metadata service of most clouds"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "for protocols"),
    ("192.0.2.0/24", "for documentation"),
    ("192.88.99.0/24", "a relay (6to4)"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "for benchmarks"),
    ("198.51.100.0/24", "for documentation"),
    ("203.0.113.0/24", "for documentation"),
    ("168.63.129.16/32", "the metadata service of a cloud (Azure)"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::ffff:0:0/96", "an IPv4 address in disguise"),
    ("::ffff:0:0:0/96", "an IPv4 address in disguise"),
    ("::/96", "an IPv4 address in disguise"),
    ("64:ff9b:1::/48", "of a local translator (NAT64)"),
    ("100::/64", "for discarding"),
    ("2001::/23", "for protocols"),
    ("2001:db8::/32", "for documentation"),
    ("2002::/16", "a tunnel (6to4)"),
    ("3fff::/20", "for documentation"),
    ("5f00::/16", "of a local network (SRv6)"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
)
_NETWORKS: tuple[tuple[IPv4Network | IPv6Network, str], ...] = tuple(
    (ip_network(each), why) for each, why in _FORBIDDEN
)

#: A network without IPv4 reaches ordinary hosts by addresses in here; the last four bytes are the host's.
_NAT64 = ip_network("64:ff9b::/96")
_IPV4_MASK = 0xFFFF_FFFF


def forbidden(text: str) -> str | None:
    """Return why nothing may be sent to the address that *text* spells, in a few words; None: it may."""
    address = ip_address(text.partition("%")[0])
    if address in _NAT64:
        address = IPv4Address(int(address) & _IPV4_MASK)
    for network, why in _NETWORKS:
        if address in network:
            return why
    # What is newer than the table above.
    return None if address.is_global else "not of the public internet"
