"""Configuration of a trainer worker and of the torchft lighthouse; strict YAML, unknown keys are refused."""

from typing import Annotated, Literal

from pydantic import Field

from services.common.config import Strict

Seconds = Annotated[float, Field(gt=0)]


class CollectiveConfig(Strict):
    """The cross-replica group.

    A crash or freeze of a replica costs the others at most the discarded step + `timeout_s` + the lighthouse's
    heartbeat timeout.
    """

    lighthouse: str = Field(min_length=1)
    """Address of the lighthouse, http://host:port or host:port."""
    host: str = ""
    """Name or address under which the other replicas reach this one; empty: the address from which the lighthouse is
    reached, so that a machine on several networks uses the trainers' own."""
    timeout_s: Seconds = 20.0
    """Longest wait for one collective operation or one state transfer."""
    quorum_timeout_s: Seconds = 15.0
    """Longest wait for a quorum; then the manifest and the roster are asked for again. A replica that has the group's
    last step still to publish is waited for; one that died is gone after the lighthouse's heartbeat timeout."""
    rejoin_s: Seconds = 1.5
    """Pause before a replica that left the group asks for it again; more than the lighthouse's heartbeat timeout."""
    connect_timeout_s: Seconds = 3.0
    heartbeat_interval_ms: int = Field(default=100, ge=10)
    secret_file: str = ""
    """File with the secret that replicas of this trainer group share; state is handed only to callers that know it.
    Empty: a random one for each process, told to peers through the collective's own (trainer-only) network."""


class Config(Strict):
    """One trainer worker."""

    worker: str = Field(min_length=1)
    scheduler: str = Field(min_length=1)
    listen: str = "127.0.0.1:0"
    ready_file: str = ""
    accelerators: list[str] = Field(min_length=1, max_length=64)
    lock_dir: str = Field(min_length=1)
    blobs: str = Field(min_length=1)
    collective: CollectiveConfig
    cpu_share: float = Field(default=0.0, ge=0)
    """Duty-cycle share of one core; 0 turns it off."""
    threads: int = Field(default=1, ge=1)
    engine: Literal["torch", "fake"] = "torch"
    dtype: Literal["float32", "float64"] = "float32"
    history_path: str = ""
    metrics_path: str = ""
    """JSON lines, one a step, written by the replica that speaks for the policy."""
    session_ttl_s: float = Field(default=0.0, ge=0)
    """Wished lease; 0 leaves it to the scheduler."""
    take_wait_s: Seconds = 30.0
    """Time that one TakeBatch waits for groups before it is asked again."""
    publish_grace_s: Seconds = 3.0
    """A committed version in memory that nobody has published for so long is published by whoever has it."""
    metrics_listen: str = ""
    """host:port of /metrics; empty serves none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class LighthouseConfig(Strict):
    """The torchft lighthouse: a process of its own on a network that only trainers reach."""

    listen: str = "127.0.0.1:0"
    ready_file: str = ""
    min_replicas: int = Field(default=1, ge=1)
    heartbeat_timeout_ms: int = Field(default=1000, ge=100)
    """A replica silent for so long is gone: what a leaving replica costs the others."""
    join_timeout_ms: int = Field(default=1000, ge=10)
    """How long a majority waits for a replica that is alive and has not asked for the quorum. Longer than publishing
    takes, or the replica that publishes would miss the next step; one that left is gone after the heartbeat timeout."""
    quorum_tick_ms: int = Field(default=20, ge=1)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
