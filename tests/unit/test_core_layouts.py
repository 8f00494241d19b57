"""The search for a layout against all layouts there are, on fleets small enough to try them all."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.costmodel import NEVER_S
from services.scheduler.core.layouts import Judge, Space, search
from services.scheduler.core.placement import place
from services.scheduler.core.rates import EngineKind, TrainerKind
from services.scheduler.core.topology import Accelerator, Fleet, Replica, Room, layout_of
from tests.support.fleets import (
    DEMANDS,
    PENALTIES,
    SLOW,
    accelerators,
    demand,
    engine_rates,
    every_layout,
    fleet,
    job,
    trainer_rates,
)

POOLS = st.lists(st.sampled_from(["HYBRID", "HYBRID", "CORE_TRAINING", "CORE_ROLLOUT"]), max_size=8)


def exhaustive(where, work):
    """Seconds of the best of all layouts that have a place and keep the floors, each judged by itself."""
    kinds = [*work.trainers, *work.engines]
    judge, best = Judge(work), math.inf
    able = [
        f
        for f in every_layout(where, kinds)
        if f.training >= work.min_training and f.rollout >= work.min_rollout and place(where, f) is not None
    ]
    times = judge.seconds(able)
    return min(times.values(), default=best), len(able)


def check(where, work):
    best, tried = exhaustive(where, work)
    found = search(where, work)
    if best >= NEVER_S:
        assert found.chosen is None or found.chosen.prediction.step_seconds >= NEVER_S
        return tried
    assert found.chosen is not None
    assert found.chosen.prediction.step_seconds <= best * 1.02
    assert place(where, found.chosen.layout) is not None
    return tried


@settings(max_examples=25, deadline=None)
@given(POOLS, st.sampled_from([(1, 4), (2, 3), (2, 4)]), DEMANDS, PENALTIES, SLOW, SLOW)
def test_the_search_is_within_two_percent_of_trying_everything(pools, shape, given_, penalty, slow, heavy):
    where = Fleet(tuple(accelerators(*shape, pools=pools)))
    work = job(given_, engines=engine_rates(slow=slow, penalty=penalty), trainers=trainer_rates(slow=heavy))
    check(where, work)


@settings(max_examples=10, deadline=None)
@given(DEMANDS, PENALTIES, SLOW, st.floats(0.3, 3.0), st.floats(0.3, 3.0))
def test_so_it_is_with_two_types_in_one_fleet(given_, penalty, heavy, engine_ratio, trainer_ratio):
    where = Fleet((*accelerators(1, 4), *accelerators(1, 4, type_="b", prefix="m")))
    engines = engine_rates(penalty=penalty) | engine_rates("b", (1, 2, 4), slow=engine_ratio, penalty=penalty)
    trainers = trainer_rates(slow=heavy, sizes=(2,)) | trainer_rates("b", (2, 4), slow=heavy * trainer_ratio)
    assert check(where, job(given_, engines=engines, trainers=trainers)) > 20


@pytest.mark.parametrize("seed", range(4))
def test_uneven_nodes_and_domains(seed):
    rng = random.Random(seed)
    where = Fleet(
        tuple(
            Accelerator(f"{n}/{d}{i}", "a", f"n{n}", d)
            for n in range(2)
            for d in "xy"
            for i in range(rng.randint(1, 3))
        )
    )
    check(where, job(demand(groups=rng.randint(2, 16)), trainers=trainer_rates(slow=rng.choice([0.2, 1.0, 5.0]))))


def test_with_another_type_that_generates_faster_training_stays_on_the_other():
    """b decodes five times as fast and trains as fast as a: b generates."""
    where = Fleet((*accelerators(1, 4), *accelerators(1, 4, type_="b", prefix="m")))
    engines = engine_rates() | engine_rates("b", slow=0.2)
    trainers = trainer_rates() | trainer_rates("b")
    found = search(where, job(demand(), engines=engines, trainers=trainers)).chosen
    assert found is not None
    assert {k.type for k, _ in found.layout.engines} == {"b"}
    assert {k.type for k, _ in found.layout.trainers} == {"a"}


@settings(max_examples=25, deadline=None)
@given(POOLS, DEMANDS, PENALTIES, SLOW, st.integers(0, 5), st.integers(0, 5))
def test_a_layout_keeps_floors_pools_nodes_and_memory(pools, given_, penalty, heavy, min_training, min_rollout):
    where = fleet(pools=pools)
    work = job(
        given_, engines=engine_rates(penalty=penalty), trainers=trainer_rates(slow=heavy, budget=30_000.0),
        min_training=min_training, min_rollout=min_rollout,
    )  # fmt: skip
    found = search(where, work)
    if found.chosen is None:
        return
    layout = found.chosen.layout
    assert layout.training >= min_training
    assert layout.rollout >= min_rollout
    if found.chosen.prediction.step_seconds < NEVER_S:
        assert found.chosen.micro_batch_tokens >= given_.longest_context
        for level in found.chosen.levels:
            assert level.use.running <= level.use.concurrency_cap + 1
    (moves,) = (place(where, layout),)
    assert moves is not None
    for target in (t for m in moves for t in m.targets):
        used = [where.by_name[name] for name in target.accelerators]
        wrong = "CORE_ROLLOUT" if target.role == "TRAINER" else "CORE_TRAINING"
        assert all(a.pool != wrong for a in used)
        if target.role == "ROLLOUT":
            assert len({a.node for a in used}) == 1


def test_engines_that_cannot_hold_the_longest_context_get_the_short_ones_or_none():
    """TP1 holds 5,000 tokens of 16,500: alone it is no choice; TP4 holds all."""
    engines = engine_rates(degrees=(1, 4), kv=5_000.0)
    assert engines[EngineKind("a", 4)].kv_tokens > 16_500
    found = search(fleet(), job(engines=engines))
    assert found.chosen is not None
    assert EngineKind("a", 4) in dict(found.chosen.layout.engines)
    alone = Judge(job(engines=engines)).judged(layout_of({EngineKind("a", 1): 4, TrainerKind("a", 4): 1}))
    assert alone.prediction.trained_tokens_per_second == 0.0


def test_a_budget_below_the_longest_sequence_rules_a_trainer_out():
    trainers = trainer_rates(sizes=(2,), budget=10_000.0) | trainer_rates(sizes=(4,), budget=20_000.0)
    found = search(fleet(), job(trainers=trainers))
    assert found.chosen is not None
    assert [k.accelerators for k, _ in found.chosen.layout.trainers] == [4]
    assert found.chosen.micro_batch_tokens == 20_000.0
    assert search(fleet(), job(trainers=trainer_rates(budget=10_000.0))).chosen is None


def test_what_may_not_move_is_part_of_every_layout():
    names = [a.name for a in accelerators()]
    pinned = Replica("pinned", "ROLLOUT", (names[0], names[1]), movable=False)
    where = Fleet(tuple(accelerators()), (pinned,))
    work = job()
    found = search(where, work)
    assert found.chosen is not None
    for judged in (found.chosen, *found.others, found.homogeneous):
        assert judged is not None
        assert dict(judged.layout.engines)[EngineKind("a", 2)] >= 1
    assert not Space(where, work).allows(layout_of({EngineKind("a", 4): 1, TrainerKind("a", 2): 1}))


def test_the_best_homogeneous_layout_is_among_what_is_shown_and_never_better():
    found = search(fleet(), job(engines=engine_rates(penalty=0.6)))
    assert found.chosen is not None
    assert found.homogeneous is not None
    assert len(found.homogeneous.layout.engines) == 1
    chosen, uniform = (j.prediction.step_seconds for j in (found.chosen, found.homogeneous))
    assert chosen <= uniform * 1.0002
    assert [j.prediction.step_seconds for j in found.others] == sorted(j.prediction.step_seconds for j in found.others)


@pytest.mark.parametrize("heavy", [0.3, 1.0, 3.0])
def test_on_a_large_fleet_the_grid_is_refined(heavy):
    """256 accelerators, of whose 127 splits the grid has 16; every split of every single degree is tried instead."""
    where = Fleet(tuple(accelerators(64, 4)))
    work = job(
        demand(groups=64, samples=16), engines=engine_rates(penalty=0.5), trainers=trainer_rates(sizes=(2,), slow=heavy)
    )
    every = [
        layout_of({TrainerKind("a", 2): n, EngineKind("a", tp): (256 - 2 * n) // tp})
        for n in range(1, 128)
        for tp in (1, 2, 4)
    ]
    judge = Judge(work)
    space = Space(where, work)
    best = min(judge.seconds(f for f in every if space.allows(f)).values())
    found = search(where, work)
    assert found.chosen is not None
    assert found.homogeneous is not None
    assert found.chosen.prediction.step_seconds <= best * 1.0005
    assert found.homogeneous.prediction.step_seconds <= best * 1.005


def test_a_present_layout_that_the_grid_lacks_is_tried_as_well():
    odd = layout_of({EngineKind("a", 1): 1, EngineKind("a", 2): 1, TrainerKind("a", 2): 1})
    found = search(fleet(), job(), alternatives=1_000, seeds=(odd,))
    assert found.chosen is not None
    slow = Judge(job()).judged(odd)
    assert found.chosen.prediction.step_seconds <= slow.prediction.step_seconds


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), st.integers(0, 2),
    st.sampled_from([1, 2, 4]), st.integers(0, 12),
)  # fmt: skip
def test_room_for_engines_of_one_degree_is_counted_exactly(domains, core, tp, training):
    """Against taking every combination of hybrid accelerators away from the domains."""
    some = [
        Accelerator(f"{d}/{p}{i}", "a", f"n{d}", pool=p)
        for d, sizes in enumerate(domains)
        for p, n in zip(("HYBRID", "CORE_ROLLOUT"), sizes, strict=True)
        for i in range(n)
    ] + [Accelerator(f"c{i}", "a", "c", pool="CORE_TRAINING") for i in range(core)]
    blocks = Room.of(some).blocks(tp, training)
    taken = max(0, training - core)
    best = {0: 0}
    for hybrid, fixed in domains:
        nxt: dict[int, int] = {}
        for used, count in best.items():
            for more in range(hybrid + 1):
                value = count + (hybrid + fixed - more) // tp
                nxt[used + more] = max(nxt.get(used + more, -1), value)
        best = nxt
    exact = max((count for used, count in best.items() if used >= taken), default=-1)
    assert blocks == exact


def test_a_layout_that_cannot_keep_up_says_which_side_cannot():
    judge = Judge(job())
    engine, trainer = EngineKind("a", 1), TrainerKind("a", 2)
    assert judge.judged(layout_of({engine: 4})).bound == "training"
    assert judge.judged(layout_of({trainer: 2})).bound == "rollout"
    assert judge.judged(layout_of({trainer: 2, engine: 4})).prediction.step_seconds < NEVER_S
