"""The cost model's laws: finite numbers whatever was reported, and times that follow replicas, rates and work."""

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.scheduler.core.costmodel import ALPHA, LOSS_PER_REPLICA, MAX_LOSS, NEVER_S, CostModel, Layout, Mean

BAD = st.sampled_from([math.nan, math.inf, -math.inf, -1.0])
ANY = st.one_of(st.floats(0.0, 1e12), BAD)
OBSERVATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("rollout"), st.integers(0, 3), ANY, ANY),
        st.tuples(st.just("step"), st.integers(0, 10**9), st.integers(0, 10**9)),
        st.tuples(st.just("training"), ANY, ANY, st.integers(0, 64)),
        st.tuples(st.just("tail"), ANY),
        st.tuples(st.just("handover"), st.sampled_from(["TRAINER", "ROLLOUT"]), ANY),
        st.tuples(st.just("step_seconds"), ANY, ANY),
    ),
    max_size=20,
)  # fmt: skip
LAYOUTS = st.builds(
    Layout, st.integers(0, 8), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), max_size=3).map(tuple)
)


@given(OBSERVATIONS, LAYOUTS, st.integers(0, 8))
def test_predictions_are_finite_whatever_was_reported(observations, layout, bound):
    known = CostModel()
    for kind, *values in observations:
        getattr(known, f"observe_{kind}")(*values)
    guess = known.predict(layout, bound)
    for name, value in dataclasses.asdict(guess).items():
        assert math.isfinite(value), (name, value)
        assert value >= 0, (name, value)
    assert guess.step_seconds >= max(guess.rollout_seconds, guess.train_seconds)
    for role in ("TRAINER", "ROLLOUT"):
        assert math.isfinite(known.handover(role))
    assert known.error.value is None or math.isfinite(known.error.value)


def test_one_bad_report_does_not_spoil_what_is_known():
    known = CostModel()
    for bad in (math.nan, math.inf, -3.0):
        for good in (False, True):
            value = 2.0 if good else bad
            known.observe_training(value, value, 1)
            known.observe_rollout(0, value, 1.0)
            known.observe_tail(value)
            known.observe_handover("TRAINER", value)
            known.observe_step_seconds(2.0, value)
    means = (known.parallel_seconds, known.serial_seconds, known.capacity[0], known.tail_seconds)
    assert [m.value for m in means] == [2.0] * 4
    assert known.handover("TRAINER") == 2.0
    assert known.error.value == 0.0


def test_a_step_of_no_trainers_teaches_nothing():
    known = CostModel()
    known.observe_training(4.0, 0.1, 0)
    assert known.parallel_seconds.value is None
    assert not known.ready


def test_a_phase_without_replicas_never_ends():
    known = CostModel()
    known.observe_step(1_000, 1_000)
    known.observe_training(1.0, 0.1, 1)
    known.observe_rollout(0, 100.0, 1.0)
    assert known.ready
    assert known.predict(Layout(0, ((0, 1),)), 1).train_seconds == NEVER_S
    assert known.predict(Layout(1, ((0, 0),)), 1).rollout_seconds == NEVER_S
    assert known.predict(Layout(0, ()), 1).trained_tokens_per_second == 0.0


@given(
    st.lists(st.floats(1.0, 1e4), min_size=1, max_size=3), st.floats(0.01, 100.0), st.floats(0.0, 10.0),
    st.integers(1, 10**6), LAYOUTS, st.integers(0, 4),
)  # fmt: skip
def test_more_replicas_never_lengthen_a_step(rates, parallel, serial, tokens, layout, bound):
    known = CostModel()
    for level, rate in enumerate(rates):
        known.observe_rollout(level, rate, 1.0)
    known.observe_training(parallel, serial, 1)
    known.observe_step(tokens, tokens)
    plain = known.predict(layout, bound)
    more_rollout = known.predict(Layout(layout.trainers, (*layout.rollouts, (0, 1))), bound)
    more_training = known.predict(Layout(layout.trainers + 1, layout.rollouts), bound)
    assert more_rollout.rollout_seconds <= plain.rollout_seconds
    assert more_rollout.train_seconds == plain.train_seconds
    assert more_training.train_seconds <= plain.train_seconds
    assert known.predict(layout, bound + 1).step_seconds <= plain.step_seconds


@given(st.floats(0.01, 1e3), st.floats(0.0, 1e2), st.integers(1, 16))
def test_what_was_observed_is_predicted_for_the_same_replicas(parallel, serial, replicas):
    known = CostModel()
    known.observe_training(parallel, serial, replicas)
    guess = known.predict(Layout(replicas, ((0, 1),)), 0)
    assert guess.train_seconds == pytest.approx(parallel + serial)
    one = parallel * replicas / (1 + LOSS_PER_REPLICA * (replicas - 1))
    assert known.predict(Layout(1, ((0, 1),)), 0).train_seconds == pytest.approx(one + serial)


@given(st.floats(0.1, 100.0), st.floats(0.0, 0.5), st.integers(1, 4), st.integers(1, 4))
def test_what_a_replica_loses_is_learnt_when_their_number_changes(alone, loss, before, after):
    assume(before != after)
    known = CostModel()
    for replicas in (before, after):
        for _ in range(5):
            known.observe_training(alone / replicas * (1 + loss * (replicas - 1)), 0.0, replicas)
    assert known.replica_loss == pytest.approx(loss, abs=1e-6)
    for replicas in range(1, 6):
        expected = alone / replicas * (1 + loss * (replicas - 1))
        assert known.predict(Layout(replicas, ((0, 1),)), 0).train_seconds == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 8)), max_size=40))
def test_whatever_is_read_the_loss_stays_believable(readings):
    known = CostModel()
    for seconds, replicas in readings:
        known.observe_training(seconds, 0.0, replicas)
    assert 0.0 <= known.replica_loss <= MAX_LOSS
    if readings:
        times = [known.predict(Layout(n, ((0, 1),)), 0).train_seconds for n in range(1, 9)]
        assert times == sorted(times, reverse=True)


def test_a_level_never_seen_takes_the_mean_of_the_others():
    known = CostModel()
    known.observe_rollout(0, 100.0, 1.0)
    known.observe_rollout(1, 300.0, 1.0)
    known.observe_step(1_000, 1_000)
    assert known.predict(Layout(1, ((7, 1),)), 0).rollout_seconds == pytest.approx(5.0)


@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_a_mean_lies_within_what_it_has_seen(values, alpha):
    mean = Mean()
    for value in values:
        mean.add(value, alpha)
    assert min(values) * (1 - 1e-9) <= mean.value <= max(values) * (1 + 1e-9)
    assert mean.count == len(values)


def test_the_newest_observations_weigh_most():
    mean = Mean()
    for value in [1.0] * 20 + [2.0] * 5:
        mean.add(value)
    assert mean.value == pytest.approx(2.0 - (1 - ALPHA) ** 5)
