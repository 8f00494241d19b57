"""The search for a layout: how many accelerators train, in which replicas, and engines of which degrees generate.

Candidates are vectors of counts by kind. First a coarse grid: every kind of trainer with up to SPLITS numbers of
replicas, and beside each every engine kind alone and every pair of kinds (of one type, or one of each type) in a few
proportions. `steptime` judges all candidates of the same engine kinds at once. Then the best ones are improved step by
step: a replica more or less, engines of one kind turned into another, in strides that halve. Time is the objective: all
layouts of one demand train the same tokens in a step.

Layouts are compared as (seconds of a step, training accelerators, counts), so that the answer depends on nothing else.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.costmodel import NEVER_S, Prediction
from services.scheduler.core.demand import Demand
from services.scheduler.core.placement import place
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates
from services.scheduler.core.steptime import LevelUse, Problem
from services.scheduler.core.topology import Fleet, FleetLayout, Kind, layout_of

Ints = NDArray[np.intp]

SPLITS = 16
"""Numbers of training replicas tried at first, for each kind."""
SHARES = 7
"""Proportions of a pair of engine kinds tried at first."""
LEAST_SPLITS = 4
MAX_COARSE = 1_500
"""Candidates of the grid; with many kinds fewer splits and proportions are tried."""
SEEDS = 4
"""Candidates that are improved. Four times as many in fleets of at most ..."""
SMALL = 32
"""... accelerators, where one more or less matters."""
MAX_ROUNDS = 40
MAX_PLACED = 32
"""Layouts, best first, for which a place is looked for before none is found."""
BETTER = 1e-4
"""Relative gain in seconds below which two layouts are equal."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be laid out for: the demand, and what every kind does a second."""

    demand: Demand
    engines: Mapping[EngineKind, EngineRates]
    trainers: Mapping[TrainerKind, TrainerRates]
    imbalance: float = 1.0
    """Heaviest training shard over the mean one, as reported."""
    min_training: int = 1
    min_rollout: int = 1
    """Floors, accelerators."""

    def usable_engines(self) -> list[EngineKind]:
        """All kinds, slowest first for one sequence; `steptime` leaves out what holds too little."""
        context = self.demand.tokens / self.demand.sequences
        return sorted(self.engines, key=lambda k: (-self.engines[k].decode_s(1.0, context), k))

    def usable_trainers(self) -> list[TrainerKind]:
        """Kinds whose memory holds the longest sequence."""
        return sorted(k for k, r in self.trainers.items() if r.holds(self.demand.longest_context))


@dataclass(frozen=True, slots=True)
class Level:
    """Engines of one kind in a layout, and their part of the work."""

    kind: EngineKind
    engines: int
    use: LevelUse


@dataclass(frozen=True, slots=True)
class Judged:
    """A layout and what is expected of it."""

    layout: FleetLayout
    prediction: Prediction
    levels: tuple[Level, ...]
    """Slowest first."""
    micro_batch_tokens: float
    bound: str
    """rollout, training or tail."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best layout found, what else was good, and how many were judged."""

    chosen: Judged | None
    others: tuple[Judged, ...]
    """Best first."""
    homogeneous: Judged | None
    """The best with engines of one kind alone, besides those that may not move."""
    tried: int
    near: tuple[FleetLayout, ...] = ()
    """All whose seconds are within `tie` of the best, best first."""


