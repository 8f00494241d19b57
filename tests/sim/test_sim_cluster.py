"""The whole simulation: conservation, limits, staleness, failures, hand-over, and the same bytes for the same seed."""

import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.simulator import handover
from services.simulator.cluster import Cluster
from services.simulator.layout import ClusterSpec, Failure, Layout, Mode, check, place
from services.simulator.parametric import Parametric
from services.simulator.policies.base import Move, Policy
from services.simulator.policies.synchronous import Colocated, TailBatching
from services.simulator.trajectory import NOWHERE
from services.simulator.workload import Fixed
from tests.support.sim_times import ConstantTimes, LinearTimes, LinearTraining
from tests.support.sim_worlds import Restless, Watched, episode, random_episodes, rollout

SMALL = Parametric(groups=6, members=4, mean_start=600.0, mean_end=1_500.0)
TRAINING = LinearTraining(rate=400.0, fixed=3.0, least=2)
SPEC = ClusterSpec(LinearTimes(kv=60_000), TRAINING, accelerators=8, node_size=4)


@settings(max_examples=40)
@given(st.integers(0, 1_000_000))
def test_every_token_is_generated_once_and_all_episodes_end_whatever_the_policy_does(seed):
    rng = random.Random(seed)
    episodes = random_episodes(rng)
    kv = max(e.tokens for e in episodes) * rng.choice([1, 2, 5]) + 50
    failures = tuple(
        Failure(i, rng.choice(["die", "hang", "slow"]), rng.uniform(0, 20)) for i in range(3) if rng.random() < 0.5
    )
    spec = ClusterSpec(
        LinearTimes(kv=kv, weights=0.01), None, accelerators=4, node_size=2, max_running=rng.choice([1, 3, 50]),
        failures=failures, detect_s=rng.choice([0.5, 8.0]),
    )  # fmt: skip
    cluster, result = rollout(spec, episodes, Restless(Layout((1, 1, 1, 1), 0), rng), steps=2)
    assert not cluster.view.live, seed
    assert sum(s.tokens for s in result.steps) == 2 * sum(e.generated for e in episodes)
    assert sum(e.generated for e in cluster.engines) == 2 * sum(e.generated for e in episodes) + result.wasted
    for engine in cluster.engines:
        assert not engine._running
        assert not engine._waiting


@given(st.integers(0, 1_000_000), st.integers(1, 3))
@settings(max_examples=10)
def test_no_consumed_token_is_staler_than_the_bound(seed, staleness):
    spec = replace(SPEC, staleness=staleness)
    layout = Layout((1, 1, 1), 4) if seed % 2 else Layout((2,), 6)
    result = Watched(spec, SMALL, Policy(layout), seed=seed, steps=6).run()
    assert len(result.steps) == 6
    assert max(s.staleness for s in result.steps) <= staleness
    assert all(s.sequences == 24 for s in result.steps)


def test_slow_rollout_is_never_waited_for_by_more_staleness_and_slow_training_uses_it():
    fast_training = Watched(SPEC, SMALL, Policy(Layout((1,), 6)), seed=1, steps=5).run()
    slow_training = Watched(replace(SPEC, training=LinearTraining(20.0, 3.0, 2)), SMALL, Policy(Layout((1,) * 6, 2)),
                            seed=1, steps=5).run()  # fmt: skip
    assert fast_training.since(0).idle_training > 0.3
    assert slow_training.since(0).idle_training < 0.3
    assert slow_training.since(0).max_staleness == 1


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    def once(seed):
        policy = Restless(Layout((1, 1, 2), 4), random.Random(3))
        policy.mode = Mode.ASYNC
        return pickle.dumps(Cluster(SPEC, SMALL, policy, seed=seed, steps=4).run())

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_a_colocated_step_is_rollout_then_training_then_the_switches():
    times = ConstantTimes(step=0.01, start=7.0, update=2.0)
    trainer = LinearTraining(rate=100.0, fixed=1.0, least=2, offload=3.0)
    spec = ClusterSpec(times, trainer, accelerators=4, node_size=4)
    work = Fixed((episode("a", 1_000), episode("b", 500)))
    result = Watched(spec, work, Colocated(Layout((1, 1, 1, 1), 0)), seed=0, steps=3).run()
    training = 1.0 + (1_010 + 510) / 400
    assert result.steps[0].ended_at == pytest.approx(10.0 + 7.0 + 3.0 + training)
    switches = 3.0 + 7.0 + 2.0, 7.0 + 3.0
    assert result.steps[1].ended_at - result.steps[0].ended_at == pytest.approx(sum(switches) + 10.0 + training)
    assert result.since(0).max_staleness == 0
    assert result.since(0).idle_training == pytest.approx(1 - 3 * training / result.steps[-1].ended_at)


