"""A real Postgres for tests: one server for a test run, a fresh database for each test that asks for one.

The system's binaries are used if there are any, else those of the pgserver wheel. The server lives in a temporary
folder, listens on a socket in it, and stops with the test run.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import psycopg
import pytest

START_SECONDS = 60.0
STOP_SECONDS = 30.0


class NoPostgres(Exception):
    """No server can be had here; the message says why."""


def find_binaries() -> Path:
    """The folder with initdb and postgres; NoPostgres if there is none."""
    system = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True)
    path = [Path(found).parent for found in (shutil.which("initdb"),) if found]
    spec = find_spec("pgserver")
    wheel = [Path(spec.origin).parent / "pginstall" / "bin"] if spec and spec.origin else []
    for folder in (*system, *path, *wheel):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise NoPostgres("no Postgres binaries: neither in /usr/lib/postgresql, nor on PATH, nor the pgserver wheel")


def unprivileged() -> dict[str, object]:
    """How Popen runs the server as somebody else: Postgres refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    raise NoPostgres("running as root, and there is neither a user postgres nor nobody to run the server as")


class Postgres:
    """A running server. `stop` ends it and removes its folder."""

    def __init__(self) -> None:
        binaries, user = find_binaries(), unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="libra-pg-"))
        self._names = count(1)
        self._process: subprocess.Popen[str] | None = None
        try:
            if user:
                os.chown(self.folder, user["user"], user["group"])
            self._initialise(binaries, user)
            self._start(binaries, user)
        except BaseException:
            self.stop()
            raise

    def _initialise(self, binaries: Path, user: dict[str, object]) -> None:
        data = str(self.folder / "data")
        base = [str(binaries / "initdb"), "-D", data, "-U", "libra", "-A", "trust", "-E", "UTF8", "-N"]
        # a language's order instead of the bytes', where the build has it, so that relying on the default shows
        for locale in (["--locale-provider=icu", "--icu-locale=en", "--locale=C"], ["--locale=C"]):
            done = subprocess.run(
                [*base, *locale],
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=START_SECONDS,
                check=False,
                **user,
            )
            if done.returncode == 0:
                return
            shutil.rmtree(data, ignore_errors=True)
        raise NoPostgres(f"{binaries}/initdb failed: {done.stderr.strip()[-300:]}")

    def _start(self, binaries: Path, user: dict[str, object]) -> None:
        command = [
            str(binaries / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder),
            "-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=50", "-c", "shared_buffers=32MB",
        ]  # fmt: skip
        if shutil.which("setpriv"):  # a killed test run takes its server along
            command = ["setpriv", "--pdeathsig", "INT", "--", *command]
        self._process = subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, text=True, **user)
        log: list[str] = []
        ready = threading.Event()
        threading.Thread(target=self._drain, args=(log, ready), daemon=True).start()
        ready.wait(START_SECONDS)
        if not any("ready to accept connections" in line for line in log):
            raise NoPostgres(f"{binaries}/postgres did not start: {''.join(log)[-300:]}")

    def _drain(self, log: list[str], ready: threading.Event) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if not ready.is_set():
                log.append(line)
            if "ready to accept connections" in line:
                ready.set()
        ready.set()

    def url(self, database: str) -> str:
        """The database's URL for open_store."""
        return f"postgresql://libra@/{database}?host={self.folder}"

    def create(self) -> str:
        """Makes an empty database and returns its name."""
        name = f"libra_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def drop(self, database: str) -> None:
        """Removes a database and whoever is connected to it."""
        self.execute(f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Runs one statement outside a transaction, past the store; returns rows if there are any."""
        with psycopg.connect(host=str(self.folder), user="libra", dbname=database, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def stop(self) -> None:
        """Ends the server (fast shutdown, then by force) and removes its files."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """The server of this test run; tests that need it are skipped where none can be had."""
    try:
        server = Postgres()
    except NoPostgres as reason:
        pytest.skip(str(reason))
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    """URL of an empty database of its own."""
    name = postgres_server.create()
    try:
        yield postgres_server.url(name)
    finally:
        postgres_server.drop(name)
