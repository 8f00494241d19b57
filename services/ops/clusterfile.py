"""The cluster file: what `libra up` starts, and the configuration of each service made from it."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from services.common import config
from services.common.config import Strict
from services.common.errors import ConfigError
from services.node.config import AcceleratorSection, RestartSection
from services.scheduler import rates
from services.scheduler.config import SchedulerConfig

LOCAL = Path(__file__).with_name("assets") / "local.yaml"
"""The default cluster: four CPU accelerators on this machine."""

ID = r"[A-Za-z0-9._-]{1,63}"
SET_BY_LAUNCHER = ("ready_file", "blobs", "environments", "levels", "concurrency_caps")


class SchedulerSection(SchedulerConfig):
    """The scheduler's own settings; what connects it to the rest is filled in here."""

    database: str = ""
    """Default: SQLite in the run folder."""

    @model_validator(mode="after")
    def _not_ours(self) -> "SchedulerSection":
        given = [key for key in SET_BY_LAUNCHER if key in self.model_fields_set]
        if given:
            raise ValueError(f"{', '.join(given)}: set by the launcher from the other sections; leave it out")
        return self


class LighthouseSection(Strict):
    """torchft's lighthouse, which trainer replicas find each other through."""

    listen: str = "127.0.0.1:0"
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further keys of services.trainer.config.LighthouseConfig."""


class NodeSection(Strict):
    """One machine with a node agent."""

    name: str = Field(pattern=ID)
    rack: str = ""
    residue_mib: int = Field(default=256, ge=0)
    """Memory a released worker may keep above its idle baseline."""
    metrics_listen: str = ""
    """Of the node agent."""
    measure_s: float = Field(default=0.5, gt=0)
    kill_after_s: float = Field(default=10.0, gt=0)
    restart: RestartSection = RestartSection()
    accelerators: Annotated[list[AcceleratorSection], Field(min_length=1, max_length=64)]


class WorkerProcess(Strict):
    """One worker process, kept by a node's agent."""

    name: str = Field(pattern=ID)
    kind: Literal["rollout", "trainer"]
    accelerators: Annotated[list[int], Field(min_length=1, max_length=64)]
    """Indices on its node."""
    level: int = Field(default=0, ge=0)
    """Rollout: level of the queue; 0 = many and cheap."""
    concurrency_cap: int = Field(default=32, ge=1)
    """Rollout: running sequences."""
    engine: str = ""
    """Default: transformers for rollout, torch for trainers."""
    threads: int = Field(default=1, ge=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the service's own configuration."""
    env: dict[str, str] = Field(default_factory=dict)


class WorkerSection(WorkerProcess):
    """A worker process, and whose agent keeps it."""

    node: str


class ToolEnvSection(Strict):
    """One tool environment: ours to start (`listen`), or running elsewhere (`address`)."""

    environment: str = Field(pattern=ID)
    listen: str = ""
    address: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further keys of the toolenv service's own configuration."""

    @model_validator(mode="after")
    def _one(self) -> "ToolEnvSection":
        if bool(self.listen) == bool(self.address):
            raise ValueError("expected either listen (started here) or address (runs elsewhere)")
        return self


class ClusterConfig(Strict):
    """A whole cluster on this machine."""

    name: str = Field(default="local", pattern=ID)
    run_dir: str = ""
    """Folder of everything it writes; default runs/{name}."""
    scheduler: SchedulerSection = Field(default_factory=lambda: SchedulerSection.model_validate({}))
    blobs: str = ""
    """Blob store URI; default: blobs/ in the run folder."""
    lighthouse: LighthouseSection = LighthouseSection()
    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    workers: list[WorkerSection] = Field(default_factory=list)
    toolenvs: list[ToolEnvSection] = Field(default_factory=list)
    ready_timeout_s: float = Field(default=180.0, gt=0)
    stop_grace_s: float = Field(default=8.0, ge=0)
    log_files: bool = True
    """A log file for each worker; otherwise they write where the launcher's own output goes."""

    @field_validator("nodes", mode="after")
    @classmethod
    def _nodes(cls, value: list[NodeSection]) -> list[NodeSection]:
        _unique([n.name for n in value])
        return value

    @field_validator("toolenvs", mode="after")
    @classmethod
    def _toolenvs(cls, value: list[ToolEnvSection]) -> list[ToolEnvSection]:
        _unique([t.environment for t in value])
        return value

    @field_validator("workers", mode="after")
    @classmethod
    def _workers(cls, value: list[WorkerSection], info: ValidationInfo) -> list[WorkerSection]:
        nodes: list[NodeSection] = info.data.get("nodes", [])
        _unique([w.name for w in value] + [f"node-{n.name}" for n in nodes] + ["scheduler", "lighthouse"])
        indices = {n.name: {a.index for a in n.accelerators} for n in nodes}
        for worker in value:
            if not indices:
                break  # the nodes themselves are wrong, which is said already
            if worker.node not in indices:
                raise ValueError(f"worker {worker.name}: node {worker.node!r} is not one of {', '.join(indices)}")
            missing = sorted(set(worker.accelerators) - indices[worker.node])
            if missing:
                raise ValueError(
                    f"worker {worker.name}: accelerators {missing} are not on node {worker.node}, which has "
                    f"{sorted(indices[worker.node])}"
                )
        return value

    def names(self, worker: WorkerSection) -> list[str]:
        """Resource names of a worker's accelerators."""
        return [f"nodes/{worker.node}/accelerators/{index}" for index in worker.accelerators]


def _unique(names: Sequence[str]) -> None:
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} named twice; the names of processes must differ")


