"""Shards and micro-batches: every sequence exactly once, balanced, the same whoever computes them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common import packing

LENGTHS = st.lists(st.integers(0, 2_000), max_size=60)


@given(LENGTHS, st.integers(1, 9))
def test_shards_hold_every_sequence_exactly_once(lengths, count):
    parts = packing.shards(lengths, count)
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for rank, part in enumerate(parts):
        assert packing.shard(lengths, rank, count) == part == tuple(sorted(part))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 3))
def test_the_heaviest_shard_is_within_grahams_bound_of_the_best(lengths, count):
    heaviest = max(sum(lengths[i] for i in part) for part in packing.shards(lengths, count))
    best = min(
        max(sum(n for n, r in zip(lengths, ranks, strict=True) if r == rank) for rank in range(count))
        for ranks in itertools.product(range(count), repeat=len(lengths))
    )
    assert heaviest <= (4 / 3 - 1 / (3 * count)) * best + 1e-9


@given(LENGTHS, st.integers(1, 3_000))
def test_packs_keep_to_the_budget_and_lose_nothing(lengths, budget):
    for packs, size in (
        (packing.pack(lengths, budget), lambda p: sum(lengths[i] for i in p)),
        (packing.pack_padded(lengths, budget), lambda p: max(lengths[i] for i in p) * len(p)),
    ):
        assert sorted(i for p in packs for i in p) == list(range(len(lengths)))
        assert all(size(p) <= budget or len(p) == 1 for p in packs)


def test_a_budget_is_not_passed_by_one_token():
    assert packing.pack([3, 3], 5) == ((0,), (1,))
    assert packing.pack([3, 3], 6) == ((0, 1),)
    assert packing.pack_padded([4, 1], 7) == ((0,), (1,))


@given(LENGTHS, st.integers(1, 9))
def test_no_shard_is_heavier_than_another_by_more_than_one_sequence(lengths, count):
    parts = packing.shards(lengths, count)
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert packing.report(lengths, count).imbalance >= 1.0 - 1e-9


@given(LENGTHS, st.integers(1, 3_000))
def test_no_two_micro_batches_would_fit_into_one(lengths, budget):
    loads = [sum(lengths[i] for i in p) for p in packing.pack(lengths, budget)]
    assert all(a + b > budget for a, b in itertools.combinations(loads, 2))
    if lengths and max(lengths) <= budget:
        assert len(loads) <= max(1, 2 * -(-sum(lengths) // budget))


def test_a_perfect_division_has_no_imbalance():
    assert packing.report([4, 4, 4, 4], 2).imbalance == 1.0
    assert packing.report([10], 4).imbalance == 4.0
    assert packing.report([], 3).imbalance == 1.0


def test_impossible_requests_name_their_numbers():
    with pytest.raises(ValueError, match="rank 3 of 3"):
        packing.shard([1], 3, 3)
    with pytest.raises(ValueError, match="0 replicas"):
        packing.shards([1], 0)
    with pytest.raises(ValueError, match="length -1 at index 1"):
        packing.shards([1, -1], 2)
    with pytest.raises(ValueError, match="budget of 0"):
        packing.pack([1], 0)
