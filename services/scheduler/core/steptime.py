"""How long a step takes on a layout: the batches that the staleness bound lets be in flight, followed to their tail.

With a bound of K versions K + 1 batches are in flight. Training takes as many steps in quick succession as it can and
then waits for the longest trajectories, so that the K + 1 batches come in nearly together, and a step takes

    T = max(T_train, T_full, (T_tail + T_train) / (K + 1))

T_full is the time in which engines that are always full generate a step. T_tail is that from the batches' arrival to
the end of the last trajectory, followed token by token: all trajectories stand at the same position p, where A(p) of
them are left with a mean context of x(p), pi(p) further tokens to compute for each that is generated, and z(p) seconds
in tool calls for each. An engine of rates a, b, d, e (`rates`) with n of them decoding takes

    s = a + beta n          beta = b + d x + e pi

seconds for a token of each. Queues keep engines of all kinds at the same pace, so that a kind decodes
n = (s - a) / beta on each engine, none if it is slower than that alone, and no more than its KV cache holds (FILL KV /
x, those in tool calls included). s solves

    sum over kinds of N n(s) = A s / (s + z)

What no cache has room for waits its turn: time goes on by the factor A / room. So the last ones have the fastest
engines for themselves, as when a queue moves them there; what moves is computed again. That, weight updates and the
prompts' prefill stop all engines.

With K = 0 rollout and training take turns, and T is their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.cmlfq import KV_GROWTH
from services.scheduler.core.costmodel import NEVER_S
from services.scheduler.core.demand import Demand
from services.scheduler.core.rates import ROUNDING, EngineRates

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

FILL = 0.9
"""Share of a KV cache that contexts take on average: they grow, and not in step."""
LEAST = 1e-9
"""Seconds that one more sequence costs at least."""
ROUNDS = 10
"""Of the iteration for s: from above, each round nearer; monotonous in all that it depends on."""


@dataclass(frozen=True, slots=True)
class LevelUse:
    """What one level does in a step."""

    running: float
    """Sequences decoding on each engine, on average over the time that the batches take."""
    concurrency_cap: int
    """Most that should run on each: what its KV cache holds at the contexts it has there."""
    tokens_per_s: float
    """Of each engine, over a step."""
    share: float
    """Of the step's tokens."""
    above: float
    """Position from which on no slower level has any work left."""
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Found:
    """Of each layout: seconds of a step (NEVER_S: it cannot keep up), and what they come from."""

    seconds: Floats
    full_s: Floats
    tail_s: Floats


@dataclass(frozen=True, slots=True)
class _Pace:
    """Along the positions. Arrays of shape (layouts, positions), `running` with a last axis of kinds."""

    running: Floats
    """Decoding on each engine."""
    seconds: Floats
    """For a token, without tools and waiting."""
    waiting: Floats
    """Factor by which time goes on while some wait for room."""
    able: NDArray[np.bool_]