def load(path: str | Path) -> ClusterConfig:
    """Reads a cluster file and checks the services' own settings in it; ConfigError otherwise."""
    cluster = config.load(path, ClusterConfig)
    if cluster.scheduler.planner.rates:
        cluster = cluster.model_copy(update={"scheduler": rates.beside(cluster.scheduler, path)})
        rates.read(cluster.scheduler.planner.rates)
    check(cluster, str(path))
    return cluster


def check(cluster: ClusterConfig, source: str) -> None:
    """Builds every service's configuration once, so that a wrong setting is found before anything starts."""
    for service in services(cluster, RunFolder(Path("/run-folder")), Addresses()):
        service.validate(source)


# ---- the run folder


@dataclass(frozen=True)
class RunFolder:
    """Where a cluster keeps what."""

    path: Path

    @classmethod
    def of(cls, cluster: ClusterConfig) -> "RunFolder":
        """The folder that the cluster's file names, relative to the working directory."""
        return cls(Path(cluster.run_dir or f"runs/{cluster.name}").absolute())

    def config(self, name: str) -> Path:
        return self.path / "config" / f"{name}.yaml"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def ready(self, name: str) -> Path:
        return self.path / "ready" / name

    def history(self, name: str) -> Path:
        return self.path / "history" / f"{name}.jsonl"

    def state(self, node: str) -> Path:
        """What the node's agent says of its workers."""
        return self.path / "state" / f"{node}.json"

    @property
    def pids(self) -> Path:
        return self.path / "pids"

    @property
    def locks(self) -> Path:
        return self.path / "locks"

    @property
    def cluster(self) -> Path:
        """Says that a cluster runs here and where its scheduler is; see ops/target.py."""
        return self.path / "cluster.json"


@dataclass
class Addresses:
    """What is known of bound addresses; until then placeholders, which only checks may see."""

    scheduler: str = "127.0.0.1:1"
    lighthouse: str = "127.0.0.1:1"
    toolenvs: dict[str, str] | None = None


# ---- each service's configuration


