"""The production planner in a simulated cluster: told of what happens alone, it changes the layout and learns rates."""

from dataclasses import replace

import pytest

from services.scheduler.core.rates import EngineKind, TrainerKind
from services.simulator.cluster import Cluster
from services.simulator.layout import ClusterSpec, Layout, Mode, check
from services.simulator.parametric import Parametric, Shift
from services.simulator.policies.libra import Libra
from services.simulator.policies.planned import TYPE, Planned, evidence_of
from services.simulator.policies.static import uniform
from tests.support.sim_times import LinearTimes, LinearTraining
from tests.support.sim_worlds import Watched

WORK = Parametric(groups=6, members=4, mean_start=600.0, mean_end=1_500.0)
HEAVY = LinearTraining(rate=30.0, fixed=3.0, least=2)
"""Training is the longer phase by far with half of the accelerators."""
SPEC = ClusterSpec(LinearTimes(kv=60_000), HEAVY, accelerators=8, node_size=4)


def run(spec, policy, steps=10, work=WORK, seed=1):
    return Watched(spec, work, policy, seed=seed, steps=steps).run()


def test_from_a_uniform_split_training_gets_what_it_needs():
    policy = Libra()
    result = run(SPEC, policy)
    first, last = Layout.parse(result.steps[0].layout), Layout.parse(result.steps[-1].layout)
    assert first == uniform(SPEC)
    assert last.training > first.training
    assert result.relayouts >= 1
    assert result.refused == 0
    planned = run(SPEC, Libra()).since(4).tokens_per_s
    assert planned > 1.1 * run(SPEC, Libra(plans=False)).since(4).tokens_per_s


def test_every_plan_is_a_layout_of_the_cluster_and_keeps_whole_replicas():
    policy = Libra()
    run(SPEC, policy, work=replace(WORK, shift=Shift(5)))
    assert policy.planned is not None
    for told in policy.planned.told:
        for move in told.relayout.moves:
            engines = tuple(k.tp for k, n in move.layout.engines for _ in range(n))
            check(Layout(engines, move.layout.training), SPEC, Mode.ASYNC)
            assert move.layout.training % HEAVY.least == 0
        assert told.relayout.reason.text


def test_a_given_layout_stays_and_where_nothing_trains_nothing_is_planned():
    given = Layout((1, 1, 2), 4)
    policy = Libra(given)
    assert {s.layout for s in run(SPEC, policy, steps=4).steps} == {given.words()}
    assert policy.planned is None
    rollout = Libra()
    rollout.mode = Mode.ROLLOUT
    assert rollout.start(replace(SPEC, training=None)).training == 0
    assert rollout.planned is None
    with pytest.raises(ValueError, match="nothing trains"):
        Planned(replace(SPEC, training=None))


def test_a_table_that_is_wrong_by_a_factor_is_corrected_by_what_is_told():
    believed = replace(SPEC, times=LinearTimes(kv=60_000, weights=0.0185 * 3), training=replace(HEAVY, rate=10.0))
    policy = Libra()
    cluster = Cluster(SPEC, WORK, policy, seed=1, steps=8)
    assert policy.planned is not None
    evidence = policy.planned.evidence = evidence_of(SPEC, believed)
    cluster.run()
    for engine in {e.state.tp for e in cluster.engines}:
        found = evidence.engines.rates(EngineKind(TYPE, engine)).decode_s(4, 4_000)
        assert found == pytest.approx(SPEC.times.decode_s(engine, 4, 4_000), rel=0.15)
    shares = [2_000.0] * 24
    step = evidence.trainers.rates(TrainerKind(TYPE, 2)).seconds(3, sum(shares), sum(s * s for s in shares))
    assert step == pytest.approx(HEAVY.step_s(3, 2, shares), rel=0.15)
