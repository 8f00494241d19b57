"""Opening the database: one scheduler at a time, the schema brought up to date, a newer one refused."""

import threading
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from services.common.errors import ConfigError
from services.scheduler.store import database
from services.scheduler.store.database import FileLock
from services.scheduler.store.store import Store

VERSION_TABLE = "libra_schema"
MIGRATION_LOCK = 0x11B2A
"""Key of the advisory lock that lets one process at a time migrate a Postgres database."""

_ALEMBIC = threading.Lock()
"""Alembic keeps its context in module globals."""


def open_store(url: str, password_file: str = "") -> Store:
    """Opens the database of `url`: `sqlite:///PATH` or `postgresql://USER@HOST:PORT/DATABASE`.

    The password is the first line of `password_file`, else it stands in the URL. ConfigError if the database cannot be
    reached, is in use by another scheduler (SQLite), or was written by a newer version.
    """
    parsed = database.parse(url)
    if password_file:
        parsed = database.with_password(parsed, Path(password_file))
    lock = FileLock(str(parsed.database)) if parsed.get_backend_name() == "sqlite" else None
    try:
        engine = database.connect(parsed)
        try:
            with _ALEMBIC, engine.connect().execution_options(**database.WRITES) as connection, connection.begin():
                migrate(connection, database.address(parsed))
        except BaseException:
            engine.dispose()
            raise
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return Store(engine, lock)


def alembic_config(connection: sa.Connection | None = None) -> Config:
    """Alembic's settings for the migrations in this package."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def migrate(connection: sa.Connection, where: str) -> None:
    """Brings the schema to the newest known revision within the connection's transaction."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    config = alembic_config(connection)
    scripts = ScriptDirectory.from_config(config)
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    found, known = context.get_current_revision(), scripts.get_current_head()
    if found == known:
        return
    if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
        raise ConfigError(
            f"database: {where} has schema {found}, this version of Libra knows up to {known}; run a Libra at least "
            f"as new as the one that wrote it, or use another database"
        )
    try:
        command.upgrade(config, "head")
    except sa.exc.DBAPIError as error:
        raise ConfigError(
            f"database: {where} cannot be brought from schema {found or 'none'} to {known}: {error.orig}; nothing was "
            f"changed; if other programs keep tables there, give Libra a database of its own"
        ) from error
