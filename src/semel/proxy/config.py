"""What can be set of a proxy: values, from a TOML file, the environment and the command line, checked before anything
listens.

The command line comes first, and then the environment. Under ``[proxy]`` are its own options, under ``[policy]`` the
fields of ``Policy``.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

from semel.core.policy import Policy, PolicyFields
from semel.errors import ConfigurationError
from semel.proxy.place import COUNTED
from semel.proxy.scope import TRUSTED
from semel.work.plan import duration

LISTEN = "127.0.0.1:8080"

#: A policy's fields that a file can't hold: they are made of code.
_CODE = {"fingerprint", "key_from"}
_DURATIONS = {"lease", "retention", "wait", "max_response_time"}
#: Of any duration: a century.
_MAX_SECONDS = 100 * 365 * 86400
_PRESETS = {"ietf": Policy.ietf, "stripe": Policy.stripe}

#: After an upstream is lost, a proxy knows nothing of what it did; and how an upstream reads a request, it can't know.
_DEFAULTS = {"on_crash": "refuse", "fingerprint": COUNTED}

#: What can say that nothing was done.
_NO_EFFECT = frozenset(range(500, 600)) - {502, 504}
#: An origin as a browser sends it, which leaves out the port of the scheme. A sandboxed page sends "null", as any does.
_ORIGIN = re.compile(r"\*|(?!https://.*:443$|http://.*:80$)[a-z][a-z0-9+.-]*://[^\s/?#@A-Z,]+")

_GUARD_ONLY = 'Policy.mode can\'t be "atomic" in a proxy: it has no part in the transaction of the server behind it.'


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole proxy, as it was set. Every process of it is made from this."""

    upstream: str
    scope: str
    store: str
    policy: Policy
    listen: str = LISTEN
    workers: int = 1
    #: Networks of peers that may name the user of a request.
    trusted: tuple[str, ...] = TRUSTED
    #: The file of the key, or of the keys, that sign bearer tokens; or the URL at which they are published.
    jwt_key: str | None = None
    #: The audiences (``aud``), one of which a token must be for, and the issuers (``iss``) that it may be from.
    jwt_audience: tuple[str, ...] = ()
    jwt_issuer: tuple[str, ...] = ()
    #: The origins of pages that may read what the proxy answers by itself, such as https://shop.example; "*" is all.
    cors_origins: tuple[str, ...] = ()
    #: The statuses by which the upstream says that it has done nothing: the key is freed.
    no_effect: tuple[int, ...] = ()
    #: Patterns of the paths that are guarded; none: all.
    paths: tuple[str, ...] = ()
    #: How long the upstream may be silent.
    timeout: timedelta = timedelta(seconds=60)
    connect_timeout: timedelta = timedelta(seconds=5)
    #: How long an idle connection is kept. Servers close theirs after 2 seconds or more, and a request that meets such
    #: an end is lost: nothing tells whether it was carried out.
    keepalive: timedelta = timedelta(seconds=1)
    #: How many connections to the upstream each process has at most.
    connections: int = 256
    #: How long a client may take for the head of a request, or be silent in a body, or take nothing of its answer.
    client_timeout: timedelta = timedelta(seconds=60)
    #: How many connections of clients each process has at most. Past that, those that wait for longest are closed.
    client_connections: int = 4096
    #: A file of certificates to trust, for an upstream by https.
    upstream_ca: str | None = None
    #: A path of the upstream that says by its status whether it is well.
    check: str | None = None
    #: How long guarded requests are refused with 503, once it is told to stop, before it no longer listens.
    drain: timedelta = timedelta(0)
    #: How long it then waits for requests under way.
    grace: timedelta = timedelta(seconds=30)
    #: Whether the upstream is shown the key.
    pass_key: bool = True
    #: Whether each process also sweeps and reaps, and runs what was accepted.
    work: bool = True
    #: Where metrics are served, as the command line has it; None: nowhere.
    metrics: str | None = None
    healthz: str = "/healthz"
    readyz: str = "/readyz"

    def __post_init__(self) -> None:
        """Refuse what can't be."""
        if self.policy.mode == "atomic":
            raise ConfigurationError(_GUARD_ONLY)
        if self.policy.may_accept and self.scope.partition(":")[0] in {"jwt", "cookie"}:
            raise ConfigurationError(
                "A request that is accepted (202) is stored without its credentials, and run later: the upstream would "
                "not know its user. Accept requests with --scope header:NAME only, or take that from the policy."
            )
        if self.policy.may_accept and not self.work:
            raise ConfigurationError("Only the proxy can run what it has accepted (202): don't turn its work off.")
        if self.workers > 1 and self.store.startswith("memory:"):
            raise ConfigurationError(
                "memory:// is the memory of one process: with several workers, give another --store."
            )
        self._check_tokens()
        self._check_no_effect()
        self._check_values()

    def _check_tokens(self) -> None:
        if (self.jwt_audience or self.jwt_issuer) and self.jwt_key is None:
            raise ConfigurationError("--jwt-audience and --jwt-issuer need a --jwt-key: it verifies what a token says.")
        for name in ("jwt_audience", "jwt_issuer"):
            if not all(getattr(self, name)):
                raise ConfigurationError(f"{name} can't be empty: it is what the claim of a token has to be.")

    def _check_no_effect(self) -> None:
        if wrong := sorted(set(self.no_effect) - _NO_EFFECT):
            raise ConfigurationError(
                f"no_effect can't have {wrong[0]}: it has server errors (5xx), and neither 502 nor 504: a gateway that "
                'has lost its server does not know. on_crash = "rerun" under [policy] frees the key after those.'
            )
        if self.no_effect and self.policy.server_errors == "keep":
            raise ConfigurationError(
                'no_effect needs server_errors = "auto" under [policy]: with "keep", as in the preset "stripe", every '
                "server error is kept."
            )

    def _check_values(self) -> None:
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin) or (origin == "*" and len(self.cors_origins) > 1):
                raise ConfigurationError(
                    f"cors_origins can't have {origin!r}: write origins as browsers send them, https://shop.example or "
                    'http://localhost:3000, without a path and in lower case; or "*" alone.'
                )
        for name in ("workers", "connections", "client_connections"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} can't be {getattr(self, name)}: it is 1 or more.")
        for name in ("timeout", "connect_timeout", "client_timeout"):
            if not getattr(self, name):
                raise ConfigurationError(f"{name} can't be 0: nothing is answered in no time. Give a time such as 60s.")
        for name in ("healthz", "readyz", "check"):
            path = getattr(self, name)
            if path and not path.startswith("/"):
                raise ConfigurationError(f"{name} can't be {path!r}: a path starts with a slash.")


