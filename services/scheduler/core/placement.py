"""Where a layout's replicas go, and how the fleet gets there: a few safe moves instead of one great leap.

Replicas of a wanted kind stay where they are. New engines, largest first, go into the domain where they leave least
over, idle accelerators before others; training replicas take what is left, on as few nodes as can be. A *move* gives
up whole replicas and makes new ones of their accelerators: a connected component of old and new replicas that share
accelerators, the smallest set that can be handed over by itself. Moves are put in an order in which each is safe while
it is under way: both roles keep their floors without what is being handed over, some engine that stays holds the
longest context, and the hosts have the memory for what is put to sleep before anything wakes.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates
from services.scheduler.core.reason import Reason
from services.scheduler.core.topology import Accelerator, Fleet, FleetLayout, Kind, Replica, layout_of

HOST_MARGIN = 0.1
"""Of the free host memory, what is left alone: page cache and other processes."""


@dataclass(frozen=True, slots=True)
class NewReplica:
    """One to be made."""

    kind: Kind
    accelerators: tuple[str, ...]

    @property
    def role(self) -> str:
        """TRAINER or ROLLOUT."""
        return "TRAINER" if isinstance(self.kind, TrainerKind) else "ROLLOUT"


@dataclass(frozen=True, slots=True)
class Move:
    """One hand-over: replicas given up, by name, and those made of their (and idle) accelerators."""

    sources: tuple[str, ...]
    targets: tuple[NewReplica, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds at any moment. Floors in accelerators."""

    min_training: int = 1
    min_rollout: int = 1
    longest_context: float = 0.0


def place(fleet: Fleet, wanted: FleetLayout) -> tuple[Move, ...] | None:
    """Moves to a layout, in no order yet; None if it cannot be had beside the fixed replicas."""
    left: Counter[Kind] = Counter(dict(wanted.trainers))
    left.update(dict(wanted.engines))
    kept = []
    for item in sorted(fleet.replicas, key=lambda r: (r.movable, _place_of(fleet, r))):
        kind = fleet.kind(item)
        if left[kind] > 0:
            left[kind] -= 1
            kept.append(item)
        elif not item.movable:
            return None
    new = _put(fleet, kept, left)
    if new is None:
        # what stays lies in the way of what comes: lay out everything movable anew
        kept = [r for r in fleet.replicas if not r.movable]
        left = Counter(dict(wanted.trainers))
        left.update(dict(wanted.engines))
        left.subtract(Counter(fleet.kind(r) for r in kept))
        new = _put(fleet, kept, left)
        if new is None:
            return None
        same = {(fleet.kind(r), frozenset(r.accelerators)): r for r in fleet.replicas if r.movable}
        kept += [same[n.kind, frozenset(n.accelerators)] for n in new if (n.kind, frozenset(n.accelerators)) in same]
        new = [n for n in new if (n.kind, frozenset(n.accelerators)) not in same]
    names = {r.name for r in kept}
    return _components([r for r in fleet.replicas if r.name not in names], new)


@dataclass(frozen=True, slots=True)
class Safety:
    """What moves are checked against."""

    limits: Limits
    engines: Mapping[EngineKind, EngineRates]
    trainers: Mapping[TrainerKind, TrainerRates]

    def asleep_bytes(self, kind: Kind) -> float:
        """Host memory of a sleeping replica, on each of its accelerators."""
        if isinstance(kind, TrainerKind):
            known = self.trainers.get(kind)
            return known.asleep_bytes / kind.accelerators if known else 0.0
        seen = self.engines.get(kind)
        return seen.asleep_bytes / kind.tp if seen else 0.0


