"""The only place that builds and wires the scheduler's objects."""

import asyncio
import contextlib
import signal

from services.common import log
from services.common.blobs import BlobStore
from services.common.clock import SystemClock
from services.common.rpc.server import RunningServer, serve
from services.common.supervise import Tasks
from services.scheduler import rates
from services.scheduler.api.admin import AdminService
from services.scheduler.api.contract import NAMES, add_to_server, check
from services.scheduler.api.fleet import FleetService
from services.scheduler.api.idempotency import Idempotency
from services.scheduler.api.placement import PlacementService
from services.scheduler.api.trajectories import TrajectoryService
from services.scheduler.config import SchedulerConfig
from services.scheduler.control import sessions
from services.scheduler.control.cycle import Cycle
from services.scheduler.control.ledger import Ledger
from services.scheduler.exposition import SchedulerExposition
from services.scheduler.store.engine import open_store
from services.scheduler.store.store import Store
from services.scheduler.store.writer import Writer

_log = log.get(__name__)


class Scheduler:
    """A running scheduler: leads from `start` until `stop`, or until its store fails."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._store: Store | None = None
        self._writer: Writer | None = None
        self._server: RunningServer | None = None
        self._tasks = Tasks(on_failure=self._died)
        self.metrics: SchedulerExposition | None = None
        """None unless `metrics_listen` is configured."""
        self.failed = asyncio.Event()
        self.cycle: Cycle | None = None

    @property
    def address(self) -> str:
        """host:port that is served."""
        assert self._server is not None
        return self._server.address

    async def start(self) -> None:
        """Opens the store, takes the lead under a new term, loads the state and serves. ConfigError if it cannot."""
        table = rates.read(self._config.planner.rates) if self._config.planner.rates else None
        store = await asyncio.to_thread(open_store, self._config.database, self._config.database_password_file)
        self._store = store
        term = await asyncio.to_thread(store.acquire_term)
        fleet = await asyncio.to_thread(store.load)
        fleet.term = term
        writer = Writer(store, term)
        self._writer = writer
        ledger = Ledger(fleet, writer, SystemClock(), self._config)
        cycle = Cycle(ledger, BlobStore(self._config.blobs), table)
        self.cycle = cycle
        await cycle.load_tasks()
        await ledger.commit(sessions.take_over(ledger))
        if self._config.metrics_listen:
            self.metrics = SchedulerExposition(cycle, writer)
            await self.metrics.restore(store)
            await self.metrics.exposition.serve(self._config.metrics_listen)
        idempotency = Idempotency(ledger, store)
        trajectories = TrajectoryService(cycle, store, idempotency)
        admin = AdminService(cycle, store, idempotency)
        self._server = await serve(
            add_to_server(FleetService(cycle), trajectories, admin, PlacementService()),
            self._config.listen,
            service_names=NAMES,
            ready_file=self._config.ready_file,
            check=check,
        )
        self._tasks.start("cycle", cycle.run())
        self._tasks.start("prune", cycle.prune(store))
        self._tasks.start("store", self._watch_store(ledger))
        _log.info("scheduler leads", term=term, address=self._server.address, revision=fleet.revision)

    async def _watch_store(self, ledger: Ledger) -> None:
        error = await ledger.failed
        _log.error("the store failed; the scheduler stops leading and must be restarted", error=repr(error))
        self.failed.set()

    def _died(self, name: str, error: BaseException) -> None:
        _log.error("the scheduler cannot go on", task=name, error=repr(error))
        self.failed.set()

    async def stop(self) -> None:
        """Stops serving, flushes what is committed and closes the store."""
        if self._server is not None:
            await self._server.stop(0.5)
        await self._tasks.stop()
        if self.metrics is not None:
            await self.metrics.exposition.stop()
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close)
        if self._store is not None:
            await asyncio.to_thread(self._store.close)


async def run(config: SchedulerConfig) -> int:
    """Serves until SIGTERM or SIGINT (0) or until the store fails (1)."""
    scheduler = Scheduler(config)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        await scheduler.start()
        waits = [asyncio.create_task(stopped.wait()), asyncio.create_task(scheduler.failed.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return 1 if scheduler.failed.is_set() else 0
    finally:
        with contextlib.suppress(RuntimeError):
            await scheduler.stop()