#: Which kind of value each option has in a file.
_TIMES = {each.name for each in fields(Settings) if each.type == "timedelta"}
_LISTS = {"trusted", "paths", "jwt_audience", "jwt_issuer", "cors_origins"}
_NUMBERS = {"workers", "connections", "client_connections"}
_SWITCHES = {"pass_key", "work"}
#: Options that the command line takes one at a time, and by the name of one.
_TYPED_AS = {"path": "paths", "cors_origin": "cors_origins"}
#: Those of a policy that have several values.
_COLLECTIONS = {"methods", "preferences", "keep", "store_headers", "omit_headers", "replay_headers"}

#: In front of an option in the environment, and of a field of the policy there.
PREFIX = "SEMEL_PROXY_"
_POLICY = "policy_"
#: Options that say who is believed. A variable that was forgotten elsewhere must not leave them out.
_IDENTIFYING = {"trusted", "jwt_key", "jwt_audience", "jwt_issuer"}
#: A variable of the environment, in the file.
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
#: What Kubernetes sets in every container of a namespace that has a service called "semel-proxy".
_KUBERNETES = re.compile(r"(.*_)?(service_(host|port(_.*)?)|port(_\d+_(tcp|udp|sctp)(_.*)?)?)")


def read(path: str | None, typed: Mapping[str, Any], *, store: str) -> Settings:
    """Return the settings of a file, of the environment, and those that were *typed*, of which the last count; None
    there stands for what was not typed.

    *store* is the one that is meant where none is named.
    """
    tables = _tables(path) if path is not None else {}
    options, rules = _set_in(os.environ)
    given = {"store": store} | _named(tables.get("proxy", {}), path) | options
    given |= {
        name: _option(name, each, f"--{name.replace('_', '-')}") for name, each in typed.items() if each is not None
    }
    return made(given, tables.get("policy", {}) | rules)


