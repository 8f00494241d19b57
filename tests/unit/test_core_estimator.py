"""The remaining-work estimator: what it may conclude, from what, and what it must not."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core import estimator
from services.scheduler.core.estimator import RemainingWork


def feed(work, name, totals, group="g", outcome="OK"):
    """One episode: cumulative generated tokens at each turn; the last is the end."""
    for turn, total in enumerate(totals[:-1]):
        work.observe_turn(group, name, turn, total, "calculate", "number", outcome)
    work.observe_end("run", group, name, totals[-1])


def test_nothing_is_known_at_first():
    guess = RemainingWork().estimate("run", "g", "t", 0, 0)
    assert guess.source == "prior"
    assert guess.evidence == 0
    assert 0 < guess.p50 < guess.p90


def test_one_sample_is_never_trusted():
    work = RemainingWork()
    before = work.estimate("run", "g", "t", 0, 0)
    feed(work, "a", [5], group="g")
    assert work.estimate("run", "g", "t", 0, 0) == before


def test_the_run_teaches_its_length():
    work = RemainingWork()
    for i in range(200):
        feed(work, f"a{i}", [100], group=f"g{i}")
    guess = work.estimate("run", "new", "t", 0, 0)
    assert 80 < guess.p50 < 120
    assert guess.source in ("run", "progress")


def test_finished_siblings_move_the_estimate():
    work = RemainingWork()
    for i in range(200):
        feed(work, f"a{i}", [100 if i // 4 % 2 else 1_000], group=f"g{i // 4}")
    plain = work.estimate("run", "other", "t", 0, 0)
    for i in range(6):
        feed(work, f"long{i}", [1_000], group="hard")
    hard = work.estimate("run", "hard", "t", 0, 0)
    assert hard.source == "siblings"
    assert hard.p50 > 700
    assert hard.p50 > plain.p50


def test_siblings_that_say_nothing_are_passed_over():
    work = RemainingWork()
    rng = random.Random(5)
    for i in range(800):
        feed(work, f"a{i}", [rng.choice([100, 1_000])], group=f"g{i // 8}")
    assert work._runs["run"].worth["siblings"].mean <= 0.02
    for i in range(3):
        feed(work, f"long{i}", [1_000], group="chance")
    plain = work.estimate("run", "other", "t", 0, 0)
    chance = work.estimate("run", "chance", "t", 0, 0)
    assert chance.p90 == pytest.approx(plain.p90, rel=0.2)


def test_siblings_that_mislead_are_found_out():
    work = RemainingWork()
    for i in range(80):
        for k, total in enumerate([1_000, 1_000, 100, 100, 100, 100]):
            feed(work, f"a{i}-{k}", [total], group=f"g{i}")
    for k in range(2):
        feed(work, f"long{k}", [1_000], group="new")
    assert work.estimate("run", "new", "t", 0, 0).p50 < 200


def test_a_siblings_end_counts_at_once_though_estimates_are_kept():
    work = RemainingWork()
    for i in range(64):
        feed(work, f"a{i}", [100], group=f"g{i}")
    before = work.estimate("run", "g", "t", 0, 0)
    for i in range(4):
        feed(work, f"s{i}", [2_000], group="g")
    assert work.estimate("run", "g", "t", 0, 0).p50 > 2 * before.p50


def test_outcomes_that_lengthen_what_follows_are_learnt():
    work = RemainingWork()
    for i in range(300):
        bad = i % 2 == 0
        feed(work, f"a{i}", [20, 320 if bad else 40], group=f"g{i}", outcome="TOOL_ERROR" if bad else "OK")
    guesses = {}
    for outcome in ("OK", "TOOL_ERROR"):
        work.observe_turn("new", outcome, 0, 20, "calculate", "number", outcome)
        guesses[outcome] = work.estimate("run", "new", outcome, 20, 1)
    assert guesses["OK"].p50 < 40 < 200 < guesses["TOOL_ERROR"].p50
    assert guesses["TOOL_ERROR"].source == "tool_tree"


def test_outcomes_without_signal_do_not_make_it_worse():
    rng = random.Random(7)
    told, blind = RemainingWork(), RemainingWork()
    errors = {"told": [], "blind": []}
    for i in range(800):
        lengths = [rng.lognormvariate(3.2, 0.8) for _ in range(rng.randint(2, 6))]
        totals = [int(sum(lengths[: k + 1])) + k + 1 for k in range(len(lengths))]
        outcomes = [rng.choice(["OK", "TOOL_ERROR", "TIMEOUT"]) for _ in totals]
        for work, name in ((told, "told"), (blind, "blind")):
            for turn, total in enumerate(totals[:-1]):
                outcome = outcomes[turn] if name == "told" else "OK"
                work.observe_turn(f"g{i}", "t", turn, total, "calculate", "number", outcome)
                if i > 200:
                    guess = work.estimate("run", f"g{i}", "t", total, turn + 1).p50
                    errors[name].append(abs(math.log((guess + 1) / (totals[-1] - total + 1))))
            work.observe_end("run", f"g{i}", "t", totals[-1])
    mean = {name: sum(rows) / len(rows) for name, rows in errors.items()}
    assert mean["told"] < 1.02 * mean["blind"], mean


def test_drift_is_followed():
    work = RemainingWork()
    for i in range(600):
        feed(work, f"a{i}", [100], group=f"a{i}")
    for i in range(1_200):
        feed(work, f"b{i}", [1_000], group=f"b{i}")
    assert work.estimate("run", "new", "t", 0, 0).p50 > 700


def test_within_a_turn_what_was_generated_since_is_taken_off():
    work = RemainingWork()
    for i in range(300):
        feed(work, f"a{i}", [20, 220], group=f"g{i}")
    work.observe_turn("new", "t", 0, 20, "calculate", "number", "OK")
    at_start = work.estimate("run", "new", "t", 20, 1).p50
    later = work.estimate("run", "new", "t", 120, 1).p50
    assert at_start == pytest.approx(200, rel=0.15)
    assert later == pytest.approx(100, rel=0.35)


def test_what_was_forgotten_teaches_nothing():
    work = RemainingWork()
    for i in range(50):
        work.observe_turn("g", f"void{i}", 0, 7, "calculate", "number", "OK")
        work.forget(f"void{i}")
    assert work.estimate("run", "g", "t", 0, 0) == RemainingWork().estimate("run", "g", "t", 0, 0)


def test_a_new_attempt_starts_anew():
    work = RemainingWork()
    work.observe_turn("g", "t", 0, 500, "calculate", "number", "OK")
    work.observe_turn("g", "t", 0, 20, "calculate", "number", "OK")
    assert [p.generated for p in estimator._points(work._live["t"])] == [0, 20]


def test_the_limit_caps_the_estimate():
    guess = RemainingWork().estimate("run", "g", "t", 0, 0, at_most=10)
    assert guess.p50 == guess.p90 == 10


def test_memory_is_bounded(monkeypatch):
    for name in ("MAX_RUNS", "MAX_GROUPS", "MAX_LIVE", "MAX_NODES", "MAX_TURNS_KEPT", "MAX_SIBLINGS", "MAX_KEPT"):
        monkeypatch.setattr(estimator, name, 8)
    work = RemainingWork()
    rng = random.Random(3)
    for i in range(200):
        run, group = f"run{i % 11}", f"g{i % 23}"
        for turn in range(20):
            work.observe_turn(group, f"t{i}", turn, 10 * turn + i, rng.choice("abc"), "", rng.choice("xy"))
            work.estimate(run, group, f"t{i}", 10 * turn + i, turn + 1)
        work.observe_turn(group, f"live{i}", 0, 10, "a", "", "x")
        work.observe_end(run, group, f"t{i}", 400 + i)
    assert len(work._runs) <= 8
    assert len(work._siblings) <= 8
    assert len(work._live) <= 8
    for state in work._runs.values():
        assert len(state.nodes) <= 8
        assert len(state.kept) <= 8 + 2
    assert all(len(s) <= 8 for s in work._siblings.values())
    assert all(len(estimator._points(t)) <= 8 for t in work._live.values())


EPISODE = st.lists(
    st.tuples(st.integers(0, 500), st.sampled_from(["", "a", "b"]), st.sampled_from(["OK", "TIMEOUT"])),
    min_size=1,
    max_size=6,
)


@given(st.lists(EPISODE, max_size=12), st.integers(0, 10_000), st.integers(0, 20))
def test_quantiles_are_ordered_finite_and_not_negative(episodes, generated, turns):
    work = RemainingWork()
    for i, episode in enumerate(episodes):
        total = 0
        for turn, (tokens, tool, outcome) in enumerate(episode):
            total += tokens
            work.observe_turn(f"g{i % 3}", f"t{i}", turn, total, tool, "", outcome)
        work.observe_end("run", f"g{i % 3}", f"t{i}", total)
    guess = work.estimate("run", "g0", "new", generated, turns)
    assert 0 <= guess.p50 <= guess.p90 < math.inf
    assert guess.evidence >= 0
