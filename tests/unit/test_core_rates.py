"""Rates: a profile's table that gives way to what is observed, kind by kind, and no further than the evidence goes."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.scheduler.core.rates import (
    MAX_FACTOR,
    EngineBook,
    EngineKind,
    EngineRates,
    TrainerBook,
    TrainerKind,
    TrainerRates,
)

ONE, TWO, OTHER = EngineKind("a", 1), EngineKind("a", 2), EngineKind("b", 1)
TABLE = {
    ONE: EngineRates(0.02, 5e-5, 1e-7, 250_000.0, prefill_s=1e-4),
    TWO: EngineRates(0.012, 4e-5, 5e-8, 700_000.0, prefill_s=6e-5),
    OTHER: EngineRates(0.01, 3e-5, 5e-8, 300_000.0, prefill_s=5e-5),
}
TRAINERS = {TrainerKind("a", 4): TrainerRates(2e-4, 1e-9, 0.4, 1.0, 0.5, 40_960.0)}


def observe(book, kind, true, times=60, seed=0):
    rng = random.Random(seed)
    for _ in range(times):
        running, context = rng.uniform(1, 100), rng.uniform(500, 9_000)
        book.observe(kind, running, running * context, running / true.decode_s(running, running * context))


def test_without_evidence_the_table_stands():
    book = EngineBook(TABLE)
    for kind, known in TABLE.items():
        got = book.rates(kind)
        assert got.step_s == pytest.approx(known.step_s)
        assert got.context_s == pytest.approx(known.context_s)
        assert book.evidence(kind) == 0


def test_each_term_is_learnt_where_load_and_context_vary():
    book, true = EngineBook(TABLE), replace(TABLE[ONE], step_s=0.03, sequence_s=1.5e-4, context_s=2e-7)
    observe(book, ONE, true, times=400)
    got = book.rates(ONE)
    for running, context in ((2.0, 1_000.0), (30.0, 2_000.0), (90.0, 8_000.0)):
        ratio = got.decode_s(running, running * context) / true.decode_s(running, running * context)
        assert ratio == pytest.approx(1.0, abs=0.12), (running, context)


def test_one_observation_is_not_believed_by_half():
    book = EngineBook(TABLE)
    seen = TABLE[ONE].decode_s(20.0, 40_000.0) * 2.0
    book.observe(ONE, 20.0, 40_000.0, 20.0 / seen)
    after = book.rates(ONE).decode_s(20.0, 40_000.0) / TABLE[ONE].decode_s(20.0, 40_000.0)
    assert 1.0 < after < 1.5


def test_more_of_the_same_evidence_comes_closer():
    book, gaps = EngineBook(TABLE), []
    seen = TABLE[ONE].decode_s(20.0, 40_000.0) * 2.0
    for _ in range(30):
        book.observe(ONE, 20.0, 40_000.0, 20.0 / seen)
        gaps.append(abs(book.rates(ONE).decode_s(20.0, 40_000.0) / seen - 1.0))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.2


def test_what_was_true_once_fades():
    book = EngineBook(TABLE)
    observe(book, ONE, replace(TABLE[ONE], step_s=0.08), times=100)
    observe(book, ONE, TABLE[ONE], times=150, seed=1)
    assert book.rates(ONE).step_s == pytest.approx(TABLE[ONE].step_s, rel=0.05)


def test_a_factor_common_to_a_type_reaches_degrees_never_tried_and_no_other_type():
    book = EngineBook(TABLE)
    slow = EngineRates(0.06, 1.5e-4, 3e-7, 250_000.0)
    observe(book, ONE, slow, times=200)
    assert 1.3 < book.rates(TWO).step_s / TABLE[TWO].step_s < 3.0, "the table is wrong by 3; a part of it is believed"
    assert book.rates(OTHER).step_s == pytest.approx(TABLE[OTHER].step_s)


def test_an_own_observation_outweighs_what_the_type_has_in_common():
    book = EngineBook(TABLE)
    observe(book, ONE, EngineRates(0.06, 1.5e-4, 3e-7, 250_000.0), times=200)
    observe(book, TWO, TABLE[TWO], times=200, seed=1)
    assert book.rates(TWO).decode_s(30.0, 90_000.0) == pytest.approx(TABLE[TWO].decode_s(30.0, 90_000.0), rel=0.12)


def test_the_error_of_predictions_shrinks_as_they_are_corrected():
    book = EngineBook(TABLE)
    true = replace(TABLE[ONE], step_s=0.05)
    observe(book, ONE, true, times=3)
    early = book.errors.median
    observe(book, ONE, true, times=200, seed=1)
    assert early is not None
    assert book.errors.median is not None
    assert book.errors.median < 0.3 * early


ANY = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(1e-6, 1e6))


@example([(ONE, 1.0, 1.0, 2.2e-309)])
@given(st.lists(st.tuples(st.sampled_from([ONE, TWO, OTHER, EngineKind("z", 9)]), ANY, ANY, ANY), max_size=30))
def test_whatever_is_reported_rates_stay_within_the_largest_correction(reports):
    book = EngineBook(TABLE)
    for report in reports:
        book.observe(*report)
    for kind, known in TABLE.items():
        got = book.rates(kind)
        for name in ("step_s", "sequence_s", "context_s"):
            ratio = getattr(got, name) / getattr(known, name)
            assert 1 / MAX_FACTOR - 1e-9 <= ratio <= MAX_FACTOR + 1e-9
    assert book.errors.median is None or math.isfinite(book.errors.median)


def test_training_seconds_follow_what_is_observed():
    kind = TrainerKind("a", 4)
    book, true = TrainerBook(TRAINERS), replace(TRAINERS[kind], token_s=3e-4)
    for _ in range(60):
        book.observe(kind, 3, 4e6, 4e10, true.seconds(3, 4e6, 4e10))
    assert book.rates(kind).seconds(3, 4e6, 4e10) == pytest.approx(true.seconds(3, 4e6, 4e10), rel=0.06)
    assert book.errors.median is not None
    for bad in (math.nan, -1.0, 0.0, math.inf):
        book.observe(kind, 3, 4e6, 4e10, bad)
    assert book.rates(kind).seconds(3, 4e6, 4e10) == pytest.approx(true.seconds(3, 4e6, 4e10), rel=0.06)


def test_a_training_step_is_work_over_replicas_plus_what_does_not_shrink():
    known = TrainerRates(1e-3, square_s=0.0, gather_s=0.0, fixed_s=2.0, reduce_s=4.0)
    assert known.seconds(1, 10_000, 0.0) == pytest.approx(10.0 + 2.0)
    assert known.seconds(4, 10_000, 0.0) == pytest.approx(2.5 + 2.0 + 3.0)
    assert known.seconds(4, 10_000, 0.0, imbalance=1.2) == pytest.approx(3.0 + 2.0 + 3.0)


def test_small_micro_batches_are_bound_by_the_traffic_of_each():
    small = TrainerRates(1e-4, gather_s=1.0, micro_batch_tokens=1_000.0)
    large = replace(small, micro_batch_tokens=20_000.0)
    assert small.seconds(1, 20_000, 0.0) == pytest.approx(20.0)
    assert large.seconds(1, 20_000, 0.0) == pytest.approx(2.0)
