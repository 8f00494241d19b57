"""Connections to SQLite and Postgres, set so that what is committed is on disk."""

import fcntl
import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from services.common.errors import ConfigError

BUSY_SECONDS = 10.0
"""How long a SQLite write waits for another one: pruning takes its turns between commits."""
CONNECT_SECONDS = 10
STALLED_SECONDS = 10
"""Postgres ends a transaction that lies idle for so long, so that a frozen leader does not keep its term for ever."""
LOCK_SECONDS = 20
"""How long a statement waits for a lock: longer than STALLED_SECONDS, or a new leader would give up too early."""
WRITES = {"libra_writes": True}
"""Execution option of connections that write."""


def parse(url: str) -> sa.URL:
    """The URL with its driver; ConfigError if it is none of the two databases."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise ConfigError(f"database: not a database URL; {_EXPECTED}") from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise ConfigError(f"database: {parsed.drivername!r} is not supported; {_EXPECTED}")
    if not parsed.database or parsed.database == ":memory:":
        raise ConfigError(f"database: {url!r} names no file, so nothing would survive a restart; {_EXPECTED}")
    return parsed


def with_password(url: sa.URL, file: Path) -> sa.URL:
    """The URL with the password that the file's first line is; ConfigError if there is none to be had."""
    if url.get_backend_name() == "sqlite":
        raise ConfigError("database_password_file: SQLite has no passwords; leave it out")
    try:
        password = file.read_text().split("\n")[0].strip()
    except OSError as error:
        raise ConfigError(f"database_password_file: cannot read {file}: {error.strerror}") from None
    if not password:
        raise ConfigError(f"database_password_file: {file} is empty; expected the password in its first line")
    return url.set(password=password)


_EXPECTED = "expected sqlite:///PATH or postgresql://USER@HOST:PORT/DATABASE"


def address(url: sa.URL) -> str:
    """What a message may show of it: never the password or the options."""
    if url.get_backend_name() == "sqlite":
        return f"sqlite {url.database}"
    host = url.host or url.query.get("host") or "local socket"
    return f"postgres {host}:{url.port or 5432}/{url.database}"


class FileLock:
    """Held while a scheduler has a SQLite database open; the kernel lets it go when the process dies."""

    def __init__(self, database: str) -> None:
        self.path = Path(f"{database}.lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"database: cannot create {self.path}: {error.strerror}; the scheduler needs to write in that folder"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            self.release()
            raise ConfigError(
                f"database: {database} is in use by another scheduler (process {holder or 'unknown'} holds "
                f"{self.path}); stop it, or give this one a database of its own"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets go. No effect the second time."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def connect(url: sa.URL) -> sa.Engine:
    """An engine for the database, its settings checked; ConfigError says what is wrong with it."""
    if url.get_backend_name() == "sqlite":
        engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS}, hide_parameters=True)
        sa.event.listen(engine, "connect", _set_up_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
    else:
        try:
            engine = sa.create_engine(
                url,
                connect_args={"connect_timeout": CONNECT_SECONDS, "application_name": "libra-scheduler"},
                pool_pre_ping=True,
                hide_parameters=True,  # rows must not appear in errors and logs
            )
        except ModuleNotFoundError:
            raise ConfigError("database: Postgres needs psycopg; install libra-rl[postgres]") from None
        sa.event.listen(engine, "connect", _set_up_postgres)
    try:
        with engine.connect() as connection:
            _check(connection, url)
    except sa.exc.DBAPIError as error:
        engine.dispose()
        cause = str(error.orig).strip().split("\n")[0]
        raise ConfigError(
            f"database: cannot open {address(url)}: {cause}; check that it runs there, that this user may use it, and "
            f"the `database` setting"
        ) from None
    return engine


def _set_up_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so, not where the driver guesses
    for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "cache_size = -32768"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: sa.Connection) -> None:
    # a transaction that begins as a reader and then writes can fail with "database is locked" at once
    writes = connection.get_execution_options().get("libra_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _set_up_postgres(connection: Any, _record: object) -> None:
    connection.autocommit = True
    for name, seconds in (
        ("idle_in_transaction_session_timeout", STALLED_SECONDS),
        ("lock_timeout", LOCK_SECONDS),
    ):
        connection.execute(f"SET {name} = '{seconds}s'")
    connection.autocommit = False


def _check(connection: sa.Connection, url: sa.URL) -> None:
    if connection.dialect.name == "sqlite":
        mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
        if mode != "wal":
            raise ConfigError(
                f"database: {address(url)} has journal mode {mode}, not WAL; put it on a local file system"
            )
    elif connection.exec_driver_sql("SHOW synchronous_commit").scalar() == "off":
        raise ConfigError(
            f"database: {address(url)} has synchronous_commit = off, so a crash would lose what was acknowledged; "
            f"set it to on for this user or database"
        )
