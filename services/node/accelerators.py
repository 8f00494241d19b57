"""The accelerators of a node as measured: who holds them, how much memory is free, and whether a release is proven."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.common import wire
from services.common.locks import GenerationLock
from services.node import memory
from services.node.config import AcceleratorSection

MIB = 1 << 20
MAX_HOLDERS = 32


@dataclass
class WorkerView:
    """What measuring needs to know of a worker process on this node."""

    name: str
    accelerators: Sequence[str]
    pid: Callable[[], int | None]
    """Process id of the present life; None while it does not run."""
    ready: Callable[[], bool]
    """True once it has started up: only then its idle memory can be told."""
    baseline_pid: int = 0
    baseline_bytes: int = 0
    """Idle memory of the life `baseline_pid`: measured when ready and holding nothing."""
    generation: int = 0
    """Newest generation that this life was seen to hold."""


@dataclass(frozen=True)
class Held:
    """A worker's hold on an accelerator: memory above its idle baseline, and whether it has the lock."""

    worker: str
    pid: int
    generation: int
    excess_bytes: int
    locked: bool


@dataclass(frozen=True)
class Proof:
    """Whether a generation is gone; `why` states the numbers when it is not."""

    free: bool
    why: str
    numbers: dict[str, float]
    blockers: tuple[Held, ...] = ()


class Slot:
    """One accelerator: its lock, its memory, its holders."""

    def __init__(self, name: str, section: AcceleratorSection, locks: str, residue_bytes: int) -> None:
        self.name = name
        self.section = section
        self.residue_bytes = residue_bytes
        self.lock = GenerationLock(locks, name)
        self.workers: list[WorkerView] = []
        self._cpu: dict[int, float] = {}
        self._measured_at = time.monotonic()

    @property
    def memory_bytes(self) -> int:
        """Total memory of the slot."""
        return self.section.memory_mib * MIB

    def describe(self) -> wire.Accelerator:
        """The accelerator as this node states it."""
        return wire.Accelerator(
            name=self.name, type=self.section.type, device_uuid=f"{self.section.type}:{self.name}",
            memory_bytes=self.memory_bytes, cpu_share=self.section.cpu_share,
            pool=wire.Pool.Value(f"POOL_{self.section.pool}"),
            sharing=wire.Sharing.Value(f"SHARING_{self.section.sharing}"),
        )  # fmt: skip

    def held(self) -> list[Held]:
        """Every running worker of this slot, with what it holds; also learns idle baselines."""
        generation, owner, locked = self.lock.probe()
        result = []
        for worker in self.workers:
            pid = worker.pid()
            used = memory.usage(pid) if pid is not None else None
            if pid is None or used is None:
                continue
            mine = locked and owner == pid
            if worker.baseline_pid != pid:
                worker.generation = 0
                # one that took the lock before it was first measured is measured early in its grant
                if worker.ready() or mine:
                    worker.baseline_pid, worker.baseline_bytes = pid, used.anonymous_bytes
            if mine:
                worker.generation = generation
            # a process that is still starting has never held anything
            known = worker.baseline_pid == pid
            excess = max(0, used.anonymous_bytes - worker.baseline_bytes) if known else 0
            result.append(Held(worker.name, pid, worker.generation, excess, mine))
        if locked and all(h.pid != owner for h in result):
            result.append(Held("", owner, generation, 0, locked=True))
        return result

    def observe(self) -> wire.AcceleratorObservation:
        """A measurement: holders are those with the lock, or with more memory than the residue allows."""
        held = self.held()
        holders = [h for h in held if h.locked or h.excess_bytes > self.residue_bytes]
        return wire.AcceleratorObservation(
            accelerator=self.name,
            free_memory_bytes=max(0, self.memory_bytes - sum(h.excess_bytes for h in held)),
            locked_generation=max((h.generation for h in held if h.locked), default=0),
            holders=[
                wire.Holder(
                    pid=h.pid, worker=f"workers/{h.worker}" if h.worker else "", generation=h.generation,
                    memory_bytes=h.excess_bytes,
                )
                for h in holders[:MAX_HOLDERS]
            ],
            health=wire.ACCELERATOR_HEALTH_OK,
            utilization=self._utilization(held),
        )  # fmt: skip

    def _utilization(self, held: Sequence[Held]) -> float:
        """CPU time of the slot's processes since the last measurement, as a share of what the slot may use."""
        now, used, cpu = time.monotonic(), 0.0, {}
        for holder in held:
            usage = memory.usage(holder.pid)
            if usage is not None:
                cpu[holder.pid] = usage.cpu_seconds
                used += usage.cpu_seconds - self._cpu.get(holder.pid, usage.cpu_seconds)
        elapsed = max(1e-3, now - self._measured_at)
        self._cpu, self._measured_at = cpu, now
        return min(1.0, max(0.0, used / elapsed / (self.section.cpu_share or 1.0)))

    def prove_free(self, generation: int) -> Proof:
        """Is every process of `generation` or older gone from here, or asleep and measured small?"""
        held = self.held()
        locked = [h for h in held if h.locked]
        numbers = {
            "generation": float(generation),
            "locked_generation": float(max((h.generation for h in locked), default=0)),
            "residue_bytes": float(self.residue_bytes),
            "excess_bytes": float(sum(h.excess_bytes for h in held if not h.locked)),
        }
        # a newer owner could only take the lock after the older one had let go
        awake = [h for h in locked if h.generation <= generation]
        if awake:
            holder = awake[0]
            return Proof(
                False,
                f"{self.name}: process {holder.pid} ({holder.worker or 'not one of ours'}) still holds the lock of "
                f"generation {holder.generation}; expected it free of generations up to {generation}",
                numbers, tuple(awake),
            )  # fmt: skip
        large = [h for h in held if not h.locked and h.excess_bytes > self.residue_bytes]
        if large:
            holder = large[0]
            return Proof(
                False,
                f"{self.name}: process {holder.pid} ({holder.worker}) still holds {holder.excess_bytes // MIB} MiB "
                f"above its idle memory; expected at most {self.residue_bytes // MIB} MiB",
                numbers, tuple(large),
            )  # fmt: skip
        return Proof(True, f"{self.name} is free of generations up to {generation}", numbers)
