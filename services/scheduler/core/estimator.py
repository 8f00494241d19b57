"""How many tokens a trajectory will still generate: quantiles, with the evidence behind them.

The estimate is a chain of distributions of the remaining tokens, each shrunk to the one before it:

    prior      something broad, scaled by what was generated already
    run        totals of the run's recent episodes that got at least as far as this one, less what it has
    progress   what remained for earlier episodes at the same turn and about as many tokens
    tool_tree  the same, where also the last 1, 2, 3 tool returns (tool, payload class, outcome), in order, were equal
    siblings   totals of finished members of the same group that got at least as far, less what this one has

A layer with n (decayed) samples mixes as n : SHRINKAGE with its parent; below FLOOR samples it says nothing, so one
sample is never trusted. A context of k returns is a subset of the context of its last k - 1, all at the same turn, so
a child's population lies within its parent's and the tree is causal: it holds only what was known at that turn.

Whether a layer helps is measured, not assumed: at each end, one of the trajectory's own turns is predicted with and
without the layer (before the end is learnt) and the gain in log likelihood is averaged. A layer whose average is not
above 0 is passed over. So outcomes without signal cannot make the estimate worse for long.

Estimates are asked for far more often than evidence arrives, so they are kept for REFRESH_ENDS ends of the run.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np

from services.scheduler.core import histogram
from services.scheduler.core.histogram import BINS, Floats, bin_of

Source = Literal["tool_tree", "siblings", "progress", "run", "prior"]
ToolReturn = tuple[str, str, str]

MAX_RUNS = 64
MAX_GROUPS = 8_192
MAX_LIVE = 65_536
"""Trajectories followed at once; beyond each of these bounds the least recently used one is forgotten."""
MAX_NODES = 4_096
"""Cells of progress and contexts of tool returns, for each run."""
MAX_TURNS_KEPT = 64
"""Turns of one trajectory from which its end is learnt."""
MAX_SIBLINGS = 64
RECENT_TOTALS = 512
"""Ends that make up a run's recent distribution."""
CONTEXT = 3
"""Most tool returns in a context."""
HALF_LIFE_ENDS = 512.0
"""Ends of the run after which a sample counts half: follows drift."""
FLOOR = 3.0
"""Samples below which a layer is not used."""
SIBLING_FLOOR = 2
SHRINKAGE = 8.0
"""Weight of the parent, in samples."""
SIBLING_SHRINKAGE = 4.0
"""Lower: a finished sibling of the same prompt says more than another prompt's episode (leave-one-out R^2 of 0.52 on
tau-bench groups, against about 0 for tool outcomes)."""
TRIALS = 32
"""Predictions after which a layer's measured worth decides whether it is used."""
WORTH_DECAY = 1.0 - 1.0 / 256.0
REFRESH_ENDS = 16
"""Ends of a run after which kept estimates are made anew; a sibling's end or a turn counts at once."""
MAX_KEPT = 16_384
"""Estimates kept for one run."""
PRIOR_TOKENS = 256.0
"""Median of the prior for a trajectory that has generated nothing."""
PRIOR_OCTAVES = 2.0
"""Standard deviation of the prior's log2."""
SMOOTHING = 1e-6


@dataclass(frozen=True, slots=True)
class Estimate:
    """Remaining generated tokens: median and 0.9 quantile; `evidence` in samples of the layer that weighs most."""

    p50: float
    p90: float
    evidence: float
    source: Source


@dataclass(slots=True)
class _Point:
    """A turn's end, as it was known then."""

    generated: int
    turns: int
    returns: tuple[ToolReturn, ...]
    siblings: int
    """Siblings finished by then."""


@dataclass(slots=True)
class _Live:
    run: str
    group: str
    points: list[_Point]


@dataclass(slots=True)
class _Node:
    counts: Floats = field(default_factory=lambda: np.zeros(BINS))
    mass: float = 0.0
    tick: int = 0

    def decayed(self, tick: int) -> None:
        if tick != self.tick:
            factor = 0.5 ** ((tick - self.tick) / HALF_LIFE_ENDS)
            self.counts *= factor
            self.mass *= factor
            self.tick = tick


@dataclass(slots=True)
class _Worth:
    """Mean gain in log likelihood (nats) of a layer over its parent."""

    trials: int = 0
    mean: float = 0.0

    def add(self, gain: float) -> None:
        self.trials += 1
        step = max(1.0 / self.trials, 1.0 - WORTH_DECAY)
        self.mean += step * (gain - self.mean)

    @property
    def used(self) -> bool:
        return self.trials < TRIALS or self.mean > 0.0


@dataclass(slots=True)
class _Run:
    totals: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TOTALS))
    nodes: OrderedDict[tuple[object, ...], _Node] = field(default_factory=OrderedDict)
    worth: dict[Source, _Worth] = field(default_factory=dict)
    ends: int = 0
    kept: dict[tuple[object, ...], Estimate] = field(default_factory=dict)
    recent: dict[float, "_Layer | None"] = field(default_factory=dict)
    """Layer `run` by tokens so far."""
    kept_at: int = 0

    def refresh(self) -> None:
        """Forgets kept answers when enough was learnt since."""
        if self.ends - self.kept_at >= REFRESH_ENDS or len(self.kept) + len(self.recent) > MAX_KEPT:
            self.kept.clear()
            self.recent.clear()
            self.kept_at = self.ends