def test_a_split_overlaps_a_batch_with_training_on_the_one_before():
    spec = ClusterSpec(ConstantTimes(step=0.01), LinearTraining(rate=1e9, fixed=10.0, least=2), 4, 4)
    policy = Policy(Layout((1, 1), 2))
    policy.mode = Mode.SPLIT
    result = Watched(spec, Fixed((episode("a", 800),)), policy, seed=0, steps=4).run()
    # 8 s of rollout, then training of 10 s beside the next rollout of 8 s
    assert [s.ended_at for s in result.steps] == pytest.approx([18.0, 28.0, 38.0, 48.0])
    assert result.since(0).max_staleness == 1


def test_tail_batching_takes_whole_batches_and_defers_the_longest():
    work = Parametric(groups=8, members=2, mean_start=600.0, mean_end=600.0)
    plain = Watched(SPEC, work, Colocated(Layout((1,) * 8, 0)), seed=4, steps=8).run()
    tail = Watched(SPEC, work, TailBatching(Layout((1,) * 8, 0)), seed=4, steps=8).run()
    assert all(s.sequences == 16 for s in tail.steps)
    assert tail.since(0).max_staleness == 0
    assert tail.wasted > 0
    assert plain.wasted == 0
    spans = [s.took_at for s in tail.steps]
    assert spans == sorted(spans)


def test_a_weight_update_recomputes_what_runs_unless_it_is_kept():
    policy = Policy(Layout((1, 1), 4))
    recomputed = Cluster(replace(SPEC, recompute=True), SMALL, policy, seed=1, steps=4)
    kept = Cluster(replace(SPEC, recompute=False), SMALL, policy, seed=1, steps=4)
    recomputed.run()
    kept.run()
    assert sum(e.prefilled for e in recomputed.engines) > sum(e.prefilled for e in kept.engines)


@pytest.mark.parametrize("kind", ["die", "hang"])
def test_a_lost_engine_gets_nothing_after_it_is_noticed_and_its_work_goes_on_elsewhere(kind):
    spec = ClusterSpec(
        ConstantTimes(step=0.01), None, accelerators=4, node_size=4, failures=(Failure(2, kind, 20.0),), detect_s=15.0
    )
    work = [episode(f"e{i}", 500, 500, 500, latency=1.0) for i in range(40)]
    placed = []

    class Noting(Policy):
        def place(self, view, trajectory):
            chosen = super().place(view, trajectory)
            placed.append((view.now, chosen))
            return chosen

    cluster, result = rollout(spec, work, Noting(Layout((1, 1, 1, 1), 0)), steps=4)
    assert not [p for p in placed if p[1] == 2 and p[0] >= 35.0]
    assert [p for p in placed if p[1] == 2 and p[0] < 35.0]
    assert not cluster.view.engines[2].alive
    assert sum(e.generated for e in cluster.engines) == 4 * 40 * 1_500 + result.wasted


def test_a_move_costs_the_cheaper_of_copying_and_computing():
    class Mover(Policy):
        decide_every_s = 1.0
        asked = False

        def place(self, view, trajectory):
            return 0 if trajectory.turns == 0 else NOWHERE

        def decide(self, view):
            if self.asked:
                return ()
            self.asked = True
            return [Move(t, 1, at_turn_end=False) for t in view.live.values()]

    def ended(move, prefill):
        times = ConstantTimes(step=0.01, move=move, prefill=prefill)
        spec = ClusterSpec(times, None, accelerators=2, node_size=2)
        cluster, result = rollout(spec, [episode("a", 1_000, prompt=100)], Mover(Layout((1, 1), 0)))
        return result.steps[-1].ended_at, cluster.engines[1].prefilled, result.moves

    at_first = 100 * 0.001
    # after 1 s the context is 100 + 90 (the first 0.1 s was prefill)
    assert ended(0.05, 0.001) == (pytest.approx(at_first + 10.0 + 0.05), 0, 1)
    assert ended(5.0, 0.001) == (pytest.approx(at_first + 10.0 + 0.19), 190, 1)


class Once(Policy):
    """Asks for the given move of every trajectory once, at the first decision."""

    decide_every_s = 1.0

    def __init__(self, layout, target, *, at_turn_end):
        super().__init__(layout)
        self._move = (target, at_turn_end)
        self._asked = False

    def place(self, view, trajectory):
        able = [e.index for e in view.admitting()]
        return able[0] if able else NOWHERE

    def decide(self, view):
        if self._asked:
            return ()
        self._asked = True
        return [Move(t, self._move[0], at_turn_end=self._move[1]) for t in view.live.values()]


