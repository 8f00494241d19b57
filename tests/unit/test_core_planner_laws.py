"""The planner's laws over random clusters, models and time: what it may never do, however the numbers fall.

First of single accelerators (`planner.plan`), then of whole layouts (`relayout.plan`).
"""

import dataclasses
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core import relayout
from services.scheduler.core.costmodel import NEVER_S, CostModel
from services.scheduler.core.layouts import Job, Judge, search
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState
from services.scheduler.core.placement import Limits, Progress, Safety, after
from services.scheduler.core.planner import MAX_ALTERNATIVES, AcceleratorView, PlanInput, layout_of, plan
from services.scheduler.core.topology import Fleet, Replica
from tests.support.fleets import (
    AT_ONCE,
    DEMANDS,
    PENALTIES,
    SLOW,
    demand,
    engine_rates,
    fleet,
    situation,
    trainer_rates,
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


# ---- whole layouts

TRAINING = st.lists(st.sampled_from([2, 4]), max_size=2)
ENGINES = st.lists(st.sampled_from([1, 1, 2, 4]), max_size=4)
PACES = st.builds(
    Pace, now=st.just(1_000.0), steps_seen=st.integers(0, 6), steps_since_move=st.integers(0, 6),
    last_moves=st.lists(st.floats(700.0, 1_000.0), max_size=4).map(tuple), busy=st.booleans(), shifted=st.booleans(),
)  # fmt: skip
LAYOUT_RULES = st.builds(
    PlannerSettings,
    confirmations=st.integers(1, 2), min_trainers=st.integers(0, 3), min_rollouts=st.integers(0, 3),
    min_steps=st.integers(0, 4), hysteresis=st.floats(0.0, 1.0), horizon_s=st.floats(10.0, 10_000.0),
    max_moves_per_window=st.integers(1, 4), cooldown_s=st.floats(0.0, 100.0),
)  # fmt: skip


def packed(trainers, engines):
    """Three nodes of four: trainers on the first, engines on the second, as many as there is room for."""
    names, replicas = [a.name for a in fleet(nodes=3).accelerators], []
    for role, start, sizes in (("TRAINER", 0, trainers), ("ROLLOUT", 4, engines)):
        at = start
        for number, width in enumerate(sizes):
            if at + width <= start + 4:
                replicas.append(Replica(f"{role[0].lower()}{number}", role, tuple(names[at : at + width])))
                at += width
    return Fleet(fleet(nodes=3).accelerators, tuple(replicas))


@pytest.mark.parametrize("tie", [0.0, 0.1])
@pytest.mark.parametrize(("mean", "groups"), [(2_000.0, 8), (1_000.0, 16)])
def test_of_equal_layouts_the_fewest_kinds_of_engines_and_then_the_best_for_longer_sequences(
    mean, groups, tie, monkeypatch
):
    monkeypatch.setattr(relayout, "TIE", tie)
    work, here = demand(mean, groups=groups, samples=4), fleet(trainers=(2,), engines=(1, 1), nodes=3)
    engines, trainers = engine_rates(penalty=0.7, kv=20_000.0), trainer_rates()
    given_ = situation(here, demand=work, engines=engines, trainers=trainers)
    chosen = relayout.plan(given_, AT_ONCE, PlannerState()).chosen.judged.layout
    near = search(here, Job(work, engines, trainers), seeds=(here.present,), tie=tie).near
    assert len(near[0].engines) == 2, "a mix is the fastest by a little"
    assert (len(near) > 1) == (chosen != near[0]) == (tie > 0)
    fewest = [f for f in near if len(f.engines) == min(len(n.engines) for n in near)]
    longer = Judge(Job(work.scaled(relayout.LONGER), engines, trainers)).seconds(near)
    assert chosen in fewest
    assert longer[chosen] == min(longer[f] for f in fewest)


@settings(max_examples=50, deadline=None)
@given(TRAINING, ENGINES, DEMANDS, PENALTIES, SLOW, LAYOUT_RULES, PACES, st.floats(-0.3, 0.3))
def test_laws_of_every_relayout(trainers, engines, work, penalty, heavy, rules, pace, drift):
    here = packed(trainers, engines)
    given_ = situation(
        here, demand=work, engines=engine_rates(penalty=penalty), trainers=trainer_rates(slow=heavy), pace=pace,
        drift=drift,
    )  # fmt: skip
    found = relayout.plan(given_, rules, PlannerState())
    # what is shown
    shown = (found.chosen, found.present, *found.alternatives)
    assert found.present.judged.layout == here.present
    assert all(c.reason.code and c.reason.text for c in shown)
    assert "present" in {c.label for c in shown}
    assert "homogeneous-best" in {c.label for c in shown} or found.reason.code == "NO_LAYOUT"
    assert len({c.label for c in shown[1:]}) == len(shown[1:]) - (found.chosen is not found.present)
    assert found.reason.code
    assert all(math.isfinite(n) for n in numbers_of(found) if n != math.inf)
    assert all("nan" not in c.reason.text and " inf" not in c.reason.text for c in shown)
    best = found.chosen.judged.prediction.trained_tokens_per_second
    # as good as the best, but for what is lost where a tie is settled for longer sequences
    assert best >= max(c.judged.prediction.trained_tokens_per_second for c in shown) * (1 - relayout.TIE - 2e-4)
    # what moves
    if pace.busy or pace.steps_seen < rules.min_steps:
        assert found.moves == ()
    if not found.moves:
        return
    recent = [t for t in pace.last_moves if 1_000.0 - t < rules.window_s]
    assert len(found.moves) + len(recent) <= rules.max_moves_per_window
    assert all(1_000.0 - t >= rules.cooldown_s for t in recent)
    assert found.gain_tokens > found.cost_tokens * (1 + rules.hysteresis)
    assert found.reason.code == "GAIN"
    limits = Limits(rules.min_trainers, rules.min_rollouts, work.longest_context)
    safety, there = Safety(limits, given_.engines, given_.trainers), here
    for planned in found.moves:
        assert Progress(there, safety).unsafe(planned.move) is None
        there = after(there, planned.move, safety)
        assert there.present == planned.layout
        assert planned.reason.text


@settings(max_examples=12, deadline=None)
@given(DEMANDS, PENALTIES, SLOW, st.randoms(use_true_random=False))
def test_the_order_of_input_does_not_matter(work, penalty, heavy, rng):
    here = packed([2], [1, 1, 2])
    engines, trainers = engine_rates(penalty=penalty), trainer_rates(slow=heavy)
    plain = relayout.plan(situation(here, demand=work, engines=engines, trainers=trainers), AT_ONCE, PlannerState())
    shuffled = [list(items) for items in (here.accelerators, here.replicas, engines.items(), trainers.items())]
    for items in shuffled:
        rng.shuffle(items)
    mixed = relayout.plan(
        situation(
            Fleet(tuple(shuffled[0]), tuple(shuffled[1])), demand=work, engines=dict(shuffled[2]),
            trainers=dict(shuffled[3]),
        ),
        AT_ONCE, PlannerState(),
    )  # fmt: skip
    assert mixed.chosen.judged.layout == plain.chosen.judged.layout
    assert [m.move for m in mixed.moves] == [m.move for m in plain.moves]
    assert mixed.reason.text == plain.reason.text


@settings(max_examples=20, deadline=None)
@given(DEMANDS, st.floats(0.05, 5.0), st.floats(1.5, 10.0))
def test_more_work_for_a_role_never_lowers_its_accelerators(work, heavy, factor):
    """Engines of one degree and trainers of one size, so that every accelerator counts on either side."""

    def chosen(training, rollout):
        given_ = situation(
            packed([2], [1]), demand=work, engines=engine_rates(degrees=(1,), slow=rollout, kv=1e6),
            trainers=trainer_rates(sizes=(2,), slow=training),
        )  # fmt: skip
        return relayout.plan(given_, AT_ONCE, PlannerState()).chosen.judged.layout

    plain = chosen(heavy, 1.0)
    assert chosen(heavy * factor, 1.0).training >= plain.training
    assert chosen(heavy, factor).rollout >= plain.rollout


@settings(max_examples=12, deadline=None)
@given(DEMANDS, PENALTIES, SLOW)
def test_at_the_best_layout_nothing_moves_and_a_change_comes_to_rest(work, penalty, heavy):
    engines, trainers = engine_rates(penalty=penalty), trainer_rates(slow=heavy)
    here, state = packed([2], [1, 1, 2]), PlannerState()
    safety = Safety(Limits(), engines, trainers)
    for _ in range(6):
        found = relayout.plan(situation(here, demand=work, engines=engines, trainers=trainers), AT_ONCE, state)
        for planned in found.moves:
            here = after(here, planned.move, safety)
        if not found.moves:
            break
    assert not found.moves, "it never came to rest"
    again = relayout.plan(situation(here, demand=work, engines=engines, trainers=trainers), AT_ONCE, state)
    assert again.moves == ()


@pytest.mark.parametrize("seed", range(3))
def test_at_balance_noisy_steps_move_nothing(seed):
    """The best layout for the mean; every evaluation sees work and rates that are off by up to 5 %."""
    rng = random.Random(seed)
    engines, trainers, here = engine_rates(kv=1e6), trainer_rates(), packed([2], [1, 1, 2])
    rules = replace(AT_ONCE, horizon_s=600.0, confirmations=2, hysteresis=0.1)
    for _ in range(4):
        found = relayout.plan(situation(here, engines=engines, trainers=trainers), AT_ONCE, PlannerState())
        for planned in found.moves:
            here = after(here, planned.move, Safety(Limits(), engines, trainers))
    state, moves = PlannerState(), 0
    for _ in range(15):
        noisy = {k: replace(r, step_s=r.step_s * rng.uniform(0.95, 1.05)) for k, r in engines.items()}
        given_ = situation(here, demand=demand(2_000 * rng.uniform(0.95, 1.05)), engines=noisy, trainers=trainers)
        moves += len(relayout.plan(given_, rules, state).moves)
    assert moves == 0


def test_a_shift_skips_confirmations_and_settling_but_neither_cool_down_nor_rate():
    slow = trainer_rates(slow=20.0)
    here = packed([2], [1, 1, 2])
    rules = replace(AT_ONCE, confirmations=3, cooldown_s=50.0, max_moves_per_window=2)

    def code(**changes):
        pace = Pace(1_000.0, 50, changes.pop("since", 50), shifted=True, **changes)
        return relayout.plan(situation(here, trainers=slow, pace=pace), rules, PlannerState()).reason.code

    waiting = relayout.plan(situation(here, trainers=slow), rules, PlannerState())
    assert (waiting.reason.code, waiting.moves) == ("CONFIRMING", ())
    assert code() == "GAIN"
    assert code(since=1, last_moves=(900.0,)) == "GAIN"
    assert code(last_moves=(960.0,)) == "COOLDOWN"
    assert code(last_moves=(900.0, 910.0)) == "RATE"


def test_a_sequence_is_cut_where_the_window_ends_and_goes_on_later():
    engines = engine_rates(degrees=(1, 4), penalty=0.0, kv=1e6)
    here = fleet(trainers=(4,), engines=(1,) * 8, nodes=3)
    work, trainers = demand(max_versions=0), trainer_rates(slow=0.01)
    whole = relayout.plan(situation(here, demand=work, engines=engines, trainers=trainers), AT_ONCE, PlannerState())
    assert len(whole.moves) > 1
    cut = relayout.plan(
        situation(here, demand=work, engines=engines, trainers=trainers), replace(AT_ONCE, max_moves_per_window=1),
        PlannerState(),
    )  # fmt: skip
    assert len(cut.moves) == 1
    assert cut.chosen.judged.layout == whole.chosen.judged.layout
    there = after(here, cut.moves[0].move, Safety(Limits(), engines, trainers))
    rest = relayout.plan(situation(there, demand=work, engines=engines, trainers=trainers), AT_ONCE, PlannerState())
    assert len(rest.moves) == len(whole.moves) - 1


def test_a_move_that_does_not_pay_within_the_horizon_or_the_run_is_left():
    slow = trainer_rates(slow=20.0)
    here = packed([2], [1, 1, 2])
    assert relayout.plan(situation(here, trainers=slow), AT_ONCE, PlannerState()).moves
    brief = relayout.plan(situation(here, trainers=slow), replace(AT_ONCE, horizon_s=1.0), PlannerState())
    assert (brief.moves, brief.reason.code) == ((), "BALANCED")
    assert "not worth it" in brief.reason.text
    ending = relayout.plan(situation(here, trainers=slow, steps_left=1e-5), AT_ONCE, PlannerState())
    assert ending.moves == ()
    costly = relayout.plan(
        situation(here, trainers=slow, handover_s={"TRAINER": 1e6, "ROLLOUT": 1e6}), AT_ONCE, PlannerState()
    )
    assert costly.moves == ()


def test_drift_is_planned_for():
    """Lengths grow within the horizon, and longer contexts need more of the cache: more engines than for now alone."""
    engines, trainers = engine_rates(degrees=(1,), kv=20_000.0), trainer_rates(sizes=(1, 2), slow=0.6)
    work, here = demand(500.0, groups=32, samples=16, max_versions=2), packed([2], [1])
    now, later = (
        relayout.plan(
            situation(here, demand=work, engines=engines, trainers=trainers, drift=d), AT_ONCE, PlannerState()
        ).chosen.judged.layout
        for d in (0.0, 0.2)
    )
    assert later.rollout > now.rollout


@pytest.mark.parametrize("drift", [0.01, 0.03, 0.07, 0.2])
def test_lengths_that_grow_to_the_longest_context_still_fit_where_it_does(drift):
    """The longest sequence that a run allows is what micro-batches are made for: growth must not pass it by rounding."""
    work = demand(
        4_000.0, max_context=40_960.0, prompt_tokens=437.3, contexts=(2_437.3, 4_437.3, 8_437.3, 16_437.3, 32_437.3)
    )
    given_ = situation(packed([2], [2]), demand=work, trainers=trainer_rates(budget=40_960.0), drift=drift)
    found = relayout.plan(given_, AT_ONCE, PlannerState())
    assert found.reason.code != "NO_LAYOUT"
    assert found.chosen.judged.prediction.trained_tokens_per_second > 0


def test_case_46_a_plan_is_refused_where_what_would_sleep_does_not_fit_into_host_memory():
    """More trainers would be better, but an engine that sleeps keeps its weights in host memory, which is full."""
    engines, trainers = engine_rates(asleep_bytes=30e9), trainer_rates(slow=20.0)
    roomy = {"n0": 400e9, "n1": 400e9, "n2": 400e9}
    here = fleet(trainers=(4,), engines=(4, 4), nodes=3, host_free=roomy)
    moves = relayout.plan(situation(here, engines=engines, trainers=trainers), AT_ONCE, PlannerState()).moves
    assert any(t.role == "TRAINER" for m in moves for t in m.move.targets)
    full = Fleet(here.accelerators, here.replicas, dict.fromkeys(roomy, 20e9))
    found = relayout.plan(situation(full, engines=engines, trainers=trainers), AT_ONCE, PlannerState())
    assert (found.moves, found.reason.code) == ((), "HOST_MEMORY")
    assert "20.0 GB free" in found.reason.text


def test_case_46_engines_go_to_sleep_where_there_is_room_for_them():
    """One node has no host memory left: its engines stay, and others make room for trainers."""
    engines, trainers = engine_rates(degrees=(2,), asleep_bytes=30e9), trainer_rates(sizes=(2,), slow=20.0)
    here = fleet(trainers=(2,), engines=(2,) * 5, nodes=3, host_free={"n0": 400e9, "n1": 400e9, "n2": 20e9})
    found = relayout.plan(situation(here, engines=engines, trainers=trainers), AT_ONCE, PlannerState())
    slept = {name[:2] for m in found.moves for source in m.move.sources for name in here.replica[source].accelerators}
    assert slept
    assert "n2" not in slept


def test_a_kind_without_rates_is_named():
    with pytest.raises(ValueError, match=r"'r0' is of kind EngineKind\(type='a', tp=2\), which has no rates"):
        relayout.plan(situation(fleet(engines=(2,)), engines=engine_rates(degrees=(1, 4))), AT_ONCE, PlannerState())


def test_with_no_accelerator_or_no_room_there_is_a_reason_and_no_move():
    empty = relayout.plan(situation(Fleet(())), AT_ONCE, PlannerState())
    assert (empty.moves, empty.reason.code) == ((), "NO_LAYOUT")
    small = relayout.plan(
        situation(fleet(nodes=1, size=2), trainers=trainer_rates(sizes=(4,))), AT_ONCE, PlannerState()
    )
    assert (small.moves, small.reason.code) == ((), "NO_LAYOUT")


def test_a_fleet_that_stands_idle_is_put_to_work():
    found = relayout.plan(situation(fleet()), AT_ONCE, PlannerState())
    assert found.moves
    assert found.moves[-1].layout == found.chosen.judged.layout
