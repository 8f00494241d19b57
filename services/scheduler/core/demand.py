"""What a training step asks of the fleet: how many tokens, how deep into their sequences, and what a tail has to pass.

Trajectories are summed up in classes of like length. A class of generated length g and final context f has a context of
prompt + (f - prompt) p / g once p tokens are generated. `Positions` has what of a batch is left after p tokens.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core import histogram

Floats = NDArray[np.float64]

CELLS = 40
"""Stretches of positions in which a batch is followed."""
SPREAD = (2**-0.125 / 1.00376, 2**0.125 / 1.00376)
"""Bounds of the lengths that a class stands for, over its own, which stays their mean."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The trajectory that a step waits for: generated tokens, final context, seconds in tool calls."""

    tokens: float
    context: float
    tool_seconds: float


@dataclass(frozen=True)
class Demand:
    """One step's work. Classes by ascending generated length; tokens, seconds."""

    lengths: tuple[float, ...]
    """Generated tokens of each class."""
    shares: tuple[float, ...]
    """Of the trajectories; they sum to 1."""
    contexts: tuple[float, ...]
    """Final contexts: prompt, generated tokens and tool outputs."""
    tool_seconds: tuple[float, ...]
    """That a trajectory of a class waits for tools, in all."""
    prompt_tokens: float
    groups: int
    samples: int
    """Trajectories of a group; they share the prompt's prefill."""
    max_versions: int = 1
    """K: a token may be so many versions old when it is trained. 0: rollout and training take turns."""
    recompute: bool = True
    """KV caches are computed again after a weight update."""
    max_context: float = math.inf
    """Longest sequence that is allowed: lengths that grow stop there."""
    tail: Tail | None = None
    """What about one trajectory of a step reaches; None: the class at the quantile 1 - 1 / sequences."""

    def __post_init__(self) -> None:
        sizes = {len(c) for c in (self.lengths, self.shares, self.contexts, self.tool_seconds)}
        if len(sizes) != 1 or not self.lengths:
            raise ValueError("classes of a demand: expected lengths, shares, contexts, tool_seconds of one size > 0")
        if any(a >= b for a, b in itertools.pairwise(self.lengths)) or self.lengths[0] <= 0:
            raise ValueError("lengths of a demand: expected tokens > 0 in ascending order")
        if abs(sum(self.shares) - 1.0) > 1e-6 or min(self.shares) < 0:
            raise ValueError(f"shares of a demand sum to {sum(self.shares):.6f}; expected 1, none below 0")
        if min(f - g for f, g in zip(self.contexts, self.lengths, strict=True)) < self.prompt_tokens - 1e-6:
            raise ValueError("contexts of a demand: expected at least prompt_tokens + lengths")
        if self.groups < 1 or self.samples < 1 or self.max_versions < 0:
            raise ValueError("a demand has at least one group of one sample, and max_versions of at least 0")

    @property
    def sequences(self) -> int:
        """Trajectories of a step."""
        return self.groups * self.samples

    @cached_property
    def tokens(self) -> float:
        """Generated tokens of a step."""
        return self.sequences * float(np.dot(self.lengths, self.shares))

    @cached_property
    def trained_tokens(self) -> float:
        """Tokens that the trainer's forward passes read: whole sequences."""
        return self.sequences * float(np.dot(self.contexts, self.shares))

    @cached_property
    def trained_squares(self) -> float:
        """Sum of the squared lengths of whole sequences."""
        return self.sequences * float(np.dot(np.square(self.contexts), self.shares))

    @cached_property
    def longest_to_pass(self) -> "Tail":
        """What about one trajectory of a step reaches."""
        if self.tail is not None:
            return self.tail
        at = int(np.argmax(np.cumsum(self.shares) >= 1.0 - 1.0 / self.sequences - 1e-12))
        return Tail(self.lengths[at], self.contexts[at], self.tool_seconds[at])

    @cached_property
    def longest_context(self) -> float:
        """Of all classes."""
        return max(self.contexts)

    def scaled(self, factor: float) -> "Demand":
        """Lengths times a factor, up to the longest context; tool outputs and calls in proportion."""
        if factor == 1.0:
            return self
        room, prompt = max(1.0, self.max_context - self.prompt_tokens), self.prompt_tokens
        lengths, contexts = np.array(self.lengths), np.array(self.contexts)
        factors = np.minimum(factor, np.maximum(room / np.maximum(contexts - prompt, 1e-9), min(factor, 1.0)))
        values = np.column_stack(
            [lengths * factors, prompt + (contexts - prompt) * factors, np.array(self.tool_seconds) * factors]
        )
        values, shares = _merged(values, np.array(self.shares))
        tail = self.longest_to_pass
        stretch = min(factor, max(room / max(tail.context - prompt, 1e-9), min(factor, 1.0)))
        return replace(
            self,
            lengths=tuple(values[:, 0].tolist()),
            contexts=tuple(values[:, 1].tolist()),
            tool_seconds=tuple(values[:, 2].tolist()),
            shares=tuple(shares.tolist()),
            tail=Tail(tail.tokens * stretch, prompt + (tail.context - prompt) * stretch, tail.tool_seconds * stretch),
        )

    @cached_property
    def positions(self) -> "Positions":
        """For the search; computed once."""
        return Positions(self)


