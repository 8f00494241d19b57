"""What engines and trainers of each kind do a second: a table from a profile, corrected by what is observed.

A decoding step of n running sequences with c tokens of context in all takes a + b n + d c seconds; each of them gains a
token. The table's coefficients are a prior. An observation (n, c, tokens per second) says how long a step took, y times
as long as the table has it. The factors f of the three terms solve the ridge regression

    sum of w (y - f . x)^2 + PRIOR (f - p)^2         x: shares of the three terms in the table's step, which sum to 1

with weights w that decay with every observation, so that old ones fade and terms that were never told apart stay in
step with each other. p is 1 until other degrees of the same accelerator type were seen, and then moves to the factor
that they have in common: a table that is wrong by the same factor everywhere must not make what was never tried look
better than what was.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FORGET = 0.97
"""Weight of an observation against the next one of the same kind: about the last thirty count."""
PRIOR = 1.0
"""Strength of the prior, in observations."""
MAX_FACTOR = 8.0
"""Largest correction of a term, either way."""
ROUNDING = 1e-3
"""Tokens by which a sum of floats may exceed a limit."""
ERRORS = 32
"""Relative errors kept, of which the median is told."""


@dataclass(frozen=True, slots=True, order=True)
class EngineKind:
    """Engines of one accelerator type and tensor-parallel degree."""

    type: str
    tp: int


@dataclass(frozen=True, slots=True, order=True)
class TrainerKind:
    """Training replicas of so many accelerators of one type."""

    type: str
    accelerators: int


@dataclass(frozen=True, slots=True)
class EngineRates:
    """One engine. Seconds, tokens, bytes."""

    step_s: float
    """a: of each decoding step."""
    sequence_s: float
    """b: further, for each running sequence."""
    context_s: float
    """d: further, for each token of context."""
    kv_tokens: float
    """What its KV cache holds."""
    prefill_s: float = 0.0
    """For each token that is not cached."""
    max_running: int = 256
    start_s: float = 0.0
    """From granted to serving: wake, or load."""
    pause_s: float = 0.0
    """Of each weight update."""
    asleep_bytes: float = 0.0
    """Host memory that it takes while it sleeps."""

    def holds(self, tokens: float) -> bool:
        """True if one sequence of so many tokens fits into the KV cache (to a rounding error)."""
        return tokens <= self.kv_tokens + ROUNDING

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        """Seconds of a decoding step."""
        return self.step_s + self.sequence_s * sequences + self.context_s * context_tokens


@dataclass(frozen=True, slots=True)
class TrainerRates:
    """One replica. A step over its shard, n tokens whose squares sum to q, takes

    max(token_s n + square_s q, gather_s x micro-batches) + fixed_s + reduce_s (R - 1) / R      R: replicas in all
    """

    token_s: float
    square_s: float = 0.0
    gather_s: float = 0.0
    """Traffic inside the replica for one micro-batch."""
    fixed_s: float = 0.0
    reduce_s: float = 0.0
    """Between replicas."""
    micro_batch_tokens: float = math.inf
    """Budget of a micro-batch: what its memory holds. The longest sequence must fit."""
    start_s: float = 0.0
    asleep_bytes: float = 0.0
    """Host memory that it takes while it gave its accelerators away."""

    def holds(self, tokens: float) -> bool:
        """True if one sequence of so many tokens fits into a micro-batch (to a rounding error)."""
        return tokens <= self.micro_batch_tokens + ROUNDING

    def seconds(self, replicas: float, tokens: float, squares: float, imbalance: float = 1.0) -> float:
        """Of a training step over all tokens. `imbalance`: heaviest shard over the mean one."""
        share = imbalance / replicas
        batches = max(1.0, math.ceil(tokens * share / self.micro_batch_tokens))
        work = max((self.token_s * tokens + self.square_s * squares) * share, self.gather_s * batches)
        return work + self.fixed_s + self.reduce_s * (replicas - 1) / replicas


@dataclass(slots=True)
class Factors:
    """Decayed sums of one kind's observations."""

    moments: Floats = field(default_factory=lambda: np.zeros((3, 3)))
    products: Floats = field(default_factory=lambda: np.zeros(3))
    weight: float = 0.0
    ratio: float = 0.0
    """Decayed sum of log y: the factor all terms have in common."""

    def add(self, shares: Floats, ratio: float) -> None:
        """One observation."""
        self.moments = FORGET * self.moments + np.outer(shares, shares)
        self.products = FORGET * self.products + ratio * shares
        self.weight = FORGET * self.weight + 1.0
        self.ratio = FORGET * self.ratio + math.log(ratio)

    def solve(self, prior: float) -> Floats:
        """Factors of the three terms, `prior` without evidence."""
        left = self.moments + PRIOR * np.eye(3)
        found = np.linalg.solve(left, self.products + PRIOR * prior)
        return np.clip(found, 1.0 / MAX_FACTOR, MAX_FACTOR)