class Progress:
    """What holds while moves are made one after the other. Moves must be disjoint and of the fleet it began with."""

    def __init__(self, fleet: Fleet, safety: Safety) -> None:
        self._fleet = fleet
        self._safety = safety
        self._counts: Counter[Kind] = Counter(dict(fleet.present.trainers))
        self._counts.update(dict(fleet.present.engines))
        self.host_free = dict(fleet.host_free_bytes)
        self.asleep = {a.name: a.asleep_bytes for a in fleet.accelerators}
        """Host memory by accelerator whose other worker sleeps."""

    @property
    def layout(self) -> FleetLayout:
        """Now."""
        return layout_of(self._counts)

    def unsafe(self, move: Move) -> Reason | None:
        """Why a move would break something while it is under way; None if it would not."""
        leaving = Counter(self._fleet.kind(self._fleet.replica[name]) for name in move.sources)
        limits, here = self._safety.limits, self.layout
        given = layout_of(leaving)
        for word, held, gone, floor in (
            ("training", here.training, given.training, limits.min_training),
            ("rollout", here.rollout, given.rollout, limits.min_rollout),
        ):
            if gone and held - gone < floor:
                text = f"{held - gone} {word} accelerators would be left during the hand-over; the floor is {floor}"
                return Reason("FLOOR", text, {"left": float(held - gone), "floor": float(floor)})
        if given.engines and limits.min_rollout:
            staying = [self._safety.engines[k] for k, n in here.engines if n > leaving[k]]
            if not any(r.holds(limits.longest_context) for r in staying):
                largest = max((r.kv_tokens for r in staying), default=0.0)
                text = f"no engine that stays holds {limits.longest_context:.0f} tokens of context"
                return Reason("KV_MEMORY", text, {"kv_tokens": largest, "context": limits.longest_context})
        return self._host_memory(move)

    def do(self, move: Move) -> None:
        """The move is done: what gave its accelerators to the other role sleeps, what slept there is awake or gone."""
        for name, size in self._slept(move).items():
            node = self._fleet.by_name[name].node
            if node in self.host_free:
                self.host_free[node] += self.asleep[name] - size
            self.asleep[name] = size
        self._counts.subtract(Counter(self._fleet.kind(self._fleet.replica[name]) for name in move.sources))
        self._counts.update(Counter(t.kind for t in move.targets))

    def _host_memory(self, move: Move) -> Reason | None:
        """What goes to sleep must fit before anything wakes (vLLM's sleep level 1 keeps the weights in host memory)."""
        needed: dict[str, float] = {}
        for name, size in self._slept(move).items():
            node = self._fleet.by_name[name].node
            needed[node] = needed.get(node, 0.0) + size
        for node, size in sorted(needed.items()):
            free = self.host_free.get(node)
            if free is not None and size > free * (1 - HOST_MARGIN):
                text = (
                    f"{size / 1e9:.1f} GB would go to sleep in the host memory of {node}, which has "
                    f"{free / 1e9:.1f} GB free, of which {HOST_MARGIN:.0%} are left alone"
                )
                return Reason("HOST_MEMORY", text, {"needed_bytes": size, "free_bytes": free})
        return None

    def _slept(self, move: Move) -> dict[str, float]:
        """Host bytes by accelerator that changes sides: its worker sleeps. One that only changes shape starts anew."""
        roles = {name: t.role for t in move.targets for name in t.accelerators}
        sources = [self._fleet.replica[name] for name in move.sources]
        return {
            name: self._safety.asleep_bytes(self._fleet.kind(r))
            for r in sources
            for name in r.accelerators
            if roles.get(name) != r.role
        }


@dataclass(frozen=True, slots=True)
class Steps:
    """Moves in order, the layout after each, and why the next one is not safe, if any is left."""

    moves: tuple[Move, ...]
    layouts: tuple[FleetLayout, ...]
    unsafe: Reason | None


