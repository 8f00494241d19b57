"""How long a step takes on a layout: the smallest time in which every level, the trainers and the tail keep up.

A level of N engines that has to generate W tokens in F seconds decodes g = W / (N F) tokens per second and engine. With
a step time of a + b n + d n x at n running sequences of mean context x, e seconds for each prefilled token and p of
them for each generated one, one weight update of `pause_s` in F, which computes the running contexts again, that takes

    n = g (a + beta n) + n (g e p + pause_s / F) + n (n x e / F)        beta = b + d x

running sequences, the smaller root of a quadratic. T seconds a step are enough if

    T >= T_train
    n <= largest batch, n + those in tool calls <= FILL KV / x on every level                    capacity
    the tail's trajectory, at n / g seconds a token, with its prefill and its tool calls, takes at most
        (K + 1) T - T_train                                                                      staleness

Those in tool calls are g x tool seconds per token (Little's law); they keep their KV caches, or each of their turns
would begin with all of its context computed again. The window of the tail is what the staleness bound leaves: a
trajectory that starts on version v is at most consumed by the step whose base is v + K, which begins T_train before
version v + K + 1 is out. (That is T >= (T_tail + T_train) / (K + 1); without T_train it would promise steps that the
bound does not allow.) Where a level's KV cache is short, its trajectories come in one after the other: the last one of
a batch waits for held / cap of F, less its own stay. F is T, or T - T_train where K = 0: rollout and training then take
turns, and T is their sum. All of it holds for any larger T, so that bisection finds the smallest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core.costmodel import NEVER_S
from services.scheduler.core.demand import Demand, Divisions
from services.scheduler.core.rates import ROUNDING, EngineRates

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

FILL = 0.9
"""Share of a KV cache that running contexts take on average: they grow, and not in step."""
PRECISION = 1e-4
"""Relative, of times found."""
FAR = 1e-3
"""A layout slower than the best known by more than this is not followed further."""
STRIDE = 1.3
"""Factor between the times tried until one is enough."""


@dataclass(frozen=True, slots=True)
class Found:
    """Of each layout: its step seconds (NEVER_S: none; inf: slower than the best known), and the best division."""

    seconds: Floats
    way: Ints


@dataclass(frozen=True, slots=True)
class LevelUse:
    """What one level does in a step."""

    running: float
    """Sequences decoding on each engine, on average."""
    concurrency_cap: int
    """Most that should run on each: what its KV cache holds at the contexts it has there."""
    tokens_per_s: float
    """Of each engine."""
    share: float
    """Of the step's tokens."""
    above: float
    """Position from which on trajectories are on this level."""
    seconds_per_token: float


