"""How many tokens a trajectory will still generate: quantiles, with the evidence behind them.

The estimate is a chain of distributions of the remaining tokens, each shrunk to the one before it:

    prior      something broad, scaled by what was generated already
    run        totals of the run's recent episodes that got at least as far as this one, less what it has
    progress   what remained for earlier episodes at the same turn and about as many tokens
    failures   the same, where also as many tool returns had failed
    tool_tree  the same, where also the last 1, 2, 3 tool returns (tool, payload class, outcome), in order, were equal
    siblings   totals of finished members of the same group that got at least as far, less what this one has

A layer with n (decayed) samples mixes as n : SHRINKAGE with its parent; below FLOOR samples it says nothing, so one
sample is never trusted. A context of k returns is a subset of the context of its last k - 1, all at the same turn, so
a child's population lies within its parent's and the tree is causal: it holds only what was known at that turn. Tools,
payload classes and outcomes make many contexts, few of which reach the floor; how many calls failed so far makes few,
and is what says most where a failure has to be mended.

Whether a layer helps is measured, not assumed: at each end, one of the trajectory's own turns is predicted with and
without the layer (before the end is learnt) and the gain in log likelihood is averaged. A layer whose average is not
above 0 is passed over. So outcomes without signal cannot make the estimate worse for long.

Estimates are asked for far more often than evidence arrives, so they are kept for REFRESH_ENDS ends of the run. One
that is not kept is made from cumulative counts of its layers: a quantile is found by halving, over seven bins of each.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from services.scheduler.core import histogram
from services.scheduler.core.histogram import BINS, bin_of

Source = Literal["tool_tree", "failures", "siblings", "progress", "run", "prior"]
ToolReturn = tuple[str, str, str]
"""Tool, payload class, outcome."""

MAX_RUNS = 64
MAX_GROUPS = 8_192
MAX_LIVE = 65_536
"""Trajectories followed at once; beyond each of these bounds the least recently used one is forgotten."""
MAX_NODES = 4_096
"""Cells of progress and contexts of tool returns, for each run."""
MAX_TURNS_KEPT = 64
"""Turns of one trajectory from which its end is learnt."""
MAX_SIBLINGS = 64
SYMBOL_BITS = 12
"""Different tool returns that are told apart: 2 to this power; those beyond count as one."""
RECENT_TOTALS = 512
"""Ends that make up a run's recent distribution."""
CONTEXT = 3
"""Most tool returns in a context."""
SYMBOL_MASK = (1 << SYMBOL_BITS) - 1
RETURNS_BITS = CONTEXT * SYMBOL_BITS
RETURNS_MASK = (1 << RETURNS_BITS) - 1
ALIKE = 0.99
"""Share of a cell that is as good as all of it."""
MOST_FAILURES = 7
"""More count as so many."""
GOOD = ("", "OK")
"""Outcomes, in capitals, that are no failure."""
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
SETTLED = 1.0 / 16.0
"""Share by which evidence must have grown before its cumulative counts are made anew."""
REBASE = 64.0
"""Half-lives after which weights begin at 1 again, so that they stay finite."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Remaining generated tokens: median and 0.9 quantile; `evidence` in samples of the layer that weighs most."""

    p50: float
    p90: float
    evidence: float
    source: Source


class _Point(NamedTuple):
    """A turn's end, as it was known then."""

    generated: int
    turns: int
    returns: int
    """The last CONTEXT ones by their numbers, the newest in the lowest SYMBOL_BITS, 0 is none; above RETURNS_BITS how
    many of all failed.
    """
    siblings: int
    """Siblings finished by then."""


_Course = array
"""Points of one trajectory, number after number: there are many, and they lie outside any cache when they are read."""
FIELDS = len(_Point._fields)


