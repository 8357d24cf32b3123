"""What can be set of a proxy, in a file and on the command line, and what a mistake is told."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from semel.cli.app import app
from semel.errors import ConfigurationError
from semel.proxy.config import made, read
from semel.proxy.server import build
from semel.proxy.upstream import Address

ROOT = Path(__file__).parents[2]
STORE = "sqlite:///x.db"
TYPED = {"upstream": "http://127.0.0.1:3000", "scope": "single"}


def test_file(tmp_path: Path) -> None:
    """A file has the options and the policy; durations are numbers of seconds, or strings."""
    file = tmp_path / "semel.toml"
    file.write_text("""
        [proxy]
        upstream = "http://127.0.0.1:3000"
        scope = "header:X-User"
        listen = "127.0.0.1:9000"
        workers = 2
        trusted = ["10.0.0.0/8"]
        timeout = 5
        jwt-key = "key.pem"
        [policy]
        preset = "stripe"
        required = true
        methods = ["POST", "PUT"]
        lease = "10s"
        retention = 3600
        keep = [200, 201]
    """)
    settings = read(str(file), {"workers": 3, "timeout": None}, store=STORE)
    assert (settings.upstream, settings.listen, settings.workers) == ("http://127.0.0.1:3000", "127.0.0.1:9000", 3)
    assert (settings.trusted, settings.timeout, settings.jwt_key) == (("10.0.0.0/8",), timedelta(seconds=5), "key.pem")
    policy = settings.policy
    assert (policy.dialect, policy.required, policy.server_errors) == ("stripe", True, "keep")
    assert (policy.lease, policy.retention) == (timedelta(seconds=10), timedelta(hours=1))
    assert (policy.keep, policy.methods) == (frozenset({200, 201}), frozenset({"POST", "PUT"}))


def test_options_as_they_are_typed(tmp_path: Path) -> None:
    """A file knows every option by its name on the command line: ``--path`` is ``path`` as well as ``paths``."""
    file = tmp_path / "semel.toml"
    spelled = {each for option in get_command(app).commands["proxy"].params for each in option.opts}  # type: ignore[attr-defined]
    given = {
        "--store": STORE,
        "--workers": 2,
        "--path": ["/pay", "/orders/*"],
        "--trusted": ["10.0.0.0/8"],
        "--cors-origin": ["https://shop.example"],
        "--pass-key": False,
        "--work": False,
        **dict.fromkeys(("--timeout", "--drain", "--grace"), "5s"),
        **dict.fromkeys(("--listen", "--jwt-key", "--jwt-audience", "--jwt-issuer", "--metrics"), "x"),
        "--check": "/up",
    } | {f"--{name}": said for name, said in TYPED.items()}
    assert spelled == {"--config", *given}
    file.write_text("[proxy]\n" + "\n".join(f"{name[2:]} = {json.dumps(said)}" for name, said in given.items()))
    settings = read(str(file), {}, store="")
    assert (settings.paths, settings.cors_origins) == (("/pay", "/orders/*"), ("https://shop.example",))
    assert (settings.store, settings.workers, settings.pass_key, settings.check) == (STORE, 2, False, "/up")
    assert read(str(file), {"paths": ["/typed"]}, store="").paths == ("/typed",)


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option can be in the environment, and every field of the policy; what is typed comes before it, and a file
    behind it.
    """
    file = tmp_path / "semel.toml"
    file.write_text(
        '[proxy]\nupstream = "http://file"\nworkers = 9\ngrace = 9\n[policy]\nlease = "9s"\nmax-request-body = 9'
    )
    environment = {
        "UPSTREAM": "http://127.0.0.1:3000",
        "SCOPE": "header:X-User",
        "LISTEN": "0.0.0.0:8080",
        "WORKERS": "2",
        "TRUSTED": "10.0.0.0/8, 172.16.0.0/12",
        "PATH": "/payments,/orders/*",
        "CORS_ORIGIN": "https://shop.example",
        "NO_EFFECT": "503",
        "PASS_KEY": "False",
        "DRAIN": "2s",
        "CONNECT_TIMEOUT": "1.5",
        "METRICS": "9464",
        "CHECK": "",
        "CONFIG": "semel.toml",
        "POLICY_REQUIRED": "true",
        "POLICY_METHODS": "POST,PUT",
        "POLICY_KEEP": "200, 201",
        "POLICY_RETENTION": "48h",
        "POLICY_MAX_REQUEST_BODY": "1000",
        "POLICY_HEADER": "X-Key",
        # Kubernetes sets these where there is a service of the name "semel-proxy", and one "semel-proxy-admin".
        "PORT": "tcp://10.0.0.9:8080",
        "PORT_8080_TCP_ADDR": "10.0.0.9",
        "SERVICE_PORT_HTTP": "8080",
        "ADMIN_SERVICE_HOST": "10.0.0.9",
    }
    for name, text in environment.items():
        monkeypatch.setenv(f"SEMEL_PROXY_{name}", text)
    settings = read(str(file), {"workers": 3}, store=STORE)
    assert (settings.upstream, settings.scope, settings.listen) == (
        environment["UPSTREAM"],
        "header:X-User",
        "0.0.0.0:8080",
    )
    assert (settings.trusted, settings.paths) == (("10.0.0.0/8", "172.16.0.0/12"), ("/payments", "/orders/*"))
    assert (settings.cors_origins, settings.no_effect, settings.metrics) == (("https://shop.example",), (503,), "9464")
    assert (settings.workers, settings.pass_key, settings.check) == (3, False, None)
    times = settings.drain, settings.connect_timeout, settings.grace
    assert times == (timedelta(seconds=2), timedelta(seconds=1.5), timedelta(seconds=9))
    policy = settings.policy
    assert (policy.required, policy.methods, policy.keep) == (True, {"POST", "PUT"}, {200, 201})
    assert (policy.retention, policy.lease) == (timedelta(days=2), timedelta(seconds=9))
    assert (policy.max_request_body, policy.header_names) == (1000, (b"x-key",))


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("UPSTRAEM", "http://a", "SEMEL_PROXY_UPSTRAEM: there is no such option. Did you mean 'SEMEL_PROXY_UPSTREAM'"),
        ("PTAH", "/pay", "Did you mean 'SEMEL_PROXY_PATH'"),
        ("NO_WORK", "true", "SEMEL_PROXY_NO_WORK: there is no such option. Write SEMEL_PROXY_WORK=false"),
        ("STORE", "memory://", "SEMEL_STORE"),
        ("WORKERS", "many", "SEMEL_PROXY_WORKERS can't be 'many'"),
        ("WORK", "no", "SEMEL_PROXY_WORK can't be 'no': it is true or false"),
        ("NO_EFFECT", "all", "SEMEL_PROXY_NO_EFFECT can't be"),
        ("GRACE", "soon", "SEMEL_PROXY_GRACE: 'soon' is not a duration"),
        ("POLICY_LEASE", "forever", "SEMEL_PROXY_POLICY_LEASE: 'forever' is not a duration"),
        ("JWT_AUDIENCE", "", "SEMEL_PROXY_JWT_AUDIENCE is empty"),
        ("TRUSTED", "", "SEMEL_PROXY_TRUSTED is empty"),
        ("POLICY_LEESE", "1s", "lease"),
        ("POLICY_REQUIRED", "yes", "required"),
    ],
)
def test_mistakes_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, text: str, words: str) -> None:
    """A variable that is spelled wrongly, or has a value that can't be, is told by its name."""
    monkeypatch.setenv(f"SEMEL_PROXY_{name}", text)
    with pytest.raises(ConfigurationError, match=words):
        read(None, TYPED, store=STORE)