class Problem:
    """Layouts of the same kinds of engines, slowest first, under one demand."""

    def __init__(self, rates: Sequence[EngineRates], demand: Demand) -> None:
        self.demand = demand
        self.rates = tuple(rates)
        divisions = demand.positions.divisions(len(rates))
        fits = np.ones(len(divisions.tokens), dtype=bool)
        for level, rate in enumerate(rates):
            fits &= divisions.longest[:, level] <= rate.kv_tokens + ROUNDING
        self.division = _only(divisions, fits)
        context = np.maximum(self.division.context, 1.0)
        self.cap = np.column_stack([np.maximum(1.0, FILL * r.kv_tokens / context[:, i]) for i, r in enumerate(rates)])
        """Trajectories that each engine's KV cache holds."""
        self.tools_s = demand.longest_to_pass.tool_seconds

    def solve(self, counts: Ints, train_s: Floats, known: float = np.inf) -> Found:
        """Smallest step times. counts: (layouts, kinds); train_s: (layouts,). `known`: a time that another layout of
        the same demand reaches; what is slower is given up early, with infinite seconds.
        """
        layouts, ways = len(counts), len(self.division.tokens)
        seconds, way = np.full(layouts, NEVER_S), np.zeros(layouts, dtype=np.intp)
        if not ways or not layouts:
            return Found(seconds, way)
        layout_of, way_of = (a.ravel() for a in np.indices((layouts, ways)))
        low, limit = self._least_s(counts, train_s), np.full(layouts, np.inf)
        # what cannot even do what the best known does is out at once; for the others the bound itself comes next
        tried = np.maximum(low, known * (1 + FAR)) if known < NEVER_S else low.copy()
        open_, untried = np.ones(layouts, dtype=bool), tried > low
        while open_.any():
            fits = self._fits(tried[layout_of], layout_of, way_of, counts, train_s)
            able = np.zeros(layouts, dtype=bool)
            able[layout_of[fits]] = True
            way[layout_of[fits]] = way_of[fits]
            limit, low = np.where(able, tried, limit), np.where(open_ & ~able, tried, low)
            known = min(known, float(limit.min()))
            slow = open_ & (low >= known * (1 + FAR))
            seconds[slow] = np.inf
            found = open_ & ~slow & np.isfinite(limit) & ~(limit - low > PRECISION * limit)
            seconds[found] = limit[found]
            open_ &= ~(slow | found | (low >= NEVER_S))
            # a division that is too slow for a time is too slow for all shorter ones
            keep = open_[layout_of] & (fits | ~able[layout_of])
            layout_of, way_of = layout_of[keep], way_of[keep]
            tried = np.where(np.isfinite(limit), (low + limit) / 2, low * STRIDE)
            tried, untried = np.where(untried & able, low, tried), np.zeros(layouts, dtype=bool)
        return Found(seconds, way)

    def uses(self, counts: Sequence[int], train_s: float, step_s: float, way: int) -> list[LevelUse]:
        """What each level does when a step takes so long."""
        flow = self._flow(np.array([step_s]), np.array([train_s]))
        found = []
        for level, count in enumerate(counts):
            tokens = float(self.division.tokens[way, level])
            one = np.array([way], dtype=np.intp)
            running, _, per_token, _ = self._level(level, np.array([float(count)]), flow, one)
            rate = tokens / count / float(flow[0]) if count else 0.0
            found.append(
                LevelUse(
                    running=float(running[0]) if tokens > 0 else 0.0,
                    concurrency_cap=int(self.cap[way, level]),
                    tokens_per_s=rate,
                    share=tokens / self.demand.tokens,
                    above=float(self.division.above[way, level]),
                    seconds_per_token=float(per_token[0]) if tokens > 0 else 0.0,
                )
            )
        return found

    def rollout_s(self, counts: Ints, known: float = NEVER_S) -> float:
        """Seconds that one layout's engines need if neither training nor the tail bounds the step."""
        low, high = float(self._least_s(counts, np.zeros(1))[0]), known
        pairs = np.zeros(len(self.division.tokens), dtype=np.intp), np.arange(len(self.division.tokens))
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            fits = self._fits(np.full(len(pairs[0]), middle), *pairs, counts, np.zeros(1), tail=False)
            low, high = (low, middle) if fits.any() else (middle, high)
        return high

    def tail_s(self, counts: Sequence[int], train_s: float, step_s: float, way: int) -> float:
        """Seconds from the admission to the end of the tail's trajectory, when a step takes so long."""
        uses = self.uses(counts, train_s, step_s, way)
        decoding = sum(u.seconds_per_token * float(self.division.tail[way, i]) for i, u in enumerate(uses))
        prefill = sum(r.prefill_s * float(self.division.tail_prefill[way, i]) for i, r in enumerate(self.rates))
        return decoding + prefill + self.tools_s

    def _flow(self, seconds: Floats, train_s: Floats) -> Floats:
        """Of a step, those in which engines generate."""
        return seconds if self.demand.max_versions else np.maximum(seconds - train_s, 1e-9)

    def _least_s(self, counts: Ints, train_s: Floats) -> Floats:
        """A bound from below: all engines as full as the best division would have them, at its shortest contexts."""
        rate = np.zeros(len(counts))
        for level, known in enumerate(self.rates):
            cap, context = min(known.max_running, self.cap[:, level].max()), self.division.context[:, level].min()
            rate += counts[:, level] * cap / known.decode_s(cap, cap * context)
        rollout = np.minimum(NEVER_S, self.demand.tokens / np.maximum(rate, 1e-9))
        return np.maximum(1e-6, np.maximum(train_s, rollout) if self.demand.max_versions else train_s + rollout)

    def _fits(
        self, seconds: Floats, layout_of: Ints, way_of: Ints, counts: Ints, train_s: Floats, *, tail: bool = True
    ) -> Bools:
        """For pairs (layout, division): whether so many seconds a step are enough."""
        training = train_s[layout_of]
        flow = self._flow(seconds, training)
        enough = np.ones(len(seconds), dtype=bool)
        passing = np.full(len(seconds), self.tools_s)
        waiting = np.zeros(len(seconds))
        for level, rate in enumerate(self.rates):
            running, held, per_token, able = self._level(level, counts[layout_of, level], flow, way_of)
            enough &= able & (running <= rate.max_running) & (held <= self.cap[way_of, level])
            count = np.maximum(counts[layout_of, level], 1e-9)
            stay = held * count * flow / np.maximum(self.division.entries[way_of, level], 1.0)
            waiting = np.maximum(waiting, held / self.cap[way_of, level] * flow - stay)
            passing += per_token * self.division.tail[way_of, level]
            passing += rate.prefill_s * self.division.tail_prefill[way_of, level]
        if not tail:
            return enough
        window = (self.demand.max_versions + 1) * seconds - training
        return enough & (passing + waiting <= window) & (seconds >= training)

    def _level(
        self, level: int, count: Floats | Ints, flow: Floats, way_of: Ints
    ) -> tuple[Floats, Floats, Floats, Bools]:
        """Of an engine: running sequences, those and the ones in tool calls, seconds per token of each, and whether the
        level can keep up at all.
        """
        rate, division = self.rates[level], self.division
        context = division.context[way_of, level]
        tokens = division.tokens[way_of, level]
        wanted = tokens / (np.maximum(count, 1e-9) * flow)
        beta = rate.sequence_s + rate.context_s * context + rate.prefill_s * division.prefill[way_of, level]
        room = 1.0 - wanted * beta - rate.pause_s / flow
        again = rate.prefill_s * context / flow if self.demand.recompute else 0.0
        inside = room * room - 4.0 * again * wanted * rate.step_s
        idle = tokens <= 0
        able = ((room > 0) & (inside >= 0) & (count > 0)) | idle
        root = room + np.sqrt(np.maximum(inside, 0.0))
        running = np.where(able & ~idle, 2.0 * wanted * rate.step_s / np.where(root > 0, root, 1.0), 0.0)
        alone = rate.step_s + rate.sequence_s + rate.context_s * context
        per_token = np.where(idle, 0.0, np.maximum(running / np.maximum(wanted, 1e-12), alone))
        return running, running + wanted * division.tools[way_of, level], per_token, able


def _only(divisions: Divisions, kept: Bools) -> Divisions:
    return Divisions(*(getattr(divisions, name)[kept] for name in Divisions.__slots__))
