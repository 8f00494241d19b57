"""Groups from admission to consumption: which batch may be admitted, and which groups a training step takes.

A batch of B groups is admitted for step b once version b - K is out. A group whose oldest token is of version w is due
by step w + K. A step at base version v takes B complete groups, those due first, then those admitted first, and only if
what is left can still be consumed in time: at most j B of it due by step v + j, for each j < K. Else the trainer holds.
After step v at most K B admitted groups are left in all, so once everything is complete there is always such a choice:
no consumed token is staler than K, and the trainer never holds for ever.
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
        if staleness is None:
            return [g for g in self.groups if not g.open][:count]
        due = {g.order: _due(g, version, staleness) for g in self.groups}
        ready = sorted((g for g in self.groups if not g.open), key=lambda g: (due[g.order], g.order))
        chosen = ready[:count]
        for group in chosen:
            del due[group.order]
        for later in range(staleness):
            if sum(step <= version + later for step in due.values()) > later * count:
                return None
        return chosen

    def consume(self, groups: list[Group]) -> None:
        """They are trained, or aborted."""
        gone = {g.order for g in groups}
        self.complete -= sum(not g.open for g in groups)
        self.groups = [g for g in self.groups if g.order not in gone]


def _due(group: Group, version: int, staleness: int) -> int:
    """Last step that may consume it; what has not begun begins at the present version or later."""
    oldest = group.version()
    return (version if oldest == NOWHERE else oldest) + staleness
