"""Accelerators between roles: which engines go and come for a new layout, and the trainers as one party."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import ConfigError
from services.simulator.engine import EngineState
from services.simulator.layout import ClusterSpec, Layout, Mode, check, place, replicas_of
from services.simulator.times import TrainingTimes


@dataclass(frozen=True, slots=True)
class Change:
    """Engines to take away, by index, and to start: (degree, node)."""

    removed: tuple[int, ...]
    added: tuple[tuple[int, int], ...]


def change(engines: Sequence[EngineState], wanted: Layout, spec: ClusterSpec, mode: Mode) -> Change | None:
    """The fewest engines stopped and started for a layout, the least loaded first; None if it cannot be had."""
    try:
        check(wanted, spec, mode)
    except ConfigError:
        return None
    left = list(wanted.engines)
    removed, kept = [], []
    for engine in sorted((e for e in engines if e.alive), key=lambda e: (-e.assigned, e.index)):
        if engine.tp in left:
            left.remove(engine.tp)
            kept.append((engine.tp, engine.node))
        else:
            removed.append(engine.index)
    nodes = place(left, kept, spec)
    if nodes is None:
        return None
    return Change(tuple(sorted(removed)), tuple(zip(left, nodes, strict=True)))


def offloads_s(training: TrainingTimes | None, before: int, after: int) -> tuple[float, float]:
    """Seconds in which replicas that go copy their state to the hosts, and in which those that come copy it back.

    `before`, `after`: accelerators. Where replicas change their size all of them go, and come again.
    """
    if training is None:
        return 0.0, 0.0
    (count, each), (wanted, size) = replicas_of(training, before), replicas_of(training, after)
    kept = min(count, wanted) if each == size else 0
    leaving = training.offload_s(count - kept, each) if count > kept else 0.0
    coming = training.offload_s(wanted - kept, size) if wanted > kept else 0.0
    return leaving, coming


class Trainer:
    """All training replicas: one step at a time."""

    def __init__(self, accelerators: int) -> None:
        self.accelerators = accelerators
        self.busy = False
        self.ready_at = 0.0
        self._busy_s = 0.0
        self._held_s = 0.0
        self._since = 0.0
        self._step: tuple[float, int] = (0.0, 0)

    def begin(self, seconds: float, accelerators: int) -> None:
        """A step of so many seconds on so many accelerators."""
        self.busy = True
        self._step = (seconds, accelerators)

    def end(self) -> None:
        """It has ended."""
        self.busy = False
        self._busy_s += self._step[0] * self._step[1]

    def wait_until(self, time: float) -> None:
        """No step starts earlier."""
        self.ready_at = max(self.ready_at, time)

    def resize(self, accelerators: int, now: float) -> None:
        """Another number of accelerators, from now."""
        self._held_s += (now - self._since) * self.accelerators
        self._since = now
        self.accelerators = accelerators

    def seconds(self, now: float, always: int | None) -> tuple[float, float]:
        """Accelerator-seconds busy and held until now. `always`: held all the time, whatever the layout says."""
        if always is not None:
            return self._busy_s, now * always
        return self._busy_s, self._held_s + (now - self._since) * self.accelerators
