"""The rollout worker's configuration file."""

from typing import Literal

from pydantic import Field

from services.common.config import Strict
from services.rollout.engine.base import EngineLimits


class EngineSection(Strict):
    """The engine and its bounds; see engine/base.EngineLimits."""

    kind: Literal["transformers"] = "transformers"
    threads: int = Field(1, ge=1, le=1024)
    max_sequences: int = Field(64, ge=1, le=4096)
    max_waiting: int = Field(1_024, ge=1)
    max_context: int = Field(4_096, ge=16)
    kv_slots: int = Field(0, ge=0)
    """Sequences whose cache is kept, those waiting for tools included; 0 = twice max_sequences."""
    prefill_tokens: int = Field(4_096, ge=16)
    chunk_tokens: int = Field(16, ge=1)

    def limits(self) -> EngineLimits:
        """As the engine takes them."""
        return EngineLimits(
            max_sequences=self.max_sequences,
            max_waiting=self.max_waiting,
            max_context=self.max_context,
            kv_slots=self.kv_slots,
            prefill_tokens=self.prefill_tokens,
            chunk_tokens=self.chunk_tokens,
        )


class EpisodeSection(Strict):
    """Episodes, seconds where not said otherwise."""

    dialect: str = "libra-tags"
    max_episodes: int = Field(256, ge=1, le=4096)
    """Leases taken at once; more are given back."""
    call_s: float = Field(60.0, gt=0)
    score_s: float = Field(60.0, gt=0)
    session_s: float = Field(600.0, gt=0)
    """Wished life of an environment session between renewals."""


class RolloutConfig(Strict):
    """`python -m services.rollout --config FILE`."""

    worker: str
    """workers/{worker}, or the last part of it."""
    scheduler: str
    """host:port of the scheduler."""
    listen: str = "127.0.0.1:0"
    ready_file: str | None = None
    accelerators: list[str] = Field(min_length=1, max_length=64)
    """nodes/{node}/accelerators/{index}: those it may be granted."""
    locks: str
    """Folder of the node's generation locks."""
    blobs: str
    """Blob store: a folder or an fsspec URI."""
    history: str | None = None
    """File to which what this process saw is appended, for the checkers."""
    cpu_share: float = Field(0.0, ge=0, le=1)
    """Share of one core, enforced here; 0 or 1 = no limit."""
    ttl: float = Field(0.0, ge=0)
    """Wished lease of the session, seconds; 0 = the scheduler's."""
    load_interval: float = Field(0.5, gt=0)
    drain_s: float = Field(10.0, gt=0)
    """Time in which running episodes are given back when the process is told to stop."""
    metrics_listen: str = ""
    """host:port of /metrics; empty serves none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    engine: EngineSection = Field(default_factory=EngineSection)
    episodes: EpisodeSection = Field(default_factory=EpisodeSection)
