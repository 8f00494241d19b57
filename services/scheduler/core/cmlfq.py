"""The multi-level feedback queue of trajectories with causal signals (C-MLFQ), as one pure decision.

Levels are classes of engines: 0 many and cheap, higher ones few and fast. A trajectory starts in level 0. One that has
used its level's token quantum in one lease belongs to the next level; it is moved there when that pays:

    gain = remaining tokens (p50) x (seconds per token here - there)
    cost = re-prefill of its tokens there + a fixed hand-over
    move if gain > cost x (1 + hysteresis)

so evidence enters through the estimate of what remains, which follows tool returns, siblings and progress. A
short estimate moves nothing; in the drain phase, when nothing is queued, the same rule re-homes the tail without
asking for the quantum, also to a much faster engine of the same level. Moves wait for the end of the turn, so that the
re-prefill overlaps with the tool call.

Order: aged first, then priority, then admission order, so that groups close; within a group the longest remaining
first. Nothing starves: after `max_wait_s` any engine of any level will do; one that is past its quantum is stopped if
all are full; and if the KV cache lacks room for it, one engine takes in nothing else until it fits. Work never waits
while an engine of another level has room, but part of a higher level's slots stay reserved for its own.

Place: where what remains is expected to finish soonest,

    finish = remaining tokens (p50) x seconds per token there with this one more + re-prefill of its tokens

counting differences within the hysteresis as none: among those an engine of its own level is preferred, then the one
it was on, then the least share of slots. An engine of unknown speed counts as the best of its own level, or it would
stay unknown. KV room is kept for what leased trajectories are expected to generate (`kv_growth`).

An engine serves one run, so runs are decided apart: one run's queue neither ends another's drain phase nor hides those
of another that starve. They share `max_moves` alone: first those that make room for starving work (never more than one
pending in a run), then KV pressure, then moves, the most gain first (of the `LOOK_AT` times `max_moves` that have most
left in each run and gain).

Everything follows from the view; its order does not matter. `decide` is the readable form, from scratch; `livequeue.py`
holds the same content between decisions and does only what a change asks for.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.scheduler.core import verdicts
from services.scheduler.core.verdicts import Assign, Preempt

KV_GROWTH = 0.5
"""Half of what a trajectory is expected to generate is what that takes on average until it ends."""
PREFILL_SPEEDUP = 20.0
"""Prefill is taken to be so much faster per token than decoding, by whoever has no measurement of it."""
LOOK_AT = 4
"""Of so many moves for each that may be made, those that gain most are made: not all of thousands are compared."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Settings of the queue. `quantum_tokens` is per level; levels beyond its end have no quantum."""

    quantum_tokens: tuple[int, ...] = (48,)
    max_wait_s: float = 20.0
    max_moves: int = 4
    """Preemptions in one decision."""
    hysteresis: float = 0.25
    handover_s: float = 0.3
    """Fixed cost of a move: report, queue, lease, attach."""
    min_lease_s: float = 2.0
    """A lease younger than this is not moved again."""
    min_remaining: float = 24.0
    """Fewer remaining tokens (p50) are not worth a move whatever the rates say; twice as many for re-homing."""
    max_moves_each: int = 3
    """Moves of one trajectory: noise in the rates must not send it round and round."""
    kv_watermark: float = 0.95
    kv_growth: float = KV_GROWTH
    """Share of what a leased one is expected to generate (p50) that KV room is kept for. More keeps others out, less
    stops more of them later.
    """
    kv_pressure: float = 0.98
    reserve_share: float = 0.25
    """Share of a higher level's slots that spilled work does not take."""


@dataclass(frozen=True, slots=True)
class QueuedTrajectory:
    """One that waits. Times in seconds on the view's clock."""

    name: str
    run: str
    group: str
    admission_number: int
    priority: int
    level: int
    waiting_since: float
    tokens: int
    """Sequence length that must be prefilled."""
    generated: int
    estimate_p50: float
    estimate_p90: float
    last_engine: str
    """Preferred if it has room: its target, or where its prefix may still be cached."""


@dataclass(frozen=True, slots=True)
class RunningTrajectory:
    """One that is leased."""

    name: str
    run: str
    engine: str
    level: int
    since: float
    generated: int
    quantum_used: int
    in_tool_wait: bool
    estimate_p50: float
    estimate_p90: float
    tokens: int
    preempt_pending: bool
    admission_number: int = 0
    moves: int = 0
    """Times it was preempted so far."""
    target: str = ""
    """Engine that a pending preemption moves it to: its place there is kept."""
    reserved: float = 0.0
    """KV tokens that its lease keeps room for, if it has not more: as of its last report."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One rollout replica. Unknown rates are None."""

    name: str
    run: str
    level: int
    concurrency_cap: int
    running: int
    kv_capacity_tokens: int
    kv_used_tokens: int
    """As reported at `reported_at`, less what has left since."""
    seconds_per_token: float | None
    prefill_tokens_per_second: float | None
    admitting: bool
    seconds_per_sequence: float | None = None
    """What each further sequence adds to `seconds_per_token`, if known; that was measured at ..."""
    measured_load: float = 0.0
    """... so many."""
    reported_at: float = 0.0
    """Tells one report from the next: numbers of the same one say nothing new."""


