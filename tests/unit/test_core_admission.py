"""Admission and batches: nothing staler than K is trained, whatever waited where; what is not taken is told why."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.admission import (
    AdmissionView,
    BatchRules,
    GroupView,
    TokenSpan,
    check_commit,
    choose_batch,
    groups_to_admit,
)


def view(**changes):
    base = {
        "kind": "TRAIN", "paused": False, "max_versions": 2, "batch_groups": 16, "group_size": 8,
        "unconsumed_groups": 0, "ready_groups": 0, "in_flight": 0, "max_in_flight": 0, "tasks_left": 10_000,
    }  # fmt: skip
    return AdmissionView(**(base | changes))


def rules(**changes):
    base = {
        "groups": 2, "min_groups": 2, "multiple_of": 1, "max_versions": 2, "on_exceed": "DROP_GROUP", "look_ahead": 4,
    }  # fmt: skip
    return BatchRules(**(base | changes))


def group(number, oldest=0, closed=True, spans=()):
    return GroupView(f"g{number}", number, closed, oldest, tuple(spans))


def test_case_28_admitted_groups_stay_within_the_bound_after_a_restart():
    # nothing but what is unconsumed counts: the version number, here 500, cannot inflate capacity
    for have in range(60):
        count = groups_to_admit(view(unconsumed_groups=have)).count
        assert have + count <= max(have, (2 + 1) * 16)
    assert groups_to_admit(view(unconsumed_groups=0)).count == 48


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"paused": True}, "PAUSED"), ({"tasks_left": 0}, "NO_TASKS"), ({"unconsumed_groups": 48}, "STALENESS_BOUND")],
)
def test_nothing_is_admitted_with_the_reason_and_its_numbers(changes, code):
    decision = groups_to_admit(view(**changes))
    assert (decision.count, decision.reason.code) == (0, code)
    if code == "STALENESS_BOUND":
        assert "48 groups" in decision.reason.text
        assert "16 a step" in decision.reason.text
        assert decision.reason.numbers["unconsumed_groups"] == 48


def test_engines_that_lag_use_up_the_bound():
    assert groups_to_admit(view(serving_lag=1)).count == 32
    assert groups_to_admit(view(serving_lag=3)).count == 0


def test_the_quota_counts_trajectories():
    assert groups_to_admit(view(in_flight=30, max_in_flight=64)).count == 4
    assert groups_to_admit(view(in_flight=64, max_in_flight=64)).count == 0
    assert groups_to_admit(view(in_flight=90, max_in_flight=64)).count == 0


@given(
    st.integers(0, 5), st.integers(1, 32), st.integers(1, 16), st.integers(0, 300), st.integers(0, 300),
    st.integers(0, 500), st.integers(0, 8),
)  # fmt: skip
def test_admission_never_exceeds_its_limits(bound, batch, size, unconsumed, quota, left, lag):
    given_ = view(
        max_versions=bound, batch_groups=batch, group_size=size, unconsumed_groups=unconsumed,
        in_flight=unconsumed * size, max_in_flight=quota, tasks_left=left, serving_lag=lag,
    )  # fmt: skip
    count = groups_to_admit(given_).count
    assert 0 <= count <= left
    if count:
        # the last of them is taken floor((its rank) / batch) steps from now, and sampled lag versions behind
        assert (unconsumed + count - 1) // batch + lag <= bound
        assert not quota or (unconsumed + count) * size <= quota


def test_case_31_queue_time_counts_towards_staleness():
    # finished early, then sat closed for K + 1 versions
    waiting = [group(0, oldest=0), group(1, oldest=2), group(2, oldest=2)]
    at_bound = choose_batch(waiting, 2, rules(), 0, 10, exhausted=False)
    assert at_bound.take == ("g0", "g1")
    beyond = choose_batch(waiting, 3, rules(), 0, 10, exhausted=False)
    assert beyond.take == ("g1", "g2")
    assert beyond.stale == ("g0",)
    assert check_commit([("a", 0), ("b", 1), ("c", -1)], 3, 2) == ["a"]


@pytest.mark.parametrize("seed", range(5))
def test_case_31_in_a_closed_loop_nothing_stale_is_trained(seed):
    """Groups of random duration, admitted by groups_to_admit and taken by choose_batch over 120 steps."""
    rng = random.Random(seed)
    bound, batch, head, now, numbers = 1, 4, 0, 0.0, iter(range(10**6))
    alive, taken, dropped, ages = [], 0, 0, []
    settings = rules(groups=batch, min_groups=batch, max_versions=bound, look_ahead=batch)
    for _ in range(2_000):
        now += 1.0
        count = groups_to_admit(view(max_versions=bound, batch_groups=batch, unconsumed_groups=len(alive))).count
        assert len(alive) + count <= (bound + 1) * batch
        alive += [(next(numbers), head, now + rng.lognormvariate(1.5, 1.0)) for _ in range(count)]
        views = [GroupView(f"g{n}", n, ends <= now, version) for n, version, ends in alive]
        choice = choose_batch(views, head, settings, 0, 100, exhausted=False)
        gone = {*choice.take, *choice.stale}
        ages += [head - version for n, version, _ in alive if f"g{n}" in choice.take]
        alive = [row for row in alive if f"g{row[0]}" not in gone]
        taken, dropped = taken + len(choice.take), dropped + len(choice.stale)
        head += bool(choice.take)
    assert head > 100
    assert max(ages) <= bound
    assert dropped < 0.35 * (taken + dropped)


def test_the_oldest_come_first_and_the_look_ahead_is_bounded():
    groups = [group(n, closed=n != 0) for n in range(8)]
    choice = choose_batch(groups, 0, rules(), 0, 10, exhausted=False)
    assert choice.take == ("g1", "g2")
    blocked = [group(n, closed=n >= 6) for n in range(8)]
    assert choose_batch(blocked, 0, rules(), 0, 10, exhausted=False).take == ()
    assert choose_batch(blocked, 0, rules(look_ahead=6), 0, 10, exhausted=False).take == ("g6", "g7")


def test_groups_at_the_edge_go_before_older_admissions():
    # g1 would be too old at the next step, g0 not
    groups = [group(0, oldest=2), group(1, oldest=0), group(2, oldest=2)]
    assert choose_batch(groups, 2, rules(groups=1, min_groups=1), 0, 10, exhausted=False).take == ("g1",)


def test_a_short_batch_is_taken_only_at_the_deadline_or_the_end():
    groups = [group(n) for n in range(5)]
    few = rules(groups=8, min_groups=2, multiple_of=2)
    waiting = choose_batch(groups, 0, few, 3, 10, exhausted=False)
    assert waiting.take == ()
    assert "5 of 8 groups are ready" in waiting.reason.text
    assert choose_batch(groups, 0, few, 10, 10, exhausted=False).take == ("g0", "g1", "g2", "g3")
    assert choose_batch(groups, 0, few, 0, 10, exhausted=True).take == ("g0", "g1", "g2", "g3")


def test_a_multiple_that_does_not_divide_the_batch_takes_the_next_lower_one_without_waiting():
    groups = [group(n) for n in range(10)]
    assert len(choose_batch(groups, 0, rules(groups=8, min_groups=8, multiple_of=3), 0, 10, exhausted=False).take) == 6


def test_the_trainer_is_held_for_an_open_group_at_the_edge_and_no_longer_than_agreed():
    groups = [group(0, oldest=0, closed=False), group(1, oldest=2), group(2, oldest=2)]
    hold = rules(on_exceed="HOLD_TRAINER", hold_timeout=30)
    held = choose_batch(groups, 2, hold, 0, 60, exhausted=False)
    assert held.hold
    assert held.take == ()
    assert choose_batch(groups, 2, hold, 0, 60, exhausted=False, held=31).take == ("g1", "g2")
    assert choose_batch(groups, 1, hold, 0, 60, exhausted=False).take == ("g1", "g2")
    closed = [group(0, oldest=0), *groups[1:]]
    assert choose_batch(closed, 2, hold, 0, 60, exhausted=False).take == ("g0", "g1")


@pytest.mark.parametrize("on_exceed", ["HOLD_TRAINER", "DROP_GROUP"])
def test_an_open_group_that_is_too_old_already_holds_nobody(on_exceed):
    groups = [group(0, oldest=0, closed=False), group(1, oldest=3), group(2, oldest=3)]
    choice = choose_batch(groups, 3, rules(on_exceed=on_exceed), 0, 60, exhausted=False)
    assert choice.stale == ("g0",)
    assert choice.take == ("g1", "g2")


def test_old_tokens_are_masked_and_a_group_of_nothing_else_is_stale():
    old, new = TokenSpan("t0", 0, 5, 10, 0), TokenSpan("t0", 0, 15, 10, 3)
    groups = [group(0, oldest=0, spans=[old, new]), group(1, oldest=0, spans=[old]), group(2, oldest=3)]
    choice = choose_batch(groups, 3, rules(on_exceed="MASK_TOKENS"), 0, 10, exhausted=False)
    assert choice.take == ("g0", "g2")
    assert choice.masked == (old,)
    assert choice.stale == ("g1",)


GROUPS = st.lists(
    st.builds(
        lambda closed, oldest: (closed, oldest), st.booleans(), st.one_of(st.none(), st.integers(0, 6))
    ),
    max_size=24,
)  # fmt: skip


@given(
    GROUPS, st.integers(0, 6), st.integers(1, 8), st.integers(1, 4), st.integers(0, 3), st.integers(0, 8),
    st.sampled_from(["HOLD_TRAINER", "DROP_GROUP"]), st.booleans(), st.randoms(use_true_random=False),
)  # fmt: skip
def test_what_is_taken_is_closed_fresh_whole_and_independent_of_order(
    rows, base, wanted, multiple, bound, look_ahead, on_exceed, late, rng
):
    groups = [GroupView(f"g{n}", n, closed, oldest) for n, (closed, oldest) in enumerate(rows)]
    least = max(1, wanted // 2)
    asked = rules(
        groups=wanted, min_groups=least, multiple_of=min(multiple, wanted), max_versions=bound, on_exceed=on_exceed,
        look_ahead=look_ahead,
    )  # fmt: skip
    choice = choose_batch(groups, base, asked, 10 if late else 0, 10, exhausted=False)
    by_name = {g.name: g for g in groups}
    taken = [by_name[n] for n in choice.take]
    assert all(g.closed for g in taken)
    assert all(g.oldest_version is None or base - g.oldest_version <= bound for g in taken)
    assert len(taken) <= wanted
    assert len(taken) % asked.multiple_of == 0
    assert not taken or late or len(taken) == wanted // asked.multiple_of * asked.multiple_of
    assert not taken or len(taken) >= min(least, wanted // asked.multiple_of * asked.multiple_of)
    assert not set(choice.take) & set(choice.stale)
    assert {g.name for g in groups if g.oldest_version is not None and base - g.oldest_version > bound} == set(
        choice.stale
    )
    shuffled = groups[:]
    rng.shuffle(shuffled)
    assert choose_batch(shuffled, base, asked, 10 if late else 0, 10, exhausted=False) == choice
