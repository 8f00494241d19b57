"""The planner's laws over random clusters, models and time: what it may never do, however the numbers fall."""

import dataclasses
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.costmodel import NEVER_S, CostModel
from services.scheduler.core.planner import (
    MAX_ALTERNATIVES,
    AcceleratorView,
    PlanInput,
    PlannerSettings,
    PlannerState,
    layout_of,
    plan,
)

POOLS = st.sampled_from(["HYBRID", "HYBRID", "CORE_TRAINING", "CORE_ROLLOUT"])
CLUSTERS = st.lists(
    st.tuples(POOLS, st.sampled_from(["TRAINER", "ROLLOUT"]), st.booleans(), st.integers(0, 2), st.floats(0, 100)),
    max_size=24,
).map(lambda rows: [AcceleratorView(f"a{i}", *row) for i, row in enumerate(rows)])
RATES = st.one_of(st.none(), st.floats(0.0, 1e5), st.just(math.nan), st.just(math.inf))
BROKEN = st.tuples(st.lists(RATES, max_size=3), RATES, RATES, st.one_of(st.none(), st.integers(0, 10**7)), RATES)
HEALTHY = st.tuples(
    st.lists(st.floats(50.0, 500.0), min_size=1, max_size=3), st.sampled_from([0.5, 20.0, 400.0]), st.floats(0.0, 1.0),
    st.integers(1_000, 9_000), st.none(),
)  # fmt: skip
MODELS = st.one_of(HEALTHY, BROKEN)
RULES = st.builds(
    PlannerSettings,
    confirmations=st.integers(1, 2), min_trainers=st.integers(0, 3), min_rollouts=st.integers(0, 3),
    min_steps=st.integers(0, 4), hysteresis=st.floats(0.0, 1.0), horizon_s=st.floats(1.0, 600.0),
)  # fmt: skip


def model_of(rates, parallel, serial, tokens, tail):
    known = CostModel()
    for level, rate in enumerate(rates):
        if rate is not None:
            known.observe_rollout(level, rate, 1.0)
    if parallel is not None:
        known.observe_training(parallel, serial or 0.0, 1)
    if tokens is not None:
        known.observe_step(tokens, tokens)
    if tail is not None:
        known.observe_tail(tail)
    return known


def numbers_of(thing):
    """Every float within nested dataclasses, tuples and mappings, with where it is."""
    if isinstance(thing, float):
        yield thing
    elif dataclasses.is_dataclass(thing):
        for item in dataclasses.fields(thing):
            yield from numbers_of(getattr(thing, item.name))
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from numbers_of(value)
    elif isinstance(thing, tuple):
        for value in thing:
            yield from numbers_of(value)


def moved(accelerators, move):
    return [replace(a, role=move.to_role) if a.name == move.accelerator else a for a in accelerators]


@settings(max_examples=80)
@given(CLUSTERS, MODELS, RULES, st.integers(0, 6), st.integers(0, 4))
def test_laws_of_every_plan(accelerators, observed, rules, steps, bound):
    known = model_of(*observed)
    given_ = PlanInput(1_000.0, tuple(accelerators), bound, steps, steps)
    state = PlannerState()
    for _ in range(rules.confirmations):
        result = plan(given_, known, rules, state)
    # numbers
    assert all(math.isfinite(n) for n in numbers_of(result)), result
    for text in (result.reason.text, *(a.reason.text for a in (result.present, *result.alternatives))):
        assert "nan" not in text
        assert " inf" not in text
    # what is shown
    present = layout_of(accelerators)
    shown = (result.chosen, result.present, *result.alternatives)
    assert result.present.layout == present
    assert len(result.alternatives) <= MAX_ALTERNATIVES
    assert all(a.reason.code and a.reason.text for a in shown)
    assert result.reason.code
    assert result.reason.text
    assert result.chosen.prediction.trained_tokens_per_second >= max(
        (a.prediction.trained_tokens_per_second for a in result.alternatives if a.label != "homogeneous-best"),
        default=0.0,
    )
    # what moves
    assert len(result.moves) <= 1
    if steps < rules.min_steps or not known.ready:
        assert (result.moves, result.reason.code) == ((), "NO_EVIDENCE")
    for move in result.moves:
        item = next(a for a in accelerators if a.name == move.accelerator)
        assert item.pool == "HYBRID"
        assert item.movable
        assert (item.role, {"TRAINER", "ROLLOUT"}) == (move.from_role, {move.from_role, move.to_role})
        after = layout_of(moved(accelerators, move))
        assert after.trainers >= rules.min_trainers
        assert after.rollout_count >= rules.min_rollouts
        assert move.gain_tokens > move.cost_tokens * (1 + rules.hysteresis)
        here = result.present.prediction.trained_tokens_per_second
        assert move.gain_rate == pytest.approx(known.predict(after, bound).trained_tokens_per_second - here)
        assert move.gain_rate > here * rules.hysteresis
        assert f"{present.trainers} training / {present.rollout_count} rollout" in move.reason.text


