"""The scheduler's configuration file."""

from pydantic import Field, field_validator

from services.common.config import Strict

POOLS = ("CORE_ROLLOUT", "CORE_TRAINING", "HYBRID")


class LeaseSettings(Strict):
    """Times of sessions, seconds."""

    ttl: float = Field(10.0, gt=0.5)
    margin: float = Field(1.0, gt=0)
    report_interval: float = Field(0.5, gt=0)
    trajectory_stall: float = Field(120.0, gt=1)
    """A leased trajectory of which nothing was reported for so long is taken back."""


class QueueSection(Strict):
    """Settings of the multi-level queue; see core/cmlfq.py."""

    quantum_tokens: list[int] = Field(default_factory=lambda: [48, 1_000_000])
    """Generated tokens in one lease before demotion, per level."""
    max_wait_s: float = Field(20.0, gt=0)
    max_moves: int = Field(4, ge=0)
    """Preemptions decided in one cycle."""


class PlannerSection(Strict):
    """Settings of the planner; see core/planner.py, and core/relayout.py where a table of rates is given."""

    enabled: bool = True
    rates: str = ""
    """File of rates (rates.py), relative to the configuration file; empty: none, single accelerators are moved."""
    interval_s: float = Field(2.0, gt=0)
    horizon_s: float = Field(60.0, gt=0)
    cooldown_s: float = Field(20.0, ge=0)
    hysteresis: float = Field(0.1, ge=0)
    confirmations: int = Field(2, ge=1)
    max_moves_per_window: int = Field(6, ge=0)
    window_s: float = Field(300.0, gt=0)
    min_trainers: int = Field(1, ge=0)
    min_rollouts: int = Field(1, ge=0)
    min_steps: int = Field(3, ge=0)
    """Steps that must have been seen before the first move."""
    min_gain: float = Field(0.02, ge=0)
    """With rates: least relative gain for which the layout is changed."""


class HandoverSettings(Strict):
    """Deadlines of hand-overs, seconds."""

    command_s: float = Field(30.0, gt=0)
    total_s: float = Field(90.0, gt=0)
    confirm_retry_s: float = Field(1.0, gt=0)
    quarantine_s: float = Field(60.0, gt=0)
    """A replica that cannot be confirmed free for so long is quarantined."""


class SchedulerConfig(Strict):
    """`python -m services.scheduler --config FILE`."""

    listen: str = "127.0.0.1:7070"
    ready_file: str | None = None
    database: str = "sqlite:///libra.db"
    database_password_file: str = ""
    """File whose first line is the password of a Postgres database; empty: it has none, or stands in the URL."""
    blobs: str = "blobs"
    environments: dict[str, str] = Field(default_factory=dict)
    """Addresses of tool environments by type, for runs that name none."""
    levels: dict[str, int] = Field(default_factory=dict)
    """Queue level of rollout replicas by accelerator, or by pool (CORE_ROLLOUT, HYBRID); others are level 0."""
    concurrency_caps: dict[str, int] = Field(default_factory=dict)
    """Running sequences of rollout replicas, by the same keys; others get `default_concurrency_cap`."""
    default_concurrency_cap: int = Field(32, ge=1)
    cycle_s: float = Field(0.1, gt=0)
    leases: LeaseSettings = LeaseSettings()
    queue: QueueSection = QueueSection()
    planner: PlannerSection = PlannerSection()
    handover: HandoverSettings = HandoverSettings()
    metrics_listen: str = ""
    """host:port of /metrics; empty serves none."""
    log_level: str = "info"

    def level(self, accelerator: str, pool: str) -> int:
        """Queue level of a rollout replica on this accelerator."""
        return self.levels.get(accelerator, self.levels.get(pool, 0))

    def concurrency_cap(self, accelerator: str, pool: str) -> int:
        """Running sequences of a rollout replica on this accelerator."""
        return self.concurrency_caps.get(accelerator, self.concurrency_caps.get(pool, self.default_concurrency_cap))

    @field_validator("levels", "concurrency_caps")
    @classmethod
    def _keys(cls, value: dict[str, int]) -> dict[str, int]:
        for key in value:
            if not key.startswith("nodes/") and key not in POOLS:
                raise ValueError(f"{key!r} is neither an accelerator (nodes/NODE/accelerators/0) nor one of {POOLS}")
        return value
