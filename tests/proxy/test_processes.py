"""The proxy as a process: how it starts and stops, what a kill leaves behind, and by which ways it can be reached."""

import asyncio
import datetime as dt
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from semel.errors import ConfigurationError
from semel.proxy.config import made
from semel.proxy.server import bound, most_clients, run, shown
from tests.proxy.kit import BOB, HANG, Origin, Seen, created, proxied
from tests.proxy.running import running

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


class Held(Origin):
    """An upstream that answers when it is let go."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.arrived, self.go = asyncio.Event(), asyncio.Event()

    async def _hold(self, seen: Seen, reader: Reader, writer: Writer) -> None:
        self.arrived.set()
        await self.go.wait()
        await created(seen, reader, writer)


async def test_drain(tmp_path: Path) -> None:
    """On SIGTERM it is no longer ready, refuses guarded requests, finishes those under way, and ends with status 0."""
    origin = Held()
    upstream = await asyncio.start_server(origin.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
    async with running(tmp_path, url, "--drain", "2s") as proxy, asyncio.timeout(HANG):
        assert (await proxy.get("/healthz")).status == 200
        assert (await proxy.get("/readyz")).json() == {"status": "ok", "accepts": True, "store": True, "upstream": True}
        first = asyncio.create_task(proxy.pay())
        await origin.arrived.wait()
        proxy.signal(signal.SIGTERM)
        while (await proxy.get("/readyz")).status == 200:
            pass
        refused = await proxy.pay("key-2")
        assert (refused.status, refused.code) == (503, "shutting-down")
        assert refused.values("retry-after")
        origin.go.set()
        assert (await first).status == 201
        assert await proxy.ended() == 0
    assert [each.values("idempotency-key") for each in origin.seen] == [["key-1"]]
    upstream.close()


async def test_where_the_keys_are(tmp_path: Path) -> None:
    """A file of keys is named at the start: it is taken where no store was given, and another proxy has another."""
    async with running(tmp_path, "http://127.0.0.1:1") as proxy:
        assert f"with its keys in {tmp_path}/keys.db alone" in proxy.line


async def ends(folder: Path, told_at: str, *options: str) -> None:
    """Have SIGTERM come to ``semel proxy`` at one point of its start, and see it end."""
    program = (str(Path(__file__).with_name("told.py")),)
    async with running(folder, "http://127.0.0.1:1", *options, program=program, TOLD_AT=told_at) as proxy:
        assert await proxy.ended() == 0


async def test_sigterm_as_soon_as_it_listens(tmp_path: Path) -> None:
    """A signal that comes before the server has begun to serve is obeyed, with and without a drain."""
    await ends(tmp_path, "run", "--drain", "1s")


@pytest.mark.slow
@pytest.mark.parametrize("told_at", ["serve", "startup"])
async def test_sigterm_during_the_start(tmp_path: Path, told_at: str) -> None:
    """It is obeyed at any later point of the start, too."""
    await ends(tmp_path, told_at)


@pytest.mark.slow
@pytest.mark.parametrize("told_at", ["run", "deaf"])
async def test_sigterm_during_the_start_of_workers(tmp_path: Path, told_at: str) -> None:
    """A worker obeys it during its start; one that takes no notice of it is killed when drain and grace are over."""
    await ends(tmp_path, told_at, "--workers", "2", "--grace", "0s")


async def test_killed_after_the_upstream_did_it(tmp_path: Path) -> None:
    """A proxy that is killed leaves an unknown outcome; the next proxy does not send the request again."""
    origin = Held()
    upstream = await asyncio.start_server(origin.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
    async with running(tmp_path, url, rules='lease = "1s"') as proxy:
        first = asyncio.create_task(proxy.pay())
        await asyncio.wait_for(origin.arrived.wait(), HANG)
        proxy.signal(signal.SIGKILL)
        await proxy.ended()
        await asyncio.gather(first, return_exceptions=True)
        origin.go.set()
    async with running(tmp_path, url, rules='lease = "1s"') as proxy, asyncio.timeout(HANG):
        while (got := await proxy.pay()).code == "idempotency-key-in-progress":  # noqa: ASYNC110 - a lease has no event
            await asyncio.sleep(0.1)
        assert (got.status, got.code) == (409, "outcome-unknown")
        assert (await proxy.pay("key-2")).status == 201
    assert [each.values("idempotency-key") for each in origin.seen] == [["key-1"], ["key-2"]]
    upstream.close()


async def test_end_of_grace(tmp_path: Path) -> None:
    """What is still under way when the grace is over is as good as lost: a guarded request is parked and told so, and
    so is one without a key. One that has not been sent yet is told to come again.
    """
    origin = Held()
    upstream = await asyncio.start_server(origin.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
    rules = 'in_progress = "wait"\nwait = "30s"'
    async with running(tmp_path, url, "--grace", "1s", rules=rules) as proxy, asyncio.timeout(HANG):
        first = asyncio.create_task(proxy.pay())
        await origin.arrived.wait()
        free, waiting = asyncio.create_task(proxy.send(BOB)), asyncio.create_task(proxy.pay())
        while len(origin.seen) < 2:  # noqa: ASYNC110 - the upstream has one event
            await asyncio.sleep(0.01)
        proxy.signal(signal.SIGTERM)
        assert ((await first).status, (await first).code) == (409, "outcome-unknown")
        assert ((await free).status, (await free).code) == (502, "upstream-lost")
        assert (await waiting).code in {"outcome-unknown", "shutting-down"}
        assert await proxy.ended() == 0
    origin.go.set()
    async with running(tmp_path, url) as proxy, asyncio.timeout(HANG):
        assert (await proxy.pay()).code == "outcome-unknown"
    assert len(origin.seen) == 2
    upstream.close()


def test_mistakes_at_the_start(tmp_path: Path) -> None:
    """A folder that is not there, or an address that can't be, is named before anything listens."""
    store = f"sqlite:///{tmp_path}/gone/keys.db"
    with pytest.raises(ConfigurationError, match=f"no folder {tmp_path}/gone"):
        run(made({"upstream": "http://127.0.0.1:1", "scope": "single", "store": store}, {}))
    for wrong in ("127.0.0.1:99999", "a..b:80", "[::1]", "8080", ":80"):
        with pytest.raises(ConfigurationError, match="--listen"):
            bound(wrong)
    with bound("[0:0::1]:0") as listener:
        assert shown(listener).startswith("http://[::1]:")