def order(fleet: Fleet, moves: Sequence[Move], safety: Safety, worth: Callable[[FleetLayout], float]) -> Steps:
    """The moves in an order in which each is safe; of those possible the one first that by itself is worth most.

    Moves that change the counts alike are worth alike, so that only a few layouts are judged.
    """
    classes: dict[tuple[object, ...], list[Move]] = {}
    for move in sorted(moves, key=_key):
        classes.setdefault(_change(fleet, move), []).append(move)
    if len(classes) > 1:
        value = {kind: worth(_then(fleet.present, fleet, alike[0])) for kind, alike in classes.items()}
        classes = dict(sorted(classes.items(), key=lambda item: -value[item[0]]))
    progress, done, layouts = Progress(fleet, safety), list[Move](), list[FleetLayout]()
    while any(classes.values()):
        found: Move | Reason | None = None
        for alike in classes.values():
            checked = _first_safe(progress, alike) if alike else None
            if isinstance(checked, Move):
                found = checked
                alike.remove(checked)
                break
            found = found or checked
        if not isinstance(found, Move):
            return Steps(tuple(done), tuple(layouts), found)
        progress.do(found)
        done.append(found)
        layouts.append(progress.layout)
    return Steps(tuple(done), tuple(layouts), None)


def after(fleet: Fleet, move: Move, safety: Safety) -> Fleet:
    """The fleet once a move is done; the new replicas are named by their first accelerators."""
    progress = Progress(fleet, safety)
    progress.do(move)
    new = tuple(Replica(f"new/{t.accelerators[0]}", t.role, t.accelerators) for t in move.targets)
    replicas = (*(r for r in fleet.replicas if r.name not in move.sources), *new)
    accelerators = tuple(replace(a, asleep_bytes=progress.asleep[a.name]) for a in fleet.accelerators)
    return Fleet(accelerators, replicas, progress.host_free)


def _first_safe(progress: Progress, alike: Sequence[Move]) -> Move | Reason:
    """Of moves that change the counts alike; or why the first is not safe."""
    reasons = []
    for move in alike:
        reason = progress.unsafe(move)
        if reason is None:
            return move
        if reason.code != "HOST_MEMORY":
            return reason  # it depends on the counts alone
        reasons.append(reason)
    return reasons[0]


def _then(layout: FleetLayout, fleet: Fleet, move: Move) -> FleetLayout:
    counts: Counter[Kind] = Counter(dict(layout.trainers))
    counts.update(dict(layout.engines))
    counts.subtract(Counter(fleet.kind(fleet.replica[name]) for name in move.sources))
    counts.update(Counter(t.kind for t in move.targets))
    return layout_of(counts)


def _change(fleet: Fleet, move: Move) -> tuple[object, ...]:
    given = Counter(fleet.kind(fleet.replica[name]) for name in move.sources)
    made = Counter(t.kind for t in move.targets)
    return frozenset(given.items()), frozenset(made.items())


def _key(move: Move) -> tuple[tuple[str, ...], ...]:
    return move.sources, *(t.accelerators for t in move.targets)


def _put(fleet: Fleet, kept: Sequence[Replica], wanted: Mapping[Kind, int]) -> list[NewReplica] | None:
    """Places for so many new replicas of each kind beside those kept."""
    if any(n < 0 for n in wanted.values()):
        return None
    held = {name for r in kept for name in r.accelerators}
    busy = {name for r in fleet.replicas for name in r.accelerators}
    domains = _Domains([a for a in fleet.free if a.name not in held], busy)
    found: list[NewReplica] = []
    engines = [k for k, n in wanted.items() if isinstance(k, EngineKind) for _ in range(n)]
    for engine in sorted(engines, key=lambda k: (-k.tp, k.type)):
        chosen = domains.take(engine)
        if chosen is None:
            return None
        found.append(NewReplica(engine, chosen))
    free = domains.rest()
    trainers = [k for k, n in wanted.items() if isinstance(k, TrainerKind) for _ in range(n)]
    for trainer in sorted(trainers, key=lambda k: (-k.accelerators, k.type)):
        taken = _span(free, trainer, busy)
        if taken is None:
            return None
        found.append(NewReplica(trainer, taken))
        free = [a for a in free if a.name not in taken]
    return found


