"""Groups from admission to consumption: which batch may be admitted, and which groups a training step takes.

A batch of B groups is admitted for step b once version b - K is out. A step at base version v takes B complete groups:
all with a token of version v - K or older (the trainer holds until they are complete), then those admitted first. At
version w at most (w + K + 1) B groups were admitted and (w + K) B are consumed before step w + K, so the first kind
always fits: no consumed token is staler than K.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.simulator.trajectory import NOWHERE, Sequence
from services.simulator.workload import Episode, Workload


@dataclass(slots=True, eq=False)
class Group:
    """The trajectories of one prompt."""

    name: str
    order: int
    """Rank of admission."""
    batch: int
    members: list[Sequence] = field(default_factory=list)
    open: int = 0
    """Members that have not ended."""

    def version(self) -> int:
        """Oldest version of any token; NOWHERE while nothing was generated."""
        known = [m.seen.version for m in self.members if m.seen.version != NOWHERE]
        return min(known) if known else NOWHERE


class Stream:
    """The workload's groups, one after the other; those deferred come again in rounds of their own."""

    def __init__(self, workload: Workload, seed: int, batches: int | None) -> None:
        self._groups = self._read(workload, seed, batches)
        self.deferred: list[list[Episode]] = []
        self.batch_groups = 0
        """Groups of the first batch: what a step takes."""
        self._first = next(self._groups, None)

    def _read(self, workload: Workload, seed: int, batches: int | None) -> Iterator[list[Episode]]:
        step = 0
        while batches is None or step < batches:
            by_group: dict[str, list[Episode]] = {}
            for episode in workload.batch(step, seed):
                by_group.setdefault(episode.group, []).append(episode)
            if step == 0:
                self.batch_groups = len(by_group)
            yield from by_group.values()
            step += 1

    def take(self, count: int) -> list[list[Episode]]:
        """The next groups, fewer at the end of a bounded workload."""
        taken: list[list[Episode]] = []
        while len(taken) < count:
            if self._first is not None:
                taken.append(self._first)
                self._first = None
                continue
            group = next(self._groups, None)
            if group is None:
                break
            taken.append(group)
        return taken

    def take_deferred(self, count: int) -> list[list[Episode]]:
        """A round of deferred groups if there are enough for one, else none."""
        if len(self.deferred) < count:
            return []
        taken, self.deferred = self.deferred[:count], self.deferred[count:]
        return taken


class Pending:
    """Groups admitted and not consumed, in order of admission."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.complete = 0

    def add(self, group: Group) -> None:
        """A group was admitted."""
        self.groups.append(group)

    def ended(self, group: Group) -> bool:
        """A member has ended; True if it was the last."""
        group.open -= 1
        if group.open:
            return False
        self.complete += 1
        return True

    def batch(self, count: int, version: int, staleness: int | None) -> list[Group] | None:
        """The groups of a step at a base version; None = not yet. Without a bound nothing is due."""
        if self.complete < count:
            return None
        due: set[int] = set()
        if staleness is not None:
            due = {g.order for g in self.groups if NOWHERE < g.version() <= version - staleness}
        if any(g.open for g in self.groups if g.order in due):
            return None
        ready = sorted((g for g in self.groups if not g.open), key=lambda g: (g.order not in due, g.order))
        return ready[:count]

    def consume(self, groups: list[Group]) -> None:
        """They are trained, or aborted."""
        gone = {g.order for g in groups}
        self.complete -= sum(not g.open for g in groups)
        self.groups = [g for g in self.groups if g.order not in gone]