@dataclass(slots=True)
class Judge:
    """Times of layouts under a job; problems of the same engine kinds are set up once, times found are kept."""

    job: Job
    tried: int = 0
    _problems: dict[tuple[EngineKind, ...], Problem] = field(default_factory=dict)
    _times: dict[FleetLayout, tuple[float, float, float]] = field(default_factory=dict)
    """Seconds of a step, at full engines, and of the tail."""

    def seconds(self, layouts: Iterable[FleetLayout]) -> dict[FleetLayout, float]:
        """Step seconds of each, NEVER_S where it cannot keep up."""
        wanted = dict.fromkeys(layouts)
        groups: dict[tuple[EngineKind, ...], list[FleetLayout]] = {}
        for layout in wanted:
            if layout not in self._times:
                groups.setdefault(tuple(k for k, _ in layout.engines), []).append(layout)
        for kinds, some in groups.items():
            self._solve(kinds, some)
        return {layout: self._times[layout][0] for layout in wanted}

    def judged(self, layout: FleetLayout) -> Judged:
        """With the figures of its levels."""
        step_s = self.seconds([layout])[layout]
        train_s, tokens = self.train_s(layout), self.job.demand.tokens
        budget = min((self.job.trainers[k].micro_batch_tokens for k, _ in layout.trainers), default=0.0)
        if step_s >= NEVER_S:
            bound = "training" if train_s >= NEVER_S else "rollout"
            return Judged(layout, Prediction(0.0, NEVER_S, NEVER_S, train_s, 0.0), (), budget, bound)
        order, problem = self._problem(tuple(k for k, _ in layout.engines))
        engines = dict(layout.engines)
        counts = [engines[k] for k in order]
        _, rollout_s, tail_s = self._times[layout]
        uses = problem.uses(counts, step_s)
        levels = tuple(Level(k, n, u) for k, n, u in zip(order, counts, uses, strict=True))
        flow = step_s - train_s if not self.job.demand.max_versions else step_s
        bound = "training" if step_s <= train_s * 1.001 else "rollout" if rollout_s >= flow * 0.999 else "tail"
        return Judged(layout, Prediction(tokens / step_s, step_s, rollout_s, train_s, tail_s), levels, budget, bound)

    def train_s(self, layout: FleetLayout) -> float:
        """Seconds of a training step; shards are equal, so that the slowest kind of replica decides."""
        demand, replicas = self.job.demand, layout.replicas
        if not replicas or not all(self.job.trainers[k].holds(demand.longest_context) for k, _ in layout.trainers):
            return NEVER_S
        # no shard is smaller than the longest sequence
        imbalance = max(self.job.imbalance, demand.longest_context * replicas / demand.trained_tokens)
        return max(
            self.job.trainers[k].seconds(replicas, demand.trained_tokens, demand.trained_squares, imbalance)
            for k, _ in layout.trainers
        )

    def _problem(self, kinds: tuple[EngineKind, ...]) -> tuple[list[EngineKind], Problem]:
        order = [k for k in self.job.usable_engines() if k in kinds]
        if kinds not in self._problems:
            self._problems[kinds] = Problem([self.job.engines[k] for k in order], self.job.demand)
        return order, self._problems[kinds]

    def _solve(self, kinds: tuple[EngineKind, ...], layouts: Sequence[FleetLayout]) -> None:
        self.tried += len(layouts)
        if not kinds:
            self._times.update(dict.fromkeys(layouts, (NEVER_S, NEVER_S, 0.0)))
            return
        order, problem = self._problem(kinds)
        column = {k: i for i, k in enumerate(order)}
        counts = np.zeros((len(layouts), len(order)), dtype=np.intp)
        for row, layout in enumerate(layouts):
            for kind, number in layout.engines:
                counts[row, column[kind]] = number
        found = problem.solve(counts, np.array([self.train_s(layout) for layout in layouts]))
        for at, layout in enumerate(layouts):
            self._times[layout] = float(found.seconds[at]), float(found.full_s[at]), float(found.tail_s[at])


def search(
    fleet: Fleet, job: Job, *, alternatives: int = 8, seeds: Sequence[FleetLayout] = (), tie: float = 0.0
) -> Best:
    """The best layout for a fleet. `seeds`: layouts to try and improve besides those of the grid; `tie`: relative
    difference in seconds within which layouts are near the best.
    """
    space = Space(fleet, job)
    coarse = list(dict.fromkeys([*(s for s in seeds if space.allows(s)), *space.coarse()]))
    judge = Judge(job)
    times = judge.seconds(coarse)
    single = _ranked({c: times[c] for c in coarse if space.is_homogeneous(c)})[:1]
    count = SEEDS if space.size > SMALL else 4 * SEEDS
    for start in dict.fromkeys([*single, *_ranked(times)[:count], *(s for s in seeds if s in times)]):
        times |= _improved(start, space, judge)
    order = _ranked(times)
    ranked = _placed(order, fleet, 1)
    if not ranked:
        return Best(None, (), None, judge.tried)
    others = [judge.judged(f) for f in order[: alternatives + 1] if f != ranked[0]]
    near = tuple(f for f in order if times[f] <= times[ranked[0]] * (1.0 + tie))
    single = _placed(_ranked({f: s for f, s in times.items() if space.is_homogeneous(f)}), fleet, 1)
    homogeneous = judge.judged(single[0]) if single else None
    return Best(judge.judged(ranked[0]), tuple(others[:alternatives]), homogeneous, judge.tried, near)