class _Domains:
    """Free accelerators by NVLink domain: core ones first, since only engines can use them, then idle ones."""

    def __init__(self, free: Sequence[Accelerator], busy: Collection[str]) -> None:
        self._others = [a for a in free if a.pool == "CORE_TRAINING"]
        self._items: dict[tuple[str, str, str], list[Accelerator]] = {}
        for item in sorted(free, key=lambda a: (a.pool != "CORE_ROLLOUT", a.name in busy, a.name)):
            if item.pool != "CORE_TRAINING":
                self._items.setdefault((item.type, item.node, item.domain), []).append(item)
        self._busy = {d: sum(a.name in busy for a in items) for d, items in self._items.items()}
        self._core = {d: sum(a.pool == "CORE_ROLLOUT" for a in items) for d, items in self._items.items()}

    def take(self, kind: EngineKind) -> tuple[str, ...] | None:
        """Room for one engine, where it leaves least over; None if there is none."""
        able = [d for d, items in self._items.items() if d[0] == kind.type and len(items) >= kind.tp]
        if not able:
            return None
        best = min(able, key=lambda d: (-min(self._core[d], kind.tp), len(self._items[d]), self._busy[d], d))
        items = self._items[best]
        self._items[best], taken = items[kind.tp :], items[: kind.tp]
        self._core[best] -= min(self._core[best], kind.tp)
        return tuple(a.name for a in taken)

    def rest(self) -> list[Accelerator]:
        """What no engine took."""
        return [*self._others, *(a for items in self._items.values() for a in items)]


def _span(free: Sequence[Accelerator], kind: TrainerKind, busy: Collection[str]) -> tuple[str, ...] | None:
    """Accelerators of one type: core ones first, on as few nodes as can be, then idle ones."""
    able = [a for a in free if a.type == kind.type and a.pool != "CORE_ROLLOUT"]
    if len(able) < kind.accelerators:
        return None
    nodes = Counter(a.node for a in able)
    core = Counter(a.node for a in able if a.pool == "CORE_TRAINING")
    used = Counter(a.node for a in able if a.name in busy)
    whole = [n for n in nodes if nodes[n] >= kind.accelerators]

    def rank(item: Accelerator) -> tuple[object, ...]:
        node = item.node
        if whole:
            fit = (-min(core[node], kind.accelerators), nodes[node]) if node in whole else (1, 0)
        else:
            fit = (-core[node], -nodes[node])
        return (*fit, used[node], node, item.pool != "CORE_TRAINING", item.name in busy, item.name)

    return tuple(a.name for a in sorted(able, key=rank)[: kind.accelerators])


def _place_of(fleet: Fleet, item: Replica) -> tuple[float, str, str, str]:
    """Replicas are kept in this order: first where host memory is short, since who stays need not sleep; and node by
    node, so that those given up lie together and make room for wide ones.
    """
    first = fleet.by_name[item.accelerators[0]]
    return fleet.host_free_bytes.get(first.node, math.inf), first.node, first.domain, first.name


def _components(old: Sequence[Replica], new: Sequence[NewReplica]) -> tuple[Move, ...]:
    """Old and new replicas that share accelerators belong together."""
    owner = {name: r for r in old for name in r.accelerators}
    group: dict[str, int] = {}
    members: dict[int, tuple[set[str], list[NewReplica]]] = {}
    for at, item in enumerate(new):
        sources = {owner[name].name for name in item.accelerators if name in owner}
        merged: tuple[set[str], list[NewReplica]] = (set(sources), [item])
        for other in {group[s] for s in sources if s in group}:
            names, targets = members.pop(other)
            merged = merged[0] | names, [*targets, *merged[1]]
        members[at] = merged
        group.update(dict.fromkeys(merged[0], at))
    moves = [Move(tuple(sorted(s)), tuple(sorted(t, key=lambda n: n.accelerators))) for s, t in members.values()]
    moves += [Move((r.name,), ()) for r in old if r.name not in group]
    return tuple(sorted(moves, key=_key))
