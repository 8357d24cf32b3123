"""``semel proxy``: guards a server in any language, from in front of it. The proxy itself is in ``semel.proxy``."""

from __future__ import annotations

from typing import Annotated

import typer

from semel.cli.address import USUAL_FILE, StoreOption, named
from semel.cli.main import is_of
from semel.cli.metrics import MetricsOption, served
from semel.errors import ConfigurationError

_NEEDED = "semel proxy needs aiohttp and uvicorn. Run: pip install 'semel[proxy]'"


def proxy(
    *,
    upstream: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="The server behind it: http://…, https://… or unix:///FILE.")
    ] = None,
    store: StoreOption = None,
    scope: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="What names the user: header:NAME, jwt:CLAIM, cookie:NAME or single."),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="HOST:PORT or unix:FILE; else 127.0.0.1:8080.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="How many processes; else one.")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            envvar="SEMEL_PROXY_CONFIG",
            help="TOML, with the tables proxy (these options) and policy.",
        ),
    ] = None,
    trusted: Annotated[
        list[str] | None,
        typer.Option(metavar="NETWORK", help="Peers that may name the user, by a header; else loopback. Repeatable."),
    ] = None,
    jwt_key: Annotated[
        str | None,
        typer.Option(metavar="FILE|URL", help="What verifies tokens for jwt:CLAIM: a public key, JWKS, a secret."),
    ] = None,
    jwt_audience: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What the aud of tokens has to name. Repeatable.")
    ] = None,
    jwt_issuer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="What the iss of tokens has to be; else any. Repeatable.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Pages of it may read replays and refusals (CORS). Repeatable."),
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option("--path", metavar="PATTERN", help="Guard these paths only. Repeatable.")
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long the upstream may be silent; else 60s.")
    ] = None,
    drain: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long to refuse guarded requests (503) before it stops.")
    ] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long to wait then for what is under way; else 30s.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="PATH", help="A path of the upstream that /readyz asks for.")
    ] = None,
    pass_key: Annotated[
        bool | None, typer.Option("--pass-key/--no-pass-key", help="Show the key to the upstream. It is shown.")
    ] = None,
    work: Annotated[
        bool | None, typer.Option("--work/--no-work", help="Sweep and reap, and run what was accepted. It does.")
    ] = None,
    metrics: MetricsOption = None,
) -> None:
    """Guard a server in any language: a reverse proxy in front of it, until SIGTERM or SIGINT.

    Options can be in the environment, too: SEMEL_PROXY_UPSTREAM, SEMEL_PROXY_JWT_KEY, and so on; fields of the policy
    as SEMEL_PROXY_POLICY_RETENTION.
    """
    try:
        from semel.proxy.config import read  # noqa: PLC0415 - needs the extra semel[proxy]
        from semel.proxy.server import run  # noqa: PLC0415 - as above
        from semel.proxy.workers import set_up_logs  # noqa: PLC0415 - as above
    except ModuleNotFoundError as missing:
        if not is_of(missing, "aiohappyeyeballs", "aiohttp", "httptools", "multidict", "uvicorn", "yarl"):
            raise
        raise ConfigurationError(_NEEDED) from None
    set_up_logs()
    if upstream and len(upstream) > 1:
        raise ConfigurationError("--upstream is one server, and was given twice. For several, give a load balancer.")
    typed = {
        "upstream": upstream[0] if upstream else None,
        "store": named(store),
        "scope": scope,
        "listen": listen,
        "workers": workers,
        "trusted": trusted,
        "jwt_key": jwt_key,
        "jwt_audience": jwt_audience,
        "jwt_issuer": jwt_issuer,
        "cors_origins": cors_origin,
        "paths": path,
        "timeout": timeout,
        "drain": drain,
        "grace": grace,
        "check": check,
        "pass_key": pass_key,
        "work": work,
        "metrics": metrics,
    }
    settings = read(config, typed, store=f"sqlite:///{USUAL_FILE}")
    with served(settings.metrics, has_workers=settings.workers > 1):
        run(settings)
