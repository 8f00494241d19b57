"""The replica that this worker holds, and the generation locks that prove it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.common import errors, wire
from services.common.locks import GenerationLock


@dataclass(slots=True)
class Holding:
    """One granted replica. Generations only rise; the lock files refuse an older one too."""

    replica: str
    generation: int
    spec: wire.ReplicaSpec
    locks: list[GenerationLock]
    state: str = "ACTIVE"
    run: str = ""
    checksum: str = ""
    loads: int = 0
    """Weight switches under this generation; part of the cache salt."""
    target: wire.VersionRef | None = None
    fetched: dict[tuple[int, int], str] = field(default_factory=dict)
    """Checksum of what was prepared, by version."""

    @property
    def admits(self) -> bool:
        """True while new work may start."""
        return self.state == "ACTIVE"

    def release(self) -> None:
        """Lets the accelerators go."""
        for lock in self.locks:
            lock.release()


def take(folder: str | Path, step: wire.HandoverStep, spec: wire.ReplicaSpec, mine: Sequence[str]) -> Holding:
    """Acquires the locks of a grant, all or none. STALE_FENCE if one is held or had a newer generation."""
    foreign = sorted(set(spec.accelerators) - set(mine))
    if foreign or not spec.accelerators:
        raise errors.invalid_field(
            f"grant of {step.replica} names {foreign or 'no accelerator'}; this worker was started with {list(mine)}"
        )
    if spec.role != wire.ROLE_ROLLOUT:
        raise errors.invalid_field(
            f"grant of {step.replica} with role {wire.Role.Name(spec.role)}; expected ROLE_ROLLOUT"
        )
    locks: list[GenerationLock] = []
    try:
        for accelerator in spec.accelerators:
            lock = GenerationLock(folder, accelerator)
            lock.acquire(step.generation)
            locks.append(lock)
    except BaseException:
        for lock in locks:
            lock.release()
        raise
    return Holding(step.replica, step.generation, spec, locks)
