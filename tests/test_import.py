"""`import semel` needs the standard library only, and what is missing says how to get it."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

#: -S leaves out site-packages, and -I everything else that is not Python's own.
BARE = [sys.executable, "-I", "-S", "-c"]
ONLY_OURS = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n"

TIERED = """
from semel.stores import {0}
from semel.stores.tiered import Tiered
{0}(Tiered("memory://"))
{0}(Tiered("memory://", "redis://here/0"))
"""


def bare(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BARE, ONLY_OURS + program], capture_output=True, text=True, check=False)


def test_standard_library_only() -> None:
    """Semel, its entry points, its client, its test kit and its webhooks can be imported where nothing else is."""
    program = """
import semel, semel.asgi, semel.wsgi, semel.testing, semel.webhooks, semel.client, semel.client.httpx
known = sys.stdlib_module_names | {"semel", "__main__"}
print(sorted({name.partition(".")[0] for name in sys.modules} - known))
"""
    done = bare(program)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_name_is_there() -> None:
    """`from semel import *` gives what `__all__` says."""
    done = bare("from semel import *; import semel; print(set(semel.__all__) <= globals().keys())")
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_sqlite_and_memory_need_no_extra(tmp_path: Path) -> None:
    """The default store works where nothing else is installed."""
    done = bare(f"""
from semel.stores import store
for url in ("memory://", "sqlite:///" + {str(tmp_path / "semel.db")!r}):
    with store(url) as keys:
        print(keys.migrate())
""")
    assert done.stderr == ""


@pytest.mark.parametrize(
    "program, command",
    [
        ("from semel.stores import store; store('postgresql://here/db')", "pip install 'semel[postgres]'"),
        ("from semel.stores import async_store; async_store('postgresql://here/db')", "pip install 'semel[postgres]'"),
        (TIERED.format("store"), "pip install 'semel[redis]'"),
        (TIERED.format("async_store"), "pip install 'semel[redis]'"),
        ("from semel.cli.main import main; main()", "pip install 'semel[cli]'"),
        ("from semel.fastapi import install", "pip install 'semel[fastapi]'"),
        ("from semel.flask import idempotent", "pip install 'semel[flask]'"),
        ("from semel.webhooks.fastapi import webhook", "pip install 'semel[fastapi]'"),
        ("from semel.webhooks.flask import webhook", "pip install 'semel[flask]'"),
        ("from semel.webhooks.django import webhook", "pip install 'semel[django]'"),
        (
            "from semel.publishers import publisher; publisher('a', 'https://a.example')",
            "pip install 'semel[webhooks]'",
        ),
        ("from semel.core.webhook import new_keys; new_keys(bytes(32))", "pip install 'semel[webhooks]'"),
        ("from semel.client.requests import IdempotentAdapter", "pip install requests"),
        ("from semel.django import idempotent", "pip install 'semel[django]'"),
        ("from semel.django import IdempotencyMiddleware", "pip install 'semel[django]'"),
    ],
)
def test_missing_extra(program: str, command: str) -> None:
    """Asking for what needs an extra names the command that installs it."""
    done = bare(program)
    assert done.returncode != 0
    assert command in done.stderr.splitlines()[-1]


def test_only_public_names_are_shown() -> None:
    """`dir(semel)` shows what may be imported from it, and nothing of how it is built."""
    done = bare("import semel, semel.asgi, semel.wsgi; print(sorted(dir(semel)) == sorted(semel.__all__))")
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("name, where", [("idempotent", "semel.functions"), ("Idempotent", "semel.fastapi")])
def test_names_of_other_modules(name: str, where: str) -> None:
    """What is imported from the wrong place says the right one; what is nowhere is an error as always."""
    assert f"Write: from {where} " in bare(f"from semel import {name}").stderr
    assert "cannot import name 'nothing' from 'semel'" in bare("from semel import nothing").stderr
    done = bare("import semel; print(hasattr(semel, 'nothing'), getattr(semel, 'inbox', None))")
    assert (done.stdout, done.stderr) == ("False None\n", "")
