"""Builds and runs a node agent: its session, its measuring, its workers."""

import asyncio
import signal

from services.common import log, wire
from services.common.rpc.server import write_ready
from services.common.session import SessionFenced, SessionLost
from services.common.supervise import Tasks
from services.node.agent import NodeAgent
from services.node.config import NodeConfig
from services.node.exposition import expose

_log = log.get(__name__)


async def run(config: NodeConfig) -> int:
    """Runs until SIGTERM or SIGINT, or until a background task dies; returns the exit code."""
    stop = asyncio.Event()
    failed: list[BaseException] = []

    def on_failure(_: str, error: BaseException) -> None:
        failed.append(error)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    agent = NodeAgent(config)
    exposition = expose(agent)
    await exposition.serve(config.metrics_listen)
    tasks = Tasks(on_failure)
    tasks.start("session", agent.session.run())
    tasks.start("begun", _announce(agent, config))
    agent.workers.write_state()
    agent.workers.start_all()
    tasks.start("measure", agent.measure_forever())
    await stop.wait()
    await agent.leave()
    await tasks.stop()
    await exposition.stop()
    if failed:
        fenced = isinstance(failed[0], SessionFenced)
        _log.error("a newer agent speaks for this node" if fenced else "the agent failed", error=repr(failed[0]))
        return 1
    return 0


async def _announce(agent: NodeAgent, config: NodeConfig) -> None:
    """Ready means that the scheduler knows this node's hardware."""
    while True:
        await agent.session.wait_begun()
        observations = agent.measure()
        try:
            await agent.session.report(wire.Delta(observations=observations))
            break
        except SessionLost:
            await asyncio.sleep(config.measure_s)
    if config.ready_file:
        write_ready(config.ready_file, agent.session.name)
