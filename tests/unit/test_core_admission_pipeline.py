"""Admission and batches as one pipeline: what the prediction promises, and what masking, holding and the end do."""

import random

from hypothesis import given, settings
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


def admit(bound, batch, unconsumed, lag=0):
    view = AdmissionView("TRAIN", False, bound, batch, 4, unconsumed, 0, unconsumed * 4, 0, 10_000, lag)
    return groups_to_admit(view).count


@settings(max_examples=50)
@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 2), st.integers(0, 10_000), st.booleans())
def test_case_31_taken_in_order_no_group_is_ever_older_than_predicted(bound, batch, lag, seed, commits_late):
    """Groups end in any order and wait, closed or in an uncommitted batch; engines lag. Nothing goes stale."""
    rng = random.Random(seed)
    lag = min(lag, bound)
    rules = BatchRules(batch, batch, 1, bound, "DROP_GROUP", look_ahead=0)
    head, serial, steps = 0, 0, 0
    alive, training = [], []
    for _ in range(150):
        count = admit(bound, batch, len(alive) + len(training), lag)
        for _ in range(count):
            alive.append(GroupView(f"g{serial}", serial, False, max(0, head - lag)))
            serial += 1
        for index in rng.sample(range(len(alive)), rng.randint(0, len(alive))):
            old = alive[index]
            alive[index] = GroupView(old.name, old.admission_number, True, old.oldest_version)
        if training and (not commits_late or rng.random() < 0.5):
            assert check_commit(training, head, bound) == []
            head, training, steps = head + 1, [], steps + 1
        if not training:
            choice = choose_batch(alive, head, rules, 0.0, 1e9, exhausted=False)
            assert choice.stale == (), (seed, choice)
            training = [(g.name, g.oldest_version) for g in alive if g.name in choice.take]
            assert all(head - version <= bound for _, version in training)
            alive = [g for g in alive if g.name not in choice.take]
    assert steps > 5, "the pipeline makes progress: the bound never admits too little for a batch"


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 8), st.integers(1, 50)), max_size=4)), max_size=10
    ),
    st.integers(0, 9), st.integers(0, 3), st.integers(1, 4),
)  # fmt: skip
def test_masking_leaves_exactly_what_is_fresh(rows, base, bound, wanted):
    groups = []
    for number, (closed, spans) in enumerate(rows):
        made = tuple(TokenSpan(f"t{number}", 0, 60 * i, n, version) for i, (version, n) in enumerate(spans))
        groups.append(GroupView(f"g{number}", number, closed, min((s.number for s in made), default=None), made))
    rules = BatchRules(wanted, 1, 1, bound, "MASK_TOKENS", look_ahead=2)
    choice = choose_batch(groups, base, rules, 10.0, 10.0, exhausted=False)
    by_name = {g.name: g for g in groups}
    spans = [s for name in choice.take for s in by_name[name].spans]
    assert set(choice.masked) == {s for s in spans if base - s.number > bound}
    for name in choice.take:
        own = by_name[name].spans
        assert not own or any(s not in choice.masked for s in own), "a group of nothing but masked tokens was taken"
    for name in choice.stale:
        assert by_name[name].closed, "an open group may still make fresh tokens"
        assert all(base - s.number > bound for s in by_name[name].spans)


@given(st.integers(0, 6), st.integers(0, 3), st.floats(0.0, 120.0), st.integers(0, 5))
def test_the_trainer_is_held_only_while_that_can_save_an_open_group(oldest, bound, held, base):
    rules = BatchRules(2, 2, 1, bound, "HOLD_TRAINER", look_ahead=4, hold_timeout=60.0)
    open_ = GroupView("open", 0, False, min(oldest, base))
    ready = [GroupView(f"g{i}", i + 1, True, base) for i in range(3)]
    choice = choose_batch([open_, *ready], base, rules, 0.0, 30.0, exhausted=False, held=held)
    age_next = base + 1 - open_.oldest_version
    too_old_already = base - open_.oldest_version > bound
    assert choice.hold == (age_next > bound and not too_old_already and held < 60.0)
    assert ("open" in choice.stale) == too_old_already
    if choice.hold:
        assert choice.take == ()
        assert choice.reason.code == "HOLD_TRAINER"
        closed = GroupView("open", 0, True, open_.oldest_version)
        assert "open" in choose_batch([closed, *ready], base, rules, 0.0, 30.0, exhausted=False, held=held).take
    else:
        assert len(choice.take) == 2


@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_at_the_end_of_the_tasks_all_but_an_unusable_rest_is_trained(ready, wanted, least, multiple):
    multiple, least = min(multiple, wanted), min(least, wanted)
    rules = BatchRules(wanted, least, multiple, 2, "DROP_GROUP", look_ahead=8)
    left = [GroupView(f"g{i}", i, True, 5) for i in range(ready)]
    for _ in range(ready + 1):
        choice = choose_batch(left, 5, rules, 0.0, 60.0, exhausted=True)
        if not choice.take:
            break
        assert len(choice.take) % multiple == 0
        assert list(choice.take) == [g.name for g in left[: len(choice.take)]]
        left = left[len(choice.take) :]
    assert len(left) < max(multiple, least)
    assert choice.reason.code == "NOT_ENOUGH"
    assert not choice.hold


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 20)), max_size=10),
    st.integers(0, 20),
    st.integers(0, 5),
)
def test_a_commit_names_each_member_beyond_the_bound_and_no_other(members, base, bound):
    assert check_commit(members, base, bound) == [name for name, v in members if v != -1 and v < base - bound]


@given(st.integers(0, 4), st.integers(2, 6), st.integers(0, 10_000))
def test_case_06_ten_new_versions_under_long_rollouts_leave_work_bounded_and_room_for_fresh_work(bound, batch, seed):
    """Each batch has one group that ends as late as the bound allows. Nothing is cancelled and started anew."""
    rng = random.Random(seed)
    rules = BatchRules(batch, batch, 1, bound, "HOLD_TRAINER", look_ahead=batch, hold_timeout=1e9)
    serial, alive, fresh = 0, [], []
    for head in range(10):
        for _ in range(admit(bound, batch, len(alive))):
            alive.append((GroupView(f"g{serial}", serial, False, head), serial % batch == 0))
            fresh.append(head)
            serial += 1
        assert len(alive) <= (bound + 1) * batch, "open and closed work is bounded"
        choice = None
        while choice is None or not choice.take:
            # short ones end in any order; a long one only when the trainer is held for it, or nothing else is left
            short = [i for i, (g, long) in enumerate(alive) if not g.closed and not long]
            waits = choice is not None and (choice.hold or not short)
            at = rng.choice(short) if short and not waits else min(
                (i for i, (g, _) in enumerate(alive) if not g.closed), key=lambda i: alive[i][0].admission_number
            )  # fmt: skip
            group, long = alive[at]
            alive[at] = (GroupView(group.name, group.admission_number, True, group.oldest_version), long)
            choice = choose_batch([g for g, _ in alive], head, rules, 0.0, 1e9, exhausted=False)
            assert choice.stale == (), "no work is thrown away"
        alive = [(g, long) for g, long in alive if g.name not in choice.take]
    for version in range(1, 10):
        assert fresh.count(version) == batch, "each version lets in a whole batch of fresh work"
