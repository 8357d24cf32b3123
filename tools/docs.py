"""Keeps the documentation true: writes what the code says into the pages, and finds what points nowhere.

    python tools/docs.py            rewrite the generated blocks and the included programs
    python tools/docs.py --check    change nothing; list what is stale, dead or unlisted

A block is `<!-- generated: NAME -->` or `<!-- include: PATH -->` up to `<!-- end -->`; the names are in `GENERATED`.
No prose is written here, except what belongs to a row of a table.
"""

import argparse
import dataclasses
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import typer.main

import semel
from semel import errors
from semel.cli.app import app
from semel.core import events, policy, replay, state
from semel.core.body_hash import BodyHash
from semel.core.fingerprint import Fingerprinter
from semel.core.outcome import ENDED, OUTCOMES
from semel.core.policy import Policy
from semel.core.vendors import VENDORS
from semel.doctor import CHECKS as EXAMINATIONS
from semel.doctor import Limits
from semel.doctor.model import MEBIBYTE
from semel.telemetry import logs
from semel.telemetry.metrics import METRICS
from semel.telemetry.opentelemetry import ATTRIBUTES, SPANS
from semel.verify.runner import CHECKS

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/README.md"
PROBLEMS = "docs/reference/problems.md"
END = "<!-- end -->"