@dataclass(frozen=True, slots=True)
class QueueView:
    """All that waits, runs and serves, at one moment."""

    now: float
    queued: Sequence[QueuedTrajectory]
    running: Sequence[RunningTrajectory]
    engines: Sequence[EngineView]


def past_quantum(level: int, used: int, settings: QueueSettings) -> bool:
    """True if `used` tokens in one lease are all that a level gives."""
    return level < len(settings.quantum_tokens) and used >= settings.quantum_tokens[level]


def reserved(engine_level: int, cap: int, level: int, aged: bool, settings: QueueSettings) -> int:
    """Slots of an engine that work queued in `level` must leave free."""
    spilled = engine_level > level and not aged
    return math.ceil(cap * settings.reserve_share) if spilled and cap > 1 else 0


def pace(seconds_per_token: float, seconds_per_sequence: float | None, more: float) -> float:
    """Seconds per token of each sequence with `more` of them than when it was measured."""
    return max(0.0, seconds_per_token + (seconds_per_sequence or 0.0) * more)


def hashed(name: str) -> int:
    """Chooses among equals by the item's name: always the first would pile new sessions onto it."""
    return zlib.crc32(name.encode())


@dataclass(slots=True)
class _Room:
    """Slots and KV tokens that this decision has already given away."""

    engines: Mapping[str, EngineView]
    taken: dict[str, int] = field(default_factory=dict)
    kv: dict[str, float] = field(default_factory=dict)
    leased: dict[str, float] = field(default_factory=dict)
    """KV tokens kept for what is leased to each engine: its own count lags, and what it holds grows."""
    held: set[str] = field(default_factory=set)
    """Engines kept clear for one that waited too long and needs more of the KV cache than is free."""

    def load(self, engine: EngineView) -> int:
        return engine.running + self.taken.get(engine.name, 0)

    def fits(self, engine: EngineView, tokens: int, more: float, settings: QueueSettings, reserve: int = 0) -> bool:
        if engine.name in self.held or self.load(engine) >= engine.concurrency_cap - reserve:
            return False
        if not engine.kv_capacity_tokens:
            return True
        used = max(engine.kv_used_tokens, self.leased.get(engine.name, 0)) + self.kv.get(engine.name, 0.0)
        if self.load(engine) == 0:
            return tokens <= engine.kv_capacity_tokens
        return used + tokens + more <= engine.kv_capacity_tokens * settings.kv_watermark

    def take(self, engine: EngineView, tokens: int, more: float) -> None:
        self.taken[engine.name] = self.taken.get(engine.name, 0) + 1
        self.kv[engine.name] = self.kv.get(engine.name, 0.0) + tokens + more


def decide(view: QueueView, settings: QueueSettings) -> list[Assign | Preempt]:
    """Leases for what waits and preemptions of what runs; at most one of either for each trajectory."""
    engines = {e.name: e for e in sorted(view.engines, key=lambda e: e.name)}
    room = _Room(engines)
    running = sorted(view.running, key=lambda t: t.name)  # sums of floats follow their order
    for item in running:
        room.leased[item.engine] = room.leased.get(item.engine, 0) + max(item.tokens, item.reserved)
        if item.preempt_pending and item.target in engines:
            room.take(engines[item.target], item.tokens, item.estimate_p50)
    assigns, unplaced = _assign(view, settings, engines, room)
    preempts = _for_starving(view, settings, engines, unplaced)
    preempts += _pressure(running, settings, engines, {p.trajectory for p in preempts})
    preempts += _moves(view, settings, engines, room, unplaced, {p.trajectory for p in preempts})
    return [*assigns, *preempts[: settings.max_moves]]