def made(given: Mapping[str, Any], rules: Mapping[str, Any]) -> Settings:
    """Return the settings of two tables: options by name, and the fields of a policy."""
    names = [each.name for each in fields(Settings) if each.name != "policy"]
    for name in given:
        if name not in names:
            raise ConfigurationError(f"[proxy] has no option {name!r}.{_hint(name, names)}")
    for name in ("upstream", "scope"):
        if not given.get(name):
            raise ConfigurationError(
                f"Which {name}? Give --{name}, or {PREFIX}{name.upper()} in the environment, or {name} = … under "
                "[proxy] in --config FILE."
            )
    options = {name: _option(name, each, f"[proxy] {name}") for name, each in given.items()}
    return Settings(**options, policy=policy(rules))


def policy(table: Mapping[str, Any]) -> Policy:
    """Return the policy that a table says."""
    said = {name.replace("-", "_"): each for name, each in table.items()}
    preset = said.pop("preset", "ietf")
    if preset not in _PRESETS:
        raise ConfigurationError(f'[policy] preset can\'t be {preset!r}: it is "ietf" or "stripe".')
    if code := sorted(_CODE & said.keys()):
        raise ConfigurationError(f"[policy] can't set {code[0]}: it is made of code. Use the middleware for that.")
    wanted: dict[str, Any] = _DEFAULTS | {
        name: _duration(f"[policy] {name}", each) if name in _DURATIONS else _plain(each) for name, each in said.items()
    }
    made: PolicyFields = wanted  # type: ignore[assignment]  # a name that is wrong is told by the policy itself
    return _PRESETS[preset](**made)


def _plain(each: Any) -> Any:
    return tuple(each) if isinstance(each, list) else each