_BLOCK = re.compile(rf"^<!-- (generated|include): (\S+) -->\n(.*?)^{END}$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_FIELD = re.compile(r"^((?: {4}#: .*\n)*) {4}(\w+): ", re.MULTILINE)
_LANGUAGES = {".py": "python", ".sql": "sql"}

# In the order in which a request meets them: the situation, and whether the handler ran for *this* request.
SITUATIONS: dict[type[errors.Refusal], tuple[str, str]] = {
    errors.KeyMissing: ("no key, and `required=True`; or `key_from` can make none of the body", "no"),
    errors.KeyInvalid: ("a key that can't be read: empty, too long, sent twice, half quoted", "no"),
    errors.ScopeMissing: ("`scope` returned nothing", "no"),
    errors.BodyTooLarge: ("the request body is over `max_request_body`", "no"),
    errors.BodyIncomplete: ("the request body ended before its declared length (WSGI)", "no"),
    errors.ShuttingDown: ("the server was told to stop, and accepts nothing new", "no"),
    errors.StoreUnavailable: ("the store can't be reached, has no table, or is read-only", "no"),
    errors.KeyReused: ("the key was used for another request", "no"),
    errors.InProgress: ("the first request with this key still runs", "no"),
    errors.NotReplayable: (
        "the first answer was too large, too slow or a stream, so it was not kept; or it was erased",
        "no",
    ),
    errors.OutcomeUnknown: ('an earlier worker died while it ran, and `on_crash="refuse"`; or it is parked', "no"),
    errors.KeyExpired: ('the key is past retention, and `late="refuse"`', "no"),
    errors.OperationNotFound: ("a status URL that names no operation of this user", "no"),
    errors.OperationExpired: ("a status URL, past the retention of its operation", "no"),
    errors.OperationFailed: ("the handler raised an exception", "yes"),
    errors.OperationUnfinished: (
        "a handler with steps raised an exception, or the store failed between two: what it has done is recorded",
        "yes",
    ),
    errors.NoEffect: ("the handler raised `NoEffect`, and `server_errors` is not `keep`", "yes, without effect"),
    errors.AnswerNotStored: ("the handler ran, and its answer could not be stored", "yes"),
}

# What a caller of the API is to do about it, in words that need no knowledge of how the API is built.
ADVICE: dict[type[errors.Refusal], str] = {
    errors.KeyMissing: "Send a key.",
    errors.KeyInvalid: "Send the key as shown above; `detail` says what is wrong with it.",
    errors.ScopeMissing: "Authenticate, then send the same request with the same key.",
    errors.BodyTooLarge: "Send less.",
    errors.BodyIncomplete: "Send the same request again, whole.",
    errors.ShuttingDown: "Send the same request again, after `Retry-After`.",
    errors.StoreUnavailable: "Send the same request again, after `Retry-After`.",
    errors.KeyReused: "You used this key for another request. Use a new key for a new operation.",
    errors.InProgress: "Your first request is still running. Send the same one again, after `Retry-After`.",
    errors.NotReplayable: "The operation is done, and its answer can't be repeated. Look it up; start no new one.",
    errors.OutcomeUnknown: "We can't tell whether it happened. Do not start a new one; ask us.",
    errors.KeyExpired: "The key is too old. Look up how the operation ended before you start a new one.",
    errors.OperationNotFound: "Ask at the status URL that came with the `202`, as the user who sent the request.",
    errors.OperationExpired: "The answer is no longer kept. Look up how it ended before you start a new one.",
    errors.OperationFailed: "It failed, and may have had an effect. Check before you start a new one, with a new key.",
    errors.OperationUnfinished: "It stopped half-way. Send the same request again, after `Retry-After`: it goes on.",
    errors.NoEffect: "Nothing happened. Send the same request again, after `Retry-After`.",
    errors.AnswerNotStored: "It may have happened. Send the same request again, with the same key.",
}

# No client is sent these by Semel: what is stored past its retention, for people to look at; and what is raised to the
# application, which answers for it.
UNSENT = {errors.Abandoned.slug, errors.RowDiffers.slug}

# What the sender of a webhook is answered, and when.
WEBHOOKS: dict[type[errors.Refusal], str] = {
    errors.WebhookMalformed: "a header of the signature is missing, or can't be read; or the event has no id",
    errors.WebhookTooOld: "it was sent more than `tolerance` ago, or as far in the future",
    errors.SignatureInvalid: "none of your secrets has signed it",
    errors.BodyTooLarge: "it is larger than `max_body`",
    errors.WebhookReused: "another body came under its id before, and was handled or tried",
    errors.WebhookBusy: "another delivery of it is being handled at this moment",
    errors.WebhookParked: "it has failed too often, and waits for an operator",
}

# What the proxy answers by itself, beside what any guard does: when, and what was done.
PROXY: dict[type[errors.Refusal], tuple[str, str]] = {
    errors.RequestAmbiguous: (
        "two servers could read the request differently, or its target is no path",
        "nothing was sent",
    ),
    errors.IdentityRefused: (
        "what names the user was sent twice, or by a peer that is not trusted",
        "nothing was sent",
    ),
    errors.Unauthenticated: (
        "with a key and `--scope jwt:…`: no bearer token, or one that is not accepted; with `WWW-Authenticate`",
        "nothing was sent",
    ),
    errors.UpstreamUnreachable: (
        "no connection to the upstream could be made",
        "nothing was sent, and the key is free",
    ),
    errors.UpstreamLost: (
        "without a key: the upstream broke off, or its answer can't be read",
        "it may have been carried out",
    ),
    errors.UpstreamTimeout: (
        "without a key: the upstream was silent for longer than `--timeout`",
        "it may have been carried out",
    ),
    errors.OutcomeUnknown: (
        "with a key: the upstream was lost or silent after the request was sent, or answered `502` or `504`",
        "it may have been carried out; it is parked, and not sent again",
    ),
}  # fmt: skip - a row of the table a line

# What the source does not say beside the name itself.
NOTES = {
    "CANT_TELL": "What `verify` returns when it can't be known whether an effect happened.",
    "FINAL_STATUSES": "The statuses that are kept by default.",
    "NOT_APPLIED": "What `verify` returns when an effect did not happen.",
    "SINGLE_TENANT": "The scope of an API that has one user only, said aloud.",
    "__version__": "The version, as a string.",
    "key": "The key.",
}


#: Values of a label that are listed with it; those of more have a table of their own.
MAX_LISTED = 8


def statuses() -> Iterator[str]:
    """The answers that are Semel's own, in both dialects."""
    yield from _head("situation", "IETF", "problem type", "Stripe", "`type` / `code`", "retry as is?", "handler run?")
    for error, (situation, ran) in SITUATIONS.items():
        slug = f"[`{error.slug}`](problems.md#{error.slug})"
        stripe = f"`{error.stripe_type}`" + (f" / `{error.stripe_code}`" if error.stripe_code else "")
        retry = "yes" if error.retryable else "no"
        yield _row(situation, error.status, slug, error.stripe_status or error.status, stripe, retry, ran)


def advice() -> Iterator[str]:
    """The same answers, as a caller of the API needs them."""
    yield from _head("status", "`code`", "what to do")
    for error, what_to_do in ADVICE.items():
        yield _row(error.status, f"`{error.slug}`", what_to_do)


def problem(name: str) -> Iterator[str]:
    """One problem type: its heading, and the facts that `errors.py` knows."""
    error = next(each for each in SITUATIONS if each.slug == name)
    yield f"## {name}\n"
    yield from _head("title", "status", "Stripe's status", "`retryable`", "handler run?")
    status = error.stripe_status or error.status
    yield _row(error.title, error.status, status, str(error.retryable).lower(), SITUATIONS[error][1])
    yield f"\n> {error().detail}"


def fields_of(cls: type[Any], *presets: Any) -> Iterator[str]:
    """The settings of a frozen dataclass, with the comments that explain them in its source."""
    comments = dict(_comments(inspect.getsource(cls)))
    yield from _head("field", "default", *["`Policy.stripe()`"] * (len(presets) - 1), "what it says")
    for field in dataclasses.fields(cls):
        if not field.name.startswith("_"):
            values = [_spelled(getattr(preset, field.name)) for preset in presets]
            values[1:] = ["" if value == values[0] else value for value in values[1:]]
            choices = " or ".join(f'`"{each}"`' for each in get_args(policy._CHOICES.get(field.name)))  # noqa: SLF001 - documented here
            said = " ".join(filter(None, [comments[field.name], choices and f"({choices})"]))
            yield _row(f"`{field.name}`", *values, said)


def proxied() -> Iterator[str]:
    """What the proxy answers by itself."""
    yield from _head("status", "`code`", "when", "what was done")
    for error, (when, done) in PROXY.items():
        yield _row(error.status, f"`{error.slug}`", when, done)


def webhooks() -> Iterator[str]:
    """What the sender of a webhook is answered, where it is not 200."""
    yield from _head("status", "`code`", "when")
    for error, when in WEBHOOKS.items():
        yield _row(error.status, f"`{error.slug}`", when)


def vendors() -> Iterator[str]:
    """The vendors whose headers are known."""
    yield from _head("`Policy.vendor(…)`", "header", "longest key")
    for name, each in VENDORS.items():
        yield _row(f'`"{name}"`', f"`{each.header}`", each.max_key_length)


def outcomes() -> Iterator[str]:
    """What report mode may say of a request."""
    yield from _head("outcome", "what enforcing would have made of it")
    for name, meaning in OUTCOMES.items():
        yield _row(f"`{name}`", meaning)


def states() -> Iterator[str]:
    """The state machine, as Mermaid draws it. A record that is not there is [*]."""
    yield "```mermaid\nstateDiagram-v2"
    for before, transitions in state.TRANSITIONS.items():
        for event, after in transitions.items():
            yield f"    {before or '[*]'} --> {after or '[*]'}: {event}"
    yield "```"


def headers() -> Iterator[str]:
    """Which headers a replay repeats, and which it never does."""
    repeated = sorted(name.decode() for name in replay.REPLAYED_HEADERS)
    for what, names in (("Repeated", repeated), ("Never, even when asked for", sorted(policy.NEVER_REPLAYED))):
        yield f"- {what}: " + ", ".join(f"`{name}`" for name in names) + "."


def happenings() -> Iterator[str]:
    """What is logged."""
    yield from _head("`semel_event`", "level", "fields", "what it means")
    for event, level in logs._LEVELS.items():  # noqa: SLF001 - this table is what is documented
        logged = (field.name for field in dataclasses.fields(event))
        names = ", ".join(f"`semel_{name}`" for name in logged if name not in getattr(event, "unlogged", ()))
        yield _row(f"`{event.__name__}`", logging.getLevelName(level), names, _said(event))


def told() -> Iterator[str]:
    """All events."""
    yield from _head("event", "logged as", "fields", "what it means")
    for event in get_args(events.Event):
        names = ", ".join(f"`{field.name}`" for field in dataclasses.fields(event))
        level = logs._LEVELS.get(event)  # noqa: SLF001 - as above
        yield _row(f"`{event.__name__}`", logging.getLevelName(level) if level else "", names, _said(event))


def ended() -> Iterator[str]:
    """How a request can end."""
    yield from _head("outcome", "what it means")
    for name, meaning in ENDED.items():
        yield _row(f"`{name}`", meaning)


def measured() -> Iterator[str]:
    """All metrics."""
    yield from _head("Prometheus", "OpenTelemetry", "kind", "labels", "what it is")
    for metric in METRICS:
        labels = [f"`{name}`" for name in metric.labels]
        if metric.closed and len(metric.closed) <= MAX_LISTED:
            labels[-1] += ": " + ", ".join(metric.closed)
        yield _row(f"`{metric.prometheus}`", f"`{metric.opentelemetry}`", metric.kind, "; ".join(labels), metric.help)


def described(table: dict[str, str]) -> Iterator[str]:
    """A table of names."""
    yield from _head("name", "what it is")
    for name, meaning in table.items():
        yield _row(f"`{name}`", meaning)


def public() -> Iterator[str]:
    """What `import semel` offers."""
    yield from _head("name", "what it is")
    for name in semel.__all__:
        yield _row(f"`semel.{name}`", NOTES.get(name) or _said(getattr(semel, name)))


def commands(command: Any, name: str) -> Iterator[str]:
    """Every command of the command line, with its arguments."""
    if hasattr(command, "commands"):
        for each in command.commands.values():
            yield from commands(each, f"{name} {each.name}")
        return
    yield f"### {name}\n\n{(command.help or '').strip()}\n"
    parameters = [each for each in command.params if each.name != "help"]
    yield from _head("argument", "what it says") if parameters else ()
    for each in parameters:
        spelled = " ".join(filter(None, [each.opts[0] if each.param_type_name == "option" else None, each.metavar]))
        usual = f" ({each.default} if not given)" if isinstance(each.default, str | int) and each.default else ""
        yield _row(f"`{spelled}`", (getattr(each, "help", None) or NOTES[each.name]) + usual)
    yield ""


def checks() -> Iterator[str]:
    """What `semel verify` checks."""
    yield from _head("check", "rule")
    for each in CHECKS:
        yield _row(f"`{each.name}`", each.rule)


def examinations() -> Iterator[str]:
    """What `semel doctor` checks, by subject; each check has a heading of its own to link to."""
    for subject, several in itertools.groupby(EXAMINATIONS, key=lambda each: each.subject):
        yield f"## {subject}\n"
        for each in several:
            yield f"### {each.name}\n"
            yield f"**{each.title}.** {each.severity.capitalize()}. {each.why}\n"
            yield f"```text\n{each.mend}\n```\n"
            yield f"[More](../{each.page})\n"


def limits() -> Iterator[str]:
    """From where on something is wrong."""
    comments = dict(_comments(inspect.getsource(Limits)))
    yield from _head("limit", "value", "why")
    why = ""
    for field in dataclasses.fields(Limits):
        # One comment may be about several fields.
        why = comments[field.name] or why
        yield _row(f"`{field.name}`", _measured(getattr(Limits(), field.name)), why)


GENERATED: dict[str, Callable[[], Iterable[str]]] = {
    "statuses": statuses,
    "advice": advice,
    "policy": lambda: fields_of(Policy, Policy.ietf(), Policy.stripe()),
    "fingerprinter": lambda: fields_of(Fingerprinter, Fingerprinter()),
    "body-hash": lambda: fields_of(BodyHash, BodyHash(fields=["amount"], window=timedelta(minutes=10))),
    "vendors": vendors,
    "webhooks": webhooks,
    "proxy": proxied,
    "outcomes": outcomes,
    "states": states,
    "headers": headers,
    "unkept": lambda: [", ".join(map(str, sorted({*range(200, 500)} - policy.FINAL_STATUSES)))],
    "happenings": happenings,
    "events": told,
    "ended": ended,
    "metrics": measured,
    "spans": lambda: described(SPANS),
    "attributes": lambda: described(ATTRIBUTES),
    "checks": checks,
    "examinations": examinations,
    "limits": limits,
    "public": public,
    "commands": lambda: commands(typer.main.get_command(app), "semel"),
    **{f"problem/{each.slug}": lambda slug=each.slug: problem(slug) for each in SITUATIONS},  # type: ignore[misc]
}


def refreshed(text: str, root: Path = ROOT) -> str:
    """Return a page with every block as it should be."""

    def fresh(match: re.Match[str]) -> str:
        kind, name, _ = match.groups()
        body = _included(root / name) if kind == "include" else "\n".join(GENERATED[name]()).rstrip("\n")
        return f"<!-- {kind}: {name} -->\n{body}\n{END}"

    return _BLOCK.sub(fresh, text)


def stale(page: Path, root: Path) -> Iterator[str]:
    """Name the blocks of *page* that no longer say what the code says."""
    text = page.read_text()
    try:
        fresh = refreshed(text, root)
    except (KeyError, OSError) as missing:
        yield f"a block names what is not there: {missing}"
    else:
        pairs = zip(_BLOCK.finditer(text), _BLOCK.finditer(fresh), strict=True)
        yield from (f"stale block {old[2]}: run python tools/docs.py" for old, new in pairs if old[0] != new[0])


def dead_links(page: Path) -> Iterator[str]:
    """Name the relative links of *page* that lead to no file, or to no heading in it."""
    for target in _links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"dead link {target}"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"dead anchor {target}"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, count in found.items() for n in range(count + 1)}


def unlisted(root: Path) -> Iterator[str]:
    """Name the pages that the index does not link to."""
    index = root / INDEX
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in _links(index)} | {index}
    for page in sorted((root / "docs").rglob("*.md")):
        if page not in linked:
            yield f"{page.relative_to(root)}: not linked from {INDEX}"


def uncovered(root: Path) -> Iterator[str]:
    """Name the refusals that the tables of this file, or the page of problems, leave out."""
    slugs: set[str] = {vars(each).get("slug", "refused") for each in vars(errors).values() if isinstance(each, type)}
    shown = set(re.findall(r"generated: problem/(\S+) ", (root / PROBLEMS).read_text()))
    told = shown & {each.slug for each in SITUATIONS} & {each.slug for each in ADVICE}
    received = {each.slug for each in (*WEBHOOKS, *PROXY)}
    untold = sorted(slugs - told - received - UNSENT - {"refused"})
    yield from (f"{PROBLEMS}, SITUATIONS or ADVICE: nothing about {slug}" for slug in untold)


def pages(root: Path) -> list[Path]:
    """Return every page: those at the root of the repository, and those in docs/."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def faults(root: Path) -> list[str]:
    """List what is wrong with the pages under *root*."""
    found = [(page, fault) for page in pages(root) for fault in (*stale(page, root), *dead_links(page))]
    return [*(f"{page.relative_to(root)}: {fault}" for page, fault in found), *unlisted(root)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; list what is wrong")
    if not parser.parse_args().check:
        for page in pages(ROOT):
            page.write_text(refreshed(page.read_text()))
    found = [*faults(ROOT), *uncovered(ROOT)]
    sys.stderr.writelines(f"{fault}\n" for fault in found)
    return bool(found)


def _included(path: Path) -> str:
    return f"```{_LANGUAGES[path.suffix]}\n{path.read_text().strip()}\n```"


def _links(page: Path) -> list[str]:
    text = _INLINE_CODE.sub("", _FENCE.sub("", page.read_text()))
    return [target for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def _comments(source: str) -> Iterator[tuple[str, str]]:
    for said, name in _FIELD.findall(source):
        yield name, " ".join(said.replace("#:", "").replace("``", "`").split())


def _measured(value: object) -> str:
    match value:
        case timedelta():
            return _spelled(value)
        case int() if value % MEBIBYTE == 0:
            return f"{value // MEBIBYTE} MiB"
        case int():
            return f"{value:,}"
        case _:
            return f"{value:g}"


def _spelled(value: object) -> str:
    match value:
        case timedelta():
            return f"{value.total_seconds():g} s" if value < timedelta(hours=1) else f"{value / timedelta(hours=1):g} h"
        case frozenset() if value == policy.FINAL_STATUSES:
            return "[`FINAL_STATUSES`](http.md#which-answers-are-kept)"
        case frozenset():
            return ", ".join(f"`{each}`" for each in sorted(value, reverse=True)) or "none"
        case Fingerprinter():
            return "`Fingerprinter()`"
        case str():
            return f'`"{value}"`'
        case _:
            return f"`{value!r}`"


def _said(thing: Any) -> str:
    return " ".join((thing.__doc__ or "").split("\n\n", maxsplit=1)[0].split()).replace("``", "`")


def _head(*columns: object) -> Iterator[str]:
    yield _row(*columns)
    yield "|" + "---|" * len(columns)


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