def test_twice_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that the environment has in two spellings is refused: one of the two would guard other paths."""
    monkeypatch.setenv("SEMEL_PROXY_PATH", "/payments")
    monkeypatch.setenv("SEMEL_PROXY_PATHS", "/orders")
    with pytest.raises(ConfigurationError, match="'paths' twice"):
        read(None, TYPED, store=STORE)


def test_variables_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file can have variables of the environment in its strings; one that is not set is named."""
    file = tmp_path / "semel.toml"
    file.write_text(
        '[proxy]\nstore = "postgresql://app:${PASSWORD}@db/app"\npaths = ["/${PLACE}"]\n[policy]\nlease = "${LEASE}"'
    )
    monkeypatch.setenv("PASSWORD", "sesame")
    monkeypatch.setenv("PLACE", "pay")
    with pytest.raises(ConfigurationError, match="variable LEASE is not set"):
        read(str(file), TYPED, store=STORE)
    monkeypatch.setenv("LEASE", "5s")
    settings = read(str(file), TYPED, store=STORE)
    assert (settings.store, settings.paths) == ("postgresql://app:sesame@db/app", ("/pay",))
    assert settings.policy.lease == timedelta(seconds=5)


def test_mistakes_that_are_typed() -> None:
    """An option of the command line is told by its name there."""
    with pytest.raises(ConfigurationError, match=r"^--grace: 'soon' is not a duration"):
        read(None, TYPED | {"grace": "soon"}, store=STORE)


def test_two_upstreams() -> None:
    """A proxy has one upstream: a second one is refused, and not taken in place of the first."""
    typed = ["proxy", "--scope", "single", "--upstream", "http://127.0.0.1:1", "--upstream", "http://127.0.0.1:2"]
    with pytest.raises(ConfigurationError, match="one server"):
        CliRunner().invoke(app, typed, catch_exceptions=False)


