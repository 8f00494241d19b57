"""The fleet as the planner sees it: accelerators in NVLink domains, replicas on them, and what fits where.

A tensor-parallel group stays within one NVLink domain (on most machines the node); a training replica is of one
accelerator type and may span nodes. Pools say which side an accelerator may serve: CORE_TRAINING and CORE_ROLLOUT one,
HYBRID both. A replica that may not be moved keeps its accelerators out of everything here.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from services.scheduler.core.rates import EngineKind, TrainerKind

POOLS = ("HYBRID", "CORE_TRAINING", "CORE_ROLLOUT")
Kind = EngineKind | TrainerKind


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator."""

    name: str
    type: str
    node: str
    domain: str = ""
    """NVLink domain within the node; empty: the whole node."""
    pool: str = "HYBRID"
    asleep_bytes: float = 0.0
    """Host memory held by a worker that sleeps on it, and comes free when that one wakes."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica: an engine or a trainer on its accelerators, in order."""

    name: str
    role: str
    """TRAINER or ROLLOUT."""
    accelerators: tuple[str, ...]
    movable: bool = True


@dataclass(frozen=True, slots=True)
class FleetLayout:
    """Replicas by kind, both by kind in order; no zeros."""

    trainers: tuple[tuple[TrainerKind, int], ...]
    engines: tuple[tuple[EngineKind, int], ...]

    @property
    def training(self) -> int:
        """Accelerators that train."""
        return sum(k.accelerators * n for k, n in self.trainers)

    @property
    def rollout(self) -> int:
        """Accelerators that generate."""
        return sum(k.tp * n for k, n in self.engines)

    @property
    def replicas(self) -> int:
        """Training replicas."""
        return sum(n for _, n in self.trainers)

    def words(self) -> str:
        """Such as `24 training (3x8 A100), 24 rollout (4xTP4 + 8xTP1 A100)`."""
        trainers = " + ".join(f"{n}x{k.accelerators} {k.type}" for k, n in self.trainers) or "none"
        engines = " + ".join(f"{n}xTP{k.tp} {k.type}" for k, n in self.engines) or "none"
        return f"{self.training} training ({trainers}), {self.rollout} rollout ({engines})"


def layout_of(counts: Mapping[Kind, int]) -> FleetLayout:
    """From counts by kind, zeros left out."""
    trainers = sorted((k, n) for k, n in counts.items() if isinstance(k, TrainerKind) and n > 0)
    engines = sorted((k, n) for k, n in counts.items() if isinstance(k, EngineKind) and n > 0)
    return FleetLayout(tuple(trainers), tuple(engines))


@dataclass(frozen=True)
class Fleet:
    """Accelerators and the replicas on them. Raises ValueError for what contradicts itself."""

    accelerators: tuple[Accelerator, ...]
    replicas: tuple[Replica, ...] = ()
    host_free_bytes: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Free host memory by node; a node that is not named has no known limit."""

    def __post_init__(self) -> None:
        taken = Counter(name for r in self.replicas for name in r.accelerators)
        unknown = set(taken) - set(self.by_name)
        if unknown:
            raise ValueError(f"replicas on {min(unknown)!r}, which is no accelerator of the fleet")
        twice = [name for name, n in taken.items() if n > 1]
        if twice or len(self.by_name) != len(self.accelerators):
            raise ValueError(f"accelerator {min(twice or self.by_name)!r} is there or in use more than once")
        bad = [a for a in self.accelerators if a.pool not in POOLS]
        if bad:
            raise ValueError(f"accelerator {bad[0].name!r} has pool {bad[0].pool!r}; expected one of {POOLS}")
        for replica in self.replicas:
            types = {self.by_name[name].type for name in replica.accelerators}
            if len(types) != 1:
                raise ValueError(f"replica {replica.name!r} is on types {sorted(types)}; expected one type")

    @cached_property
    def by_name(self) -> dict[str, Accelerator]:
        """Accelerators by name."""
        return {a.name: a for a in self.accelerators}

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Accelerator types, in order."""
        return tuple(sorted({a.type for a in self.accelerators}))

    @cached_property
    def replica(self) -> dict[str, Replica]:
        """Replicas by name."""
        return {r.name: r for r in self.replicas}

    def kind(self, replica: Replica) -> Kind:
        """What the replica is."""
        type_ = self.by_name[replica.accelerators[0]].type
        size = len(replica.accelerators)
        return TrainerKind(type_, size) if replica.role == "TRAINER" else EngineKind(type_, size)

    @cached_property
    def present(self) -> FleetLayout:
        """The layout of all replicas."""
        return layout_of(Counter(self.kind(r) for r in self.replicas))

    @cached_property
    def fixed(self) -> FleetLayout:
        """The layout of those that may not move."""
        return layout_of(Counter(self.kind(r) for r in self.replicas if not r.movable))

    @cached_property
    def free(self) -> tuple[Accelerator, ...]:
        """Accelerators that a layout may use anew: without a replica, or with one that may be moved; by name."""
        held = {name for r in self.replicas if not r.movable for name in r.accelerators}
        return tuple(sorted((a for a in self.accelerators if a.name not in held), key=lambda a: a.name))

    @cached_property
    def rooms(self) -> dict[str, "Room"]:
        """Room by type for layouts beside the fixed replicas."""
        return {type_: Room.of([a for a in self.free if a.type == type_]) for type_ in self.types}


@dataclass(frozen=True, slots=True)
class Room:
    """Free accelerators of one type by pool, and the sizes of their NVLink domains."""

    hybrid: int
    training: int
    rollout: int
    domains: tuple[tuple[int, int, int], ...]
    """NVLink domains by the accelerators in them that may generate, and those of them that may train: (size, hybrid,
    number of such domains), largest first.
    """

    @property
    def generating(self) -> int:
        """Accelerators that may generate."""
        return self.hybrid + self.rollout

    @property
    def widest(self) -> int:
        """Accelerators of the largest domain; 0 without any."""
        return self.domains[0][0] if self.domains else 0

    @classmethod
    def of(cls, accelerators: Sequence[Accelerator]) -> "Room":
        """Of accelerators of one type."""
        pools = Counter(a.pool for a in accelerators)
        domains = Counter((a.node, a.domain) for a in accelerators if a.pool != "CORE_TRAINING")
        hybrid = Counter((a.node, a.domain) for a in accelerators if a.pool == "HYBRID")
        shapes = Counter((size, hybrid[d]) for d, size in domains.items())
        return cls(
            pools["HYBRID"], pools["CORE_TRAINING"], pools["CORE_ROLLOUT"],
            tuple((size, some, n) for (size, some), n in sorted(shapes.items(), reverse=True)),
        )  # fmt: skip

    def blocks(self, tp: int, training: int) -> int:
        """Most engines of a degree beside so many training accelerators; negative if there are not so many.

        Training takes first what no engine of the degree can use, then whole engines' room, then what is left of
        domains where core accelerators stay behind.
        """
        whole = unused = full = 0
        parts: list[tuple[int, int]] = []
        for size, hybrid, number in self.domains:
            spare = min(size % tp, hybrid)
            whole += size // tp * number
            unused += spare * number
            full += (hybrid - spare) // tp * number
            parts.append(((hybrid - spare) % tp, number))
        missing = max(0, training - self.training) - unused
        if missing <= full * tp:
            return whole - max(0, -(-missing // tp))
        missing, lost = missing - full * tp, full
        for size, number in sorted(parts, reverse=True):
            used = min(number, -(-missing // size)) if size else 0
            missing, lost = missing - used * size, lost + used
            if missing <= 0:
                return whole - lost
        return -1
