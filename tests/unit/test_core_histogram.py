"""The estimator's histograms: mass is kept, quantiles are ordered and within a bin of the truth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core import histogram
from services.scheduler.core.histogram import BINS, EDGES, bin_of

TOKENS = st.lists(st.integers(0, 2_000_000), min_size=1, max_size=50)


def of(tokens):
    return histogram.of_samples(np.array(tokens, dtype=np.float64), np.ones(len(tokens)))


@given(st.integers(0, 2_000_000))
def test_a_count_lies_within_the_edges_of_its_bin(tokens):
    place = bin_of(tokens)
    assert 0 <= place < BINS
    assert EDGES[place] <= tokens * (1 + 1e-9)
    assert place == BINS - 1 or tokens < EDGES[place + 1] * (1 + 1e-9)
    assert of([tokens])[place] == 1.0


@given(TOKENS, st.integers(0, 3_000_000))
def test_only_longer_ones_survive_and_none_is_made(tokens, passed):
    left = histogram.survivors(of(tokens), float(passed))
    assert left.min() >= 0
    assert left.sum() <= len(tokens) + 1e-9
    surely = sum(EDGES[bin_of(t)] >= passed for t in tokens if bin_of(t) < BINS - 1)
    perhaps = sum(EDGES[bin_of(t) + 1] > passed for t in tokens)
    assert surely - 1e-9 <= left.sum() <= perhaps + 1e-9
    if passed >= 1 and left.sum() > 1e-9:
        # counted from there: nothing is left beyond the longest, but for a bin's width
        (longest,) = histogram.quantiles(left, [1.0])
        assert longest <= max(1.0, 1.2 * (EDGES[max(bin_of(t) for t in tokens) + 1] - passed))


@given(TOKENS, st.lists(st.floats(0, 1), min_size=2, max_size=5).map(sorted))
def test_quantiles_are_ordered_and_within_the_range(tokens, probabilities):
    found = histogram.quantiles(of(tokens), probabilities)
    assert found == sorted(found)
    low, high = min(bin_of(t) for t in tokens), max(bin_of(t) for t in tokens)
    assert all(EDGES[low] - 1e-9 <= q or p == 0 for p, q in zip(probabilities, found, strict=True))
    assert found[-1] <= EDGES[high + 1] + 1e-9


@pytest.mark.parametrize("probability", [0.5, 0.9])
def test_a_quantile_is_right_within_about_a_tenth(probability):
    tokens = np.random.default_rng(11).lognormal(5.0, 1.0, 4_000).astype(int)
    (found,) = histogram.quantiles(of(list(tokens)), [probability])
    assert found == pytest.approx(np.quantile(tokens, probability), rel=0.1)


def test_an_empty_histogram_says_nothing():
    assert histogram.quantiles(np.zeros(BINS), [0.5, 0.9]) == [0.0, 0.0]