class Problem:
    """Layouts of the same kinds of engines under one demand."""

    def __init__(self, rates: Sequence[EngineRates], demand: Demand) -> None:
        self.demand = demand
        self.rates = tuple(rates)
        self._way = way = demand.positions
        self._start = np.array([r.step_s for r in rates])
        beta = [r.sequence_s + r.context_s * way.context + r.prefill_s * way.prefill for r in rates]
        self._beta = np.maximum(np.column_stack(beta), LEAST)
        """(positions, kinds)"""
        holds = np.column_stack([way.longest <= r.kv_tokens + ROUNDING for r in rates])
        room = np.column_stack([FILL * r.kv_tokens / (way.context + KV_GROWTH * way.growth) for r in rates])
        most = np.array([float(r.max_running) for r in rates])
        self.cap = np.where(holds, np.minimum(np.maximum(room, 1.0), most), 0.0)
        """Trajectories that each engine holds at each position; 0 where one would not fit. (positions, kinds)"""
        alone = _alone_s(self._start, self._beta, way.tools[:, None], self.cap)
        self._full = np.where(self.cap > 0, self.cap / (alone + way.tools[:, None]), 0.0)
        """Tokens per second of an engine that holds as many as it can. (positions, kinds)"""
        self._prefill = np.array([1.0 / r.prefill_s if r.prefill_s > 0 else np.inf for r in rates])
        self._holds_longest = np.array([r.holds(demand.longest_context) for r in rates])

    def solve(self, counts: Ints, train_s: Floats) -> Found:
        """Step times. counts: (layouts, kinds); train_s: (layouts,)."""
        together = self.demand.max_versions + 1
        pace = self._pace(counts, self._way.alive * together)
        full_s = self._full_s(counts)
        tail_s = self._tail_s(counts, pace, train_s)
        training = train_s if not self.demand.max_versions else np.zeros(len(counts))
        seconds = np.maximum(np.maximum(train_s, full_s + training), (tail_s + train_s) / together)
        able = pace.able.all(axis=1) & (counts[:, self._holds_longest].sum(axis=1) > 0) & (train_s < NEVER_S)
        return Found(np.where(able, np.minimum(seconds, NEVER_S), NEVER_S), full_s, tail_s)

    def uses(self, counts: Sequence[int], step_s: float) -> list[LevelUse]:
        """What each level of one layout does when a step takes so long."""
        way, given = self._way, np.array([counts])
        pace = self._pace(given, way.alive * (self.demand.max_versions + 1))
        running, seconds = pace.running[0], pace.seconds[0]
        spent = (seconds + way.tools) * pace.waiting[0] * way.width
        own = np.maximum(self._start + self._beta * running, 1e-12)
        made = np.array(counts) * running / own
        part = made / np.maximum(made.sum(axis=1, keepdims=True), 1e-12) * (way.alive * way.width)[:, None]
        slowest_first = np.argsort(-self._start, kind="stable")
        found = {}
        busy = np.zeros(len(way.alive), dtype=bool)
        for kind in slowest_first.tolist():
            some = running[:, kind] > 1e-9
            tokens, work = float(part[:, kind].sum()), float((running[:, kind] * spent).sum())
            context = float((part[:, kind] * way.context).sum()) / tokens if tokens > 0 else float(way.context[-1])
            rate = self.rates[kind]
            above = float(way.edges[int(np.flatnonzero(busy)[-1]) + 1]) if busy.any() else 0.0
            count = counts[kind]
            found[kind] = LevelUse(
                running=work / max(float(spent.sum()), 1e-12) if count else 0.0,
                concurrency_cap=max(1, int(min(rate.max_running, FILL * rate.kv_tokens / context))),
                tokens_per_s=tokens / count / step_s if count else 0.0,
                share=tokens / max(float(part.sum()), 1e-12),
                above=above,
                seconds_per_token=float((part[:, kind] * own[:, kind]).sum()) / tokens if tokens > 0 else 0.0,
            )
            busy |= some & (count > 0)
        return [found[kind] for kind in range(len(self.rates))]

    # ---- times

    def _full_s(self, counts: Ints) -> Floats:
        """A step's tokens at the rate of full engines, its prompts, one weight update."""
        made = np.maximum(counts.astype(float) @ self._full.T, 1e-12)
        spent = (self._way.alive * self._way.width / made).sum(axis=1)
        return np.asarray(np.minimum(NEVER_S, spent + self._stall_s(counts)))

    def _tail_s(self, counts: Ints, pace: _Pace, train_s: Floats) -> Floats:
        """From the arrival of the batches to the end of the trajectory that takes longest."""
        way, tail = self._way, self.demand.longest_to_pass
        together = self.demand.max_versions + 1
        z = tail.tool_seconds / tail.tokens
        spent = (pace.seconds + way.tools) * pace.waiting * way.width
        passed = spent / (pace.seconds * pace.waiting + z)
        """Tokens that it makes meanwhile: its calls may be longer than the others'."""
        ends, made = np.cumsum(spent, axis=1), np.cumsum(passed, axis=1)
        before = made - passed
        share = np.clip((tail.tokens - before) / np.maximum(passed, 1e-12), 0.0, 1.0)
        alone = self._alone(counts, tail.context)
        rest = np.maximum(0.0, tail.tokens - made[:, -1]) * (alone + z)
        again = self._again_s(counts, ends, train_s) if self.demand.recompute else 0.0
        stalls = together * self._stall_s(counts) + again + self._moves_s(counts, pace)
        found = (spent * share).sum(axis=1) + rest + stalls
        return np.asarray(np.minimum(NEVER_S, found))

    def _alone(self, counts: Ints, context: float) -> Floats:
        """Seconds per token of a lone sequence on the fastest engine there is."""
        lone = np.array([r.decode_s(1.0, context) for r in self.rates])
        return np.asarray(np.min(np.where(counts > 0, lone, NEVER_S), axis=1))

    def _stall_s(self, counts: Ints) -> Floats:
        """Of one batch's prompts, and of a weight update."""
        pause = np.max(np.where(counts > 0, np.array([r.pause_s for r in self.rates]), 0.0), axis=1)
        return np.asarray(pause + self.demand.groups * self.demand.prompt_tokens / self._prefill_rate(counts))

    def _again_s(self, counts: Ints, ends: Floats, train_s: Floats) -> Floats:
        """Contexts that later weight updates have computed again, those running when the next training has ended."""
        at = np.minimum((ends < train_s[:, None]).sum(axis=1), len(self._way.alive) - 1)
        held = (self._way.alive * self._way.context)[at] * (self.demand.max_versions + 1)
        return np.asarray(self.demand.max_versions * held / self._prefill_rate(counts))

    def _moves_s(self, counts: Ints, pace: _Pace) -> Floats:
        """Contexts computed again where the share of a kind shrinks: those trajectories move to faster ones."""
        if len(self.rates) == 1:
            return np.zeros(len(counts))
        there = counts[:, None, :] * pace.running
        part = there / np.maximum(there.sum(axis=2, keepdims=True), 1e-12)
        leaving = np.maximum(0.0, part[:, :-1] - part[:, 1:]).sum(axis=2)
        held = (self._way.alive * self._way.context)[1:] * (self.demand.max_versions + 1)
        return np.asarray((leaving * held).sum(axis=1) / self._prefill_rate(counts))

    def _prefill_rate(self, counts: Ints) -> Floats:
        """Tokens per second of all engines together."""
        with np.errstate(invalid="ignore"):
            rate = np.where(counts > 0, counts * self._prefill, 0.0).sum(axis=1)
        return np.asarray(np.maximum(rate, 1e-12))

    # ---- pace

    def _pace(self, counts: Ints, alive: Floats) -> _Pace:
        """At each position, with so many left on all engines together."""
        room = counts.astype(float) @ self.cap.T
        able = room > 0
        inside = np.minimum(alive, np.maximum(room, 1e-12))
        waiting = np.maximum(1.0, alive / np.maximum(room, 1e-12))
        if len(self.rates) == 1:
            each = inside / np.maximum(counts, 1e-12)
            seconds = _alone_s(self._start[0], self._beta[:, 0], self._way.tools, each)
            running = (each * seconds / (seconds + self._way.tools))[:, :, None]
            return _Pace(running, np.maximum(seconds, self._start[0] + self._beta[:, 0]), waiting, able)
        running, seconds = self._filled(counts, inside, np.ones(room.shape))
        for _ in range(ROUNDS):
            running, seconds = self._filled(counts, inside, seconds / (seconds + self._way.tools))
        return _Pace(running, seconds, waiting, able)

    def _filled(self, counts: Ints, inside: Floats, decoding: Floats) -> tuple[Floats, Floats]:
        """Decoding sequences on each engine, all at one pace as far as caches allow, and their mean seconds a token."""
        wanted = inside * decoding
        most = self.cap[None] * decoding[:, :, None]
        there = (counts[:, None, :] > 0) & (self.cap > 0)[None]
        capped = np.zeros(there.shape, dtype=bool)
        slope = np.where(there, counts[:, None, :] / self._beta[None], 0.0)
        running = np.zeros(there.shape)
        for _ in range(len(self.rates)):
            left = wanted - (counts[:, None, :] * most * capped).sum(axis=2)
            pace = self._even(left, np.where(capped, 0.0, slope))
            free = np.maximum(0.0, (pace[:, :, None] - self._start) / self._beta[None])
            running = np.where(capped, most, np.where(there, np.minimum(free, most), 0.0))
            more = there & (capped | (free >= most))
            if np.array_equal(more, capped):
                break
            capped = more
        own = self._start + self._beta[None] * np.maximum(running, 1.0)
        made = (counts[:, None, :] * running / own).sum(axis=2)
        total = (counts[:, None, :] * running).sum(axis=2)
        fastest = np.min(np.where(there, self._start + self._beta[None], NEVER_S), axis=2)
        return running, np.maximum(fastest, np.where(made > 0, total / np.maximum(made, 1e-12), fastest))

    def _even(self, wanted: Floats, slope: Floats) -> Floats:
        """The pace at which kinds take so many between them: the inverse of a sum of hinges is a least of lines."""
        pace = np.full(wanted.shape, np.inf)
        number, shifted = np.zeros(wanted.shape), np.zeros(wanted.shape)
        for kind in np.argsort(self._start, kind="stable").tolist():
            number = number + slope[:, :, kind]
            shifted = shifted + slope[:, :, kind] * self._start[kind]
            with np.errstate(divide="ignore", invalid="ignore"):
                line = np.where(number > 0, (np.maximum(wanted, 0.0) + shifted) / number, np.inf)
            pace = np.minimum(pace, line)
        return pace


def _alone_s(start: float | Floats, beta: Floats, tools: Floats, held: Floats) -> Floats:
    """Seconds per token of an engine that holds so many: s = a + beta held s / (s + z)."""
    part = tools - start - beta * held
    return np.asarray((np.sqrt(part * part + 4.0 * start * tools) - part) / 2.0)
