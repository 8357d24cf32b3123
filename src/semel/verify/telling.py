"""What was sent and what came, in words and as a line for a shell. Credentials are left out, unless they are asked for.
Nothing is sent or judged here.
"""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from semel.core.credentials import looks_secret
from semel.verify.message import WIRE, Answer, Outcome, Request

#: Characters of a body that are shown: enough to recognise it.
MAX_SHOWN = 160
#: A body that is longer is not put into a line for a shell.
MAX_PASTED = 2000
#: Characters of a body that are looked at for what is shown.
MAX_READ = 64 * 1024
#: Different outcomes of a race that are shown.
MAX_TOLD = 4
MIN_SECRET = 4
#: Prints a UUID, on macOS and on Linux.
FRESH = "uuidgen 2>/dev/null || cat /proc/sys/kernel/random/uuid"
HIDDEN = "***"
#: Sent unless others are given. curl has its own.
OWN_HEADERS = (("Accept", "*/*"), ("User-Agent", "semel-verify"))
#: Headers of an answer that say something about retries.
TELLING = ("idempotent-replayed", "retry-after", "location", "etag", "set-cookie")

#: Members of an error that have its words.
WORDS = ("detail", "message", "error_description", "error", "title")

_UNPRINTABLE = re.compile(r"[^ -~\u00a0-\u2000\u2010-\u2027\u2030-\ud7ff\U00010000-\U0001ffff]")
_SECRET_QUERY = re.compile(r"([?&][^=&]*(?:key|token|secret|passw|sig|auth)[^=&]*=)[^&#]*", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_SCHEMES = frozenset({"Bearer", "Basic", "Digest", "Token"})
_NO_NAME = re.compile(r"[^A-Za-z0-9]+")
_NOTHING = re.compile(r"(?!)")


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that were sent one by one, or all at once, and what came."""

    requests: tuple[Request, ...]
    outcomes: tuple[Outcome, ...]
    is_race: bool = False
    #: What else there is to say: that the client hung up, or that the server was restarted.
    note: str = ""
    #: Seconds that were waited, in a step without requests.
    pause: float = 0.0


class Teller:
    """Tells steps, for one server."""

    def __init__(self, base: str, *, key_header: str, shows_credentials: bool = False) -> None:
        self.base = base
        self._key_header = key_header.lower()
        self._shows = shows_credentials
        self._values: set[str] = set()
        self._hidden = _NOTHING
        #: What stands for a credential in a line for a shell, by its header and its value.
        self._variables: dict[tuple[str, str], str] = {}

    def is_secret(self, name: str) -> bool:
        """Whether the header *name* holds a credential."""
        lowered = name.lower()
        return lowered != self._key_header and looks_secret(lowered)

    def learn(self, request: Request) -> None:
        """Remember the credentials of *request*, so that they are left out wherever they turn up."""
        for name, value in request.headers:
            if self.is_secret(name):
                self._variables.setdefault((name.lower(), value), self._variable(name))
                cookies = [each.partition("=")[2].strip() for each in value.split(";")] if "=" in value else []
                self.hide(value, *value.split(), *cookies, *_pair(value))

    def hide(self, *secrets: str) -> None:
        """Leave these out wherever they turn up, in any of the spellings in which an answer may repeat them."""
        new = {each for each in secrets if len(each) >= MIN_SECRET and each not in _SCHEMES} - self._values
        if new:
            self._values |= new
            longest_first = sorted(self._values, key=lambda each: (-len(each), each))
            self._hidden = re.compile("|".join(map(_spellings, longest_first)))

    def _variable(self, name: str) -> str:
        """Return the name of a variable for one more value of the header *name*: a second principal has its own."""
        known = sum(of == name.lower() for of, _ in self._variables)
        return ("OTHER_" * known) + _NO_NAME.sub("_", name).upper()

    def sent(self, steps: Sequence[Step]) -> str:
        """Say what was sent, one line for each step."""
        return "\n".join(f"{number}. {self._sent(step)}" for number, step in enumerate(steps, 1))

    def received(self, steps: Sequence[Step]) -> str:
        """Say what came, one line for each step."""
        return "\n".join(f"{number}. {self._received(step)}" for number, step in enumerate(steps, 1))

    def curl(self, steps: Sequence[Step]) -> str:
        """Return one line for a shell that sends the same."""
        line = "; ".join(self._line(step) for step in _joined(steps) if step.requests or step.pause)
        return self._with_fresh_keys(line, [request for step in steps for request in step.requests])

    def clean(self, text: str) -> str:
        """Return *text* without the credentials of requests that were sent."""
        if not self._shows:
            text = self._hidden.sub(HIDDEN, text)
            text = _SECRET_QUERY.sub(rf"\1{HIDDEN}", text)
        return text

    def quoted(self, answer: Answer) -> str:
        """Return what *answer* says in words, in one line; "" if it says nothing."""
        content = answer.json()
        if isinstance(content, dict):
            content = next((content[name] for name in WORDS if content.get(name)), "")
            content = content.get("message", "") if isinstance(content, dict) else content
        elif answer.media_type == "text/plain":
            content = answer.body[:MAX_READ].decode(errors="replace")
        text = " ".join(self.clean(content if isinstance(content, str) else "").split())
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"

    def _with_fresh_keys(self, line: str, requests: Sequence[Request]) -> str:
        """Put variables in place of the keys: under a key that was used, nothing would run again."""
        headers = [header for each in requests for header in each.headers]
        values = " ".join(value for name, value in headers if name.lower() == self._key_header)
        keys = list(dict.fromkeys(_UUID.findall(values)))
        if len({each.lower() for each in keys}) < len(keys):
            return line  # Two that differ in case only are what this is about.
        names = ["K"] if len(keys) == 1 else [f"K{number}" for number in range(1, len(keys) + 1)]
        for name, key in zip(names, keys, strict=True):
            line = line.replace(key, f"'${name}'")  # All headers are in single quotes.
        return " ".join([*(f"{name}=$({FRESH});" for name in names), line])

    def _sent(self, step: Step) -> str:
        kinds = [(each, len(list(same))) for each, same in groupby(step.requests)]
        parts = [self._described(request) + (f" ({count} times)" if count > 1 else "") for request, count in kinds]
        text = " + ".join(parts) + (", all at once" if step.is_race else "")
        return self.clean(" ".join(filter(None, [text, step.note and f"[{step.note}]"])))

    def _described(self, request: Request) -> str:
        keys = [f"{name}: {self._shown(value)}" for name, value in request.headers if name.lower() == self._key_header]
        said = [f"{request.method} {request.target}", *(keys or ["no key"])]
        if request.body:
            said.append(self._body(request.body))
        if request.is_chunked:
            said.append("chunked")
        if request.expects:
            said.append("Expect: 100-continue")
        return ", ".join(said)

    def _received(self, step: Step) -> str:
        told = [self._told(each) for each in step.outcomes]
        counted = {each: told.count(each) for each in told}
        shown = [f"{count} times {each}" if count > 1 else each for each, count in counted.items()]
        more = [f"and {len(shown) - MAX_TOLD} others"] if len(shown) > MAX_TOLD else []
        return "; ".join(shown[:MAX_TOLD] + more) or "-"

    def _shown(self, text: str) -> str:
        # First: what is left of a credential that was cut would not be recognised.
        safe = _UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", self.clean(text))
        return safe if len(safe) <= MAX_SHOWN else f"{safe[:40]}… ({len(safe)} characters)"

    def _cookie(self, value: str) -> str:
        return f"{self._shown(value.partition('=')[0])}={HIDDEN}"

    def _body(self, body: bytes) -> str:
        try:
            text = body.decode()
        except UnicodeDecodeError:
            return f"{len(body)} bytes that are not text"
        text = re.sub(r" {4,}", " … ", self.clean(text.strip()[:MAX_READ]))  # As in ``_shown``.
        text = _UNPRINTABLE.sub(lambda match: " " if match[0] in "\r\n\t" else f"\\x{ord(match[0]):02x}", text)
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
        return shown if len(body) <= MAX_SHOWN else f"{shown} ({len(body)} bytes)"

    def _told(self, outcome: Outcome) -> str:
        if not isinstance(outcome, Answer):
            return f"no answer: {self.clean(outcome.reason)}"
        said = [str(outcome.status), self._shown(outcome.media_type)]
        for name in TELLING:
            for value in outcome.all(name):
                said.append(f"{name}: {self._cookie(value) if name == 'set-cookie' else self._shown(value)}")  # noqa: PERF401 - two loops in one line are harder to read
        if outcome.body:
            said.append(self._body(outcome.body))
        return self.clean(", ".join(filter(None, said)))

    def _line(self, step: Step) -> str:
        if step.pause:
            return f"sleep {math.ceil(step.pause)}"
        end = " &" if step.is_race else ";"
        lines = []
        for request, same in groupby(step.requests):
            count, line = len(list(same)), self._curl(request)
            lines.append(f"for i in $(seq {count}); do {line}{end} done;" if count > 1 else f"{line}{end}")
        return " ".join([*lines, "wait"] if step.is_race else lines).rstrip(";")

    def _curl(self, request: Request) -> str:
        words = ["curl -si"] if request.method != "HEAD" else ["curl -sI"]
        if request.method not in {"GET", "HEAD"}:
            words.append(f"-X {request.method}")
        words.append(shlex.quote(self.clean(self.base + request.target)))
        words += [f"-H {self._header(*each)}" for each in request.headers if each not in OWN_HEADERS]
        if request.is_chunked:
            words.append("-H 'Transfer-Encoding: chunked'")
        if request.expects:
            words.append("-H 'Expect: 100-continue'")
        if not request.body:
            return " ".join(words)
        if len(request.body) > MAX_PASTED:
            return " ".join([*words, "--data-binary @BODY"])
        try:
            text = request.body.decode()
        except UnicodeDecodeError:
            text = "\0"
        if text.isprintable() or not _UNPRINTABLE.search(text.replace("\n", "")):
            return " ".join([*words, f"--data-binary {shlex.quote(self.clean(text))}"])
        octets = "".join(f"\\{byte:03o}" for byte in request.body)
        return f"printf '{octets}' | {' '.join([*words, '--data-binary @-'])}"

    def _header(self, name: str, value: str) -> str:
        if self.is_secret(name) and not self._shows:
            # A variable, so that the line works once it is set.
            return f'"{name}: ${self._variables.get((name.lower(), value)) or self._variable(name)}"'
        if not value:
            return shlex.quote(f"{name};")  # curl's own spelling of a header without a value
        try:
            return shlex.quote(f"{name}: {value.encode(WIRE).decode()}")
        except UnicodeDecodeError:
            return shlex.quote(f"{name}: {value}")


def _joined(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps, with requests that are sent one after the other in one step."""
    for is_apart, some in groupby(steps, key=lambda each: each.is_race or each.pause > 0):
        if is_apart:
            yield from some
        else:
            yield Step(tuple(request for each in some for request in each.requests), ())


def _pair(value: str) -> tuple[str, ...]:
    """Return what ``Basic`` credentials hold: the user with the password, and the password."""
    scheme, _, rest = value.partition(" ")
    if scheme.lower() != "basic":
        return ()
    try:
        text = base64.b64decode(rest).decode()
    except ValueError:
        return ()
    return text, text.partition(":")[2]


def _spellings(secret: str) -> str:
    """Return an expression for *secret* as it may stand in a body, a URL or a page: encoders differ in what they write
    as it is.
    """
    texts = {secret}
    with suppress(UnicodeError):
        texts.add(secret.encode(WIRE).decode())  # A header's characters stand for bytes.
    return "|".join("".join(map(_spelled, text)) for text in sorted(texts))


def _spelled(character: str) -> str:
    point = ord(character)
    octets = "".join(f"%{each:02x}" for each in character.encode(errors="surrogatepass"))
    escapes = {json.dumps(character)[1:-1], f"\\{character}", html.escape(character), f"\\u{point:04x}", octets}
    numbers = rf"&\#0*{point};|&\#x0*{point:x};" + ("|\\+" if character == " " else "")
    return f"(?:{re.escape(character)}|(?i:{'|'.join(map(re.escape, sorted(escapes)))}|{numbers}))"
