"""What every command has in common."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import semel as package

Semel = Callable[..., subprocess.CompletedProcess[str]]


def test_version(semel: Semel) -> None:
    """`semel version` says which Semel this is, and so does `semel --version`."""
    assert semel("version").stdout == f"semel {package.__version__}\n"
    assert semel("--version").stdout == f"semel {package.__version__}\n"


def test_no_command(semel: Semel) -> None:
    """Without a command, the list of commands is shown."""
    shown = semel().stdout
    assert all(command in shown for command in ("demo", "migrate", "keys", "sweep", "reap", "work", "version"))


@pytest.mark.parametrize(
    "command, module, advice",
    [
        ("sweep", "typer", "pip install 'semel[cli]'"),
        ("sweep", "rich", "pip install 'semel[cli]'"),
        ("demo", "uvicorn", "pip install 'semel[demo]'"),
        ("demo", "httpx", "pip install 'semel[demo]'"),
    ],
)
def test_missing_extra(command: str, module: str, advice: str) -> None:
    """Where an extra is missing, one line says how to install it."""
    code = f"import sys; sys.modules[{module!r}] = None; from semel.cli.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert advice in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["version", "--version"])
def test_version_without_extras(command: str) -> None:
    """The version is told where the rest of the command line is not installed, too."""
    code = "import sys; sys.modules['typer'] = sys.modules['rich'] = None; from semel.cli.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert ended.stdout == f"semel {package.__version__}\n"


def in_a_pipe(environment: dict[str, str], folder: Path, typed: str, reader: str) -> subprocess.CompletedProcess[str]:
    """Run a command before *reader*, and return what was said, with the status of the command itself."""
    command = f"{{ {sys.executable} -m semel {typed}; echo $? >status; }} | {reader}"
    shell = ["/bin/sh", "-c", command]
    ended = subprocess.run(shell, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return subprocess.CompletedProcess(typed, int((folder / "status").read_text()), ended.stdout, ended.stderr)


@pytest.mark.parametrize("typed", ["--help", "doctor list --json", "doctor list"])
def test_the_end_of_a_pipe(environment: dict[str, str], tmp_path: Path, typed: str) -> None:
    """When the reader of its output has gone, a command ends without a word, and well."""
    ended = in_a_pipe(environment, tmp_path, typed, "true")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_the_end_of_a_pipe_changes_no_change(environment: dict[str, str], tmp_path: Path) -> None:
    """What a command changes, it changes, though the reader of its output has gone; a failure stays a failure."""
    url = f"sqlite:///{tmp_path}/semel.db"
    assert in_a_pipe(environment, tmp_path, f"migrate {url}", "true").returncode == 0
    assert "nothing to do" in in_a_pipe(environment, tmp_path, f"migrate {url}", "cat").stdout
    failed = in_a_pipe(environment, tmp_path, f"keys show absent --store {url}", "true")
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)


def test_flags(semel: Semel) -> None:
    """A flag is shown as one, without a type that it does not take."""
    for typed in (["--help"], ["console", "--help"], ["keys", "list", "--help"], ["doctor", "run", "--help"]):
        shown = semel(*typed, COLUMNS="120").stdout
        assert "--help" in shown
        assert "bool" not in shown.lower()


@pytest.mark.parametrize(
    "typed, found", [("semel ", "migrate"), ("semel keys r", "resolve"), ("semel keys list --st", "--state")]
)
def test_completion(semel: Semel, typed: str, found: str) -> None:
    """A shell can complete commands and options."""
    asked = {"_SEMEL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    assert found in semel(**asked).stdout.split()


def test_completion_of_a_shell() -> None:
    """A shell is told what to evaluate, so that it completes commands from then on."""
    semel = Path(sys.executable).with_name("semel")
    line = f"'{semel}' --show-completion; exit $?"  # With a second command, the shell stays and is the parent.
    shown = subprocess.run(["/usr/bin/env", "bash", "-c", line], capture_output=True, text=True, check=True).stdout
    assert "_SEMEL_COMPLETE" in shown


@pytest.mark.parametrize(
    "command",
    [
        ("migrate",),
        ("sweep",),
        ("reap",),
        ("work",),
        ("keys", "list"),
        ("keys", "show", "a"),
        ("keys", "release", "a"),
        ("keys", "resolve", "a", "--not-applied"),
    ],
)
def test_no_store(semel: Semel, command: tuple[str, ...]) -> None:
    """A command that is given no store, and finds none, asks which, in one line."""
    ended = semel(*command)
    assert ended.returncode == 2
    assert "Which store?" in ended.stderr
    assert "SEMEL_STORE" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("keys", "list"), ("demo",), ("sweep",), ("reap",), ("work",)])
def test_bad_url_everywhere(semel: Semel, command: tuple[str, ...]) -> None:
    """Every command that takes a store treats its URL alike."""
    test_bad_url(semel, command, "postgresql://user:hush%zz@localhost/shop", 2)


@pytest.mark.parametrize("command", [("migrate",)])
@pytest.mark.parametrize(
    "url, status",
    [
        ("mysql://user:hush@localhost/shop", 2),
        ("hush", 2),
        ("postgresql://user:hush@localhost:99999/shop", 2),
        ("postgresql://user:hush%zz@localhost/shop", 2),
        ("postgresql://user:hush[@localhost/shop", 2),
        ("postgresql://user:hush\u2100@localhost/shop", 2),
        ("postgresql://user:hush@localhost/shop?nonsense=1", 2),
        ("postgresql://user:hush@127.0.0.1:1/shop", 1),
    ],
)
def test_bad_url(semel: Semel, command: tuple[str, ...], url: str, status: int) -> None:
    """A URL that can't be used is one line on standard error, and its password is not in it."""
    ended = semel(*command, "--store", url)
    assert ended.returncode == status
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert "hush" not in ended.stderr


def test_unexpected(tmp_path: Path) -> None:
    """Even an error that nobody thought of is one line, and says how to see more."""
    code = "import semel.cli.app as a, semel.cli.main as m; a.app = lambda **_: 1 / 0; m.main()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == "semel: ZeroDivisionError: division by zero (Where: python -X dev -m semel ...)\n"


def test_a_command_imports_no_other(tmp_path: Path) -> None:
    """Whoever migrates does not wait for the console, the doctor and the proxy to be imported."""
    code = "import sys, semel.cli.main as m\ntry: m.main()\nfinally: print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "migrate", f"sqlite:///{tmp_path}/semel.db"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0
    imported = ended.stderr.split()
    assert "semel.cli.schema" in imported
    assert not [
        each for each in imported if each.startswith(("semel.verify", "semel.doctor", "semel.console", "jinja2"))
    ]


def test_a_folder_for_a_file(semel: Semel, tmp_path: Path) -> None:
    """A path that SQLite can't open, such as a folder's, is said in one line and not as a fault of the program."""
    refused = semel("keys", "list", "--store", f"sqlite:///{tmp_path}")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"semel: {tmp_path} can")
    assert "OperationalError" not in refused.stderr
