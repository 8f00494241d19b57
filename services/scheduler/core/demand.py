"""What a training step asks of the fleet: how many tokens, how deep into their sequences, and what a tail has to pass.

Trajectories are summed up in classes of like length. A class of generated length g and final context f has a context of
prompt + (f - prompt) p / g once p tokens are generated. Levels divide the work by *position*: a token at position p is
generated on the level whose range [low, high) holds p, as when a trajectory is moved up after so many tokens. That
needs no prediction. With `foresight` r a share r of each long trajectory's earlier tokens is generated on the level
that its final length belongs to, as if it had been known.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from services.scheduler.core import histogram

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

QUANTILES = (*np.arange(24) / 24, 0.975, 0.99)
"""Thresholds tried between levels: positions below which these shares of all tokens lie."""
COMBINATIONS = {1: 1, 2: 26, 3: 13, 4: 8}
"""Thresholds tried for so many levels, evenly taken from QUANTILES; 6 for more."""


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
    foresight: float = 0.0
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
    samples: int, max_versions: int, seconds_per_token: float = 0.02, foresight: float = 0.0, recompute: bool = True,
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
        prompt, groups, samples, max_versions, foresight, recompute, max_context, tail,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Divisions:
    """Ways to divide a step's work over levels, slowest level first. Arrays of shape (ways, levels)."""

    tokens: Floats
    """Generated."""
    context: Floats
    """Mean context of a token that is generated."""
    prefill: Floats
    """Tokens to compute for each generated one: prompts, tool outputs, contexts that moved in."""
    tools: Floats
    """Seconds in tool calls for each generated token."""
    tail: Floats
    """Tokens of the tail's trajectory."""
    tail_prefill: Floats
    longest: Floats
    """Longest context that a level holds; 0 where it has no work."""
    entries: Floats
    """Trajectories that come to the level."""
    above: Floats
    """Position from which on the level generates."""


class Positions:
    """Cumulative sums over positions: what of a step lies below each threshold."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        lengths, shares = np.array(demand.lengths), np.array(demand.shares) * demand.sequences
        contexts, prompt = np.array(demand.contexts), demand.prompt_tokens
        slopes = (contexts - prompt) / lengths
        self.grid = np.unique(np.append(_thresholds(lengths, shares), lengths[-1]))
        below = np.minimum(self.grid[:, None], lengths)
        """(thresholds, classes): tokens of one trajectory below."""
        whole = np.where(lengths <= self.grid[:, None], lengths, 0.0)
        foresight = demand.foresight

        def mixed(of: Floats, of_whole: Floats) -> Floats:
            return np.asarray((1 - foresight) * of @ shares + foresight * of_whole @ shares)

        self.tokens = mixed(below, whole)
        self.context = mixed(prompt * below + slopes * below**2 / 2, prompt * whole + slopes * whole**2 / 2)
        self.prefill = mixed((slopes - 1) * below, (slopes - 1) * whole)
        passing = np.where(lengths > self.grid[:, None], shares, 0.0)
        self.moved = (1 - foresight) * (passing * (prompt + slopes * self.grid[:, None])).sum(axis=1)
        """Context tokens that change levels at each threshold."""
        self.alive = (1 - foresight) * passing.sum(axis=1)
        self.longest = (prompt + slopes * below).max(axis=1)
        tools = np.array(demand.tool_seconds) / lengths
        self.tools = mixed(tools * below, tools * whole)
        longest = demand.longest_to_pass
        self.tail_slope = max(1.0, (longest.context - prompt) / longest.tokens)
        over = longest.tokens > self.grid
        self.tail = np.where(over, (1 - foresight) * self.grid, longest.tokens)
        self.tail[-1] = longest.tokens
        self.tail_context = np.where(over, prompt + self.tail_slope * self.grid, 0.0)
        self.prompts = demand.groups * prompt

    def divisions(self, levels: int) -> Divisions:
        """Over so many levels: all combinations of thresholds from a grid, those that leave a level out included."""
        bounds = self._bounds(levels)
        low, high = bounds[:, :-1], bounds[:, 1:]
        tokens = self._between(self.tokens, bounds)
        some = np.maximum(tokens, 1e-9)
        first = (np.cumsum(tokens > 0, axis=1) == 1) & (tokens > 0)
        """The level where trajectories begin."""
        moved = np.where((low > 0) & ~first & (tokens > 0), self._at(self.moved, low), 0.0)
        prefill = self._between(self.prefill, bounds) + np.where(first, self.prompts, 0.0) + moved
        tail = self._between(self.tail, bounds)
        arrived = np.where(tail > 0, self._at(self.tail_context, low), 0.0)
        return Divisions(
            tokens=tokens,
            context=self._between(self.context, bounds) / some,
            prefill=np.where(tokens > 0, prefill / some, 0.0),
            tools=np.where(tokens > 0, self._between(self.tools, bounds) / some, 0.0),
            tail=tail,
            tail_prefill=(self.tail_slope - 1.0) * tail + arrived,
            longest=np.where(tokens > 0, self.longest[np.maximum(high - 1, 0)], 0.0),
            entries=np.where(first, float(self.demand.sequences), self._at(self.alive, low)),
            above=np.where(low > 0, self.grid[np.maximum(low - 1, 0)], 0.0),
        )

    def _bounds(self, levels: int) -> Ints:
        """(ways, levels + 1): index of a threshold plus one, 0 = the start, len(grid) = the end."""
        last = len(self.grid)
        size = min(last, COMBINATIONS.get(levels, 6))
        inner = sorted({round(i * last / max(1, size)) for i in range(size + 1)})
        ways = itertools.combinations_with_replacement(inner, levels - 1)
        return np.array([(0, *way, last) for way in ways], dtype=np.intp)

    def _between(self, cumulative: Floats, bounds: Ints) -> Floats:
        return np.diff(np.append(0.0, cumulative)[bounds], axis=1)

    def _at(self, values: Floats, index: Ints) -> Floats:
        return np.append(0.0, values)[index]


def _merged(values: Floats, shares: Floats) -> tuple[Floats, Floats]:
    """Classes by ascending length; those that have become equal are one."""
    order = np.argsort(values[:, 0], kind="stable")
    values, shares = values[order], shares[order]
    place = np.cumsum(np.append(0, np.diff(values[:, 0]) > 1e-6))
    total = np.maximum(np.bincount(place, shares), 1e-300)
    means = [np.bincount(place, shares * column) / total for column in values.T]
    return np.column_stack(means), total / total.sum()


def _thresholds(lengths: Floats, shares: Floats) -> Floats:
    """Positions below which the QUANTILES of all tokens lie; 0 left out."""
    edges = np.append(0.0, lengths)
    alive = np.append(np.cumsum(shares[::-1])[::-1], 0.0)[: len(lengths)]
    mass = np.append(0.0, np.cumsum(np.diff(edges) * alive))
    found: Floats = np.interp(np.array(QUANTILES[1:]) * mass[-1], mass, edges)
    return found
