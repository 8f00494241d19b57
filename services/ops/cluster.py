"""A cluster on this machine: starts its services in order, keeps them running, stops them in reverse.

The launcher keeps toolenvs, lighthouse, scheduler and node agents; workers are kept by their node's agent. Everything
is tethered to its parent, so that a killed launcher leaves nothing running.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import log
from services.common.errors import ConfigError
from services.common.processes import CONFIG_EXIT, Launch, StartFailed, Supervised
from services.common.rpc.server import write_ready
from services.ops import clusterfile
from services.ops.clusterfile import Addresses, ClusterConfig, RunFolder, Service

_log = log.get(__name__)

POLL_S = 0.1
AGENT_GRACE_S = 20.0
"""Beyond the workers' own grace: the agent ends its workers, then its session."""


def claim(folder: Path) -> int:
    """Takes the run folder's lock and returns its descriptor; ConfigError if a launcher that lives has it.

    The kernel lets the lock go with its holder, so what a killed launcher left behind refuses nobody.
    """
    fd = os.open(folder / ".launcher", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode().strip()
        os.close(fd)
        raise ConfigError(
            f"{folder}: a cluster runs here already (launcher process {pid}); stop it or choose another name or run_dir"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


class ClusterFailed(Exception):
    """A process of the cluster could not be started or kept; the message ends with its own last words."""


@dataclass(frozen=True)
class WorkerState:
    """A worker process as its node's agent sees it."""

    name: str
    state: str
    pid: int | None
    restarts: int
    exit_code: int | None
    message: str


class Cluster:
    """One local cluster. `start`, then `wait_workers`; `stop` ends everything; `failure` is set when one is retired.

    `on_change(name, state, message)` is told of every change of a process that the launcher keeps.
    """

    def __init__(self, config: ClusterConfig, on_change: Callable[[str, str, str], None] | None = None) -> None:
        self.config = config
        self.folder = RunFolder.of(config)
        self.addresses = Addresses(toolenvs={})
        self.processes: dict[str, Supervised] = {}
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._on_change = on_change
        self._lock: int | None = None

    @property
    def scheduler(self) -> str:
        """host:port of the scheduler."""
        return self.addresses.scheduler

    @property
    def blobs(self) -> str:
        """URI of the blob store."""
        return self.config.blobs or str(self.folder.path / "blobs")

    # ---- starting

    async def start(self) -> None:
        """Starts all but waits only for the launcher's own children.

        ConfigError if the configuration, a port or the database cannot be used; ClusterFailed otherwise. What was
        started is stopped again then.
        """
        self._claim()
        try:
            self._check_ports()
            await self._start()
        except StartFailed as error:
            await self.stop()
            if error.exit_code == CONFIG_EXIT:
                raise ConfigError(str(error)) from None
            raise ClusterFailed(str(error)) from None
        except BaseException:
            await self.stop()
            raise

    def _claim(self) -> None:
        """One launcher for a run folder: two would write the same files."""
        self.folder.path.mkdir(parents=True, exist_ok=True)
        self._lock = claim(self.folder.path)

    def _check_ports(self) -> None:
        clusterfile.check_listen("scheduler.listen", self.config.scheduler.listen)
        clusterfile.check_listen("lighthouse.listen", self.config.lighthouse.listen)
        for toolenv in self.config.toolenvs:
            if toolenv.listen:
                clusterfile.check_listen(f"toolenvs[{toolenv.environment}].listen", toolenv.listen)

    async def _start(self) -> None:
        first = [s for s in self._services() if s.module in ("services.toolenv", "services.trainer.lighthouse")]
        found = await _all_or_first_error([self._start_one(s) for s in first])
        bound = {service.name: address for service, address in zip(first, found, strict=True)}
        self.addresses.lighthouse = bound.get("lighthouse", self.addresses.lighthouse)
        self.addresses.toolenvs = {
            t.environment: bound[clusterfile.toolenv_name(t)] for t in self.config.toolenvs if t.listen
        }
        self.addresses.scheduler = await self._start_one(self._service("scheduler"))
        self._pin_addresses()
        services = self._services()
        for service in services:
            if service.module in ("services.rollout", "services.trainer"):
                service.write(self.folder)
        self._announce()
        await _all_or_first_error([self._start_one(s) for s in services if s.module == "services.node"])

    def _services(self) -> list[Service]:
        return clusterfile.services(self.config, self.folder, self.addresses)

    def _service(self, name: str) -> Service:
        return next(s for s in self._services() if s.name == name)

    async def _start_one(self, service: Service) -> str:
        path = service.write(self.folder)
        launch = Launch(
            name=service.name,
            argv=clusterfile.argv(service.module, path),
            log=self.folder.log(service.name),
            ready_file=self.folder.ready(service.name),
            pid_file=self.folder.pids / f"{service.name}.pid",
            ready_timeout_s=self.config.ready_timeout_s,
        )
        process = Supervised(launch, on_change=self._changed)
        self.processes[service.name] = process
        process.start()
        # what fails at its first start fails for a reason that a person should see now
        return await process.wait_ready(first_try=True)

    def _pin_addresses(self) -> None:
        """A restarted service must be found where its peers know it, also if it was given a free port at first."""
        pinned = {"scheduler": self.addresses.scheduler, "lighthouse": self.addresses.lighthouse}
        pinned |= {f"toolenv-{name}": address for name, address in (self.addresses.toolenvs or {}).items()}
        for service in self._services():
            address = pinned.get(service.name, "").removeprefix("http://")
            if address:
                service.content["listen"] = address
                service.write(self.folder)

    def _announce(self) -> None:
        """Tells the other commands where the scheduler is."""
        content = {
            "name": self.config.name, "scheduler": self.scheduler, "blobs": self.blobs, "pid": os.getpid(),
            "toolenvs": {t.environment: t.address for t in self.config.toolenvs if t.address}
            | (self.addresses.toolenvs or {}),
        }  # fmt: skip
        write_ready(self.folder.cluster, json.dumps(content, indent=1))
        current = self.folder.path.parent / "current"
        if not current.exists() or current.is_symlink():
            part = current.with_name(f".current.{os.getpid()}")
            with contextlib.suppress(OSError):  # a convenience only
                part.symlink_to(self.folder.path.name)
                part.replace(current)

    def _changed(self, process: Supervised) -> None:
        if self._on_change is not None:
            self._on_change(process.name, process.state, process.message)
        if process.state == "RETIRED" and not self.failure.done():
            self.failure.set_result(process.message)

    # ---- workers

    def workers(self) -> dict[str, WorkerState]:
        """The worker processes as the node agents last wrote."""
        found: dict[str, WorkerState] = {}
        for node in self.config.nodes:
            with contextlib.suppress(FileNotFoundError):
                state: dict[str, Any] = json.loads(self.folder.state(node.name).read_text())
                found |= {name: WorkerState(name, **fields) for name, fields in state.items()}
        return found

    async def wait_workers(self, timeout_s: float | None = None) -> None:
        """Returns once every worker process is ready; ConfigError or ClusterFailed as soon as one is given up."""
        timeout_s = timeout_s or self.config.ready_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.workers()
            waiting = [w.name for w in self.config.workers if w.name not in states or states[w.name].state != "READY"]
            retired = [w for w in states.values() if w.state == "RETIRED"]
            if retired:
                error = ConfigError if retired[0].exit_code == CONFIG_EXIT else ClusterFailed
                raise error(retired[0].message)
            if self.failure.done():
                raise ClusterFailed(self.failure.result())
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise ClusterFailed(
                    f"not ready within {timeout_s:.0f} s: {', '.join(waiting)}; see {self.folder.log(waiting[0])}"
                )
            await asyncio.sleep(POLL_S)

    def pid(self, name: str) -> int | None:
        """Process id of a service or worker; None while it does not run."""
        process = self.processes.get(name)
        if process is not None:
            return process.pid
        worker = self.workers().get(name)
        return worker.pid if worker is not None else None

    # ---- stopping

    def kill(self) -> None:
        """SIGKILL to everything; workers go with their node's agent."""
        for process in self.processes.values():
            process.kill()

    async def stop(self) -> None:
        """Ends everything in reverse order: politely, then with the process group killed."""
        for name in reversed(list(self.processes)):
            process = self.processes[name]
            agent = name.startswith("node-")
            await process.stop(self.config.stop_grace_s + (AGENT_GRACE_S if agent else 0.0))
        self.processes.clear()
        self.folder.cluster.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


async def _all_or_first_error(work: Sequence[Any]) -> list[Any]:
    """Results of all; the first failure ends the wait for the others."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def load(path: str | Path) -> ClusterConfig:
    """Reads a cluster file; see clusterfile."""
    return clusterfile.load(path)


__all__ = ["Cluster", "ClusterConfig", "ClusterFailed", "WorkerState", "load"]
