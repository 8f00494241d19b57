"""The one writer: takes units in order and commits all that wait in one transaction.

A commit costs a flush to disk, hundreds a second where that is honest; while one is under way the next units gather,
so that throughput does not depend on it. After the first failure nothing is written any more: the caller reloads.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

import sqlalchemy as sa

from services.common import failpoints, log
from services.scheduler.store import leadership
from services.scheduler.store.store import Store
from services.scheduler.store.unit import MAPPINGS, Records, Rows, Unit

_log = log.get(__name__)

MAX_BATCH_UNITS = 2_048
"""Units in one transaction: bounds how long the first of them waits for the others."""
MAX_QUEUED_UNITS = 65_536
"""Units that may wait. More means that the database cannot follow; the writer gives up rather than eat the memory."""
MIN_INTERVAL_SECONDS = 0.002
"""Least time between the starts of two commits: where flushing is cheap, grouping still saves work."""
CLOSE_SECONDS = 30.0


class WriterClosed(Exception):
    """The writer was closed; nothing is written any more."""


class WriterOverloaded(Exception):
    """More units wait than may; the database does not keep up."""


class Writer:
    """Commits units under `term`, in the order of `submit`. Runs a thread of its own."""

    def __init__(
        self,
        store: Store,
        term: int,
        *,
        max_batch_units: int = MAX_BATCH_UNITS,
        max_queued_units: int = MAX_QUEUED_UNITS,
        min_interval: float = MIN_INTERVAL_SECONDS,
    ) -> None:
        self.term = term
        self.commits = 0
        """Transactions committed."""
        self.units = 0
        """Units in them."""
        self.error: Exception | None = None
        """Why nothing is written any more; None while all is well."""
        self.timed: list[Callable[[float], None]] = []
        """Told in the writer's thread how long each transaction took, seconds."""
        self._store = store
        self._max_batch, self._max_queued, self._interval = max_batch_units, max_queued_units, min_interval
        dialect = store.engine.dialect
        self._write_sql = {mapping: mapping.write_sql(dialect) for mapping in MAPPINGS}
        self._delete_sql = {mapping: mapping.delete_sql(dialect) for mapping in MAPPINGS}
        self._queue: deque[tuple[Unit, asyncio.Future[None]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, unit: Unit) -> "asyncio.Future[None]":
        """Queues a sealed unit; call on the event loop. The future is done when the unit is durable.

        It fails with Deposed, a database error, WriterOverloaded or WriterClosed; every later one then fails alike.
        """
        if not unit.sealed:
            raise RuntimeError("seal the unit before it is submitted")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            if len(self._queue) >= self._max_queued and self.error is None:
                self.error = WriterOverloaded(
                    f"{len(self._queue)} units wait to be written, {self._max_queued} may; the database is too slow"
                )
            error = self.error or (WriterClosed("the store's writer is closed") if self._closing else None)
            if error is not None:
                future.set_exception(error)
            else:
                self._queue.append((unit, future))
            self._changed.notify()
        return future

    @property
    def queued(self) -> int:
        """Units that wait, without those being committed."""
        return len(self._queue)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Writes what waits and ends the thread; TimeoutError if that takes longer than `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the store's writer did not end within {timeout} s; {self.queued} units wait")

    def _run(self) -> None:
        batch: list[tuple[Unit, asyncio.Future[None]]] = []
        try:
            with self._store.engine.connect() as connection:
                while batch := self._take():
                    started = time.monotonic()
                    self._commit(connection, [unit for unit, _ in batch])
                    for tell in self.timed:
                        tell(time.monotonic() - started)
                    self.commits += 1
                    self.units += len(batch)
                    _settle(batch, None)
                    batch = []
                    self._pause(started + self._interval - time.monotonic())
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this leader, and its callers must hear of it
            _log.error("the store's writer failed", error=repr(error), waiting=len(batch) + self.queued)
            with self._changed:
                self.error = self.error or error
                batch = [*batch, *self._queue]
                self._queue.clear()
            _settle(batch, self.error)

    def _take(self) -> list[tuple[Unit, "asyncio.Future[None]"]]:
        """All that waits, at most a batch; empty when closed and done."""
        with self._changed:
            while not self._queue and not self._closing and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise self.error
            return [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if seconds > 0 and not self._closing:
                self._changed.wait_for(lambda: self._closing, seconds)

    def _commit(self, connection: sa.Connection, units: list[Unit]) -> None:
        rows, records = _merge(units)
        connection = connection.execution_options(libra_writes=True)
        with connection.begin() as transaction:
            leadership.hold(connection, self.term)
            for mapping in MAPPINGS:
                changed = rows.get(mapping, {})
                written = records.get(mapping) or [row for row in changed.values() if row is not None]
                if written:
                    connection.exec_driver_sql(self._write_sql[mapping], written)
                deleted = [key for key, row in changed.items() if row is None]
                if deleted:
                    connection.exec_driver_sql(self._delete_sql[mapping], deleted)
            counted = [unit for unit in units if unit.revision]
            if counted:
                leadership.count(connection, counted[-1].revision, counted[-1].next_generation)
            failpoints.hit("store.before_commit")
            transaction.commit()
        failpoints.hit("store.after_commit")


def _merge(units: list[Unit]) -> tuple[Rows, Records]:
    """What a batch of units writes: the last values of each row, in the order in which rows first came."""
    rows: Rows = {}
    records: Records = {}
    for unit in units:
        for mapping, changed in unit.rows.items():
            rows.setdefault(mapping, {}).update(changed)
        for mapping, written in unit.records.items():
            records.setdefault(mapping, []).extend(written)
    return rows, records


def _settle(batch: list[tuple[Unit, "asyncio.Future[None]"]], error: Exception | None) -> None:
    if not batch:
        return

    def settle() -> None:
        for _, future in batch:
            if not future.done():
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    try:
        batch[0][1].get_loop().call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits
        _log.debug("commit finished after its event loop", units=len(batch))
