"""Builds and wires a tool environment server: the only place that does."""

import asyncio
import os
import signal
import tempfile
import uuid
from pathlib import Path

from services.common import log, wire
from services.common.clock import SystemClock
from services.common.errors import ConfigError
from services.common.rpc.server import serve
from services.common.supervise import Tasks
from services.toolenv.api import SERVICE_NAME, ToolEnvService
from services.toolenv.config import ToolEnvConfig
from services.toolenv.envs.base import Environment
from services.toolenv.envs.calculator import Calculator
from services.toolenv.envs.python import Python
from services.toolenv.exposition import expose
from services.toolenv.sandbox.bare import Bare
from services.toolenv.sandbox.base import Limits, Sandbox
from services.toolenv.sandbox.bubblewrap import Bubblewrap, usable
from services.toolenv.sessions import Sessions

_log = log.get(__name__)

STOP_GRACE_S = 2.0


async def build_environment(config: ToolEnvConfig, work_dir: Path) -> Environment:
    """The configured environment; ConfigError if this machine cannot offer it, with the reason."""
    if config.environment == "calculator":
        return Calculator(timeout_s=config.tool_timeout_s, instructions=config.instructions)
    return Python(
        await choose_sandbox(work_dir, unsafe=config.unsafe),
        limits(config),
        work_dir,
        timeout_s=config.tool_timeout_s,
        instructions=config.instructions,
    )


async def choose_sandbox(work_dir: Path, *, unsafe: bool) -> Sandbox:
    """Bubblewrap; or none at all, if that is asked for and bubblewrap does not work here."""
    reason = await usable(work_dir)
    if reason is None:
        return Bubblewrap()
    if not unsafe:
        raise ConfigError(
            f"environment python is not offered: {reason}. Install bubblewrap, or set unsafe: true to run code "
            "without a sandbox (only code that you trust)"
        )
    _log.warning("python code runs WITHOUT a sandbox, as configured", reason=reason)
    return Bare()


def limits(config: ToolEnvConfig) -> Limits:
    """The sandbox's limits as configured."""
    section = config.sandbox
    return Limits(
        memory_bytes=section.memory_mib << 20,
        cpu_s=section.cpu_s,
        processes=section.processes,
        output_bytes=section.output_kib << 10,
        disk_bytes=section.disk_mib << 20,
        files=section.files,
    )


async def run(config: ToolEnvConfig) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="libra-toolenv-", dir=config.work_dir or None)
    except OSError as error:
        raise ConfigError(f"work_dir {config.work_dir!r}: cannot make a folder there: {error.strerror}") from None
    with folder as name:
        # sandboxes may run as another user, who must reach the folders in it
        os.chmod(name, 0o711)  # noqa: PTH101, S103 - they can enter it, not list it
        return await _run(config, Path(name))


async def _run(config: ToolEnvConfig, work_dir: Path) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock = SystemClock()
    environment = await build_environment(config, work_dir)
    sessions: Sessions[wire.ToolCall, wire.ScoreResponse] = Sessions(
        config.max_sessions,
        config.max_session_life_s,
        config.default_ttl_s,
        now=clock.monotonic,
        new_name=lambda: f"sessions/{uuid.uuid4()}",
    )
    service = ToolEnvService(environment, config, sessions, clock)
    failed: list[str] = []

    def on_failure(task: str, error: BaseException) -> None:
        failed.append(f"{task}: {error}")
        stop.set()

    tasks = Tasks(on_failure)
    exposition = expose(environment.name, service.tally, sessions)
    await exposition.serve(config.metrics_listen)
    server = await serve(
        [(wire.add_ToolEnvServiceServicer_to_server, service)],
        config.listen,
        service_names=[SERVICE_NAME],
        ready_file=config.ready_file,
    )
    tasks.start("expiry", service.keep_expiring())
    _log.info("tool environment ready", environment=environment.name, address=server.address)
    await stop.wait()
    await server.set_serving(False)
    # running calls get a moment to end and be answered, then they are killed with their sessions
    await server.stop(STOP_GRACE_S)
    await tasks.stop()
    await service.shut_down()
    await exposition.stop()
    _log.info("tool environment stopped", environment=environment.name)
    return 1 if failed else 0
