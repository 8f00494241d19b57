"""Builds and wires a rollout worker: the only place that does."""

import asyncio
import contextlib
import signal
import sys

from services.common import log, wire
from services.common.blobs import BlobStore
from services.common.history import History
from services.common.rpc.server import serve
from services.common.session import FleetSession, SessionFenced
from services.common.share import CpuShare
from services.common.supervise import Tasks
from services.rollout.agent import RolloutAgent
from services.rollout.api import RolloutService
from services.rollout.config import RolloutConfig
from services.rollout.engine.thread import Engine
from services.rollout.exposition import expose

_log = log.get(__name__)

SERVICE_NAME = "libra.v1.RolloutService"
SWITCH_SECONDS = 0.0005
"""The engine's thread gives up Python's lock at each tensor operation; with the default of 5 ms it would wait that long
for a busy event loop each time."""


def build_engine(config: RolloutConfig) -> Engine:
    """The engine named in the configuration, warm: its libraries are imported, no model is resident."""
    from services.rollout.engine.model import preload
    from services.rollout.engine.transformers import TransformersCore

    preload()
    return Engine(TransformersCore(config.engine.limits(), config.engine.threads), CpuShare(config.cpu_share))


async def run(config: RolloutConfig) -> int:
    """Runs the worker until SIGTERM, SIGINT, a Drain command, or a fencing session; returns the exit code."""
    sys.setswitchinterval(SWITCH_SECONDS)
    name = config.worker.removeprefix("workers/")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = build_engine(config)
    engine.start()
    history = History(config.history, name)
    agent = RolloutAgent(config, engine, BlobStore(config.blobs), history)
    failed: list[str] = []

    def on_failure(task: str, error: BaseException) -> None:
        failed.append(f"{task}: {error}")
        stop.set()

    tasks = Tasks(on_failure)
    exposition = expose(agent)
    await exposition.serve(config.metrics_listen)
    servicers = [(wire.add_RolloutServiceServicer_to_server, RolloutService(agent))]
    server = await serve(servicers, config.listen, service_names=[SERVICE_NAME], ready_file=config.ready_file)
    session = FleetSession(
        config.scheduler,
        name,
        wire.WORKER_KIND_ROLLOUT,
        handler=agent,
        endpoint=server.address,
        accelerators=config.accelerators,
        ttl=config.ttl,
    )
    agent.bind(session)
    kept = tasks.start("session", session.run())
    tasks.start("load", agent.report_load())
    drained = tasks.start("drained", agent.drained.wait())
    stopping = asyncio.create_task(stop.wait())
    _log.info("rollout worker ready", worker=name, address=server.address, scheduler=config.scheduler)
    await asyncio.wait({stopping, drained, kept}, return_when=asyncio.FIRST_COMPLETED)
    fenced = kept.done() and not kept.cancelled() and isinstance(kept.exception(), SessionFenced)
    await server.set_serving(False)
    if fenced:
        await agent.on_session_lost("a newer session of this worker exists")
    else:
        await agent.shut_down()
    await tasks.stop()
    await engine.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await server.stop(0.5)
    await exposition.stop()
    stopping.cancel()
    for text in failed:
        _log.error("worker ends because a part of it failed", what=text)
    return 1 if failed else 0
