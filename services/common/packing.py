"""Dividing sequences over replicas and over micro-batches: pure, deterministic, the same on every member.

A replica's shard is a function of the manifest's lengths and the participating (rank, count) alone, so no member has to
tell another what it takes. Lengths are tokens; 0 is allowed (a sequence without trained tokens has to be somewhere).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def _checked(lengths: Sequence[int]) -> None:
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"length {length} at index {index}: lengths are token counts, at least 0")


def _descending(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def shards(lengths: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Indices of `lengths` for each of `count` ranks, ascending within a rank; every index in exactly one.

    Longest processing time first: each sequence, longest first (equal ones by index), goes to the lightest rank (equal
    ones by fewest sequences, then lowest rank). The heaviest rank is at most 4/3 - 1/(3 count) of the optimum (Graham,
    1969). Ranks beyond the number of sequences are empty.
    """
    if count < 1:
        raise ValueError(f"cannot divide over {count} replicas: at least 1 is needed")
    _checked(lengths)
    parts: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, 0, rank) for rank in range(count)]
    for index in _descending(lengths):
        load, held, rank = heapq.heappop(lightest)
        parts[rank].append(index)
        heapq.heappush(lightest, (load + lengths[index], held + 1, rank))
    return tuple(tuple(sorted(part)) for part in parts)


def shard(lengths: Sequence[int], rank: int, count: int) -> tuple[int, ...]:
    """The part of `shards` that rank `rank` of `count` trains."""
    if not 0 <= rank < count:
        raise ValueError(f"rank {rank} of {count}: ranks run from 0 to count - 1")
    return shards(lengths, count)[rank]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """How evenly sequences lie over replicas."""

    tokens: tuple[int, ...]
    """Of each rank."""
    longest: int
    """Tokens of the longest sequence: no heaviest shard is lighter."""

    @property
    def imbalance(self) -> float:
        """Heaviest over mean: the others wait for (imbalance - 1) / imbalance of the time that they are at work."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0

    @property
    def excess(self) -> float:
        """Heaviest over max(mean, longest), below which no division comes: what better sharding could gain at most."""
        least = max(sum(self.tokens) / len(self.tokens), self.longest)
        return max(self.tokens) / least if least else 1.0


def report(lengths: Sequence[int], count: int) -> ShardReport:
    """Of `shards`."""
    parts = shards(lengths, count)
    return ShardReport(tuple(sum(lengths[i] for i in part) for part in parts), max(lengths, default=0))


def pack(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of indices whose lengths sum to at most `budget` tokens; every index in exactly one.

    First-fit decreasing over real lengths (no padding counted). A sequence longer than the budget is alone in its
    micro-batch: it cannot be split, so the caller's budget should be at least the longest. Longest micro-batch first,
    so that a memory shortage shows at the first one.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens holds nothing: at least 1 is needed")
    _checked(lengths)
    bins: list[list[int]] = []
    loads: list[int] = []
    for index in _descending(lengths):
        length = lengths[index]
        for place, load in enumerate(loads):
            if load + length <= budget:
                bins[place].append(index)
                loads[place] = load + length
                break
        else:
            bins.append([index])
            loads.append(length)
    return tuple(tuple(sorted(part)) for part in bins)


def pack_padded(lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
    """Like `pack`, for batches padded to their longest sequence: (longest x count) is at most `budget` tokens.

    Sequences of like length lie together, so little is padding. Longest first; over-long ones are alone.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens holds nothing: at least 1 is needed")
    _checked(lengths)
    batches: list[list[int]] = []
    for index in _descending(lengths):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return tuple(tuple(batch) for batch in batches)
