"""Decayed histograms of token counts over logarithmic bins: small, bounded, and quick to mix.

A bin is a quarter of an octave (a factor of 1.19), so a quantile read from one is right within about a tenth.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS_PER_OCTAVE = 4
OCTAVES = 20
"""Counts of 2**20 tokens and more share the last bin."""

BINS = 1 + BINS_PER_OCTAVE * OCTAVES
"""Bin 0 is [0, 1); bin i > 0 is [2**((i - 1) / 4), 2**(i / 4))."""

EDGES: Floats = np.concatenate(([0.0], np.exp2(np.arange(BINS) / BINS_PER_OCTAVE)))
_LOWER: list[float] = EDGES[:-1].tolist()
MIDDLES: Floats = np.concatenate(([0.0], np.sqrt(EDGES[1:-1] * EDGES[2:])))


def bin_of(tokens: float) -> int:
    """Bin of a token count."""
    return 0 if tokens < 1 else bisect_right(_LOWER, tokens) - 1


def of_samples(tokens: Floats, weights: Floats) -> Floats:
    """Weights summed by bin of their token counts; both arrays of one length, counts at least 0."""
    bins = np.zeros(len(tokens), dtype=np.intp)
    some = tokens >= 1
    bins[some] = np.minimum(BINS - 1, 1 + (BINS_PER_OCTAVE * np.log2(tokens[some])).astype(np.intp))
    return np.bincount(bins, weights=weights, minlength=BINS).astype(np.float64)


def survivors(counts: Floats, passed: float) -> Floats:
    """What is left of a histogram once `passed` tokens are known to be exceeded, counted from there."""
    if passed < 1:
        return counts
    above = np.clip((EDGES[1:] - passed) / (EDGES[1:] - EDGES[:-1]), 0.0, 1.0)
    middles = np.maximum((np.maximum(EDGES[:-1], passed) + EDGES[1:]) / 2 - passed, 0.0)
    return of_samples(middles, counts * above)


def quantiles(counts: Floats, probabilities: Sequence[float]) -> list[float]:
    """Quantiles, tokens, linear within a bin; 0 for an empty histogram."""
    sums = np.cumsum(counts)
    total = float(sums[-1])
    if total <= 0:
        return [0.0] * len(probabilities)
    found = []
    for probability in probabilities:
        wanted = probability * total
        index = min(int(np.searchsorted(sums, wanted)), BINS - 1)
        before = float(sums[index - 1]) if index else 0.0
        inside = (wanted - before) / max(float(counts[index]), 1e-12)
        low, high = float(EDGES[index]), float(EDGES[index + 1])
        found.append(low + (high - low) * min(max(inside, 0.0), 1.0))
    return found