def demand_of(
    generated: Floats, contexts: Floats, tool_seconds: Floats, weights: Floats, *, prompt_tokens: float, groups: int,
    samples: int, max_versions: int, seconds_per_token: float = 0.02, recompute: bool = True,
    max_context: float = math.inf,
) -> Demand:  # fmt: skip
    """Trajectories (arrays of one size: tokens, tokens, seconds, weights) in classes of a quarter of an octave.

    The tail is the mean of those that take longest, as many as make up one of a step, at so many seconds a token.
    """
    generated = np.maximum(np.asarray(generated, dtype=float), 1.0)
    contexts = np.maximum(contexts, generated)
    bins = np.array([histogram.bin_of(float(g)) for g in generated], dtype=np.intp)
    total = np.bincount(bins, weights, histogram.BINS)
    used = np.flatnonzero(total > 0)
    if not len(used):
        raise ValueError("a demand needs at least one trajectory of a weight > 0")
    mean_g, mean_f, mean_z = (
        np.bincount(bins, weights * values, histogram.BINS)[used] / total[used]
        for values in (generated, contexts, tool_seconds)
    )
    prompt = max(0.0, min(prompt_tokens, float(np.min(mean_f - mean_g))))
    shares = total[used] / total.sum()
    slowest = np.argsort(-(generated * seconds_per_token + tool_seconds), kind="stable")
    before = np.cumsum(weights[slowest]) - weights[slowest]
    part = np.clip(total.sum() / (groups * samples) - before, 0.0, weights[slowest])
    tokens, context, seconds = (
        float(np.dot(part, values[slowest]) / part.sum()) for values in (generated, contexts, tool_seconds)
    )
    tail = Tail(tokens, max(context, prompt + tokens), seconds)
    return Demand(
        tuple(mean_g.tolist()), tuple(shares.tolist()), tuple(mean_f.tolist()), tuple(mean_z.tolist()),
        prompt, groups, samples, max_versions, recompute, max_context, tail,
    )  # fmt: skip


class Positions:
    """One batch along the positions that its trajectories pass: cells between thresholds, ascending.

    A class stands for lengths spread evenly over a quarter of an octave.
    """

    def __init__(self, demand: Demand) -> None:
        lengths, shares = np.array(demand.lengths), np.array(demand.shares) * demand.sequences
        slopes = (np.array(demand.contexts) - demand.prompt_tokens) / lengths
        tools = np.array(demand.tool_seconds) / lengths
        low, high = lengths * SPREAD[0], lengths * SPREAD[1]
        self.edges = _thresholds(lengths, shares, float(high[-1]))
        """Generated tokens; one more than cells."""
        self.width = np.diff(self.edges)
        middle = (self.edges[1:] + self.edges[:-1]) / 2
        alive = _left_of(self.edges, low, high) * shares
        """(cells, classes)"""
        self.alive = np.maximum(alive.sum(axis=1), 1e-9)
        """Trajectories that are left, on average over the cell."""
        contexts = demand.prompt_tokens + slopes * middle[:, None]
        self.context = np.maximum(1.0, (alive * contexts).sum(axis=1) / self.alive)
        """Mean tokens of their sequences."""
        self.growth = _median_rest(alive, np.maximum(0.0, lengths - middle[:, None]))
        """Median of the tokens that those left still generate."""
        here = np.where(alive > 0, demand.prompt_tokens + slopes * np.minimum(self.edges[1:, None], lengths), 0.0)
        self.longest = here.max(axis=1)
        self.prefill = np.maximum(0.0, (alive * (slopes - 1.0)).sum(axis=1) / self.alive)
        """Tokens to compute for each generated one: tool outputs."""
        self.tools = (alive * tools).sum(axis=1) / self.alive
        """Seconds in tool calls for each generated token."""


def _merged(values: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """Classes by ascending length; those that have become equal are one."""
    order = np.argsort(values[:, 0], kind="stable")
    values, shares = values[order], shares[order]
    place = np.cumsum(np.append(0, np.diff(values[:, 0]) > 1e-6))
    total = np.maximum(np.bincount(place, shares), 1e-300)
    means = [np.bincount(place, shares * column) / total for column in values.T]
    return np.column_stack(means), total / total.sum()


def _left_of(edges: Floats, low: Floats, high: Floats) -> Floats:
    """Mean share of lengths, even between low and high, that lie above the points of each cell. (cells, classes)"""

    def below(at: Floats) -> Floats:
        """Integral of that share from 0 to `at`: the mean of min(length, at)."""
        inside = np.clip(at[:, None], low, high)
        return np.asarray(np.minimum(at[:, None], inside) - (inside - low) ** 2 / (2 * (high - low)))

    return np.asarray(np.diff(below(edges), axis=0) / np.diff(edges)[:, None])


def _median_rest(alive: Floats, rest: Floats) -> Floats:
    """Weighted median by row; classes are in ascending order. (cells, classes)"""
    passed = np.cumsum(alive, axis=1) >= 0.5 * alive.sum(axis=1, keepdims=True)
    return np.asarray(np.take_along_axis(rest, passed.argmax(axis=1)[:, None], axis=1)[:, 0])


def _thresholds(lengths: Floats, shares: Floats, last: float) -> Floats:
    """Positions below which even shares of all tokens lie, from 0 to the last."""
    edges = np.append(0.0, lengths)
    alive = np.cumsum(shares[::-1])[::-1]
    mass = np.append(0.0, np.cumsum(np.diff(edges) * alive))
    inner = np.interp(np.arange(CELLS - 1) / (CELLS - 1) * mass[-1], mass, edges)
    found: Floats = np.unique(np.append(inner, last))
    return found
