"""The run file: what `libra run` submits, and the Run message made from it."""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from services.common import wire
from services.common.config import Strict
from services.common.errors import LibraError
from services.trainer import algorithm


class EnvironmentSection(Strict):
    """The tool environment of the run's tasks."""

    type: str = Field(min_length=1)
    address: str = ""
    """host:port; empty: the one that the scheduler's configuration names."""
    version: str = ""
    """Wanted version of the environment, as its Describe says; empty: any."""


class AlgorithmSection(Strict):
    """The trainer's algorithm, one that this version's trainer knows."""

    name: str = algorithm.NAME
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keys of services.trainer.algorithm.Grpo."""

    @model_validator(mode="after")
    def _known(self) -> "AlgorithmSection":
        if self.name != algorithm.NAME:
            raise ValueError(f"name {self.name!r} is not an algorithm of this trainer; it knows {algorithm.NAME!r}")
        try:
            algorithm.from_settings(self.settings)
        except LibraError as error:
            raise ValueError(error.message) from None
        return self


class BatchSection(Strict):
    """What a step takes, in groups."""

    groups: int = Field(default=16, ge=1, le=65_536)
    min_groups: int = Field(default=0, ge=0)
    multiple_of: int = Field(default=0, ge=0)

    @field_validator("min_groups")
    @classmethod
    def _fewest(cls, value: int, info: ValidationInfo) -> int:
        groups = info.data.get("groups", value)
        if value > groups:
            raise ValueError(f"above groups, which is {groups}")
        return value

    @field_validator("multiple_of")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        groups = info.data.get("groups", value)
        if value and groups % value:
            raise ValueError(
                f"groups is {groups}, not a multiple of {value}: a batch cannot be divided over the replicas"
            )
        return value


class StalenessSection(Strict):
    """The freshness rule."""

    max_versions: int = Field(default=2, ge=0)
    on_exceed: Literal["HOLD_TRAINER", "MASK_TOKENS", "DROP_GROUP"] = "HOLD_TRAINER"
    hold_timeout_s: float = Field(default=300.0, gt=0)


class VoidSection(Strict):
    """What happens to a group with a member lost to infrastructure."""

    action: Literal["REPLACE", "SHRINK", "DROP_GROUP"] = "REPLACE"
    min_members: int = Field(default=0, ge=0)
    max_replacements: int = Field(default=0, ge=0)


class FailureSection(Strict):
    """What one failure class leads to."""

    failure: Literal[
        "EPISODE", "ENVIRONMENT", "ENGINE", "WORKER", "REPLAY_DIVERGED", "DEADLINE", "DATA_LOSS", "TOKEN_DRIFT"
    ]
    action: Literal["RESUME_OR_RETRY", "RETRY", "VOID", "PAUSE_RUN"]
    max_attempts: int = Field(default=0, ge=0)


class LimitsSection(Strict):
    """Bounds on one trajectory; 0 means the default."""

    max_generated_tokens: int = Field(default=0, ge=0)
    max_sequence_tokens: int = Field(default=0, ge=0)
    max_turns: int = Field(default=0, ge=0)
    max_run_time_s: float = Field(default=0.0, ge=0)
    oversample: int = Field(default=0, ge=0)


class SamplingSection(Strict):
    """Sampling of all turns."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    stop: Annotated[list[str], Field(max_length=16)] = Field(default_factory=list)
    max_turn_tokens: int = Field(default=0, ge=0)