def test_a_store_that_is_not_ready(empty_postgres_url: str) -> None:
    """A store without Semel's tables is named before anything listens, with what to type; with workers, too."""
    store = {"upstream": "http://127.0.0.1:1", "scope": "single", "store": empty_postgres_url, "workers": 2}
    with pytest.raises(ConfigurationError, match="semel migrate"):
        run(made(store | {"listen": "127.0.0.1:0"}, {}))


def test_files_for_clients() -> None:
    """A process may open as many files as its clients need; where the system does not allow that, it has fewer."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = made(
        {"upstream": "http://127.0.0.1:1", "scope": "single", "store": "memory://", "client_connections": 100}, {}
    )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (700, before[1]))
        assert most_clients(few) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 100 + 2 * few.connections
        assert most_clients(replace(few, client_connections=2**40)) < 2**40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def workers_of(pid: int) -> set[int]:
    """Return the ids of the processes that serve."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(each) for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()}


async def test_workers(tmp_path: Path) -> None:
    """Several processes share the keys; one that is killed is replaced, and all end with the first."""
    origin = Origin()
    upstream = await asyncio.start_server(origin.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
    where = f"unix:{tmp_path}/semel.sock"
    async with running(tmp_path, url, "--workers", "2", listen=where) as proxy, asyncio.timeout(HANG):
        got = await asyncio.gather(*(proxy.pay() for _ in range(16)))
        assert {each.status for each in got} <= {201, 409}
        again = await asyncio.gather(*(proxy.pay() for _ in range(8)))
        assert all(each.is_replay for each in again)
        first = workers_of(proxy.process.pid)
        assert len(first) == 2
        os.kill(min(first), signal.SIGKILL)
        while len(now := workers_of(proxy.process.pid)) < 2 or now == first:  # noqa: ASYNC110 - nor has a process of others
            await asyncio.sleep(0.05)
        assert (await proxy.pay()).is_replay
        assert stat.S_IMODE((tmp_path / "semel.sock").stat().st_mode) == 0o660
        proxy.signal(signal.SIGTERM)
        assert await proxy.ended() == 0
    assert len(origin.seen) == 1
    assert not (tmp_path / "semel.sock").exists()
    upstream.close()


def test_unix_socket_that_is_there(tmp_path: Path) -> None:
    """A socket that another process listens on is left to it; one that was left behind is replaced."""
    where = f"unix:{tmp_path}/semel.sock"
    with bound(where), pytest.raises(ConfigurationError, match="another process"):
        bound(where)
    with bound(where) as listener:
        assert shown(listener) == where


async def test_unix_upstream(tmp_path: Path) -> None:
    """An upstream can listen on a Unix socket."""
    origin = Origin()
    upstream = await asyncio.start_unix_server(origin.serve, tmp_path / "app.sock")
    async with proxied(tmp_path, upstream=f"unix://{tmp_path}/app.sock") as world:
        assert (await world.pay()).status == 201
        assert (await world.pay()).is_replay
        assert (await world.send(BOB, method="GET", target="/readyz", body=b"")).status == 200
        upstream.close()
        (tmp_path / "app.sock").unlink()
        await asyncio.sleep(0)
    assert origin.seen[0].values("host") == ["shop"]


def certificate(folder: Path) -> ssl.SSLContext:
    """Make a server's certificate that has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=36500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    none = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


async def test_tls_upstream(tmp_path: Path) -> None:
    """An upstream by https is verified; one that can't be is not sent anything, and the key is freed."""
    origin = Origin()
    upstream = await asyncio.start_server(origin.serve, "localhost", 0, ssl=certificate(tmp_path))
    url = f"https://localhost:{upstream.sockets[0].getsockname()[1]}"
    async with proxied(tmp_path, upstream=url, upstream_ca=str(tmp_path / "cert.pem")) as world:
        assert (await world.pay()).status == 201
    async with proxied(tmp_path, upstream=url) as world:
        assert (await world.pay("key-2")).code == "upstream-unreachable"
        assert await world.record("key-2") is None
    assert len(origin.seen) == 1
    upstream.close()


def ending(
    context: ssl.SSLContext, *, is_said: bool, head: bytes = b"", body: bytes = b"half of a"
) -> tuple[socket.socket, Callable[[], None]]:
    """Make an upstream by TLS with answers that end with their connection, and say so, or do not."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(HANG)

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with context.wrap_socket(connection, server_side=True) as wrapped:
                assert b"\r\n\r\n" in wrapped.recv(65536)
                wrapped.sendall(b"HTTP/1.1 201 Created\r\nConnection: close\r\n" + head + b"\r\n" + body)
                if is_said:
                    wrapped.setblocking(False)
                    with suppress(ssl.SSLWantReadError):  # It does not wait for the other side's.
                        wrapped.unwrap()

    return listener, serve


async def test_a_long_answer_over_tls(tmp_path: Path) -> None:
    """An upstream that closes its connection behind a long answer over TLS, as many do, loses none of it."""
    body = bytes(900_000)
    listener, serve = ending(certificate(tmp_path), is_said=True, head=b"Content-Length: %d\r\n" % len(body), body=body)
    url = f"https://localhost:{listener.getsockname()[1]}"
    serving = asyncio.get_running_loop().run_in_executor(None, serve)
    async with running(tmp_path, url, SSL_CERT_FILE=str(tmp_path / "cert.pem")) as proxy, asyncio.timeout(HANG):
        assert (await proxy.get("/long")).body == body
        assert (await proxy.pay()).body == body
        await serving
        assert (await proxy.pay()).body == body
    listener.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("is_said", [True, False])
async def test_an_answer_that_ends_with_its_connection(
    tmp_path: Path, version: ssl.TLSVersion, *, is_said: bool
) -> None:
    """Over TLS an answer without a length is whole only if its end was said; else the outcome is unknown."""
    context = certificate(tmp_path)
    context.minimum_version = context.maximum_version = version
    listener, serve = ending(context, is_said=is_said)
    upstream = f"https://localhost:{listener.getsockname()[1]}"
    serving = asyncio.get_running_loop().run_in_executor(None, serve)
    async with proxied(tmp_path, upstream=upstream, upstream_ca=str(tmp_path / "cert.pem")) as world:
        first, again = await world.pay(), await world.pay()
        with nullcontext() if is_said else pytest.raises(asyncio.IncompleteReadError):
            assert (await world.send(BOB)).body == b"half of a"
        await serving
    assert [first.code, again.code] == ([None, None] if is_said else ["outcome-unknown"] * 2)
    assert again.is_replay == is_said
    listener.close()


async def test_health(tmp_path: Path) -> None:
    """It is alive while it runs, and ready while store and upstream are; the paths can be left to the upstream."""
    async with proxied(tmp_path, upstream="http://127.0.0.1:1") as world:
        assert (await world.send(method="GET", target="/healthz", body=b"")).status == 200
        got = await world.send(method="GET", target="/readyz", body=b"")
        assert (got.status, got.json()["upstream"], got.json()["store"]) == (503, False, True)
    async with proxied(tmp_path, healthz="", check="/up") as world:
        assert (await world.send(method="GET", target="/healthz", body=b"")).status == 201
        assert (await world.send(method="GET", target="/readyz", body=b"")).status == 200
    assert [each.target for each in world.origin.seen] == ["/healthz", "/up"]