@dataclass(frozen=True, slots=True)
class _Layer:
    source: Source
    counts: Floats
    mass: float
    shrinkage: float


_AGES = 0.5 ** (np.arange(RECENT_TOTALS)[::-1] / HALF_LIFE_ENDS)
"""Weights of a run's recent totals, oldest first."""
_LOG_MIDDLES = np.log2(np.maximum(histogram.MIDDLES, 0.5))


class RemainingWork:
    """The estimator's live state. One writer; calls come in the order in which things happened."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._siblings: OrderedDict[str, list[float]] = OrderedDict()
        self._live: OrderedDict[str, _Live] = OrderedDict()

    def observe_turn(
        self,
        run: str,
        group: str,
        trajectory: str,
        turn: int,
        generated_total: int,
        tool: str,
        payload_class: str,
        outcome: str,
    ) -> None:
        """A turn ended with a tool's return (empty strings if it called none). `turn` counts from 0;
        `generated_total` is the attempt's. A total below the last one begins a new attempt.
        """
        live = self._of(run, group, trajectory)
        if generated_total < live.points[-1].generated or turn + 1 < live.points[-1].turns:
            live.points = [self._start(group)]
        last = live.points[-1]
        returns = (*last.returns, (tool, payload_class, outcome))[-CONTEXT:] if tool else last.returns
        point = _Point(generated_total, turn + 1, returns, len(self._siblings.get(group, ())))
        if turn + 1 == last.turns:
            live.points[-1] = point  # a second tool call of the same turn
        else:
            live.points.append(point)
        if len(live.points) > MAX_TURNS_KEPT:
            # every other one goes, first and newest stay: a very long episode still teaches about all of its course
            live.points = [*live.points[:-1:2], live.points[-1]]

    def observe_end(self, run: str, group: str, trajectory: str, generated_total: int) -> None:
        """The episode ended by itself, with so many generated tokens in all. Learns from it and forgets it."""
        live = self._of(run, group, trajectory)
        state = self._run(run)
        state.refresh()
        tested = live.points[state.ends % len(live.points)]
        self._measure(state, group, tested, generated_total - tested.generated)
        state.ends += 1
        for point in live.points:
            remaining = max(0.0, generated_total - point.generated)
            for key in _keys(point.turns, point.generated, point.returns):
                node = state.nodes.get(key)
                if node is None:
                    node = state.nodes[key] = _Node(tick=state.ends)
                    if len(state.nodes) > MAX_NODES:
                        state.nodes.popitem(last=False)
                else:
                    state.nodes.move_to_end(key)
                node.decayed(state.ends)
                node.counts[bin_of(remaining)] += 1.0
                node.mass += 1.0
        state.totals.append(float(generated_total))
        siblings = _recent(self._siblings, group, MAX_GROUPS, list)
        if len(siblings) < MAX_SIBLINGS:
            siblings.append(float(generated_total))
        self.forget(trajectory)

    def forget(self, trajectory: str) -> None:
        """Void, cancelled or stale: nothing is learnt from it."""
        self._live.pop(trajectory, None)

    def estimate(
        self,
        run: str,
        group: str,
        trajectory: str,
        generated_so_far: int,
        turns: int,
        *,
        at_most: float = math.inf,
    ) -> Estimate:
        """Quantiles of the tokens still to be generated. A trajectory never seen before is estimated from its turns
        and tokens. `at_most` is what its limits leave.
        """
        live = self._live.get(trajectory)
        siblings = len(self._siblings.get(group, ()))
        point = _Point(generated_so_far, turns, (), siblings)
        passed = 0.0
        if live is not None and live.points[-1].turns == turns and live.points[-1].generated <= generated_so_far:
            # within a turn: the tree speaks of the turn's start, and we know that it went on since
            last = live.points[-1]
            point = _Point(last.generated, turns, last.returns, siblings)
            passed = generated_so_far - last.generated
        state = self._run(run)
        state.refresh()
        key = (group if siblings else "", siblings, point.generated, turns, point.returns, passed)
        kept = state.kept.get(key)
        if kept is None:
            kept = state.kept[key] = self._estimate(state, group, point, passed)
        return Estimate(min(kept.p50, at_most), min(kept.p90, at_most), kept.evidence, kept.source)

    def _estimate(self, state: _Run, group: str, point: _Point, passed: float) -> Estimate:
        chosen: Source = "prior"
        weight, evidence = 1.0, 0.0
        mixed = _prior(int(point.generated + passed))
        for layer in self._layers(state, group, point, passed):
            worth = state.worth.get(layer.source)
            if worth is not None and not worth.used:
                continue
            mixed, share = _mix(mixed, layer)
            weight *= 1.0 - share
            if share >= weight:
                chosen, weight, evidence = layer.source, share, layer.mass
        p50, p90 = histogram.quantiles(mixed, (0.5, 0.9))
        return Estimate(p50, p90, evidence, chosen)

    def _layers(self, state: _Run, group: str, point: _Point, passed: float) -> list[_Layer]:
        now = point.generated + passed
        if now not in state.recent:
            state.recent[now] = _recent_totals(state, now)
        recent = state.recent[now]
        layers = [recent] if recent is not None else []
        for depth, key in enumerate(_keys(point.turns, point.generated, point.returns)):
            node = state.nodes.get(key)
            if node is None:
                break  # deeper contexts are within this one
            node.decayed(state.ends)
            counts = histogram.survivors(node.counts, passed)
            mass = float(counts.sum())
            if mass >= FLOOR:
                layers.append(_Layer("tool_tree" if depth else "progress", counts, mass, SHRINKAGE))
        if point.siblings >= SIBLING_FLOOR:
            siblings = np.array(self._siblings.get(group, ())[: point.siblings], dtype=np.float64)
            longer = siblings[siblings > now]
            if len(longer) >= SIBLING_FLOOR:
                counts = histogram.of_samples(longer - now, np.ones(len(longer)))
                layers.append(_Layer("siblings", counts, float(len(longer)), SIBLING_SHRINKAGE))
        return layers

    def _measure(self, state: _Run, group: str, point: _Point, remaining: float) -> None:
        """Scores each layer against its parent on a point of an episode that is not learnt yet."""
        actual = bin_of(max(0.0, remaining))
        mixed = _prior(point.generated)
        for layer in self._layers(state, group, point, 0.0):
            finer, _ = _mix(mixed, layer)
            gain = math.log(_smooth(finer, actual)) - math.log(_smooth(mixed, actual))
            worth = state.worth.setdefault(layer.source, _Worth())
            worth.add(gain)
            if worth.used:
                mixed = finer

    def _of(self, run: str, group: str, trajectory: str) -> _Live:
        return _recent(self._live, trajectory, MAX_LIVE, lambda: _Live(run, group, [self._start(group)]))

    def _start(self, group: str) -> _Point:
        return _Point(0, 0, (), len(self._siblings.get(group, ())))

    def _run(self, run: str) -> _Run:
        return _recent(self._runs, run, MAX_RUNS, _Run)


V = TypeVar("V")


def _recent(cache: OrderedDict[str, V], key: str, bound: int, make: Callable[[], V]) -> V:
    """The value under a key, made if it is missing; the least recently used one goes when there are too many."""
    value = cache.get(key)
    if value is None:
        value = cache[key] = make()
        if len(cache) > bound:
            cache.popitem(last=False)
    else:
        cache.move_to_end(key)
    return value


def _keys(turns: int, generated: int, returns: tuple[ToolReturn, ...]) -> list[tuple[object, ...]]:
    """Cells from coarse to fine: the turn and the octave of tokens, then contexts of 1, 2, 3 returns at this turn."""
    at = turns if turns <= 16 else 16 + turns.bit_length()
    keys: list[tuple[object, ...]] = [(at, generated.bit_length())]
    keys += [(at, *returns[-depth:]) for depth in range(1, len(returns) + 1)]
    return keys


def _recent_totals(state: _Run, now: float) -> _Layer | None:
    """What remained for the run's recent episodes that were longer than this one is now."""
    totals = np.fromiter(state.totals, dtype=np.float64, count=len(state.totals))
    beyond = totals > now
    weights = _AGES[RECENT_TOTALS - len(totals) :][beyond]
    mass = float(weights.sum())
    if mass < FLOOR:
        return None
    return _Layer("run", histogram.of_samples(totals[beyond] - now, weights), mass, SHRINKAGE)


@lru_cache(maxsize=1_024)
def _prior(generated: int) -> Floats:
    """Log-normal around PRIOR_TOKENS, or around half of what was generated where that is more: what has gone on for
    long tends to go on. Sums to 1.
    """
    middle = math.log2(max(PRIOR_TOKENS, generated / 2))
    shape: Floats = np.exp(-0.5 * ((_LOG_MIDDLES - middle) / PRIOR_OCTAVES) ** 2)
    total: float = shape.sum()
    return shape / total


def _mix(parent: Floats, layer: _Layer) -> tuple[Floats, float]:
    """The layer shrunk to its parent, and the share that the layer has in it."""
    share = layer.mass / (layer.mass + layer.shrinkage)
    own = layer.counts / layer.mass
    return share * own + (1.0 - share) * parent, share


def _smooth(distribution: Floats, at: int) -> float:
    """Probability near a bin: neighbours count half, so that a miss by a tenth is not a miss."""
    low, high = max(0, at - 1), min(BINS - 1, at + 1)
    return float(0.5 * distribution[at] + 0.25 * (distribution[low] + distribution[high])) + SMOOTHING