def test_file_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that the how-to page shows can be read."""
    page = (ROOT / "docs/how-to/guard-any-language.md").read_text()
    file = tmp_path / "semel.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    monkeypatch.setenv("DB_PASSWORD", "sesame")
    settings = read(str(file), {}, store=STORE)
    assert (settings.store, settings.policy.in_progress) == ("postgresql://app:sesame@db/app", "wait")


def test_defaults() -> None:
    """One process, on loopback; after a crash the outcome is unknown."""
    settings = read(None, TYPED, store=STORE)
    assert (settings.listen, settings.workers, settings.policy.on_crash) == ("127.0.0.1:8080", 1, "refuse")
    assert made(TYPED | {"store": STORE}, {"on_crash": "rerun"}).policy.on_crash == "rerun"


def test_metrics() -> None:
    """Where metrics are served may be in the file, too; in them, the entry point is the proxy."""
    settings = made(TYPED | {"store": "memory://", "metrics": "9464"}, {})
    assert settings.metrics == "9464"
    assert build(settings).guard.guard.door == "proxy"


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"upstream": None}, {}, "SEMEL_PROXY_UPSTREAM"),
    ({"scope": ""}, {}, "scope"),
    ({"wrokers": 2}, {}, "workers"),
    ({"workers": 0}, {}, "workers"),
    ({"workers": 2, "store": "memory://"}, {}, "memory"),
    ({"workers": "2"}, {}, "number"),
    ({"work": "yes"}, {}, "true or false"),
    ({"timeout": "soon"}, {}, r"\[proxy\] timeout: 'soon' is not a duration"),
    ({"timeout": -1}, {}, "seconds"),
    ({"timeout": 0}, {}, "timeout can't be 0"),
    ({"timeout": "0s"}, {}, "timeout can't be 0"),
    ({"timeout": "-1s"}, {}, "duration"),
    ({"timeout": float("inf")}, {}, "seconds"),
    ({"timeout": float("nan")}, {}, "seconds"),
    ({"connect_timeout": 0}, {}, "connect_timeout can't be 0"),
    ({"connections": 0}, {}, "connections"),
    ({"trusted": 7}, {}, "list"),
    ({"healthz": "up"}, {}, "slash"),
    *(
        ({"cors_origins": each}, {}, "as browsers send them")
        for each in (
            *("shop.example", "https://shop.example/", "https://Shop.example", "null", "", ["*", "https://a"]),
            *("https://shop.example:443", "http://a:80", "https://a, https://b"),
        )
    ),
    *(({"no_effect": each}, {}, "no_effect") for each in ([502], [504], [404], ["503"], [True], 503)),
    ({"no_effect": [503]}, {"preset": "stripe"}, 'server_errors = "auto"'),
    ({"jwt_audience": "shop"}, {}, "--jwt-key"),
    ({"jwt_audience": "", "jwt_key": "x"}, {}, "jwt_audience"),
    ({}, {"mode": "atomic"}, "transaction"),
    ({}, {"preset": "paypal"}, "preset"),
    ({}, {"lease": [1]}, "lease"),
    ({}, {"requird": True}, "required"),
    ({}, {"fingerprint": "body"}, "code"),
    ({}, {"methods": ["GET"]}, "methods"),
    ({"scope": "jwt:sub"}, {"in_progress": "accept"}, "credentials"),
    ({"work": False}, {"in_progress": "accept"}, "work"),
]


@pytest.mark.parametrize("options, rules, word", WRONG)
def test_mistakes(options: dict[str, Any], rules: dict[str, Any], word: str) -> None:
    """Each is told by its name, before anything listens."""
    with pytest.raises(ConfigurationError, match=word):
        made(TYPED | {"store": STORE} | options, rules)


@pytest.mark.parametrize(
    "text", ["[proxy", "[proxies]\na = 1", "proxy = 1", '[proxy]\npath = "/a"\npaths = "/b"', None]
)
def test_bad_files(tmp_path: Path, text: str | None) -> None:
    """A file that can't be read is named, with the place of the mistake."""
    file = tmp_path / "semel.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"semel\.toml"):
        read(str(file), TYPED, store=STORE)


def test_addresses() -> None:
    """An upstream is a host by http or https, or the file of a Unix socket."""
    assert Address.read("http://127.0.0.1:3000/") == Address("http://127.0.0.1:3000")
    assert Address.read("https://[::1]").place == ("::1", 443)
    assert Address.read("https://[0:0::1]:7").place == ("::1", 7)
    assert Address.read("http://b\u00fccher.example:3000").place == ("xn--bcher-kva.example", 3000)
    assert Address.read("unix:///run/app.sock") == Address("http://localhost", "/run/app.sock")
    for wrong in (
        "127.0.0.1:3000",
        "http://",
        "ftp://a",
        "http://a/b",
        "http://u@a",
        "http://a:b",
        "unix://",
        "http://a?b",
        "http://[::1",
    ):
        with pytest.raises(ConfigurationError, match="--upstream"):
            Address.read(wrong)
