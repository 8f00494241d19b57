"""What the live queue keeps of trajectories, engines and runs, and the queue's order as lanes of buckets."""

import heapq
import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from services.scheduler.core.cmlfq import pace
from services.scheduler.core.movers import Table

Key = tuple[float, ...]


@dataclass(slots=True, eq=False)
class Item:
    """One trajectory, waiting or leased. The names are those of cmlfq.QueuedTrajectory and RunningTrajectory."""

    name: str
    run: "Run"
    group: str
    admission_number: int
    priority: int
    level: int
    tokens: int
    generated: int
    hashed: int
    """cmlfq.hashed(name)."""
    known: bool = False
    """The estimate is of the present state."""
    estimate_p50: float = 0.0
    estimate_p90: float = 0.0
    moves: int = 0
    # while it waits
    waiting_since: float = 0.0
    last_engine: str = ""
    lane: "Lane | None" = None
    key: Key = ()
    entry: int = 0
    """Its newest entry in the lane's heap of needs."""
    proposed: str = ""
    """Engine that a decision gave it; the lease itself has not come yet."""
    # while it is leased
    place: "Engine | None" = None
    since: float = 0.0
    lease_level: int = 0
    base: int = 0
    """Generated tokens when the lease began."""
    in_tool_wait: bool = False
    preempt_pending: bool = False
    target: str = ""
    quantum: float = math.inf
    """Tokens that its level gives to one lease."""
    spent: bool = False
    """Past its level's quantum."""
    ripe: bool = False
    """Leased for so long that it may move."""
    reserved: float = 0.0
    """KV tokens that its lease keeps room for."""
    row: int = -1
    """In the run's table of movers."""

    @property
    def engine(self) -> str:
        """Name of the engine that it is leased to; empty while it waits."""
        return self.place.name if self.place is not None else ""

    @property
    def charge(self) -> float:
        """KV tokens that it counts for where it is leased."""
        return max(self.tokens, self.reserved)

    @property
    def quantum_used(self) -> int:
        """Tokens generated in this lease."""
        return self.generated - self.base


@dataclass(slots=True, eq=False)
class Engine:
    """One engine, or the name of one that is leased to or moved to without being (any more) there."""

    name: str
    index: int
    """In arrays over all engines."""
    run: "Run | None" = None
    """None if it is not there."""
    level: int = 0
    cap: int = 0
    kv_capacity: int = 0
    kv_used: int = 0
    """As reported then, less what left since: what was stopped must not be stopped for again."""
    reported_at: float = -math.inf
    seconds_per_token: float | None = None
    seconds_per_sequence: float | None = None
    measured_load: float = 0.0
    prefill: float | None = None
    admitting: bool = False
    running: dict[str, Item] = field(default_factory=dict)
    incoming: dict[str, Item] = field(default_factory=dict)
    """Pending preemptions that move here: their place is kept."""
    tokens: int = 0
    """Of all that is leased to it."""
    charged: float = 0.0
    """KV tokens kept for all that is leased to it."""
    going: int = 0
    """Tokens of those leased to it whose preemption is pending."""
    pending: int = 0
    foreign: int = 0
    """Of those leased to it, how many are of another run than its own."""
    load: int = 0
    """Leased and incoming, and while a decision is made what it gives."""
    kv: float = 0.0
    """Tokens that incoming work needs, and while a decision is made what it gives; see `fresh`."""
    fresh: bool = True
    tight: bool = False
    """Something did not fit into its KV cache since room was last made there."""
    held: bool = False
    """Takes in nothing until one that waited too long fits."""

    @property
    def roomy(self) -> bool:
        """Has a free slot and admits."""
        return self.run is not None and self.admitting and self.load < self.cap

    @property
    def forgettable(self) -> bool:
        """Nothing is known of it but its name."""
        return self.run is None and not self.running and not self.incoming

    @property
    def joined(self) -> float:
        """Seconds per token once one more has joined what is there and on its way; the rate is known."""
        if not self.seconds_per_sequence:
            return self.seconds_per_token or 0.0
        return pace(self.seconds_per_token or 0.0, self.seconds_per_sequence, self.load + 1 - self.measured_load)

    def holds(self, tokens: int) -> bool:
        """Its KV cache is large enough."""
        return not self.kv_capacity or tokens <= self.kv_capacity

    def share(self) -> float:
        """How full it is."""
        return self.load / max(1, self.cap)


