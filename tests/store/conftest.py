"""Each test of the store runs unchanged on both databases."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.scheduler.store.engine import open_store
from services.scheduler.store.store import Store
from services.scheduler.store.writer import Writer


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/libra.db"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """An open store that leads term 1."""
    opened = open_store(database_url)
    opened.acquire_term()
    yield opened
    opened.close()


@pytest.fixture
async def writer(store: Store) -> AsyncIterator[Writer]:
    """The store's writer."""
    running = Writer(store, store.term)
    yield running
    running.close()