def test_a_move_to_an_engine_that_is_gone_by_then_is_not_made():
    spec = ClusterSpec(
        ConstantTimes(step=0.01), None, accelerators=2, node_size=2, failures=(Failure(1, "die", 1.5),), detect_s=1.0
    )
    cluster, result = rollout(spec, [episode("a", 1_000, 100)], Once(Layout((1, 1), 0), 1, at_turn_end=True))
    assert result.moves == 0
    assert result.steps[-1].ended_at == pytest.approx(10.0 + 1.0 + 1.0)


class Removing(Watched):
    def _begin(self):
        super()._begin()
        self._at(2.0, lambda _a, _b: self._remove(1), None, None)


@pytest.mark.parametrize(
    ("kind", "failures"), [(Watched, (Failure(1, "die", 2.0),)), (Removing, ())], ids=["lost", "taken away"]
)
def test_one_on_its_way_to_an_engine_that_goes_continues_elsewhere(kind, failures):
    times = ConstantTimes(step=0.01, move=5.0, prefill=0.1)
    spec = ClusterSpec(times, None, accelerators=2, node_size=2, failures=failures, detect_s=1.0)
    policy = Once(Layout((1, 1), 0), 1, at_turn_end=False)
    cluster, result = rollout(spec, [episode("a", 200, prompt=1)], policy, kind=kind)
    assert result.moves == 1
    assert cluster.engines[1].generated == 0
    assert cluster.engines[0].generated == 200


class Replanning(Policy):
    """Changes the layout once, after a step."""

    def __init__(self, first, second, after):
        super().__init__(first)
        self._second = second
        self._after = after

    def plan(self, view):
        return self._second if len(view.steps) >= self._after else None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Layout((1, 1, 1, 1), 4), Layout((1, 1), 6)),
        (Layout((2,), 6), Layout((2, 2), 4)),
        (Layout((1, 1, 1, 1), 4), Layout((4,), 4)),
        (Layout((4,), 4), Layout((1, 1, 2), 4)),
    ],
)
def test_accelerators_change_sides_between_steps_and_nothing_is_lost(first, second):
    cluster = Watched(SPEC, SMALL, Replanning(first, second, 2), seed=1, steps=6)
    result = cluster.run()
    assert result.relayouts == 1
    assert result.wasted == 0
    alive = sorted(e.tp for e in cluster.view.engines if e.alive)
    assert alive == sorted(second.engines)
    for node in range(2):
        assert sum(e.tp for e in cluster.view.engines if e.alive and e.node == node) <= 4
    assert {s.layout for s in result.steps} == {first.words(), second.words()}
    waiting = sum(m.total for g in cluster.pending.groups for m in g.members if m.seen.index not in cluster.view.live)
    for engine in cluster.engines:
        engine.present()
    live = sum(t.generated for t in cluster.view.live.values())
    assert sum(e.generated for e in cluster.engines) == sum(s.tokens for s in result.steps) + live + waiting


class Noting(Watched):
    """Notes when engines that were added were awake, and how long they then paused."""

    def _begin(self):
        self.served = []
        super()._begin()

    def _engine_ready(self, index, _):
        super()._engine_ready(index, _)
        self.served.append((self.now, self.engines[index]._stall))


def test_accelerators_that_change_sides_wait_until_the_trainers_state_is_copied():
    """Engines sleep and wake in 2 s and take weights in 3 s; replicas' state goes to the host or comes back in 5 s."""
    trainer = LinearTraining(rate=1e9, fixed=1.0, least=2, offload=5.0)
    spec = ClusterSpec(ConstantTimes(step=0.01, start=2.0, update=3.0), trainer, accelerators=8, node_size=4)
    work = Fixed((episode("a", 10),))
    to_rollout = Noting(spec, work, Replanning(Layout((1,) * 4, 4), Layout((1,) * 6, 2), 1), seed=0, steps=20)
    result = to_rollout.run()
    awake, pauses = zip(*to_rollout.served, strict=True)
    assert awake == pytest.approx([result.steps[0].ended_at + 5.0 + 2.0] * 2)
    assert pauses == pytest.approx([3.0, 3.0])
    assert result.steps[1].took_at == pytest.approx(result.steps[0].ended_at + 3.0), "the replica that stays trains on"
    back = Noting(spec, work, Replanning(Layout((1,) * 6, 2), Layout((1,) * 4, 4), 1), seed=0, steps=3).run()
    assert back.steps[1].took_at == pytest.approx(back.steps[0].ended_at + 2.0 + 5.0)


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [(16, 16, (0, 0)), (16, 8, (1, 0)), (8, 24, (0, 2)), (20, 24, (2, 3)), (0, 0, (0, 0)), (0, 8, (0, 1))],
)
def test_replicas_that_go_come_or_change_their_size_are_copied(before, after, seconds):
    class Counted(LinearTraining):
        def offload_s(self, replicas, accelerators_each):
            return float(replicas)

    assert handover.offloads_s(Counted(least=8), before, after) == seconds
    assert handover.offloads_s(None, before, after) == (0, 0)