class Lane:
    """Trajectories of one class, in buckets of equal rank, in order; and the least KV room that any of them needs."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.buckets: dict[Key, dict[str, Item]] = {}
        self.count = 0
        self._needs: list[tuple[float, int, Item]] = []
        self._entries = 0

    def add(self, item: Item, key: Key) -> None:
        """Queues it under `key`."""
        bucket = self.buckets.get(key)
        if bucket is None:
            bucket = self.buckets[key] = {}
            insort(self.keys, key)
        bucket[item.name] = item
        item.lane, item.key = self, key
        self.count += 1
        self.renew(item)

    def drop(self, item: Item) -> None:
        """Takes it out."""
        bucket = self.buckets[item.key]
        del bucket[item.name]
        if not bucket:
            del self.buckets[item.key]
            del self.keys[bisect_left(self.keys, item.key)]
        item.lane = None
        self.count -= 1

    def renew(self, item: Item) -> None:
        """Its need may have become less."""
        self._entries += 1
        item.entry = self._entries
        need = item.tokens + item.estimate_p50 if item.known else float(item.tokens)
        heapq.heappush(self._needs, (need, item.entry, item))
        if len(self._needs) > 64 + 4 * self.count:
            self._needs = [e for e in self._needs if e[2].lane is self and e[2].entry == e[1]]
            heapq.heapify(self._needs)

    def least(self, reach: float) -> float:
        """Fewest KV tokens that one without a proposal may need, or some number above `reach` if none needs so few. Of
        one whose estimate is not known it is its tokens.
        """
        needs = self._needs
        while needs:
            need, entry, item = needs[0]
            if item.lane is not self or item.entry != entry or item.proposed:
                heapq.heappop(needs)
                continue
            if need > reach:
                return need
            actual = item.tokens + (item.estimate_p50 if item.known else 0.0)
            if actual <= need:
                return actual
            heapq.heapreplace(needs, (actual, entry, item))
        return math.inf


@dataclass(slots=True, eq=False)
class Run:
    """The queue of one run, and what may have changed since its last decision."""

    name: str
    engines: dict[str, Engine] = field(default_factory=dict)
    keepers: tuple[list[str], int] | None = None
    """Its engines that admit and have any slot at all, by name, and their least KV cache; None when engines changed."""
    roomy: dict[str, Engine] = field(default_factory=dict)
    """Those of its engines that have a free slot and admit."""
    items: int = 0
    waiting: int = 0
    aged: Lane = field(default_factory=Lane)
    lanes: dict[int, Lane] = field(default_factory=dict)
    """By level, those that have not waited too long."""
    table: Table = field(default_factory=Table)
    """All that is leased."""
    spent: dict[str, Item] = field(default_factory=dict)
    """Past their quantum, and no preemption pending."""
    pending: int = 0
    # as of the last decision
    unplaced: bool = False
    head: Item | None = None
    """First of those that waited too long and found no place."""
    kept: Engine | None = None
    proposed: dict[str, Item] = field(default_factory=dict)
    moving: dict[str, str] = field(default_factory=dict)
    """Moves decided and not yet seen: target by trajectory."""
    no_victim: bool = False
    """No one could make way for `head` when last looked ..."""
    young_since: float = math.inf
    """... but one leased since then will, once its lease is old enough."""
    # what a move may have become possible for, since nothing could be moved
    all_movers: bool = False
    movers: dict[str, Item] = field(default_factory=dict)
    targets: dict[str, Engine] = field(default_factory=dict)
    emptied: dict[str, Engine] = field(default_factory=dict)
    """Had room before, and are emptier now."""
    sources: dict[str, Engine] = field(default_factory=dict)
    fuller: dict[str, Engine] = field(default_factory=dict)
    bounds: "Bounds | None" = None
    """None when engines changed."""

    def lane(self, level: int) -> Lane:
        """The lane of a level."""
        lane = self.lanes.get(level)
        if lane is None:
            lane = self.lanes[level] = Lane()
        return lane


class Bounds:
    """What no move to one of these engines can do better than, at one moment."""

    __slots__ = ("above", "emptiest", "fastest", "places")

    def __init__(self, places: list[Engine]) -> None:
        self.places = places
        """All have room and a known rate."""
        self.above: list[tuple[int, float, float]] = []
        """Falling: a level, and the fastest decode and prefill of engines of that level and above, seconds and tokens
        per second; without a prefill rate it is free."""
        self.emptiest = math.inf
        """Least share that one of them would have with one more."""
        self.fastest = math.inf
        """Least seconds per token that one of them would have with one more, of those of which that is known."""
        best: dict[int, tuple[float, float]] = {}
        for engine in places:
            share = (engine.load + 1) / engine.cap
            self.emptiest = min(self.emptiest, share)
            here, there = engine.joined, engine.prefill or math.inf
            if here < self.fastest and engine.seconds_per_sequence is not None:
                self.fastest = here
            fastest, prefill = best.get(engine.level, (math.inf, 0.0))
            if here < fastest or there > prefill:
                best[engine.level] = (min(here, fastest), max(there, prefill))
        fastest, prefill = math.inf, 0.0
        for level in sorted(best, reverse=True):
            fastest, prefill = min(fastest, best[level][0]), max(prefill, best[level][1])
            self.above.append((level, fastest, prefill))

    @classmethod
    def of(cls, run: Run) -> "Bounds":
        """The bounds of a run at present."""
        places = [
            e for e in run.roomy.values() if not e.held and e.load < e.cap and e.seconds_per_token is not None
        ]  # fmt: skip
        places.sort(key=lambda e: e.name)
        return cls(places)

    def best_from(self, source: Engine, draining: bool) -> tuple[float, float] | None:
        """Fastest decode and prefill that a move from `source` could lead to; None if it can lead nowhere."""
        if source.run is None or source.seconds_per_token is None or not self.places:
            return None
        if draining and (
            self.emptiest < 0.5 * source.load / max(1, source.cap) or self.fastest < 0.5 * source.seconds_per_token
        ):
            return self.above[-1][1:]
        best = None
        for level, fastest, prefill in self.above:
            if level <= source.level:
                break
            best = (fastest, prefill)
        return best
