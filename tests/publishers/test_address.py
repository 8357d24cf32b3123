"""The URLs of destinations: what they may say, and what is never shown of them."""

import pytest

from semel.core.outbox import Failed, Rejected, Unreachable
from semel.errors import ConfigurationError
from semel.publishers import Publisher, publisher
from semel.publishers.address import MAX_REASON, address, filled, host_and_port, template
from tests.publishers.sending import message

URLS = [
    "amqp://guest:s3cr3t@host:5672/vhost?exchange=shop",
    "amqps://host?cafile=/etc/ca.pem",
    "nats://user:s3cr3t@host:4222,other:4222",
    "tls://host",
    "redis://:s3cr3t@host:6379/2?maxlen=1000&wait=1",
    "rediss://host?ssl_ca_certs=/etc/ca.pem",
    "kafka://user:s3cr3t@host:9092,other:9092?topic=orders",
    "celery+amqp://user:s3cr3t@host//?queue=mail",
    "celery+redis://host",
]


@pytest.mark.parametrize("url", URLS)
def test_each_kind_is_a_publisher(url: str) -> None:
    """Each URL names a publisher, which connects to nothing before `open`, and shows no password of itself."""
    made = publisher("events", url)
    assert isinstance(made, Publisher)
    assert "s3cr3t" not in repr(vars(made).get("_address")) + repr(made)


@pytest.mark.parametrize("url", URLS)
def test_unknown_setting(url: str) -> None:
    """A setting that is not known is refused, with those that are."""
    more = f"{url}{'&' if '?' in url else '?'}exchnage=shop"
    with pytest.raises(ConfigurationError, match=r"\?exchnage= is not known .* There are: .*timeout") as caught:
        publisher("events", more)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "url, said",
    [
        ("amqp://", "names one host"),
        ("amqp://a,b", "names one host"),
        ("nats://", "names at least one host"),
        ("redis://user:s3cr3t@host:port/0", "can't be read: check its host and port"),
        ("nats://user:s3cr3t@a:1,b:99999", "can't be read: check its host and port"),
        ("kafka://a?timeout=soon", "a number above 0, not 'soon'"),
        ("redis://a?maxlen=0", "a number above 0, not '0'"),
        ("nats://a?timeout=inf", "a number above 0"),
        ("amqp://a?timeout=1&timeout=2", "is there twice"),
        ("amqp://a?routing_key={kind}", "{kind} is no placeholder. There are: {type} and {key}."),
        ("nats://a?subject={}", "{} is no placeholder"),
    ],
)
def test_wrong_urls(url: str, said: str) -> None:
    """What is wrong with a URL is said in words, without the password in it."""
    with pytest.raises(ConfigurationError) as caught:
        publisher("events", url)
    assert said in str(caught.value)
    assert "s3cr3t" not in str(caught.value)


def test_parts() -> None:
    """User, password and path are unquoted; hosts may be IPv6."""
    read = address("events", "amqp://a%40b:p%2Fw@[::1]:5672/my%2Fvhost?timeout=2.5", {"timeout"})
    assert (read.user, read.password, read.path, read.place) == ("a@b", "p/w", "my/vhost", "[::1]:5672")
    assert read.number("timeout", 10.0) == 2.5
    assert host_and_port(read.hosts[0], 1) == ("::1", 5672)
    assert host_and_port("host", 1) == ("host", 1)


def test_reasons() -> None:
    """A reason is one line of bounded length, and what a client says has its password taken out."""
    read = address("events", "amqp://user:p%2Fw@host", ())
    assert read.reason("lost", OSError("amqp://user:p/w@host\nis\x1b gone")) == (
        "lost (amqp://user:***@host is\\x1b gone)"
    )
    assert read.reason("lost", TimeoutError()) == "lost (TimeoutError)"
    assert len(read.reason("x" * 10_000)) == MAX_REASON


def test_verdicts() -> None:
    """The first line of a table that knows the error says what it means; an error that none knows is raised."""
    read = address("events", "amqp://host", ())
    table = ((ConnectionError, Unreachable, "{place} is {how}"), ((OSError, KeyError), Failed, "{name}"))
    assert read.verdict(table, ConnectionError("x"), how="gone") == Unreachable("host is gone (x)")
    assert read.verdict(table, OSError("y"), how="") == Failed("events (y)")
    with pytest.raises(ZeroDivisionError):
        read.verdict(((OSError, Rejected, ""),), ZeroDivisionError())


def test_templates() -> None:
    """Type and key are put in once: braces in them are text."""
    text = template("events", "a.{type}.{key}")
    assert filled(text, message(type="{key}", key="{type}")) == "a.{key}.{type}"
    assert filled(text, message(type="paid")) == "a.paid."
