"""Builds and wires a trainer worker; the only place that does."""

import asyncio
import signal
from collections.abc import Callable

from services.common import log, wire
from services.common.blobs import BlobStore
from services.common.history import History
from services.common.metrics import Exposition
from services.common.rpc.server import RunningServer, serve
from services.common.session import FleetSession, SessionFenced
from services.common.supervise import Tasks
from services.trainer.agent import TrainerAgent, read_secret
from services.trainer.api import TrainerApi
from services.trainer.config import Config
from services.trainer.engine.base import Engine
from services.trainer.exposition import expose

_log = log.get(__name__)

FAILED = 1
FENCED = 3


def make_engine(config: Config) -> Engine:
    """The engine that the configuration names, warmed up: a grant must not wait for libraries to load."""
    if config.engine == "fake":
        from services.trainer.engine.fake import FakeEngine

        return FakeEngine()
    from services.trainer.engine.torch import TorchEngine

    engine = TorchEngine(config.dtype, config.threads)
    engine.warm_up()
    return engine


class Running:
    """A started trainer worker."""

    def __init__(
        self, agent: TrainerAgent, session: FleetSession, server: RunningServer, tasks: Tasks, exposition: Exposition
    ) -> None:
        self.agent = agent
        self.address = server.address
        self._session, self._server, self._tasks, self._exposition = session, server, tasks, exposition

    async def stop(self) -> None:
        """Finishes the step in hand, lets go of the replica, ends the session and stops serving."""
        await self.agent.stop()
        await self._session.stop(abandon=True)
        await self._tasks.stop()
        await self._server.stop()
        await self._exposition.stop()


async def start(config: Config, engine: Engine, end: Callable[[int], None]) -> Running:
    """Serves and begins a session. `end` is called with an exit code if the worker cannot go on."""
    worker = f"workers/{config.worker.removeprefix('workers/')}"
    agent = TrainerAgent(
        config, engine, BlobStore(config.blobs), History(config.history_path or None, worker),
        secret=read_secret(config.collective.secret_file), on_failure=lambda _: end(FAILED),
    )  # fmt: skip
    exposition = expose(agent)
    await exposition.serve(config.metrics_listen)
    server = await serve(
        [(wire.add_TrainerServiceServicer_to_server, TrainerApi(agent))],
        config.listen,
        service_names=["libra.v1.TrainerService"],
        ready_file=config.ready_file or None,
    )
    session = FleetSession(
        config.scheduler, worker, wire.WORKER_KIND_TRAINER, handler=agent, endpoint=server.address,
        accelerators=config.accelerators, ttl=config.session_ttl_s,
    )  # fmt: skip
    agent.attach(session)

    def failed(name: str, error: BaseException) -> None:
        del name
        end(FENCED if isinstance(error, SessionFenced) else FAILED)

    tasks = Tasks(failed)
    tasks.start("session", session.run())
    tasks.start("load", agent.report_load())
    return Running(agent, session, server, tasks, exposition)


async def run(config: Config) -> int:
    """Serves until a signal (0), a failure of the training thread (1) or a newer session of this worker (3)."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(code: int) -> None:
        if not ended.done():
            ended.set_result(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, 0)
    running = await start(config, make_engine(config), end)
    code = await ended
    _log.info("stopping", code=code)
    await running.stop()
    return code