def test_a_plan_that_does_not_fit_is_refused_and_counted():
    result = Watched(SPEC, SMALL, Replanning(Layout((1, 1), 4), Layout((4, 4), 4), 1), seed=1, steps=3).run()
    assert result.relayouts == 0
    assert result.refused >= 1


def test_a_plan_with_an_engine_too_small_for_a_live_episode_is_refused_and_counted():
    spec = replace(SPEC, times=Growing(step=0.1), max_running=4)  # the next batch is under way when one is trained
    policy = Replanning(Layout((4,), 4), Layout((2, 2), 4), 1)
    work = Fixed(tuple(episode(f"e{i}", 200 if i else 100) for i in range(4)))
    result = Watched(spec, work, policy, seed=1, steps=3).run()
    assert (result.relayouts, result.refused > 0) == (0, True)
    assert result.steps[-1].layout == Layout((4,), 4).words()


def test_engines_are_placed_within_nodes():
    spec = replace(SPEC, accelerators=12)
    assert place((4, 2, 2, 1, 1, 1, 1), (), spec) is not None
    assert place((4, 4, 4, 1), (), spec) is None
    assert place((4,), [(1, 0), (1, 1), (1, 2)], spec) is None
    assert place((2, 4, 2), [(4, 1)], spec) == [2, 0, 2]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout((), 4), "no engine"),
        (Layout((8,), 4), "expected engines of 1 to 4"),
        (Layout((4, 4), 4), "takes 12 accelerators; there are 8"),
        (Layout((4,), 1), "one replica needs 2"),
    ],
)
def test_a_layout_that_cannot_be_says_why(layout, words):
    with pytest.raises(ConfigError, match=words):
        check(layout, SPEC, Mode.ASYNC)


class Growing(ConstantTimes):
    """A KV cache of 100 tokens an accelerator."""

    def kv_tokens(self, tp):
        return 100 * tp


def test_an_episode_that_the_smallest_engine_cannot_hold_is_refused_by_name():
    spec = ClusterSpec(Growing(), None, accelerators=3, node_size=3)
    words = r"episode 0/big grows to 110 tokens; the KV cache of engine 1 \(TP1\) holds 100"
    with pytest.raises(ConfigError, match=words):
        rollout(spec, [episode("big", 100)], Policy(Layout((2, 1), 0)))
    rollout(spec, [episode("small", 90)], Policy(Layout((2, 1), 0)))


def test_a_policy_that_places_nothing_is_told_so():
    class Idle(Policy):
        def place(self, view, trajectory):
            return NOWHERE

    spec = ClusterSpec(ConstantTimes(), None, accelerators=1, node_size=1)
    for every in (None, 1.0):
        policy = Idle(Layout((1,), 0))
        policy.decide_every_s = every
        with pytest.raises(RuntimeError, match="1 queued, 1 engines admit"):
            rollout(spec, [episode("a", 5)], policy)


def test_case_49_idle_shares_equal_the_count_by_hand_of_a_timeline_with_three_pauses():
    trainer = LinearTraining(rate=100.0, fixed=1.0, least=2)
    spec = ClusterSpec(ConstantTimes(step=0.01), trainer, accelerators=3, node_size=3, staleness=0)
    work = Fixed((episode("a", 100, 200, 300, 50, latency=2.0, observation=0),))
    result = Watched(spec, work, Policy(Layout((1,), 2)), seed=0, steps=3).run()
    decoding, pauses, training = 6.5, 3 * 2.0, 1.0 + 660 / 200
    step = decoding + pauses + training
    assert [s.ended_at for s in result.steps] == pytest.approx([step, 2 * step, 3 * step])
    assert result.since(0).idle_rollout == pytest.approx((pauses + training) / step)
    assert result.since(0).idle_training == pytest.approx((decoding + pauses) / step)