@pytest.mark.parametrize("parallel", [0.2, 2_000.0], ids=["rollout-bound", "training-bound"])
@pytest.mark.parametrize("seed", range(12))
def test_where_one_phase_is_far_too_slow_only_what_may_move_moves(seed, parallel):
    """One side is short by orders of magnitude; still floors hold and only movable hybrids go, until none is left."""
    rng = random.Random(seed)
    here = [
        AcceleratorView(
            f"a{i}", rng.choice(["HYBRID", "HYBRID", "CORE_TRAINING", "CORE_ROLLOUT"]),
            rng.choice(["TRAINER", "ROLLOUT"]), rng.random() < 0.7, rng.randint(0, 2), rng.uniform(0, 9),
        )
        for i in range(rng.randint(4, 10))
    ]  # fmt: skip
    rules = PlannerSettings(
        confirmations=1, min_trainers=rng.randint(1, 2), min_rollouts=rng.randint(1, 2), horizon_s=6_000.0
    )
    known, went = model_of([100.0, 60.0], parallel, 0.01, 100_000, None), 0
    for _ in range(20):
        result = plan(PlanInput(0.0, tuple(here), 1, 50, 50), known, rules, PlannerState())
        for move in result.moves:
            item = next(a for a in here if a.name == move.accelerator)
            assert (item.pool, item.movable) == ("HYBRID", True)
            here, went = moved(here, move), went + 1
            assert layout_of(here).trainers >= rules.min_trainers
            assert layout_of(here).rollout_count >= rules.min_rollouts
    assert not result.moves, "it comes to rest"
    assert went <= len(here)


@settings(max_examples=12)
@given(
    st.integers(0, 10_000), st.floats(0.0, 60.0), st.integers(1, 4), st.floats(20.0, 300.0), st.integers(1, 3)
)  # fmt: skip
def test_moves_keep_their_distance_and_their_rate_while_the_load_swings(seed, cooldown, most, window, confirmations):
    """Work swings between the phases every few evaluations, so that a planner without bounds would move all the time."""
    rng = random.Random(seed)
    rules = PlannerSettings(
        cooldown_s=cooldown, max_moves_per_window=most, window_s=window, confirmations=confirmations, min_steps=2
    )
    here = [AcceleratorView("t", "CORE_TRAINING", "TRAINER", False, 0)]
    here += [AcceleratorView("r", "CORE_ROLLOUT", "ROLLOUT", False, 0)]
    here += [AcceleratorView(f"h{i}", "HYBRID", "ROLLOUT", True, 0) for i in range(4)]
    state, moves, now, since_move, wins = PlannerState(), [], 0.0, 10, 0
    for step in range(150):
        now += rng.uniform(1.0, 6.0)
        known = model_of([100.0], 1.0 if step // 8 % 2 else 200.0, 0.1, 4_000, None)
        given_ = PlanInput(now, tuple(here), 2, step, since_move, tuple(moves))
        result = plan(given_, known, rules, state)
        since_move += 1
        wins = wins + 1 if result.moves or result.reason.code == "CONFIRMING" else wins
        for move in result.moves:
            assert wins >= confirmations, seed
            wins = 0
            assert not moves or now - moves[-1] >= cooldown, seed
            assert not moves or since_move > rules.min_steps, seed
            moves.append(now)
            assert sum(now - t < window for t in moves) <= most, seed
            here, since_move = moved(here, move), 0
    assert moves, seed


@given(st.floats(0.5, 50.0), st.floats(1.0, 30.0), st.integers(1, 8), st.integers(0, 8))
def test_more_training_work_never_lowers_the_trainers_chosen(parallel, factor, hybrids, training):
    here = [AcceleratorView("t", "CORE_TRAINING", "TRAINER", False, 0)]
    here += [AcceleratorView("r", "CORE_ROLLOUT", "ROLLOUT", False, 1)]
    here += [
        AcceleratorView(f"h{i}", "HYBRID", "TRAINER" if i < training else "ROLLOUT", True, i % 2)
        for i in range(hybrids)
    ]
    given_ = PlanInput(0.0, tuple(here), 1, 10, 10)
    trainers = [
        plan(given_, model_of([200.0, 90.0], work, 0.3, 2_000, 6.0), PlannerSettings(), PlannerState())
        .chosen.layout.trainers
        for work in (parallel, parallel * factor, parallel * factor * factor)
    ]  # fmt: skip
    assert trainers == sorted(trainers)


def test_before_any_evidence_no_step_is_promised():
    here = [
        AcceleratorView("t", "CORE_TRAINING", "TRAINER", False, 0),
        AcceleratorView("h", "HYBRID", "ROLLOUT", True, 0),
    ]
    result = plan(PlanInput(0.0, tuple(here), 1, 0, 0), CostModel(), PlannerSettings(), PlannerState())
    assert result.present.prediction.rollout_seconds == NEVER_S
    assert result.present.prediction.trained_tokens_per_second == 0.0
    assert "rollout never" in result.present.reason.text


def test_with_no_accelerator_there_is_a_plan_that_moves_nothing():
    result = plan(PlanInput(0.0, (), 1, 10, 10), model_of([1.0], 1.0, 0.0, 10, None), PlannerSettings(), PlannerState())
    assert result.moves == ()
    assert result.chosen.layout == result.present.layout == layout_of([])