def _assign(
    view: QueueView, settings: QueueSettings, engines: Mapping[str, EngineView], room: _Room
) -> tuple[list[Assign], list[QueuedTrajectory]]:
    def aged(item: QueuedTrajectory) -> bool:
        return view.now - item.waiting_since > settings.max_wait_s

    def order(item: QueuedTrajectory) -> tuple[object, ...]:
        since = item.waiting_since if aged(item) else 0.0
        return (not aged(item), since, -item.priority, item.admission_number, -item.estimate_p50, item.name)

    assigns: list[Assign] = []
    unplaced: list[QueuedTrajectory] = []
    held_for: set[str] = set()
    for item in sorted(view.queued, key=order):
        level = _level(item, settings, engines, room)
        engine = _engine_for(item, level, aged(item), settings, engines, room)
        if engine is None:
            unplaced.append(item)
            if aged(item) and item.run not in held_for and (keep := _kept_for(item, engines)) is not None:
                held_for.add(item.run)
                room.held.add(keep.name)
            continue
        room.take(engine, item.tokens, item.estimate_p50)
        assigns.append(verdicts.lease(item, engine, level, room.load(engine), view.now, aged(item)))
    return assigns, unplaced


def _level(item: QueuedTrajectory, settings: QueueSettings, engines: Mapping[str, EngineView], room: _Room) -> int:
    """The level it queues in: one lower if what remains surely fits half of the quantum there (promotion). Not while
    the engine of its level that it was on, or was moved to, has room: that would undo the move.
    """
    last = engines.get(item.last_engine)
    if last is not None and last.run == item.run and last.level == item.level:
        if last.admitting and not _crowded(last, room):
            return item.level
    below = item.level - 1
    if 0 <= below < len(settings.quantum_tokens) and item.estimate_p90 <= 0.5 * settings.quantum_tokens[below]:
        return below
    return item.level


def _engine_for(
    item: QueuedTrajectory,
    level: int,
    aged: bool,
    settings: QueueSettings,
    engines: Mapping[str, EngineView],
    room: _Room,
) -> EngineView | None:
    def reserve(engine: EngineView) -> int:
        return reserved(engine.level, engine.concurrency_cap, level, aged, settings)

    able = [
        e
        for e in engines.values()
        if e.admitting and e.run == item.run and room.fits(e, item.tokens, item.estimate_p50, settings, reserve(e))
    ]
    if not able:
        return None

    finishes = {e.name: _finish(item, e, room) for e in able}
    known = [f for f in finishes.values() if f is not None]
    soonest = min(known, default=0.0)

    def key(engine: EngineView) -> tuple[object, ...]:
        finish = finishes[engine.name]
        unmeasured = finish is None and bool(known)
        finish = soonest if finish is None else finish
        distance = 0 if aged or unmeasured else abs(engine.level - level)
        share = room.load(engine) / engine.concurrency_cap
        again = _again(item, engine, room)
        return (finish > soonest * (1 + settings.hysteresis), distance, not again, share)

    best = min(key(e) for e in able)
    return _one_of(item, [e for e in able if key(e) == best])


def _finish(item: QueuedTrajectory, engine: EngineView, room: _Room) -> float | None:
    """Seconds that what remains takes there, slowed down by itself, with the prefill; None if the rate is unknown."""
    if engine.seconds_per_token is None:
        return None
    more = room.load(engine) + 1 - engine.measured_load
    decode = item.estimate_p50 * pace(engine.seconds_per_token, engine.seconds_per_sequence, more)
    if not engine.prefill_tokens_per_second or _again(item, engine, room):
        return decode
    return decode + item.tokens / engine.prefill_tokens_per_second


def _again(item: QueuedTrajectory, engine: EngineView, room: _Room) -> bool:
    """It was there before, and may find its prefix."""
    return engine.name == item.last_engine and not _crowded(engine, room)


def _crowded(engine: EngineView, room: _Room) -> bool:
    """So full that having been there before is no reason to prefer it."""
    return room.load(engine) > 0.9 * engine.concurrency_cap


def _one_of(item: QueuedTrajectory, equals: Sequence[EngineView]) -> EngineView:
    return equals[hashed(item.name) % len(equals)]


def _kept_for(item: QueuedTrajectory, engines: Mapping[str, EngineView]) -> EngineView | None:
    """The engine that takes in nothing else until this one, which waited too long, fits: smaller ones would fill every
    gap for ever. The same one each time, one a run; None if none is large enough.
    """
    able = [
        e
        for e in engines.values()
        if e.admitting
        and e.run == item.run
        and e.concurrency_cap > 0
        and (not e.kv_capacity_tokens or item.tokens <= e.kv_capacity_tokens)
    ]
    return _one_of(item, able) if able else None