def _tables(path: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config: {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--config: {path}: {error}.") from None
    for name, table in tables.items():
        if name not in {"proxy", "policy"} or not isinstance(table, dict):
            raise ConfigurationError(f"--config: {path} has tables [proxy] and [policy], not {name!r}.")

    def variable(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigurationError(f"--config: {path}: the variable {found[1]} is not set in the environment.")
        return os.environ[found[1]]

    def expanded(each: Any) -> Any:
        if isinstance(each, list):
            return [expanded(one) for one in each]
        return _VARIABLE.sub(variable, each) if isinstance(each, str) else each

    return {name: {key: expanded(each) for key, each in table.items()} for name, table in tables.items()}


def _set_in(environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options and the fields of a policy that are set there. What is empty is not set, as a rule."""
    options: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    names = {each.name for each in fields(Settings)} - {"policy", "store"}
    for variable, text in environment.items():
        spelled = variable.removeprefix(PREFIX).lower()
        name = _TYPED_AS.get(spelled, spelled)
        if not variable.startswith(PREFIX) or name == "config":
            continue
        if not text and name in _IDENTIFYING:
            raise ConfigurationError(f"{variable} is empty: it says who is believed. Give it a value, or take it away.")
        if not text:
            continue
        if name in options:
            raise ConfigurationError(f"{variable}: the environment has {name!r} twice, in two spellings.")
        if name.startswith(_POLICY):
            field = name.removeprefix(_POLICY)
            rules[field] = _rule(field, text, variable)
        elif name in names:
            options[name] = _option(name, _in_text(name, text), variable)
        elif name == "store":
            raise ConfigurationError(f"{variable}: the store is set by SEMEL_STORE, as for every command.")
        elif not _KUBERNETES.fullmatch(name):
            raise ConfigurationError(f"{variable}: there is no such option.{_meant(variable, names)}")
    return options, rules


def _rule(field: str, text: str, variable: str) -> Any:
    """Return what a field of the policy has in the environment as a file would have it."""
    found = [_plainly(each) for each in _parts(text)] if field in _COLLECTIONS else _plainly(text)
    return _duration(variable, found) if field in _DURATIONS else found


def _meant(variable: str, names: set[str]) -> str:
    """Say which variable may be meant by one that is no option of these *names*."""
    switch = variable.replace("_NO_", "_", 1)
    if switch != variable and switch.removeprefix(PREFIX).lower() in _SWITCHES:
        return f" Write {switch}=false."
    return _hint(variable, sorted(PREFIX + each.upper() for each in names | _TYPED_AS.keys()))


def _in_text(name: str, text: str) -> Any:
    """Return what an option has in the environment as a file would have it."""
    if name in _LISTS:
        return _parts(text)
    if name == "no_effect":
        return [_plainly(each) for each in _parts(text)]
    return _plainly(text) if name in _NUMBERS | _SWITCHES | _TIMES else text


def _parts(text: str) -> list[str]:
    return [each.strip() for each in text.split(",")]


def _plainly(text: str) -> Any:
    """Return a number, or true or false, where *text* is one. Many programs set True in an environment."""
    try:
        found = tomllib.loads(f"found = {text.lower()}")["found"]
    except tomllib.TOMLDecodeError:
        return text
    return found if isinstance(found, bool | int | float) else text


def _named(table: Mapping[str, Any], path: str | None) -> dict[str, Any]:
    """Return the options of a file by their names here. A file may spell them as the command line does."""
    given: dict[str, Any] = {}
    for spelled, each in table.items():
        plain = spelled.replace("-", "_")
        name = _TYPED_AS.get(plain, plain)
        if name in given:
            raise ConfigurationError(f"--config: {path} has {name!r} twice under [proxy], in two spellings.")
        given[name] = each
    return given


def _option(name: str, each: Any, where: str) -> Any:
    """Return a value as ``Settings`` has it; *where* is what set it."""
    if name in _TIMES:
        return _duration(where, each)
    if name == "no_effect":
        if not isinstance(each, list | tuple) or not all(type(one) is int for one in each):
            raise ConfigurationError(f"{where} can't be {each!r}: it is a list of statuses, such as [503].")
        return tuple(each)
    if name in _LISTS:
        many = (each,) if isinstance(each, str) else each
        if not isinstance(many, list | tuple) or not all(isinstance(one, str) for one in many):
            raise ConfigurationError(f"{where} can't be {each!r}: it is a list of strings.")
        return tuple(many)
    wanted, spelled = (
        (int, "a number") if name in _NUMBERS else (bool, "true or false") if name in _SWITCHES else (str, "a string")
    )
    if not isinstance(each, wanted) or (wanted is int and isinstance(each, bool)):
        raise ConfigurationError(f"{where} can't be {each!r}: it is {spelled}.")
    return each


def _duration(where: str, each: Any) -> timedelta:
    """Return a number of seconds, or a string such as "30s", as a duration."""
    if isinstance(each, timedelta):
        return each
    if isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each <= _MAX_SECONDS:
        return timedelta(seconds=each)
    if isinstance(each, str):
        if each.strip() in {"0", "0s"}:
            return timedelta(0)
        try:
            return duration(each)
        except ConfigurationError as wrong:
            raise ConfigurationError(f"{where}: {wrong}") from None
    raise ConfigurationError(f'{where} can\'t be {each!r}: it is a number of seconds, or a string such as "30s".')


def _hint(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(names)}."