class EngineBook:
    """Rates of engines by kind: the table's, corrected. One writer."""

    def __init__(self, table: Mapping[EngineKind, EngineRates]) -> None:
        self._table = dict(table)
        self._factors: dict[EngineKind, Factors] = {}
        self.errors = Errors()
        """Of tokens per second, predicted before each observation."""

    def observe(self, kind: EngineKind, running: float, context_tokens: float, tokens_per_s: float) -> float | None:
        """An engine with so many running sequences on average, their contexts in all, and its rate while it decoded.

        What says nothing (idle, broken, a kind that the table lacks) is left out: None. Else the seconds of a decoding
        step, as far from the table's as corrections go: one absurd figure must not outweigh hours of reports.
        """
        known = self._table.get(kind)
        if known is None or not all(math.isfinite(v) and v > 0 for v in (running, context_tokens, tokens_per_s)):
            return None
        expected = known.decode_s(running, context_tokens)
        if expected <= 0:
            return None
        ratio = min(MAX_FACTOR, max(1.0 / MAX_FACTOR, running / tokens_per_s / expected))
        self.errors.add(running / self.rates(kind).decode_s(running, context_tokens), tokens_per_s)
        terms = np.array([known.step_s, known.sequence_s * running, known.context_s * context_tokens])
        self._factors.setdefault(kind, Factors()).add(terms / expected, ratio)
        return ratio * expected

    def rates(self, kind: EngineKind) -> EngineRates:
        """Corrected. Raises KeyError for a kind that the table lacks. Prefill has the common factor."""
        known = self._table[kind]
        seen = self._factors.get(kind)
        prior = self._prior(kind)
        one, two, three = (float(f) for f in (seen or Factors()).solve(prior))
        step_s, sequence_s, context_s = known.step_s * one, known.sequence_s * two, known.context_s * three
        return replace(known, step_s=step_s, sequence_s=sequence_s, context_s=context_s)

    def all(self) -> dict[EngineKind, EngineRates]:
        """Of every kind in the table."""
        return {kind: self.rates(kind) for kind in self._table}

    def evidence(self, kind: EngineKind) -> float:
        """Observations of a kind that still count."""
        seen = self._factors.get(kind)
        return seen.weight if seen is not None else 0.0

    def _prior(self, kind: EngineKind) -> float:
        """What the other degrees of its type have in common, each at most PRIOR observations strong."""
        others = [f for k, f in sorted(self._factors.items()) if k.type == kind.type and k != kind and f.weight > 0]
        weights = [min(f.weight, PRIOR) for f in others]
        total = sum(w * f.ratio / f.weight for w, f in zip(weights, others, strict=True))
        return math.exp(total / (sum(weights) + PRIOR))


class TrainerBook:
    """Rates of trainers by kind, corrected by one factor a kind. One writer."""

    def __init__(self, table: Mapping[TrainerKind, TrainerRates]) -> None:
        self._table = dict(table)
        self._logs: dict[TrainerKind, tuple[float, float]] = {}
        """(weight, decayed sum of the log of observed over the table's seconds)."""
        self.errors = Errors()
        """Of a training step's seconds, predicted before each observation."""

    def observe(self, kind: TrainerKind, replicas: int, tokens: float, squares: float, seconds: float) -> None:
        """A training step of so many replicas of a kind over sequences of `tokens` in all, their squares `squares`."""
        known = self._table.get(kind)
        if known is None or replicas < 1 or not all(math.isfinite(v) and v > 0 for v in (tokens, squares, seconds)):
            return
        self.errors.add(self.rates(kind).seconds(replicas, tokens, squares), seconds)
        ratio = seconds / max(1e-9, known.seconds(replicas, tokens, squares))
        weight, total = self._logs.get(kind, (0.0, 0.0))
        log = math.log(min(MAX_FACTOR, max(1.0 / MAX_FACTOR, ratio)))
        self._logs[kind] = (FORGET * weight + 1.0, FORGET * total + log)

    def rates(self, kind: TrainerKind) -> TrainerRates:
        """Corrected. Raises KeyError for a kind that the table lacks."""
        known, factor = self._table[kind], self._factor(kind)
        return replace(
            known,
            token_s=known.token_s * factor,
            square_s=known.square_s * factor,
            gather_s=known.gather_s * factor,
            fixed_s=known.fixed_s * factor,
            reduce_s=known.reduce_s * factor,
        )

    def all(self) -> dict[TrainerKind, TrainerRates]:
        """Of every kind in the table."""
        return {kind: self.rates(kind) for kind in self._table}

    def _factor(self, kind: TrainerKind) -> float:
        weight, total = self._logs.get(kind, (0.0, 0.0))
        others = [v for k, v in sorted(self._logs.items()) if k.type == kind.type and k != kind]
        known = sum(min(w, PRIOR) for w, _ in others)
        prior = sum(min(w, PRIOR) * t / w for w, t in others) / (known + PRIOR)
        return math.exp((total + PRIOR * prior) / (weight + PRIOR))


@dataclass(slots=True)
class Errors:
    """Predicted against observed: the last ERRORS relative errors."""

    last: list[float] = field(default_factory=list)

    def add(self, predicted: float, observed: float) -> None:
        """One pair; what is not finite or not positive is left out, as is an error beyond all numbers."""
        if not (math.isfinite(predicted) and math.isfinite(observed) and observed > 0):
            return
        error = abs(predicted - observed) / observed
        if not math.isfinite(error):
            return
        self.last = [*self.last[-(ERRORS - 1) :], error]

    @property
    def median(self) -> float | None:
        """None before the first."""
        return statistics.median(self.last) if self.last else None
