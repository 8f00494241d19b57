"""The node agent's configuration file."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.common.config import Strict


class AcceleratorSection(Strict):
    """One accelerator of this node."""

    index: int = Field(ge=0, le=9_999)
    type: str = "cpu"
    pool: Literal["CORE_TRAINING", "CORE_ROLLOUT", "HYBRID"]
    cpu_share: float = Field(default=0.0, ge=0, le=1)
    """CPU slots: share of one core; 0 for devices."""
    memory_mib: int = Field(ge=1)
    """What a CPU slot may hold; its free memory is counted against this."""
    sharing: Literal["EXCLUSIVE", "TIME_SLICED"] = "EXCLUSIVE"


class WorkerTemplate(Strict):
    """How to start one worker process; commands name templates and never carry shell text."""

    name: str
    argv: Annotated[list[str], Field(min_length=1)]
    accelerators: list[str]
    ready_file: str
    log: str = ""
    """File for its output; empty: it goes where the agent's own goes."""
    env: dict[str, str] = Field(default_factory=dict)
    start: bool = True
    """Started with the agent; otherwise only on command."""


class RestartSection(Strict):
    """Restarts of crashed workers."""

    max_restarts: int = Field(default=5, ge=0)
    window_s: float = Field(default=60.0, gt=0)
    first_pause_s: float = Field(default=0.2, gt=0)
    longest_pause_s: float = Field(default=5.0, gt=0)


class NodeConfig(Strict):
    """`python -m services.node --config FILE`."""

    scheduler: str
    node: str
    worker: str = ""
    """Name of the agent itself; default: node-{node}."""
    locks: str
    """Folder of the generation lock files."""
    state_file: str | None = None
    """Where the agent writes what its workers do, as JSON."""
    pids: str | None = None
    """Folder for one pid file per worker."""
    ready_file: str | None = None
    """Written once the agent has a session."""
    rack: str = ""
    measure_s: float = Field(default=0.5, gt=0)
    residue_mib: int = Field(default=256, ge=0)
    """Memory that a released worker may keep above its idle baseline."""
    kill_after_s: float = Field(default=10.0, gt=0)
    """A holder that should be gone and is not is killed after so long."""
    stop_grace_s: float = Field(default=5.0, ge=0)
    ready_timeout_s: float = Field(default=180.0, gt=0)
    restart: RestartSection = RestartSection()
    accelerators: Annotated[list[AcceleratorSection], Field(min_length=1, max_length=64)]
    workers: list[WorkerTemplate] = Field(default_factory=list)
    metrics_listen: str = ""
    """host:port of /metrics; empty serves none."""
    log_level: str = "info"

    @model_validator(mode="after")
    def _consistent(self) -> "NodeConfig":
        names = [self.accelerator_name(a.index) for a in self.accelerators]
        if len(set(names)) != len(names):
            raise ValueError("two accelerators have the same index")
        workers = [w.name for w in self.workers]
        if len(set(workers)) != len(workers):
            raise ValueError("two workers have the same name")
        for worker in self.workers:
            for accelerator in worker.accelerators:
                if accelerator not in names:
                    raise ValueError(f"worker {worker.name}: {accelerator} is not one of {', '.join(names)}")
        return self

    def accelerator_name(self, index: int) -> str:
        """Resource name of one of this node's accelerators."""
        return f"nodes/{self.node}/accelerators/{index}"