@dataclass(slots=True)
class _Node:
    """Counts by bin of one cell. Instead of decaying what is there, newer samples weigh more: 2 to the power of the
    half-lives since `base`, which is its run's.
    """

    base: int
    counts: "array[float]" = field(default_factory=lambda: array("d", bytes(8 * BINS)))
    total: float = 0.0
    sums: "array[float]" = field(default_factory=lambda: array("d"))

    def rebase(self, tick: int) -> None:
        """Counts from a later moment on."""
        factor = math.exp2((self.base - tick) / HALF_LIFE_ENDS)
        self.counts = array("d", [c * factor for c in self.counts])
        self.total, self.sums, self.base = self.total * factor, array("d"), tick

    def mass(self, tick: int) -> float:
        """Samples, each decayed by its age."""
        return self.total * math.exp2((self.base - tick) / HALF_LIFE_ENDS)

    def cumulative(self) -> "array[float]":
        if not self.sums or self.total > self.sums[-1] * (1.0 + SETTLED):
            self.sums = array("d", accumulate(self.counts))
        return self.sums


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
    nodes: OrderedDict[int, _Node] = field(default_factory=OrderedDict)
    worth: dict[Source, _Worth] = field(default_factory=dict)
    ends: int = 0
    base: int = 0
    """End from which samples are weighed."""
    kept: dict[tuple[object, ...], Estimate] = field(default_factory=dict)
    recent: "_Recent | None" = None
    """Layer `run`, as of some ends ago."""
    kept_at: int = 0

    def refresh(self) -> None:
        """Forgets kept answers when enough was learnt since."""
        if self.ends - self.kept_at >= REFRESH_ENDS or len(self.kept) > MAX_KEPT:
            self.kept.clear()
            self.kept_at = self.ends

    def recent_totals(self) -> "_Recent":
        """The recent totals in order, not older than REFRESH_ENDS ends, and fewer while there are few."""
        if self.recent is None or self.ends - self.recent.ends > SETTLED * len(self.totals):
            self.recent = _Recent(self.totals, self.ends)
        return self.recent


