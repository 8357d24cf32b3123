"""The container and the compose file of the proxy: what they name is there. Nothing is built here."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from semel.proxy.config import PREFIX, read

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ops" / "proxy"
EXTRA = re.compile(r"\[([a-z,]+)\]")


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_container() -> None:
    """What the container copies is there, and the extras that it installs are those of the package."""
    text = (FOLDER / "Dockerfile").read_text()
    copied = [
        shlex.split(line)[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    assert all((ROOT / each).exists() for line in copied for each in line)
    found = EXTRA.search(text)
    assert found is not None
    assert {"proxy", "postgres"} <= set(found[1].split(",")) <= extras()


def test_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compose file sets options of the proxy, which gets more time to stop than it takes."""
    yaml = pytest.importorskip("yaml")  # uvicorn brings it.
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    proxy = services["proxy"]
    assert (FOLDER / proxy["build"]["context"] / proxy["build"]["dockerfile"]).is_file()
    assert (FOLDER / services["app"]["volumes"][0].partition(":")[0] / "server.js").is_file()
    assert proxy["environment"]["SEMEL_STORE"] == services["migrate"]["environment"]["SEMEL_STORE"]
    for name, text in proxy["environment"].items():
        assert name.startswith((PREFIX, "SEMEL_STORE"))
        monkeypatch.setenv(name, text)
    settings = read(None, {}, store="sqlite:///semel.db")
    assert settings.upstream == "http://127.0.0.1:3000"
    assert int(proxy["stop_grace_period"].removesuffix("s")) > (settings.drain + settings.grace).total_seconds() + 12


def test_install_line() -> None:
    """The how-to's first line installs what its first command needs: the proxy, and a driver of PostgreSQL."""
    page = (ROOT / "docs/how-to/guard-any-language.md").read_text()
    first = page.partition("```\n")[2].partition("```")[0]
    found = EXTRA.search(first)
    assert "postgresql://" in first
    assert found is not None
    assert set(found[1].split(",")) == {"proxy", "postgres"}