class RunConfig(Strict):
    """One run."""

    run: str = Field(pattern=r"^[a-z0-9-]{1,63}$")
    kind: Literal["TRAIN", "EVAL"] = "TRAIN"
    model: str = Field(min_length=1)
    """Folder in Hugging Face format, relative to this file, or a hub name."""
    tasks: str = Field(min_length=1)
    """File with one JSON task per line, relative to this file."""
    environment: EnvironmentSection
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    group_size: int = Field(default=8, ge=1, le=1_024)
    batch: BatchSection = Field(default_factory=BatchSection)
    staleness: StalenessSection = Field(default_factory=StalenessSection)
    on_void: VoidSection = Field(default_factory=VoidSection)
    failures: Annotated[list[FailureSection], Field(max_length=16)] = Field(default_factory=list)
    min_reward_spread: float | None = Field(default=None, ge=0)
    """Groups whose rewards differ by no more are dropped (dynamic sampling)."""
    limits: LimitsSection = Field(default_factory=LimitsSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    epochs: int = Field(default=1, ge=1)
    shuffle: bool = False
    seed: int | None = None
    priority: int = 0
    labels: Annotated[dict[str, str], Field(max_length=32)] = Field(default_factory=dict)

    @field_validator("group_size")
    @classmethod
    def _group(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("kind") == "TRAIN" and value == 1:
            raise ValueError(
                "a TRAIN run compares the members of a group; expected at least 2 (an EVAL run may have 1)"
            )
        return value

    @field_validator("on_void")
    @classmethod
    def _members(cls, value: VoidSection, info: ValidationInfo) -> VoidSection:
        size = info.data.get("group_size", value.min_members)
        if value.min_members > size:
            raise ValueError(f"min_members is {value.min_members}, above group_size {size}")
        return value

    def tasks_path(self, source: Path) -> Path:
        """The task file, relative to the run file `source`."""
        return source.parent / self.tasks

    def model_path(self, source: Path) -> Path | None:
        """The model's folder; None if `model` is a hub name."""
        path = source.parent / self.model
        explicit = self.model.startswith(("/", ".", "~")) or self.model.count("/") != 1
        return path.expanduser() if explicit or path.exists() else None


def message(config: RunConfig, source: Path, tasks: wire.BlobRef) -> wire.Run:
    """The Run as submitted; `tasks` refers to the task file's durable copy."""
    path = config.model_path(source)
    run = wire.Run(
        kind=wire.RunKind.Value(f"RUN_KIND_{config.kind}"),
        policies=[wire.Policy(model=str(path.resolve()) if path else config.model)],
        environment=config.environment.type,
        group_size=config.group_size,
        algorithm=wire.Algorithm(name=config.algorithm.name),
        staleness=wire.StalenessPolicy(
            max_versions=config.staleness.max_versions,
            on_exceed=wire.OnExceed.Value(f"ON_EXCEED_{config.staleness.on_exceed}"),
            hold_timeout=wire.duration(config.staleness.hold_timeout_s),
        ),
        void_policy=wire.VoidPolicy(
            action=wire.OnVoid.Value(f"ON_VOID_{config.on_void.action}"),
            min_members=config.on_void.min_members,
            max_replacements=config.on_void.max_replacements,
        ),
        failure_rules=[
            wire.FailureRule(
                failure=wire.FailureClass.Value(f"FAILURE_CLASS_{f.failure}"),
                action=wire.FailureAction.Value(f"FAILURE_ACTION_{f.action}"),
                max_attempts=f.max_attempts,
            )
            for f in config.failures
        ],
        limits=wire.TrajectoryLimits(
            max_generated_tokens=config.limits.max_generated_tokens,
            max_sequence_tokens=config.limits.max_sequence_tokens,
            max_turns=config.limits.max_turns,
            oversample=config.limits.oversample,
        ),
        sampling=wire.SamplingParams(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            stop=config.sampling.stop,
            max_turn_tokens=config.sampling.max_turn_tokens,
        ),
        tasks=wire.TaskSource(file=tasks, epochs=config.epochs, shuffle=config.shuffle),
        priority=config.priority,
        labels=config.labels,
    )
    wire.ParseDict(config.algorithm.settings, run.algorithm.settings)
    if config.kind == "TRAIN":
        run.batch.CopyFrom(wire.BatchSize(**config.batch.model_dump()))
    if config.min_reward_spread is not None:
        run.filter.min_reward_spread = config.min_reward_spread
    if config.limits.max_run_time_s:
        run.limits.max_run_time.CopyFrom(wire.duration(config.limits.max_run_time_s))
    if config.seed is not None:
        run.seed = config.seed
    if config.environment.address:
        run.tool_envs.append(
            wire.ToolEnvRoute(environment=config.environment.type, endpoint=config.environment.address)
        )
    return run


def task_ref(path: Path, data: bytes) -> wire.BlobRef:
    """A reference to the task file where it lies, for a scheduler on this machine without a known blob store."""
    return wire.BlobRef(uri=f"file://{path.resolve()}", sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