class _Counts:
    """A layer of counts by bin; `sums` (cumulated) is made when asked for, unless it is given."""

    __slots__ = ("_counts", "_sums", "_total", "mass", "shrinkage", "source")

    def __init__(
        self,
        source: Source,
        counts: Sequence[float],
        total: float,
        mass: float,
        shrinkage: float,
        sums: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        self.source, self.mass, self.shrinkage = source, mass, shrinkage
        self._counts, self._total = counts, total
        self._sums = sums

    def sums(self) -> Sequence[float]:
        """Counts in bins up to each."""
        return self._sums() if self._sums is not None else list(accumulate(self._counts))

    def near(self, at: int) -> float:
        """Probability near a bin: neighbours count half, so that a miss by a tenth is not a miss; beyond either end
        lies the same again.
        """
        counts = self._counts
        own = counts[at]
        lower, upper = counts[at - 1] if at else own, counts[at + 1] if at < BINS - 1 else own
        return (0.5 * own + 0.25 * (lower + upper)) / self._total


class _Recent:
    """Totals of a run's recent episodes in order, with the sums of their weights (the newest weighs 1)."""

    __slots__ = ("ends", "sums", "totals")

    def __init__(self, totals: Sequence[float], ends: int) -> None:
        rows = np.array(totals, dtype=np.float64)
        order = np.argsort(rows, kind="stable")
        self.totals: list[float] = rows[order].tolist()
        self.sums: list[float] = [0.0, *np.cumsum(_AGES[RECENT_TOTALS - len(rows) :][order]).tolist()]
        self.ends = ends

    def beyond(self, now: float) -> "_Beyond | None":
        """What remained for those that were longer than `now`; None if too few were."""
        first = bisect_right(self.totals, now)
        mass = self.sums[-1] - self.sums[first]
        return None if mass < FLOOR else _Beyond(self, now, self.sums[first], mass)


class _Beyond:
    """Layer `run` for one that has generated `now` tokens."""

    __slots__ = ("_before", "_now", "_recent", "mass", "shrinkage", "source")

    def __init__(self, recent: _Recent, now: float, before: float, mass: float) -> None:
        self.source: Source = "run"
        self.shrinkage = SHRINKAGE
        self.mass = mass
        self._recent, self._now, self._before = recent, now, before

    def below(self, at: int) -> float:
        """Share of what lies in bins up to `at`."""
        if at == BINS - 1:
            return 1.0
        sums = self._recent.sums
        return (sums[bisect_left(self._recent.totals, self._now + _EDGES[at + 1])] - self._before) / self.mass

    def near(self, at: int) -> float:
        """Probability near a bin, as of _Counts."""
        own, before = self.below(at), self.below(at - 1) if at else 0.0
        lower = self.below(at - 2) if at > 1 else 0.0 if at else -own
        upper = self.below(at + 1) if at < BINS - 1 else own + (own - before)
        return 0.25 * (upper + own - before - lower)


_Layer = _Counts | _Beyond

_AGES = 0.5 ** (np.arange(RECENT_TOTALS)[::-1] / HALF_LIFE_ENDS)
"""Weights of a run's recent totals, oldest first."""
_LOG_MIDDLES = np.log2(np.maximum(histogram.MIDDLES, 0.5))
_EDGES: list[float] = histogram.EDGES.tolist()


class RemainingWork:
    """The estimator's live state. One writer; calls come in the order in which things happened."""

    def __init__(self) -> None:
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._siblings: OrderedDict[str, list[float]] = OrderedDict()
        self._live: OrderedDict[str, _Course[int]] = OrderedDict()
        self._symbols: dict[ToolReturn, int] = {}

    def observe_turn(
        self,
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
        course = self._live.get(trajectory) or self._of(group, trajectory)
        if generated_total < course[-4] or turn + 1 < course[-3]:
            course = self._live[trajectory] = self._start(group)
        self._live.move_to_end(trajectory)
        returns = course[-2]
        if tool:
            failures = min(MOST_FAILURES, (returns >> RETURNS_BITS) + (outcome.upper() not in GOOD))
            last = (returns << SYMBOL_BITS | self._symbol((tool, payload_class, outcome))) & RETURNS_MASK
            returns = failures << RETURNS_BITS | last
        if turn + 1 == course[-3]:
            del course[-FIELDS:]  # a second tool call of the same turn
        course.extend((generated_total, turn + 1, returns, len(self._siblings.get(group, ()))))
        if len(course) > FIELDS * MAX_TURNS_KEPT:
            # every other one goes, first and newest stay: a very long episode still teaches about all of its course
            points = _points(course)
            kept = [*points[:-1:2], points[-1]]
            self._live[trajectory] = array("q", [number for point in kept for number in point])

    def _symbol(self, answer: ToolReturn) -> int:
        """A number for a kind of tool return, from 1."""
        symbol = self._symbols.get(answer)
        if symbol is None:
            if len(self._symbols) >= (1 << SYMBOL_BITS) - 2:
                return (1 << SYMBOL_BITS) - 1
            symbol = self._symbols[answer] = len(self._symbols) + 1
        return symbol

    def observe_end(self, run: str, group: str, trajectory: str, generated_total: int) -> None:
        """The episode ended by itself, with so many generated tokens in all. Learns from it and forgets it."""
        numbers = self._of(group, trajectory).tolist()
        state = self._run(run)
        state.refresh()
        at = state.ends % (len(numbers) // FIELDS) * FIELDS
        tested = _Point(*numbers[at : at + FIELDS])
        self._measure(state, group, tested, generated_total - tested.generated)
        state.ends += 1
        if state.ends - state.base > REBASE * HALF_LIFE_ENDS:
            state.base = state.ends
        nodes, base = state.nodes, state.base
        weight = math.exp2((state.ends - base) / HALF_LIFE_ENDS)
        for generated, turns, returns in zip(numbers[::FIELDS], numbers[1::FIELDS], numbers[2::FIELDS], strict=True):
            at = bin_of(generated_total - generated)
            for key in _keys(turns, generated, returns):
                node = nodes.get(key)
                if node is None:
                    node = nodes[key] = _Node(base)
                    if len(nodes) > MAX_NODES:
                        nodes.popitem(last=False)
                else:
                    nodes.move_to_end(key)
                    if node.base != base:
                        node.rebase(base)
                node.counts[at] += weight
                node.total += weight
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
        course = self._live.get(trajectory)
        siblings = len(self._siblings.get(group, ()))
        point = _Point(generated_so_far, turns, 0, siblings)
        passed = 0.0
        if course is not None and course[-3] == turns and course[-4] <= generated_so_far:
            # within a turn: the tree speaks of the turn's start, and we know that it went on since
            point = _Point(course[-4], turns, course[-2], siblings)
            passed = generated_so_far - point.generated
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
        mixed: list[_Layer] = [_prior(_rounded(int(point.generated + passed)))]
        shares = [1.0]
        for layer in self._layers(state, group, point, passed):
            worth = state.worth.get(layer.source)
            if worth is not None and not worth.used:
                continue
            share = layer.mass / (layer.mass + layer.shrinkage)
            mixed.append(layer)
            shares.append(share)
            weight *= 1.0 - share
            if share >= weight:
                chosen, weight, evidence = layer.source, share, layer.mass
        mixture = _Mixture(mixed, shares)
        low, p50 = mixture.quantile(0.5, 0)
        _, p90 = mixture.quantile(0.9, low)
        return Estimate(p50, p90, evidence, chosen)

    def _layers(self, state: _Run, group: str, point: _Point, passed: float) -> list[_Layer]:
        now = point.generated + passed
        recent = state.recent_totals().beyond(now)
        layers: list[_Layer] = [recent] if recent is not None else []
        progress = 0.0
        for depth, key in enumerate(_keys(point.turns, point.generated, point.returns)):
            node = state.nodes.get(key)
            if node is None:
                if depth == FAILURES:
                    continue
                break  # deeper contexts are within this one
            mass = node.mass(state.ends)
            if depth == FAILURES and mass > ALIKE * progress:
                continue  # nobody failed otherwise: the same evidence again
            progress = mass if not depth else progress
            if mass < FLOOR:
                continue
            source: Source = "tool_tree" if depth > FAILURES else "failures" if depth else "progress"
            if passed < 1:
                layers.append(_Counts(source, node.counts, node.total, mass, SHRINKAGE, node.cumulative))
                continue
            left = histogram.survivors(np.array(node.counts), passed).tolist()
            total = sum(left)
            mass *= total / node.total
            if mass >= FLOOR:
                layers.append(_Counts(source, left, total, mass, SHRINKAGE))
        if point.siblings >= SIBLING_FLOOR:
            longer = [total - now for total in self._siblings.get(group, ())[: point.siblings] if total > now]
            count = float(len(longer))
            if count >= SIBLING_FLOOR:
                counts = [0.0] * BINS
                for remaining in longer:
                    counts[bin_of(remaining)] += 1.0
                layers.append(_Counts("siblings", counts, count, count, SIBLING_SHRINKAGE))
        return layers

    def _measure(self, state: _Run, group: str, point: _Point, remaining: float) -> None:
        """Scores each layer against its parent on a point of an episode that is not learnt yet."""
        actual = bin_of(max(0.0, remaining))
        mixed = _prior(_rounded(point.generated)).near(actual)
        for layer in self._layers(state, group, point, 0.0):
            share = layer.mass / (layer.mass + layer.shrinkage)
            finer = share * layer.near(actual) + (1.0 - share) * mixed
            gain = math.log((finer + SMOOTHING) / (mixed + SMOOTHING))
            worth = state.worth.get(layer.source)
            if worth is None:
                worth = state.worth[layer.source] = _Worth()
            worth.add(gain)
            if worth.used:
                mixed = finer

    def _of(self, group: str, trajectory: str) -> "_Course[int]":
        return _recent(self._live, trajectory, MAX_LIVE, lambda: self._start(group))

    def _start(self, group: str) -> "_Course[int]":
        return array("q", (0, 0, 0, len(self._siblings.get(group, ()))))

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


def _points(course: "_Course[int]") -> list[_Point]:
    numbers = course.tolist()
    return [_Point(*numbers[i : i + FIELDS]) for i in range(0, len(numbers), FIELDS)]


FAILURES = 1
"""Place of the cell of failures among the keys."""


def _keys(turns: int, generated: int, returns: int) -> list[int]:
    """Cells: the turn and the octave of tokens; that and the number of failures; contexts of 1, 2, 3 returns at this
    turn.
    """
    at = turns if turns <= 16 else 16 + turns.bit_length()
    progress = at << 6 | min(63, generated.bit_length())
    keys = [progress << 3, (progress << 3 | returns >> RETURNS_BITS) << 3 | 4]
    returns &= RETURNS_MASK
    depth = 1
    while returns:
        at = at << SYMBOL_BITS | returns & SYMBOL_MASK
        keys.append(at << 3 | depth)
        returns >>= SYMBOL_BITS
        depth += 1
    return keys


def _rounded(generated: int) -> int:
    """To an eighth of an octave: nothing beside the prior's two octaves, and few enough to keep."""
    drop = max(0, generated.bit_length() - 4)
    return generated >> drop << drop


@lru_cache(maxsize=1_024)
def _prior(generated: int) -> _Counts:
    """Log-normal around PRIOR_TOKENS, or around half of what was generated where that is more: what has gone on for
    long tends to go on.
    """
    middle = math.log2(max(PRIOR_TOKENS, generated / 2))
    shape = np.exp(-0.5 * ((_LOG_MIDDLES - middle) / PRIOR_OCTAVES) ** 2)
    sums: list[float] = np.cumsum(shape).tolist()
    return _Counts("prior", shape.tolist(), sums[-1], 0.0, 0.0, lambda: sums)


class _Mixture:
    """Layers from coarse to fine, each with its share of what the finer ones leave."""

    __slots__ = ("_counts", "_run", "_run_weight")

    def __init__(self, layers: Sequence[_Layer], shares: Sequence[float]) -> None:
        self._counts: list[tuple[float, Sequence[float]]] = []
        """Weight of a count, and the counts."""
        self._run: _Beyond | None = None
        self._run_weight = 0.0
        left = 1.0
        for at in range(len(layers) - 1, -1, -1):
            layer, share = layers[at], shares[at]
            if isinstance(layer, _Beyond):
                self._run, self._run_weight = layer, left * share
            else:
                sums = layer.sums()
                self._counts.append((left * share / sums[-1], sums))
            left *= 1.0 - share

    def below(self, at: int) -> float:
        """Share of what lies in bins up to `at`."""
        share = self._run_weight * self._run.below(at) if self._run is not None else 0.0
        for weight, sums in self._counts:
            share += weight * sums[at]
        return share

    def quantile(self, probability: float, low: int) -> tuple[int, float]:
        """The bin of a quantile, not below `low`, and the quantile in tokens, linear within the bin."""
        high, above, before = BINS - 1, 1.0, -1.0
        while low < high:
            middle = (low + high) // 2
            share = self.below(middle)
            if share < probability:
                low, before = middle + 1, share
            else:
                high, above = middle, share
        if before < 0.0:
            before = self.below(low - 1) if low else 0.0
        inside = (probability - before) / max(above - before, 1e-12)
        return low, _EDGES[low] + (_EDGES[low + 1] - _EDGES[low]) * min(max(inside, 0.0), 1.0)
