"""Cost model and planner: the split that the model says is best, moved to only when that is sure to pay."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.costmodel import DEFAULT_HANDOVER_S, CostModel, Layout
from services.scheduler.core.pacing import PlannerSettings, PlannerState
from services.scheduler.core.planner import AcceleratorView, PlanInput, layout_of, plan


def model(parallel=4.0, serial=0.2, rates=((0, 1_000.0), (1, 700.0)), tokens=4_000, tail=0.0):
    """After ten equal steps: `parallel` and `serial` seconds of one trainer, tokens per second of each level."""
    known = CostModel()
    for _ in range(10):
        known.observe_step(tokens, tokens)
        known.observe_training(parallel, serial, 1)
        for level, rate in rates:
            known.observe_rollout(level, rate, 1.0)
        if tail:
            known.observe_tail(tail)
    return known


def cluster(trainers=0, hybrids=2, core_training=1, core_rollout=1):
    """Core accelerators and `hybrids` of which the first `trainers` train."""
    rows = [AcceleratorView(f"t{i}", "CORE_TRAINING", "TRAINER", False, 0) for i in range(core_training)]
    rows += [AcceleratorView(f"r{i}", "CORE_ROLLOUT", "ROLLOUT", False, 1) for i in range(core_rollout)]
    return rows + [
        AcceleratorView(f"h{i}", "HYBRID", "TRAINER" if i < trainers else "ROLLOUT", True, 0, float(i))
        for i in range(hybrids)
    ]


def given_(accelerators, **changes):
    base = {"now": 1_000.0, "max_versions": 2, "steps_seen": 50, "steps_since_move": 50}
    return PlanInput(accelerators=tuple(accelerators), **(base | changes))


AT_ONCE = PlannerSettings(confirmations=1)


# ---- cost model


def test_a_step_takes_as_long_as_its_slower_phase():
    known = model(parallel=4.0, serial=0.2, rates=((0, 1_000.0),), tokens=4_000)
    few = known.predict(Layout(1, ((0, 1),)), 2)
    assert few.rollout_seconds == pytest.approx(4.0)
    assert few.train_seconds == pytest.approx(4.2)
    assert few.step_seconds == pytest.approx(4.2)
    assert few.trained_tokens_per_second == pytest.approx(4_000 / 4.2)
    more = known.predict(Layout(2, ((0, 1),)), 2)
    # half of the parallel part, 5 % lost, and the serial part as before
    assert more.train_seconds == pytest.approx(0.2 + 2.0 * 1.05)


def test_the_tail_bounds_a_step_over_k_plus_one_steps():
    known = model(tail=30.0)
    assert known.predict(Layout(4, ((0, 4),)), 2).step_seconds == pytest.approx(10.0)
    assert known.predict(Layout(4, ((0, 4),)), 0).step_seconds == pytest.approx(30.0)


def test_a_plan_says_that_the_longest_trajectory_bounds_the_step():
    result = plan(given_(cluster()), model(tail=300.0), AT_ONCE, PlannerState())
    assert "bound by tail" in result.present.reason.text
    assert "longest trajectory 300.0 s" in result.present.reason.text


def test_a_role_without_a_replica_trains_nothing():
    known = model()
    assert known.predict(Layout(0, ((0, 1),)), 2).trained_tokens_per_second == 0
    assert known.predict(Layout(1, ()), 2).trained_tokens_per_second == 0
    assert not CostModel().ready


def test_capacity_is_the_rate_over_how_full_it_was():
    known = CostModel()
    for _ in range(5):
        known.observe_rollout(0, 300.0, 0.5)
        known.observe_rollout(0, 1.0, 0.01)  # nearly idle: says nothing
        known.observe_rollout(0, 0.0, 1.0)
    assert known.capacity[0].value == pytest.approx(600.0)


def test_what_two_replicas_took_is_told_apart_from_what_one_takes():
    known = CostModel()
    known.observe_training(2.1, 0.3, 2)
    assert known.parallel_seconds.value == pytest.approx(4.0)


def test_drift_is_followed_within_a_dozen_steps():
    known = model(tokens=1_000)
    for _ in range(12):
        known.observe_step(8_000, 8_000)
    assert known.tokens_per_step.value == pytest.approx(8_000, rel=0.02)


def test_a_handover_costs_the_default_until_one_was_seen():
    known = CostModel()
    assert known.handover("TRAINER") == DEFAULT_HANDOVER_S
    known.observe_handover("TRAINER", 2.0)
    assert known.handover("TRAINER") == 2.0
    assert known.handover("ROLLOUT") == DEFAULT_HANDOVER_S


# ---- moves


def test_training_bound_moves_a_rollout_accelerator_to_training():
    result = plan(given_(cluster(trainers=0)), model(parallel=6.0), AT_ONCE, PlannerState())
    (move,) = result.moves
    assert (move.accelerator, move.from_role, move.to_role) == ("h0", "ROLLOUT", "TRAINER")
    assert move.gain_tokens > move.cost_tokens * 1.1
    assert move.gain_rate == pytest.approx(move.gain_tokens / AT_ONCE.horizon_s)
    assert "1 training / 3 rollout" in move.reason.text
    assert "2 training / 2 rollout" in move.reason.text


def test_rollout_bound_moves_a_training_accelerator_to_rollout():
    result = plan(given_(cluster(trainers=2)), model(parallel=1.0), AT_ONCE, PlannerState())
    assert [m.to_role for m in result.moves] == ["ROLLOUT"]


def test_a_move_must_win_as_often_in_a_row_as_agreed():
    state, rules = PlannerState(), PlannerSettings(confirmations=3)
    slow, balanced, view = model(parallel=6.0), model(parallel=1.0), given_(cluster(trainers=0))
    codes = [plan(view, slow, rules, state).reason.code for _ in range(2)]
    codes.append(plan(view, balanced, rules, state).reason.code)
    codes += [plan(view, slow, rules, state).reason.code for _ in range(3)]
    assert codes == ["CONFIRMING", "CONFIRMING", "BALANCED", "CONFIRMING", "CONFIRMING", "GAIN"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"busy": True}, "HANDOVER"),
        ({"steps_seen": 2}, "NO_EVIDENCE"),
        ({"last_moves": (995.0,)}, "COOLDOWN"),
        ({"last_moves": (900.0,), "steps_since_move": 1}, "SETTLING"),
        ({"last_moves": tuple(range(750, 810, 10))}, "RATE"),
    ],
)
def test_when_nothing_may_move_and_why(changes, code):
    result = plan(given_(cluster(trainers=0), **changes), model(parallel=6.0), AT_ONCE, PlannerState())
    assert (result.moves, result.reason.code) == ((), code)


def test_a_model_that_has_seen_one_phase_only_moves_nothing():
    known = CostModel()
    known.observe_rollout(0, 1_000.0, 1.0)
    assert plan(given_(cluster()), known, AT_ONCE, PlannerState()).reason.code == "NO_EVIDENCE"


def test_a_gain_smaller_than_the_move_costs_is_left():
    known = model(parallel=6.0)
    known.observe_handover("TRAINER", 5_000.0)
    assert plan(given_(cluster(trainers=0)), known, AT_ONCE, PlannerState()).moves == ()


def test_core_accelerators_and_those_without_another_worker_stay():
    rows = [AcceleratorView("t0", "CORE_TRAINING", "TRAINER", True, 0)]
    rows += [AcceleratorView(f"r{i}", "CORE_ROLLOUT", "ROLLOUT", True, 0) for i in range(3)]
    rows += [AcceleratorView("h0", "HYBRID", "ROLLOUT", False, 0)]
    assert plan(given_(rows), model(parallel=60.0), AT_ONCE, PlannerState()).moves == ()


def test_floors_hold():
    rules = PlannerSettings(confirmations=1, min_rollouts=3)
    assert plan(given_(cluster(trainers=0)), model(parallel=60.0), rules, PlannerState()).moves == ()
    rules = PlannerSettings(confirmations=1, min_trainers=3)
    assert plan(given_(cluster(trainers=2)), model(parallel=0.1), rules, PlannerState()).moves == ()


@pytest.mark.parametrize("seed", range(4))
def test_at_balance_noise_moves_nothing(seed):
    """300 evaluations with every observation off by up to a tenth; the best layout is the present one."""
    rng = random.Random(seed)
    known, state, rules = model(parallel=5.0, rates=((0, 1_000.0),), tokens=6_000), PlannerState(), PlannerSettings()
    here = cluster(trainers=1)
    for _ in range(300):
        known.observe_step(int(6_000 * rng.uniform(0.9, 1.1)), int(6_000 * rng.uniform(0.9, 1.1)))
        known.observe_training(2.6 * rng.uniform(0.9, 1.1), 0.2 * rng.uniform(0.9, 1.1), 2)
        known.observe_rollout(0, 1_000.0 * rng.uniform(0.9, 1.1), 1.0)
        assert plan(given_(here), known, rules, state).moves == ()


def test_a_move_is_not_taken_back_by_the_next_evaluation():
    known = model(parallel=6.0)
    for trainers in range(3):
        result = plan(given_(cluster(trainers=trainers)), known, AT_ONCE, PlannerState())
        if not result.moves:
            break
        assert result.moves[0].to_role == "TRAINER"
    else:
        raise AssertionError("it never came to rest")


def test_of_equal_ones_that_which_has_served_longest_moves():
    rows = [*cluster(hybrids=0), AcceleratorView("young", "HYBRID", "ROLLOUT", True, 0, 9.0)]
    rows += [AcceleratorView("old", "HYBRID", "ROLLOUT", True, 0, 1.0)]
    (move,) = plan(given_(rows), model(parallel=6.0), AT_ONCE, PlannerState()).moves
    assert move.accelerator == "old"


def test_the_present_and_the_best_homogeneous_layout_are_always_shown():
    for trainers in range(3):
        result = plan(given_(cluster(trainers=trainers)), model(), AT_ONCE, PlannerState())
        labels = [a.label for a in (result.chosen, result.present, *result.alternatives)]
        assert "present" in labels
        assert "homogeneous-best" in labels
        assert len(result.alternatives) <= 15
    uniform = next(a for a in result.alternatives if a.label == "homogeneous-best")
    assert len(uniform.layout.rollouts) == 1
    assert "levels follow the configuration" in uniform.reason.text


# ---- laws

SPEEDS = st.floats(0.1, 60.0)


@settings(max_examples=60)
@given(SPEEDS, st.floats(0.0, 3.0), st.floats(50.0, 5_000.0), st.integers(0, 12), st.floats(1.0, 20.0))
def test_more_demand_for_a_role_never_lowers_its_share(parallel, serial, rate, hybrids, factor):
    rows = cluster(trainers=hybrids // 2, hybrids=hybrids)

    def chosen(parallel_now, rate_now):
        known = model(parallel=parallel_now, serial=serial, rates=((0, rate_now), (1, rate_now)))
        return plan(given_(rows), known, AT_ONCE, PlannerState()).chosen.layout

    plain = chosen(parallel, rate)
    assert chosen(parallel * factor, rate).trainers >= plain.trainers
    assert chosen(parallel, rate / factor).rollout_count >= plain.rollout_count


@settings(max_examples=60)
@given(SPEEDS, st.floats(50.0, 5_000.0), st.integers(0, 12), st.integers(0, 12), st.integers(0, 3), st.integers(0, 3))
def test_the_chosen_split_is_the_best_of_all_within_the_floors(
    parallel, rate, hybrids, training, min_trainers, min_rollouts
):
    rows = cluster(trainers=min(training, hybrids), hybrids=hybrids)
    known = model(parallel=parallel, rates=((0, rate), (1, rate / 2)))
    rules = PlannerSettings(confirmations=1, min_trainers=min_trainers, min_rollouts=min_rollouts)
    result = plan(given_(rows), known, rules, PlannerState())
    fits = [
        layout
        for count in range(hybrids + 1)
        if (layout := layout_of(cluster(trainers=count, hybrids=hybrids))).trainers >= min_trainers
        and layout.rollout_count >= min_rollouts
    ]
    best = max((known.predict(f, 2).trained_tokens_per_second for f in fits), default=None)
    if best is not None:
        assert result.chosen.prediction.trained_tokens_per_second == pytest.approx(best)
    for move in result.moves:
        assert move.accelerator.startswith("h")
        after = layout_of(
            [AcceleratorView(a.name, a.pool, move.to_role if a.name == move.accelerator else a.role, a.movable, a.level)
             for a in rows]
        )  # fmt: skip
        assert after.trainers >= min_trainers
        assert after.rollout_count >= min_rollouts
        assert known.predict(after, 2).trained_tokens_per_second > result.present.prediction.trained_tokens_per_second


def test_a_move_must_pay_before_the_run_ends():
    known = model(parallel=8.0, serial=0.0, rates=((0, 1_000.0), (1, 700.0)), tokens=4_000)
    long = plan(given_(cluster()), known, AT_ONCE, PlannerState())
    assert [m.to_role for m in long.moves] == ["TRAINER"]
    again = plan(given_(cluster(), steps_left=20.0), known, AT_ONCE, PlannerState())
    assert again.moves[0].gain_tokens == pytest.approx(long.moves[0].gain_tokens), "160 s are left: the whole horizon"
    short = plan(given_(cluster(), steps_left=0.1), known, AT_ONCE, PlannerState())
    assert not short.moves
    assert short.reason.code == "BALANCED"
