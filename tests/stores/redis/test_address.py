"""What the URL of a Redis store may say, what is refused, and that nobody is shown a password."""

import pytest

from semel import stores
from semel.errors import ConfigurationError
from semel.stores.redis.address import Address, Login, Node


def test_one_server() -> None:
    """A plain URL names a server, a database and who we are; all but the server may be left out."""
    full = Address.of("redis://zoë:p%40ss@cache.example:6380/2")
    assert (full.nodes, full.database, full.login) == ((Node("cache.example", 6380),), 2, Login("zoë", "p@ss"))
    bare = Address.of("redis://cache.example")
    assert (bare.nodes, bare.database, bare.login, bare.tls) == ((Node("cache.example", 6379),), 0, Login(), None)
    assert Address.of("redis://:secret@h").login == Login(None, "secret")
    assert Address.of("redis://[::1]:6380/0").nodes == (Node("::1", 6380),)


def test_tls() -> None:
    """rediss:// is encrypted, and so is any other with tls=on; certificates are checked unless it is told not to."""
    assert Address.of("rediss://h").tls is not None
    assert Address.of("redis+cluster://h?tls=on").tls is not None
    checked, unchecked = (Address.of(f"rediss://h?ssl_cert_reqs={what}").tls for what in ("required", "none"))
    assert checked is not None
    assert checked.context().check_hostname
    assert unchecked is not None
    assert not unchecked.context().check_hostname


def test_cluster() -> None:
    """A Cluster is named by some of its nodes."""
    address = Address.of("redis+cluster://a:7000,b:7001,c")
    assert (address.kind, address.nodes) == ("cluster", (Node("a", 7000), Node("b", 7001), Node("c", 6379)))


def test_sentinels() -> None:
    """Sentinels are named with what they call the master; their login is another."""
    address = Address.of("redis+sentinel://u:p@a:1,b/orders/3?sentinel_password=s")
    assert address.nodes == (Node("a", 1), Node("b", 26379))
    assert (address.service, address.database) == ("orders", 3)
    assert (address.sentinel_login, address.login) == (Login(None, "s"), Login("u", "p"))


def test_settings() -> None:
    """Prefix, audit trail and time-outs are told after the question mark; there is no trail unless it is asked for."""
    address = Address.of("redis://h?prefix=shop&audit=replays&connect_timeout=0.5&timeout=2")
    said = (address.prefix, address.audit, address.connect_seconds, address.command_seconds)
    assert said == ("shop", "replays", 0.5, 2.0)
    usual = Address.of("redis://h")
    assert (usual.prefix, usual.audit, usual.connect_seconds, usual.command_seconds) == ("semel", "off", 5.0, 10.0)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:secret@h:6380/1",
        "rediss://u:secret@h",
        "redis+cluster://u:secret@a:1,b:2",
        "redis+sentinel://u:secret@a:1,b:2/orders/0?sentinel_password=secret",
    ],
)
def test_passwords_are_shown_to_nobody(url: str) -> None:
    """What people see of an address says where it is, and not the password."""
    address = Address.of(url)
    assert "secret" not in f"{address} {address!r} {address.login!r} {address.sentinel_login!r}"
    assert str(address).startswith(url.partition(":")[0])


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush/secret@h/0",
        "redis://:hush?secret@h/0",
        "redis://:hush?secret=1@h/0",
        "redis://:hush#secret@h",
        "redis+cluster://:12/secret@h",
        "redis+sentinel://:hush/secret@h/orders",
    ],
)
def test_a_password_that_is_not_escaped(url: str) -> None:
    """A password with characters that end the host of a URL is in no message, and people are told how to write it."""
    with pytest.raises(ConfigurationError, match="%2F") as raised:
        stores.store(url)
    assert "hush" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url, named",
    [
        ("redis://h:port", "port"),
        ("redis://h/orders", "number"),
        ("redis://h/0/1", "number"),
        ("redis://a:1,b:2", "redis+cluster"),
        ("redis+cluster://h/1", "database 0"),
        ("redis+sentinel://h", "NAME"),
        ("redis://h?prefix=a{b}", "prefix"),
        ("redis://h?audit=maybe", "audit"),
        ("redis://h?timeout=0", "timeout"),
        ("redis://h?timeout=soon", "timeout"),
        ("redis://h?tabel=x", "tabel"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("rediss://h?ssl_ca_certs=/nowhere", "ssl_ca_certs"),
    ],
)
@pytest.mark.parametrize("open_store", [stores.store, stores.async_store], ids=["threads", "loop"])
def test_what_is_wrong_is_said(open_store: type, url: str, named: str) -> None:
    """A URL that can't be right is refused at once, by a message that names what is wrong."""
    with pytest.raises(ConfigurationError, match=named.replace("+", r"\+")):
        open_store(url)


def test_atomic_mode_is_refused() -> None:
    """Redis has no transaction to share with the application's database, and says which stores have."""
    with pytest.raises(ConfigurationError, match="need PostgreSQL or SQLite"):
        stores.store("redis://h").transaction()
