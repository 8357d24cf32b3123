"""How tables and logs are printed, in a terminal or in a pipe. How values are written is in ``core/text.py``."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, TextIO, overload

import typer
from rich.console import Console
from rich.text import Text

from semel.core.text import as_text, as_typed, brief, hex_dump, pasteable, relative, safe, typed

__all__ = [
    "JsonOption",
    "as_text",
    "as_typed",
    "brief",
    "counting",
    "has_reader",
    "hex_dump",
    "iso",
    "keep_writing",
    "log_to_stderr",
    "pasteable",
    "put",
    "relative",
    "safe",
    "typed",
    "unfolded",
    "width",
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

#: A pipe has no width: a record stays on one line, and grep and awk can be used on it.
PIPE_WIDTH = 10_000


def width() -> int:
    """Return the width of the terminal in columns."""
    return Console().width if sys.stdout.isatty() else PIPE_WIDTH


@overload
def iso(moment: float | datetime) -> str: ...


@overload
def iso(moment: None) -> None: ...


def iso(moment: float | datetime | None) -> str | None:
    """Write a time, of UTC, as every command does: in milliseconds, for people and for programs."""
    if moment is None:
        return None
    when = moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)
    return when.isoformat(timespec="milliseconds")


def log_to_stderr() -> None:
    """Print what services log."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    # It has the whole URL of each webhook, which may be a secret of the endpoint's.
    logging.getLogger("httpx2").setLevel(logging.WARNING)


def unfolded(*parts: str | tuple[str, str]) -> Text:
    """Return a line to be copied, such as a command: a terminal that breaks it at its edge copies it as one line."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


def put(*parts: Any) -> None:
    """Print tables and texts: in a terminal at its width, in a pipe as wide as the content needs."""
    console = Console(width=width(), highlight=False)
    if console.is_terminal:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
        return
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    # Cells are padded with blanks, which a program does not need.
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


class _Output(io.FileIO):
    """Standard output. Where its reader has gone, as head does, what is written is dropped: a command that changes
    something does all of it, whoever reads along, and its exit status says what came of it.
    """

    has_reader = True

    def write(self, data: Any) -> int:
        """Write, or drop."""
        if self.has_reader:
            try:
                return super().write(data)
            except BrokenPipeError:
                self.has_reader = False
        return len(data)


def keep_writing(out: TextIO) -> TextIO:
    """Return *out*, as one that does not end with its reader. A terminal is left as it is."""
    if out.isatty():
        return out
    try:
        raw = _Output(out.fileno(), "wb", closefd=False)
    except (OSError, ValueError):  # It is no file, or closed.
        return out
    out.flush()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=out.encoding, errors=out.errors)


def has_reader() -> bool:
    """Whether anything still reads what is printed."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return not isinstance(raw, _Output) or raw.has_reader


@contextmanager
def counting(said: str) -> Iterator[Callable[[int], None]]:
    """Show on a terminal that work goes on, and how much of it is done; yield what counts more. A pipe sees nothing."""
    done = 0
    with Console(stderr=True, highlight=False).status(said) as status:

        def count(more: int) -> None:
            nonlocal done
            done += more
            status.update(f"{said}: {done:,}")

        yield count