@dataclass(frozen=True)
class Service:
    """One process: its name, its module, its configuration."""

    name: str
    module: str
    model: str
    """module:class of the configuration model."""
    content: dict[str, Any]
    settings: str
    """Where in the cluster file its further settings stand."""

    def validate(self, source: str) -> None:
        """ConfigError, in the cluster file's terms, if the service would refuse this."""
        module, _, name = self.model.partition(":")
        model: type[BaseModel] = getattr(__import__(module, fromlist=[name]), name)
        try:
            model.model_validate(self.content)
        except ValidationError as error:
            lines = []
            for part in error.errors():
                key = ".".join(str(p) for p in part["loc"])
                known = f"; known keys: {', '.join(sorted(model.model_fields))}"
                wrong = part["type"] == "extra_forbidden"
                lines.append(
                    f"{source}: {self.settings}: "
                    + (
                        f"unknown key {key!r}{known}"
                        if wrong
                        else f"{key!r}: {part['msg']} (found {part['input']!r:.80})"
                    )
                )
            raise ConfigError("\n".join(lines)) from None

    def write(self, folder: RunFolder) -> Path:
        """Writes the configuration file."""
        path = folder.config(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # values as they are: a dollar sign in them is no variable to who reads the file
        path.write_text(yaml.safe_dump(self.content, sort_keys=False).replace("$", "$$"))
        return path


def services(cluster: ClusterConfig, folder: RunFolder, addresses: Addresses) -> list[Service]:
    """Every process of the cluster, in the order of their start."""
    blobs = cluster.blobs or str(folder.path / "blobs")
    return [
        *(_toolenv(t, folder) for t in cluster.toolenvs if t.listen),
        *([_lighthouse(cluster, folder)] if any(w.kind == "trainer" for w in cluster.workers) else []),
        _scheduler(cluster, folder, addresses, blobs),
        *(_worker(cluster, w, folder, addresses, blobs) for w in cluster.workers),
        *(_node(cluster, n, folder, addresses) for n in cluster.nodes),
    ]


def toolenv_name(section: ToolEnvSection) -> str:
    """Process name of a tool environment."""
    return f"toolenv-{section.environment}"


def _toolenv(section: ToolEnvSection, folder: RunFolder) -> Service:
    name = toolenv_name(section)
    content = {
        "listen": section.listen,
        "ready_file": str(folder.ready(name)),
        "environment": section.environment,
        **section.settings,
    }
    return Service(
        name, "services.toolenv", "services.toolenv.config:ToolEnvConfig", content,
        f"toolenvs[{section.environment}].settings",
    )  # fmt: skip


def _lighthouse(cluster: ClusterConfig, folder: RunFolder) -> Service:
    content = {
        "listen": cluster.lighthouse.listen,
        "ready_file": str(folder.ready("lighthouse")),
        **cluster.lighthouse.settings,
    }
    return Service(
        "lighthouse", "services.trainer.lighthouse", "services.trainer.config:LighthouseConfig", content,
        "lighthouse.settings",
    )  # fmt: skip


def _scheduler(cluster: ClusterConfig, folder: RunFolder, addresses: Addresses, blobs: str) -> Service:
    rollouts = [w for w in cluster.workers if w.kind == "rollout"]
    external = {t.environment: t.address for t in cluster.toolenvs if t.address}
    content = cluster.scheduler.model_dump() | {
        "ready_file": str(folder.ready("scheduler")),
        "database": cluster.scheduler.database or f"sqlite:///{folder.path / 'libra.db'}",
        "blobs": blobs,
        "environments": external | (addresses.toolenvs or {}),
        "levels": {a: w.level for w in rollouts for a in cluster.names(w)},
        "concurrency_caps": {a: w.concurrency_cap for w in rollouts for a in cluster.names(w)},
    }
    return Service("scheduler", "services.scheduler", "services.scheduler.config:SchedulerConfig", content, "scheduler")


def _worker(
    cluster: ClusterConfig, section: WorkerSection, folder: RunFolder, addresses: Addresses, blobs: str
) -> Service:
    node = next(n for n in cluster.nodes if n.name == section.node)
    share = min(a.cpu_share for a in node.accelerators if a.index in section.accelerators)
    where = f"workers[{section.name}].settings"
    if section.kind == "rollout":
        settings = dict(section.settings)
        engine = {"threads": section.threads, "max_sequences": section.concurrency_cap} | settings.pop("engine", {})
        if section.engine:
            engine["kind"] = section.engine
        content: dict[str, Any] = {
            "worker": section.name,
            "scheduler": addresses.scheduler,
            "listen": "127.0.0.1:0",
            "ready_file": str(folder.ready(section.name)),
            "accelerators": cluster.names(section),
            "locks": str(folder.locks),
            "blobs": blobs,
            "history": str(folder.history(section.name)),
            "cpu_share": share,
            # what is given back must be given back before the agent's patience ends
            "drain_s": max(0.5, cluster.stop_grace_s - 1.0),
            "engine": engine,
        } | settings
        return Service(section.name, "services.rollout", "services.rollout.config:RolloutConfig", content, where)
    settings = dict(section.settings)
    collective = {"lighthouse": addresses.lighthouse} | settings.pop("collective", {})
    content = {
        "scheduler": addresses.scheduler,
        "worker": section.name,
        "accelerators": cluster.names(section),
        "listen": "127.0.0.1:0",
        "ready_file": str(folder.ready(section.name)),
        "blobs": blobs,
        "lock_dir": str(folder.locks),
        "history_path": str(folder.history(section.name)),
        "metrics_path": str(folder.path / "metrics" / f"{section.name}.jsonl"),
        "collective": collective,
        "cpu_share": share,
        "engine": section.engine or "torch",
        "threads": section.threads,
    } | settings
    return Service(section.name, "services.trainer", "services.trainer.config:Config", content, where)


def _node(cluster: ClusterConfig, section: NodeSection, folder: RunFolder, addresses: Addresses) -> Service:
    content = {
        "scheduler": addresses.scheduler,
        "node": section.name,
        "locks": str(folder.locks),
        "state_file": str(folder.state(section.name)),
        "pids": str(folder.pids),
        "ready_file": str(folder.ready(f"node-{section.name}")),
        "rack": section.rack,
        "metrics_listen": section.metrics_listen,
        "measure_s": section.measure_s,
        "residue_mib": section.residue_mib,
        "kill_after_s": section.kill_after_s,
        "stop_grace_s": cluster.stop_grace_s,
        "ready_timeout_s": cluster.ready_timeout_s,
        "restart": section.restart.model_dump(),
        "accelerators": [a.model_dump() for a in section.accelerators],
        "workers": [_template(cluster, w, folder) for w in cluster.workers if w.node == section.name],
    }
    return Service(
        f"node-{section.name}", "services.node", "services.node.config:NodeConfig", content, f"nodes[{section.name}]"
    )


def _template(cluster: ClusterConfig, section: WorkerSection, folder: RunFolder) -> dict[str, Any]:
    return {
        "name": section.name,
        "argv": argv(f"services.{section.kind}", folder.config(section.name)),
        "accelerators": cluster.names(section),
        "ready_file": str(folder.ready(section.name)),
        "log": str(folder.log(section.name)) if cluster.log_files else "",
        "env": {
            # several torch processes on few cores: one thread each, and none that spins while it waits
            "OMP_NUM_THREADS": str(section.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            "TOKENIZERS_PARALLELISM": "false",
            **section.env,
        },
    }


def argv(module: str, path: Path) -> list[str]:
    """The command of a service."""
    return [sys.executable, "-m", module, "--config", str(path)]


def check_listen(key: str, address: str) -> None:
    """ConfigError if host:port is malformed, or taken by another process (port 0 never is)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"{key}: {address!r} is no address; expected host:port, e.g. 127.0.0.1:7070")
    if int(port) == 0:
        return
    try:
        kind, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"{key}: host {host!r} is unknown: {error.strerror}") from None
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise ConfigError(
                f"{key}: port {port} on {host} cannot be used ({reason}); stop what holds it, or configure another "
                "port (0 picks a free one)"
            ) from None