def _pressure(
    running: Iterable[RunningTrajectory], settings: QueueSettings, engines: Mapping[str, EngineView], stopped: set[str]
) -> list[Preempt]:
    """Stops the youngest on engines whose KV cache is nearly full, one an engine and decision."""
    on: dict[str, list[RunningTrajectory]] = {}
    for item in running:
        on.setdefault(item.engine, []).append(item)
    found = []
    for engine in engines.values():
        if not engine.kv_capacity_tokens:
            continue
        # what was stopped already makes room soon
        mine = [t for t in on.get(engine.name, ()) if not t.preempt_pending and t.name not in stopped]
        going = sum(t.tokens for t in on.get(engine.name, ())) - sum(t.tokens for t in mine)
        share = (engine.kv_used_tokens - going) / engine.kv_capacity_tokens
        if share <= settings.kv_pressure or len(mine) < 2:
            continue
        victim = max(mine, key=lambda t: (t.admission_number, -t.generated, t.name))
        found.append(verdicts.relieve(victim, share, len(mine)))
    return found


def _moves(
    view: QueueView,
    settings: QueueSettings,
    engines: Mapping[str, EngineView],
    room: _Room,
    unplaced: Sequence[QueuedTrajectory],
    stopped: set[str],
) -> list[Preempt]:
    """Demotions past the quantum, and re-homing of the tail of a run of which nothing is queued."""
    waiting = {t.run for t in unplaced}
    found: list[tuple[float, RunningTrajectory, Preempt]] = []
    counts: dict[str, int] = {}
    for item in sorted(view.running, key=lambda t: (-t.estimate_p50, t.name)):
        source = engines.get(item.engine)
        if source is None or item.preempt_pending or item.name in stopped:
            continue
        if counts.get(item.run, 0) >= LOOK_AT * settings.max_moves:
            continue
        if view.now - item.since < settings.min_lease_s or source.seconds_per_token is None:
            continue
        spent = past_quantum(item.level, item.quantum_used, settings)
        draining = item.run not in waiting
        if not spent and not draining:
            continue
        least = settings.min_remaining if spent else 2 * settings.min_remaining
        if item.moves >= settings.max_moves_each or item.estimate_p50 < least:
            continue
        best = _target(item, source, settings, engines, room, draining)
        if best is None:
            continue
        gain, cost, target = best
        room.take(target, item.tokens, item.estimate_p50)
        counts[item.run] = counts.get(item.run, 0) + 1
        found.append((gain - cost, item, verdicts.move(item, target, spent, gain, cost)))
    found.sort(key=lambda f: (-f[0], f[1].name))
    return [preempt for _, _, preempt in found]


def _target(
    item: RunningTrajectory,
    source: EngineView,
    settings: QueueSettings,
    engines: Mapping[str, EngineView],
    room: _Room,
    draining: bool,
) -> tuple[float, float, EngineView] | None:
    """The engine with the best gain over cost that passes the hysteresis; None if none does."""
    best: tuple[float, float, EngineView] | None = None
    here = source.seconds_per_token or 0.0
    for target in engines.values():
        there = target.seconds_per_token
        if target.name == source.name or there is None or not target.admitting or target.run != item.run:
            continue
        if not room.fits(target, item.tokens, item.estimate_p50, settings):
            continue
        there = pace(there, target.seconds_per_sequence, room.load(target) + 1 - target.measured_load)
        faster = target.seconds_per_sequence is not None and there < 0.5 * here
        clearly = faster or _half_as_full(target, source, room)
        if target.level <= source.level and not (draining and clearly):
            continue
        gain = item.estimate_p50 * (here - there)
        prefill = item.tokens / target.prefill_tokens_per_second if target.prefill_tokens_per_second else 0.0
        cost = settings.handover_s + prefill
        if gain > cost * (1 + settings.hysteresis) and (best is None or gain - cost > best[0] - best[1]):
            best = (gain, cost, target)
    return best


def _half_as_full(target: EngineView, source: EngineView, room: _Room) -> bool:
    """Between engines of one kind only a clear difference in load or speed is worth a move."""
    there = (room.load(target) + 1) / target.concurrency_cap
    return there < 0.5 * room.load(source) / max(1, source.concurrency_cap)


def _for_starving(
    view: QueueView, settings: QueueSettings, engines: Mapping[str, EngineView], unplaced: Sequence[QueuedTrajectory]
) -> list[Preempt]:
    """For each run: stops one that is past its quantum where the longest waiting one could run, if that waited too long
    and no place comes free already.
    """
    first: dict[str, QueuedTrajectory] = {}
    for item in unplaced:
        if view.now - item.waiting_since > settings.max_wait_s:
            first.setdefault(item.run, item)
    coming = {t.run for t in view.running if t.preempt_pending}
    found = []
    for run, item in first.items():
        victims = [
            t
            for t in view.running
            if run not in coming
            and t.run == run
            and t.engine in engines
            and engines[t.engine].admitting
            and view.now - t.since > settings.max_wait_s
            and past_quantum(t.level, t.quantum_used, settings)
        ]
        if victims:
            found.append(verdicts.make_way(max(victims, key=lambda t: (t.quantum_used, t.name)), item, view.now))
    return found
