"""No endpoint's URL leads a webhook into the sender's own network."""

import asyncio
import datetime as dt
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from semel.core import addresses
from semel.core.outbox import Delivered, Message, Unreachable, Verdict
from semel.core.webhook import new_secret
from semel.publishers.webhook import Webhook
from tests.webhooks.endpoint import http, serving

SECRET = new_secret(b"s" * 32)
MESSAGE = Message("01920000-0000-7000-8000-000000000001", "order.paid", "acme", b"{}")


class Names:
    """A name server that a test gives the answers of, one after the other."""

    def __init__(self, *answers: Iterable[str]) -> None:
        self.answers = [*answers]
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int) -> Iterable[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def verdict_of(url: str, **settings: Any) -> Verdict:
    sender = Webhook("acme", url, secrets=[SECRET], **settings)
    try:
        (verdict,) = await sender.publish([MESSAGE])
    finally:
        await sender.close()
    return verdict


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "LOCALHOST",
        "127.1",
        "0x7f000001",
        "2130706433",
        "017700000001",
        "0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "169.254.169.254",
        "10.0.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "[fe80::1]",
        "[fd00:ec2::254]",
    ],
)
async def test_refused(host: str) -> None:
    """An endpoint at an address that is not public gets nothing, however the address is spelled; not even a SYN."""
    async with serving() as server:
        verdict = await verdict_of(f"http://{host}:{server.port}/")
        assert server.connections == 0
    assert isinstance(verdict, Unreachable)
    assert "nothing was sent" in verdict.reason
    assert "allow it: semel relay --webhooks --allow-private" in verdict.reason


async def test_one_bad_address_of_many() -> None:
    """Where one of a host's addresses is forbidden, none of them is used."""
    names = Names(["93.184.216.34", "10.0.0.1"])
    verdict = await verdict_of("https://mixed.example/", resolve=names.resolve)
    assert isinstance(verdict, Unreachable)
    assert "10.0.0.1, which is private" in verdict.reason


async def test_allowed() -> None:
    """An endpoint in the own network is sent to where that is allowed."""
    async with serving() as server:
        assert await verdict_of(server.url(host="localhost"), allow_private=True) == Delivered()


async def test_rebinding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is resolved once for each try, and what was checked is what is connected to: a name server that says
    something else the second time leads nowhere.
    """
    # 127.0.0.2 stands in for the public internet, which tests can't reach.
    monkeypatch.setattr(
        "semel.publishers.webhook.forbidden", lambda text: None if text == "127.0.0.2" else addresses.forbidden(text)
    )

    def no_name_server(*_: Any, **__: Any) -> Any:
        raise AssertionError("A name was resolved a second time.")

    names = Names(["127.0.0.2"], ["127.0.0.1"])
    async with serving(host="127.0.0.2") as public, serving(port=public.port) as internal:
        monkeypatch.setattr(socket, "getaddrinfo", no_name_server)
        sender = Webhook("acme", public.url(host="rebinding.example"), secrets=[SECRET], resolve=names.resolve)
        assert await sender.publish([MESSAGE]) == [Delivered()]
        assert names.asked == ["rebinding.example"]
        assert public.requests[0].headers["host"] == f"rebinding.example:{public.port}"
        (verdict,) = await sender.publish([MESSAGE])
        assert isinstance(verdict, Unreachable)
        assert (len(public.requests), internal.connections) == (1, 0)
        await sender.close()


async def test_redirects_lead_nowhere() -> None:
    """A redirect into the own network is not followed."""
    async with serving() as internal:
        async with serving(lambda _: http(307, location=internal.url())) as outer:
            await verdict_of(outer.url(), allow_private=True)
        assert internal.connections == 0


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name by itself, so those of the environment are passed over."""
    async with serving() as proxy, serving() as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url())
        assert await verdict_of(server.url(), allow_private=True) == Delivered()
        assert (proxy.connections, server.connections) == (0, 1)


async def test_the_next_address() -> None:
    """Of a host with several addresses, the next is tried where one can't be connected to."""
    async with serving() as server:
        names = Names(["127.0.0.3", "127.0.0.1"])
        url = server.url(host="two.example")
        assert await verdict_of(url, allow_private=True, resolve=names.resolve) == Delivered()


async def test_no_address() -> None:
    """A name server that answers nothing leaves an endpoint unreachable; one that never answers, too."""

    async def never(host: str, port: int) -> Iterable[str]:
        await asyncio.Event().wait()
        return []

    short = dt.timedelta(milliseconds=200)
    for resolve in (Names([]).resolve, never):
        verdict = await verdict_of("https://none.example/", resolve=resolve, timeout=short)
        assert isinstance(verdict, Unreachable)


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a server of this name needs, and what its clients do."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    day = dt.timedelta(days=1)
    now = dt.datetime.now(dt.UTC)  # noqa: TID251 - certificates are about the machine's clock
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cadata=made.public_bytes(serialization.Encoding.PEM).decode())


async def test_tls_is_by_name(tmp_path: Path) -> None:
    """The connection is to an address; the certificate is asked for, and checked, by the endpoint's name."""
    serves, trusts = certificate(tmp_path, "hooks.example")
    asked: list[str | None] = []
    serves.sni_callback = lambda _socket, name, _context: asked.append(name)
    names = Names(["127.0.0.1"])
    settings: dict[str, Any] = {"allow_private": True, "tls": trusts, "resolve": names.resolve}
    async with serving(tls=serves) as server:
        assert await verdict_of(server.url("https", "hooks.example"), **settings) == Delivered()
        # A full stop at its end is for name servers; certificates don't have it.
        assert await verdict_of(server.url("https", "hooks.example."), **settings) == Delivered()
        assert asked == ["hooks.example", "hooks.example"]
        # Another's certificate, and one that is not trusted.
        other = await verdict_of(server.url("https", "other.example"), **settings)
        untrusted = await verdict_of(server.url("https", "hooks.example"), **settings | {"tls": None})
        assert isinstance(other, Unreachable)
        assert isinstance(untrusted, Unreachable)
        assert len(server.requests) == 2
    assert "hostname mismatch" in other.reason.lower()
    assert "certificate" in untrusted.reason.lower()


async def test_a_slow_name_server() -> None:
    """An endpoint's name is asked for by one of its tries at a time, so that its name server takes no more than one
    thread from other endpoints; also while tries give up and others begin.
    """
    asked, may_end = 0, asyncio.Event()

    async def resolve(_host: str, _port: int) -> Iterable[str]:
        nonlocal asked
        asked += 1
        await may_end.wait()
        return ["127.0.0.1"]

    settings: dict[str, Any] = {"resolve": resolve, "timeout": dt.timedelta(milliseconds=50)}
    sender = Webhook("acme", "https://slow.example/", secrets=[SECRET], **settings)
    for _ in range(3):
        verdicts = await sender.publish([MESSAGE] * 8)
        assert [type(each) for each in verdicts] == [Unreachable] * 8
    assert asked == 1
    may_end.set()
    for verdict in await sender.publish([MESSAGE] * 2):
        assert isinstance(verdict, Unreachable)
        assert "127.0.0.1, which is loopback" in verdict.reason
    await sender.close()