def _placed(layouts: Sequence[FleetLayout], fleet: Fleet, count: int) -> list[FleetLayout]:
    """The first of them that have a place; `Space.allows` is exact but for the way in which several degrees and core
    accelerators share domains.
    """
    able = (f for f in layouts[:MAX_PLACED] if place(fleet, f) is not None)
    return list(itertools.islice(able, count))


def _ranked(times: Mapping[FleetLayout, float]) -> list[FleetLayout]:
    """Those that keep up: faster first (equal within BETTER), then fewer training accelerators, then by counts."""

    def key(layout: FleetLayout) -> tuple[object, ...]:
        seconds = round(math.log(max(times[layout], 1e-9)) / BETTER)
        return seconds, layout.training, layout.trainers, layout.engines

    return sorted((f for f, s in times.items() if s < NEVER_S), key=key)


def _improved(start: FleetLayout, space: "Space", judge: Judge) -> dict[FleetLayout, float]:
    """All layouts tried on the way from `start` to one without a better neighbour."""
    here, seconds = start, judge.seconds([start])[start]
    tried = {here: seconds}
    stride = max(1, 2 ** int(math.log2(max(1.0, space.size / 8))))
    for _ in range(MAX_ROUNDS):
        found = judge.seconds(n for n in space.neighbours(here, stride) if n not in tried)
        tried |= found
        best = _ranked(found)[:1]
        if best and found[best[0]] < seconds * (1 - BETTER):
            here, seconds = best[0], found[best[0]]
        elif stride == 1:
            break
        else:
            stride //= 2
    return tried


