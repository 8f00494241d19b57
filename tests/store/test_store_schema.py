"""Migrations lead to the schema that the code knows, and a database that is not ours to use is refused in words."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from services.common.errors import ConfigError
from services.scheduler.store import database
from services.scheduler.store.engine import VERSION_TABLE, open_store
from services.scheduler.store.schema import METADATA
from services.scheduler.store.store import Store
from tests.support.postgres import Postgres

POSTGRES_CATALOG = {
    "columns": "SELECT table_name, column_name, data_type, is_nullable, collation_name, is_identity, "
    "column_default IS NULL FROM information_schema.columns WHERE table_schema = 'public'",
    "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = 'public'::regnamespace",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
}


def catalog(engine: sa.Engine) -> set[tuple[object, ...]]:
    """What the database says of its tables, without the one that counts migrations."""
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            found = {
                (what, *row) for what, query in POSTGRES_CATALOG.items() for row in connection.exec_driver_sql(query)
            }
        else:
            query = "SELECT tbl_name, name, sql FROM sqlite_master WHERE sql IS NOT NULL"
            found = {
                (table, name, *sorted(line.strip().rstrip(",") for line in sql.splitlines()))
                for table, name, sql in connection.exec_driver_sql(query)
            }
    return {row for row in found if VERSION_TABLE not in map(str, row)}


def empty_engine(url: str) -> sa.Engine:
    """A connection that is set up like the store's, without its schema."""
    return database.connect(database.parse(url))


@pytest.fixture
def second_url(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Iterator[str]:
    """Another empty database of the same sort."""
    if database_url.startswith("sqlite"):
        yield f"sqlite:///{tmp_path}/second.db"
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    name = server.create()
    yield server.url(name)
    server.drop(name)


def test_migrations_lead_to_the_schema(store: Store, second_url: str) -> None:
    engine = empty_engine(second_url)
    METADATA.create_all(engine)
    assert catalog(store.engine) == catalog(engine)
    assert len(catalog(engine)) > 30
    engine.dispose()


def test_alembic_finds_nothing_to_migrate(store: Store) -> None:
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, METADATA) == []


def test_opening_again_changes_nothing(database_url: str) -> None:
    first = open_store(database_url)
    before = catalog(first.engine)
    first.close()
    second = open_store(database_url)
    assert catalog(second.engine) == before
    second.close()


def test_newer_schema_is_refused(database_url: str) -> None:
    store = open_store(database_url)
    with store.writing() as connection:
        connection.exec_driver_sql(f"UPDATE {VERSION_TABLE} SET version_num = '9001'")
    store.close()
    with pytest.raises(ConfigError, match=r"has schema 9001, this version of Libra knows up to 0001; run a Libra"):
        open_store(database_url)


def test_a_migration_that_fails_leaves_nothing(database_url: str) -> None:
    engine = empty_engine(database_url)
    with engine.connect() as connection, connection.begin():
        connection.exec_driver_sql("CREATE TABLE turns (id INTEGER)")
    before = catalog(engine)
    with pytest.raises(ConfigError, match=r"from schema none to 0001: .*turns.* already exists"):
        open_store(database_url)
    assert catalog(engine) == before
    engine.dispose()


def test_second_scheduler_on_one_file_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/libra.db"
    first = open_store(url)
    with pytest.raises(ConfigError, match=rf"process \d+ holds {tmp_path}/libra.db.lock.*stop it"):
        open_store(url)
    first.close()
    open_store(url).close()


def test_sqlite_settings(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/new/folder/libra.db")
    with store.reading() as connection:
        found = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert found == ["wal", 2, 1]
    store.close()


def test_sqlite_writers_exclude_each_other_from_their_first_statement(tmp_path: Path) -> None:
    """One that began as a reader would fail at its first write if another one had written meanwhile."""
    store = open_store(f"sqlite:///{tmp_path}/libra.db")
    other = sqlite3.connect(tmp_path / "libra.db", timeout=0, isolation_level=None)
    with store.writing(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    with store.reading():
        other.execute("BEGIN IMMEDIATE")
    other.close()
    store.close()


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libra.db"
    path.write_text("this is a text file, and not a short one either" * 100)
    with pytest.raises(ConfigError, match=f"cannot open sqlite {path}: file is not a database"):
        open_store(f"sqlite:///{path}")


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot create .*the scheduler needs to write in that folder"):
        open_store(f"sqlite:///{tmp_path}/file/libra.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("libra.db", "not a database URL; expected sqlite:///PATH or postgresql://"),
        ("mysql://root@localhost/x", "'mysql' is not supported; expected"),
        ("sqlite://", "names no file, so nothing would survive a restart"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_unreachable_postgres_is_named_without_its_password() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot open postgres 127\.0\.0\.1:1/libra: .*check that it runs"
    ) as refusal:
        open_store("postgresql://libra:hidden-word@127.0.0.1:1/libra?password=hidden-word")
    assert "hidden-word" not in str(refusal.value)
    assert "hidden-word" not in repr(refusal.value.__cause__)


@pytest.mark.postgres
def test_unknown_postgres_database_is_refused(postgres_server: Postgres) -> None:
    with pytest.raises(ConfigError, match='database "nowhere" does not exist'):
        open_store(postgres_server.url("nowhere"))


@pytest.mark.postgres
def test_postgres_that_forgets_is_refused(postgres_server: Postgres, postgres_url: str) -> None:
    name = database.parse(postgres_url).database
    postgres_server.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    with pytest.raises(ConfigError, match="synchronous_commit = off, so a crash would lose"):
        open_store(postgres_url)
