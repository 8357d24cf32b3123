"""`semel work --app`: jobs that were accepted are run by real processes, which are stopped, killed and replaced."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from semel.core.commands import Browse, Claim
from semel.core.message import Head, Request
from semel.core.record import Record
from semel.core.state import State
from semel.stores import store
from tests.cli.jobs import LEASE
from tests.kit import servers
from tests.web.harness import HANG_SECONDS, wait_until
from tests.web.serving import NO_CERTIFICATES, ROOT

Semel = Callable[..., subprocess.CompletedProcess[str]]
DAY = LEASE * 60_000

#: Each store and each entry point once: what differs between them is tested elsewhere.
EACH_ONCE = pytest.mark.parametrize(
    "works, app", [("sqlite_url", "asgi"), ("postgres_url", "wsgi")], indirect=["works"]
)


@dataclass
class Works:
    """A store, the file in which workers write down what they did, and the processes of one test."""

    url: str
    folder: Path
    environment: dict[str, str]
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, *command: str) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        mine = {"JOBS_STORE": self.url, "JOBS_FOLDER": str(self.folder), "PYTHONPATH": path}
        with (self.folder / f"{len(self.processes)}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=self.environment | mine,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def work(self, app: str, *options: str) -> "subprocess.Popen[str]":
        process = self.start("semel", "work", "--app", f"tests.cli.jobs:{app}", *options)
        assert process.stdout is not None
        assert "finishing every 1s" in process.stdout.readline(), self.log
        return process

    def serve(self, app: str) -> tuple[str, "subprocess.Popen[str]"]:
        port = servers.free_port()
        if app.startswith("asgi"):
            process = self.start("uvicorn", f"tests.cli.jobs:{app}", "--port", str(port), "--log-level", "warning")
        else:
            workers = ("--workers", "2", "--threads", "2", "--preload")
            process = self.start("gunicorn", f"tests.cli.jobs:{app}", "--bind", f"127.0.0.1:{port}", *workers)
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            assert process.poll() is None, self.log
            try:
                return httpx.get(url, verify=NO_CERTIFICATES).status_code == 201
            except httpx.TransportError:
                return False

        wait_until(is_up)
        return url, process

    def accept(self, *keys: str) -> None:
        """Accept jobs, as an app does."""
        request = Request(Head("POST", "/", b"", ()), b"", "single-tenant")
        with closing(store(self.url)) as opened:
            for key in keys:
                opened.perform(
                    Claim("single-tenant", key, os.urandom(16), b"", LEASE, DAY, request=request, is_accepted=True)
                )

    def let_go(self, *keys: str) -> None:
        for key in keys:
            (self.folder / key).touch()

    @property
    def done(self) -> list[tuple[str, int, str]]:
        """What was done: of which job, in which attempt, which phase."""
        return [(key, attempt, phase) for _, key, attempt, phase in self._lines()]

    def pid_of(self, key: str) -> int:
        return next(pid for pid, each, _, _ in self._lines() if each == key)

    def _lines(self) -> list[tuple[int, str, int, str]]:
        file = self.folder / "done"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(pid), key, int(attempt), phase) for pid, key, attempt, phase in lines]

    @property
    def records(self) -> dict[str, Record]:
        with closing(store(self.url)) as opened:
            return {record.key: record for record in opened.perform(Browse(limit=100))}

    def is_half_way(self, key: str) -> bool:
        """Whether its first phase is done, and committed: what the phase wrote down came a little sooner."""
        return self.records[key].milestone is not None

    @property
    def states(self) -> dict[str, State]:
        return {key: record.state for key, record in self.records.items()}

    @property
    def log(self) -> str:
        return "\n".join(file.read_text() for file in self.folder.glob("*.log"))

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=HANG_SECONDS)


@pytest.fixture(params=["sqlite_url", "postgres_url"])
def works(request: pytest.FixtureRequest, environment: dict[str, str], tmp_path: Path) -> Iterator[Works]:
    url: str = request.getfixturevalue(request.param)
    with closing(store(url)) as opened:
        opened.migrate()
    made = Works(url, tmp_path, environment)
    yield made
    made.close()


def test_a_factory(tmp_path: Path, sqlite_url: str, plain_environment: dict[str, str]) -> None:
    """The app may be made by a function, as servers let it be."""
    with store(sqlite_url) as keys:
        keys.migrate()
    code = "from tests.cli import jobs\ndef create_app(): return jobs.wsgi"
    (tmp_path / "shop.py").write_text(code)
    works = Works(sqlite_url, tmp_path, plain_environment)
    try:
        process = works.start("semel", "work", "--app", "shop:create_app()")
        assert process.stdout is not None
        assert "finishing every 1s" in process.stdout.readline(), works.log
    finally:
        works.close()


@EACH_ONCE
def test_sigterm_in_the_middle_of_a_job(works: Works, app: str) -> None:
    """The job under way ends, nothing new is begun, and the exit is in order."""
    works.accept("first", "second")
    worker = works.work(app, "--concurrency", "1")
    wait_until(lambda: works.is_half_way("first"))
    worker.terminate()
    assert worker.stdout is not None
    assert worker.stdout.readline() == "SIGTERM: finishing the current runs.\n"
    works.let_go("first", "second")
    assert worker.wait(HANG_SECONDS) == 0, works.log
    assert works.done == [("first", 1, "one"), ("first", 1, "two")]
    assert works.states == {"first": State.COMPLETE, "second": State.PENDING}
    assert "Traceback" not in works.log


@EACH_ONCE
def test_a_second_signal_ends_it_at_once(works: Works, app: str) -> None:
    """Whoever does not want to wait says so twice; the lease does the rest, and the next worker goes on."""
    works.accept("first")
    worker = works.work(app)
    wait_until(lambda: works.is_half_way("first"))
    worker.terminate()
    assert worker.stdout is not None
    assert worker.stdout.readline()
    worker.terminate()
    assert worker.wait(HANG_SECONDS) == -signal.SIGTERM
    works.let_go("first")
    works.work(app)
    wait_until(lambda: works.states == {"first": State.COMPLETE})
    assert works.done == [("first", 1, "one"), ("first", 2, "two")]


@pytest.mark.parametrize("app", ["asgi", "wsgi"])
def test_kill_9_in_the_middle_of_a_job(works: Works, app: str) -> None:
    """Another worker takes over when the lease is over, goes on at the recovery point, and repeats no step."""
    works.accept("job")
    doomed, heir = works.work(app), works.work(app)
    wait_until(lambda: works.is_half_way("job"))
    assert works.pid_of("job") in {doomed.pid, heir.pid}
    os.kill(works.pid_of("job"), signal.SIGKILL)
    works.let_go("job")
    wait_until(lambda: works.states == {"job": State.COMPLETE})
    assert works.done == [("job", 1, "one"), ("job", 2, "two")]


@pytest.mark.parametrize("works", ["sqlite_url"], indirect=True)
def test_several_at_once(works: Works) -> None:
    """A long job occupies one place of four; the others go on."""
    works.accept("long", *(f"short-{number}" for number in range(6)))
    works.let_go(*(f"short-{number}" for number in range(6)))
    works.work("asgi", "--concurrency", "2")
    shorts = {f"short-{number}": State.COMPLETE for number in range(6)}
    wait_until(lambda: works.states == {"long": State.PROCESSING, **shorts})
    works.let_go("long")
    wait_until(lambda: works.states["long"] is State.COMPLETE)
    assert len(works.done) == len(set(works.done)) == 14


@EACH_ONCE
def test_kill_9_of_the_app_right_after_the_202(works: Works, app: str) -> None:
    """Whoever has a 202 has an operation that is run, though the app that gave it is gone."""
    url, doomed = works.serve(app)
    accepted = httpx.post(url, headers={"Idempotency-Key": "job"}, verify=NO_CERTIFICATES)
    os.killpg(doomed.pid, signal.SIGKILL)
    assert accepted.status_code == 202
    works.let_go("job")
    works.work(app)
    wait_until(lambda: works.states == {"job": State.COMPLETE})
    url, _ = works.serve(app)
    told = httpx.get(f"{url}{accepted.headers['location']}", verify=NO_CERTIFICATES)
    assert (told.status_code, told.json()) == (201, {"attempt": 1})


@EACH_ONCE
def test_work_in_the_app_itself(works: Works, app: str) -> None:
    """With work=True the server's own processes run what they accept, and say how far it is."""
    url, server = works.serve(f"{app}_working")
    accepted = httpx.post(url, headers={"Idempotency-Key": "job"}, verify=NO_CERTIFICATES)
    where = f"{url}{accepted.headers['location']}"

    def told() -> httpx.Response:
        return httpx.get(where, verify=NO_CERTIFICATES)

    wait_until(lambda: told().json().get("note") == "half-way")
    assert (told().status_code, told().json()["progress"]) == (202, 0.5)
    works.let_go("job")
    wait_until(lambda: told().status_code == 201)
    assert works.done == [("job", 1, "one"), ("job", 1, "two")]
    server.terminate()
    server.wait(HANG_SECONDS)


@pytest.mark.parametrize("works", ["sqlite_url"], indirect=True)
def test_pending_ones_are_listed(works: Works, semel: Semel) -> None:
    """`semel keys list --state pending` shows what waits for a worker."""
    works.accept("waiting")
    listed = semel("keys", "list", "--state", "pending", "--store", works.url)
    assert "waiting" in listed.stdout
    assert "waiting" in semel("keys", "show", "waiting", "--store", works.url).stdout
    assert "waiting" not in semel("keys", "list", "--state", "processing", "--store", works.url).stdout