class Space:
    """The layouts that a fleet allows."""

    def __init__(self, fleet: Fleet, job: Job) -> None:
        self._job = job
        self.size = len(fleet.free)
        self._rooms = fleet.rooms
        self._fixed: Counter[Kind] = Counter(dict(fleet.fixed.trainers))
        self._fixed.update(dict(fleet.fixed.engines))
        self._trainers: dict[str, list[TrainerKind]] = {t: [] for t in self._rooms}
        self._engines: dict[str, list[EngineKind]] = {t: [] for t in self._rooms}
        for trainer in job.usable_trainers():
            room = self._rooms.get(trainer.type)
            if room is not None and trainer.accelerators <= room.hybrid + room.training:
                self._trainers[trainer.type].append(trainer)
        for engine in job.usable_engines():
            room = self._rooms.get(engine.type)
            if room is not None and engine.tp <= room.widest:
                self._engines[engine.type].append(engine)

    def allows(self, layout: FleetLayout) -> bool:
        """True if it has what is fixed, keeps the floors, and its replicas fit (see `Room.blocks`)."""
        counts: dict[Kind, int] = {**dict(layout.trainers), **dict(layout.engines)}
        if layout.training < self._job.min_training or layout.rollout < self._job.min_rollout:
            return False
        if any(counts.get(kind, 0) < n for kind, n in self._fixed.items()):
            return False
        if any(k not in self._job.trainers for k, _ in layout.trainers):
            return False
        if any(k not in self._job.engines for k, _ in layout.engines):
            return False
        free = {kind: n - self._fixed[kind] for kind, n in counts.items()}
        return all(self._fits(type_, free) for type_ in {k.type for k, n in free.items() if n})

    def is_homogeneous(self, layout: FleetLayout) -> bool:
        """Engines of one kind alone, besides the fixed ones."""
        return sum(n > self._fixed[k] for k, n in layout.engines) <= 1

    def coarse(self) -> list[FleetLayout]:
        """The grid, with fewer splits and proportions where there are many kinds; at last only every n-th of it."""
        splits, shares = SPLITS, SHARES
        while splits > LEAST_SPLITS or shares:
            if len(list(itertools.islice(self._grid(splits, shares), MAX_COARSE + 1))) <= MAX_COARSE:
                break
            splits, shares = max(LEAST_SPLITS, splits // 2), shares // 2
        found = list(self._grid(splits, shares))
        thinned = found[:: -(-len(found) // MAX_COARSE)]
        layouts = (layout_of(Counter(self._fixed) + Counter(t) + Counter(e)) for t, e in thinned)
        return [layout for layout in dict.fromkeys(layouts) if self.allows(layout)]

    def neighbours(self, layout: FleetLayout, stride: int) -> list[FleetLayout]:
        """Layouts that differ by about `stride` replicas."""
        base: Counter[Kind] = Counter(dict(layout.trainers))
        base.update(dict(layout.engines))
        found: dict[FleetLayout, None] = {}
        for changed in self._changes(base, stride):
            if min(changed.values(), default=0) >= 0:
                found.setdefault(layout_of(changed))
        found.pop(layout, None)
        return [f for f in found if self.allows(f)]

    # ---- what fits

    def _fits(self, type_: str, free: Mapping[Kind, int]) -> bool:
        room = self._rooms.get(type_)
        if room is None:
            return False
        training = sum(k.accelerators * n for k, n in free.items() if isinstance(k, TrainerKind) and k.type == type_)
        engines = [(k.tp, n) for k, n in free.items() if isinstance(k, EngineKind) and k.type == type_ and n]
        if training > room.hybrid + room.training:
            return False
        if sum(tp * n for tp, n in engines) > room.generating - max(0, training - room.training):
            return False
        return all(
            sum(-(-other // tp) * n for other, n in engines if other >= tp) <= room.blocks(tp, training)
            for tp, _ in engines
        )

    def _idle(self, counts: Mapping[Kind, int], type_: str) -> int:
        """Accelerators of a type that could generate and have nothing to do."""
        room = self._rooms[type_]
        training = rollout = 0
        for kind, number in counts.items():
            if kind.type == type_:
                free = number - self._fixed[kind]
                if isinstance(kind, TrainerKind):
                    training += kind.accelerators * free
                else:
                    rollout += kind.tp * free
        return room.generating - rollout - max(0, training - room.training)

    # ---- the grid

    def _grid(self, splits: int, shares: int) -> Iterator[tuple[dict[TrainerKind, int], dict[EngineKind, int]]]:
        """Free trainers, and free engines beside them."""
        for trainers in self._training(splits):
            used: dict[str, int] = {}
            for kind, number in trainers.items():
                used[kind.type] = used.get(kind.type, 0) + kind.accelerators * number
            for engines in self._generating(used, shares):
                yield trainers, engines

    def _training(self, splits: int) -> Iterator[dict[TrainerKind, int]]:
        """Numbers of free replicas of one kind; alone, and with core accelerators of other types beside it."""
        yield {}
        for type_, kinds in self._trainers.items():
            beside = {
                k[0]: self._rooms[t].training // k[0].accelerators
                for t, k in self._trainers.items()
                if t != type_ and k and self._rooms[t].training >= k[0].accelerators
            }
            for kind in kinds:
                most = (self._rooms[type_].hybrid + self._rooms[type_].training) // kind.accelerators
                for number in _spaced(1, most, splits):
                    yield {kind: number}
                    if beside:
                        yield {kind: number, **beside}

    def _generating(self, used: Mapping[str, int], shares: int) -> Iterator[dict[EngineKind, int]]:
        """Of each type no engine, engines of one kind, or (for one of the types) of two."""
        plain: list[list[dict[EngineKind, int]]] = []
        paired: list[list[dict[EngineKind, int]]] = []
        for type_, kinds in self._engines.items():
            room, training = self._rooms[type_], used.get(type_, 0)
            blocks = {k: room.blocks(k.tp, training) for k in kinds}
            plain.append([{}, *({k: n} for k, n in blocks.items() if n > 0)])
            paired.append([])
            for wide, narrow in itertools.permutations(kinds, 2):
                if wide.tp <= narrow.tp:
                    continue
                for number in _spaced(1, blocks[wide], shares):
                    rest = blocks[narrow] - number * -(-wide.tp // narrow.tp)
                    if rest > 0:
                        paired[-1].append({wide: number, narrow: rest})
        for way in itertools.product(*plain):
            yield {k: n for part in way for k, n in part.items()}
        for at, pairs in enumerate(paired):
            others = plain[:at] + plain[at + 1 :]
            for pair in pairs:
                for way in itertools.product(*others):
                    yield {k: n for part in (pair, *way) for k, n in part.items()}

    # ---- neighbours

    def _changes(self, base: Counter[Kind], stride: int) -> Iterator[Counter[Kind]]:
        for type_ in self._rooms:
            yield from self._between_roles(base, type_, stride)
            yield from self._between_kinds(base, self._trainers[type_], stride)
            yield from self._between_kinds(base, self._engines[type_], stride)
            yield from self._filled(base, type_)
        for here, there in itertools.permutations(self._rooms, 2):
            yield from self._between_types(base, here, there, stride)

    def _between_roles(self, base: Counter[Kind], type_: str, stride: int) -> Iterator[Counter[Kind]]:
        for trainer in self._trainers[type_]:
            for engine in self._engines[type_]:
                for sign in (1, -1):
                    changed = Counter(base)
                    changed[trainer] += sign * stride
                    self._settle(changed, engine)
                    yield changed
                    for narrow in self._engines[type_]:
                        if narrow.tp < engine.tp and self._idle(changed, type_) >= narrow.tp:
                            filled = Counter(changed)
                            self._settle(filled, narrow)
                            yield filled

    def _settle(self, changed: Counter[Kind], engine: EngineKind) -> None:
        """Engines of one kind give up what is missing of their type, or take what is idle."""
        changed[engine] += self._idle(changed, engine.type) // engine.tp

    def _between_kinds(self, base: Counter[Kind], kinds: Sequence[Kind], stride: int) -> Iterator[Counter[Kind]]:
        for old, new in itertools.permutations(kinds, 2):
            if not base[old]:
                continue
            sizes = _size(old), _size(new)
            block = max(sizes) * stride
            for given in {min(base[old], -(-block // sizes[0])), base[old]}:
                changed = Counter(base)
                changed[old] -= given
                changed[new] += given * sizes[0] // sizes[1]
                yield changed

    def _filled(self, base: Counter[Kind], type_: str) -> Iterator[Counter[Kind]]:
        for engine in self._engines[type_]:
            changed = Counter(base)
            self._settle(changed, engine)
            yield changed

    def _between_types(self, base: Counter[Kind], here: str, there: str, stride: int) -> Iterator[Counter[Kind]]:
        """Training moves from one type to another, engines the other way."""
        for old in self._trainers[here]:
            if not base[old]:
                continue
            for new in self._trainers[there]:
                given = min(base[old], stride)
                for mine, other in itertools.product(self._engines[here], self._engines[there]):
                    changed = Counter(base)
                    changed[old] -= given
                    changed[new] += max(1, given * old.accelerators // new.accelerators)
                    self._settle(changed, mine)
                    self._settle(changed, other)
                    yield changed


def _size(kind: Kind) -> int:
    return kind.accelerators if isinstance(kind, TrainerKind) else kind.tp


def _spaced(first: int, last: int, count: int) -> list[int]:
    """At most `count` whole numbers from first to last, evenly, both ends among them."""
    if last < first or count < 1:
        return []
    if last - first + 1 <= count:
        return list(range(first, last + 1))
    if count == 1:
        return [(first + last) // 2]
    return sorted({first + round(i * (last - first) / (count - 1)) for i in range(count)})
