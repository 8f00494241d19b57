"""The node file: one machine, or one container, whose agent and workers serve a scheduler that runs elsewhere."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from services.common import config
from services.common.config import Strict
from services.common.errors import ConfigError
from services.ops import clusterfile
from services.ops.clusterfile import (
    Addresses,
    ClusterConfig,
    NodeSection,
    RunFolder,
    Service,
    WorkerProcess,
    WorkerSection,
)


class NodeFile(Strict):
    """`libra node FILE`."""

    scheduler: str = Field(min_length=1)
    """host:port of the scheduler."""
    lighthouse: str = ""
    """Address of torchft's lighthouse; needed where a trainer worker runs."""
    blobs: str = Field(min_length=1)
    """Blob store URI, the same for the whole cluster."""
    run_dir: str = ""
    """Folder of what this node writes: locks, histories, logs; default runs/{node}. It must survive a restart."""
    host: str = ""
    """Name or address under which the other machines' trainers reach this one's; empty: the address from which the
    lighthouse is reached."""
    listen: str = "127.0.0.1"
    """Address on which workers take calls; 0.0.0.0 for all."""
    node: NodeSection
    workers: Annotated[list[WorkerProcess], Field(min_length=1)]
    ready_timeout_s: float = Field(default=180.0, gt=0)
    stop_grace_s: float = Field(default=8.0, ge=0)
    log_files: bool = False
    """A log file for each worker; otherwise all write to this command's own output."""

    @property
    def folder(self) -> RunFolder:
        """Where this node keeps what."""
        return RunFolder(Path(self.run_dir or f"runs/{self.node.name}").absolute())

    def services(self) -> list[Service]:
        """The workers' and the agent's configurations; the agent comes last."""
        cluster = ClusterConfig(
            name=self.node.name,
            blobs=self.blobs,
            nodes=[self.node],
            workers=[WorkerSection(**_settings(self, w), node=self.node.name) for w in self.workers],
            ready_timeout_s=self.ready_timeout_s,
            stop_grace_s=self.stop_grace_s,
            log_files=self.log_files,
        )
        addresses = Addresses(scheduler=self.scheduler, lighthouse=self.lighthouse or "127.0.0.1:1")
        wanted = ("services.rollout", "services.trainer", "services.node")
        return [s for s in clusterfile.services(cluster, self.folder, addresses) if s.module in wanted]


def load(path: str | Path) -> NodeFile:
    """Reads a node file and checks the services' own settings in it; ConfigError otherwise."""
    node = config.load(path, NodeFile)
    if not node.lighthouse and any(w.kind == "trainer" for w in node.workers):
        raise ConfigError(f"{path}: 'lighthouse' is missing; trainer workers find each other through it")
    for service in node.services():
        service.validate(str(path))
    return node


def _settings(node: NodeFile, worker: WorkerProcess) -> dict[str, Any]:
    """The worker with what being reached from other machines needs, unless it says that itself."""
    settings: dict[str, Any] = {"listen": f"{node.listen}:0"} | worker.settings
    if worker.kind == "trainer" and node.host:
        settings["collective"] = {"host": node.host} | worker.settings.get("collective", {})
    return worker.model_dump() | {"settings": settings}
