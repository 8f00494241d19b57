"""What policies see and do, each on a small cluster."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.common.errors import ConfigError
from services.simulator.cluster import Cluster
from services.simulator.engine import Engine, EngineState
from services.simulator.layout import ClusterSpec, Layout, Mode
from services.simulator.parametric import Parametric
from services.simulator.policies import registry, search
from services.simulator.policies.base import Policy, View, least_loaded
from services.simulator.policies.clairvoyant import Clairvoyant, bound
from services.simulator.policies.feedback import FeedbackQueue
from services.simulator.policies.libra import Libra
from services.simulator.policies.predictor import LengthPredictor
from services.simulator.policies.priority import TrajectoryPriority
from services.simulator.policies.static import degrees, uniform
from services.simulator.policies.sticky import StickyHash
from services.simulator.processes import here
from services.simulator.trajectory import Sequence, Trajectory
from services.simulator.workload import Episode, Fixed, Turn
from tests.support.sim_times import ConstantTimes, LinearTimes, LinearTraining
from tests.support.sim_worlds import Watched, episode, random_episodes, rollout

SMALL = Parametric(groups=6, members=4, mean_start=600.0, mean_end=1_500.0)
SPEC = ClusterSpec(LinearTimes(), LinearTraining(rate=400.0, fixed=3.0, least=2), accelerators=8, node_size=4)
HIDDEN = (Turn, Episode, Sequence, Engine, Cluster)


def reachable(root):
    """Everything that can be reached from an object, private attributes and closures included."""
    seen, todo = {}, [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, str | bytes | int | float | type):
            continue
        seen[id(item)] = item
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        else:
            todo += vars(item).values() if hasattr(item, "__dict__") else ()
            names = [s for kind in type(item).__mro__ for s in getattr(kind, "__slots__", ())]
            todo += [getattr(item, s) for s in names if hasattr(item, s)]
            todo += [c.cell_contents for c in getattr(item, "__closure__", None) or ()]
            todo += [item.__self__] if hasattr(item, "__self__") else []
    return list(seen.values())


class Prying(Policy):
    """Looks for what it should not see in all that it is given."""

    decide_every_s = 1.0

    def __init__(self, layout):
        super().__init__(layout)
        self.looks = 0

    def look(self, *given):
        found = [item for item in reachable(list(given)) if isinstance(item, HIDDEN)]
        assert not found, found
        self.looks += 1

    def start(self, spec):
        self.look(spec)
        return super().start(spec)

    def place(self, view, trajectory):
        self.look(view, trajectory)
        return super().place(view, trajectory)

    def resume(self, view, trajectory):
        self.look(view, trajectory)
        return super().resume(view, trajectory)

    def decide(self, view):
        self.look(view)
        return ()

    def plan(self, view):
        self.look(view)

    def on_turn(self, trajectory, tool, outcome, observation):
        self.look(trajectory)

    def on_end(self, trajectory):
        self.look(trajectory)


def test_no_policy_can_reach_what_is_to_come():
    policy = Prying(Layout((1, 1), 4))
    Watched(SPEC, replace(SMALL, groups=3, members=2), policy, seed=1, steps=3).run()
    assert policy.looks > 50


def test_only_the_declared_foresight_is_handed_over():
    foresight = {name: registry.POLICIES[name].make(Layout((1,), 4)).foresight for name in registry.POLICIES}
    assert {n for n, f in foresight.items() if f == "exact"} == {"clairvoyant"}
    assert {n for n, f in foresight.items() if f == "noisy"} == {"length-predictor"}


@pytest.mark.parametrize("name", list(registry.POLICIES))
def test_every_policy_by_name_trains_whole_batches_and_loses_nothing_unless_it_aborts(name):
    found = registry.Layouts(
        {
            "uniform": uniform(SPEC),
            "homogeneous": Layout((2, 2), 4),
            "mixed": Layout((1, 1, 2), 4),
            "foresight": Layout((2, 2), 4),
            "colocated": Layout((2, 2, 2, 2), 0),
        }
    )
    for policy in registry.build(name, found):
        assert policy.name == name
        result = Watched(SPEC, SMALL, policy, seed=3, steps=5).run()
        assert [s.sequences for s in result.steps] == [24] * 5
        assert result.since(0).max_staleness <= (0 if policy.mode is Mode.COLOCATED else 1)
        assert (result.wasted > 0) == (name == "tail-batching")


def test_unknown_policies_are_refused_with_the_nearest():
    assert registry.names("all") == list(registry.POLICIES)
    assert registry.names("libra, libra,mlfq") == ["libra", "mlfq"]
    with pytest.raises(ConfigError, match="did you mean 'colocated'"):
        registry.names("colocatd")


def test_least_loaded_counts_for_each_accelerator_and_passes_over_closed_engines():
    cluster = Cluster(SPEC, SMALL, Policy(Layout((1, 1, 2), 4)), seed=0, steps=1)
    cluster._begin()
    states = cluster.view.engines
    for state, assigned in zip(states, (3, 2, 5), strict=True):
        state.assigned = assigned
    assert least_loaded(states) == 1
    states[1].admitting = False
    assert least_loaded(states) == 2


def test_sticky_hash_spreads_stays_and_moves_little_when_an_engine_goes():
    policy = StickyHash(Layout((1,) * 4, 4))
    cluster = Cluster(SPEC, Fixed(tuple(episode(f"e{i}", 5) for i in range(400))), policy, seed=0, steps=1)
    cluster._begin()
    live = list(cluster.view.live.values())
    before = {t.id: policy.place(cluster.view, t) for t in live}
    assert all(140 <= n <= 260 for n in Counter(before.values()).values())  # of 800: two batches
    cluster.view.engines[3].admitting = False
    after = {t.id: policy.place(cluster.view, t) for t in live}
    assert all(after[name] == home for name, home in before.items() if home != 3)


def test_the_predictor_balances_predicted_tokens_and_forgets_what_ended():
    episodes = [episode(f"e{i}", n) for i, n in enumerate([4_000, 100, 100, 100, 100, 100])]
    policy = LengthPredictor(Layout((1, 1), 0))
    spec = replace(SPEC, training=None)
    cluster, _ = rollout(spec, episodes, policy)
    assert sorted(e.generated for e in cluster.engines) == [500, 4_000]
    assert all(abs(load) < 1e-6 for load in policy._load.values())


def test_the_feedback_queue_moves_the_long_ones_up():
    episodes = [episode(f"e{i}", *([600] * (8 if i == 0 else 2))) for i in range(6)]
    cluster, result = rollout(replace(SPEC, training=None), episodes, FeedbackQueue(Layout((1, 1, 2), 0)))
    assert cluster.engines[2].generated == 8 * 600 - 4 * 600  # from 2,048 tokens on
    assert result.moves == 1


def test_the_clairvoyant_ends_no_earlier_than_the_bound_and_no_later_than_twice():
    rng = random.Random(5)
    spec = replace(SPEC, training=None)
    for _ in range(10):
        episodes = random_episodes(rng, groups=10, members=8)
        least = bound(episodes, spec, 8, degrees(spec))
        _, result = rollout(spec, episodes, Clairvoyant(Layout((1,) * 8, 0)))
        assert result.steps[-1].ended_at >= least
    work = [episode(f"e{i}", 1_000) for i in range(64)]
    flat = replace(spec, times=ConstantTimes(step=0.01), max_running=2)
    _, result = rollout(flat, work, Clairvoyant(Layout((1,) * 8, 0)))
    assert result.steps[-1].ended_at == pytest.approx(bound(work, flat, 8, [1]), rel=1e-6)


def test_the_clairvoyant_starts_the_longest_first():
    lengths = [300, 200, 1_000, 400, 500, 600]
    work = [episode(f"e{i}", n) for i, n in enumerate(lengths)]
    spec = ClusterSpec(ConstantTimes(step=0.01), None, accelerators=2, node_size=2, max_running=1)
    _, result = rollout(spec, work, Clairvoyant(Layout((1, 1), 0)))
    assert result.steps[-1].ended_at == pytest.approx(16.0)  # 1,000 + 400 + 200 and 600 + 500 + 300
    _, blind = rollout(spec, work, Policy(Layout((1, 1), 0)))
    assert blind.steps[-1].ended_at == pytest.approx(18.0)


def test_a_queue_that_knows_the_kv_caches_goes_on_while_any_engine_has_room():
    """The least filled engine may be too small for the next one; it goes to a larger one, and waits if none has room."""
    policy = TrajectoryPriority(Layout((1, 4), 0))
    view = View(Layout((1, 4), 0))
    view.engines = [EngineState(0, 1, 0, 50_000, 256), EngineState(1, 4, 0, 300_000, 256)]
    for engine in view.engines:
        engine.admitting = True
    policy._room = {100: (0, 25_000.0), 101: (1, 180_000.0)}  # one half and three fifths
    queued = [Trajectory(i, episode(f"e{i}", 1_024, prompt=30_000), 0, 0.0) for i in range(4)]
    view.queued = {t.index: t for t in queued}
    assert [(a.trajectory.index, a.engine) for a in policy.admit(view)] == [(0, 1), (1, 1)]
    policy._room = {101: (1, 280_000.0)}
    assert [(a.trajectory.index, a.engine) for a in policy.admit(view)] == [(0, 0)], "an empty engine takes any"


def test_libra_is_the_production_queue():
    """A long one on an engine of level 0 is moved up when the evidence says so, and the queue respects the KV cache."""
    policy = Libra(Layout((1, 1, 1, 1, 2, 2), 0))
    spec = replace(SPEC, training=None, times=LinearTimes(kv=30_000))
    work = Parametric(groups=12, members=4, mean_start=3_000.0, mean_end=3_000.0).batch(0, 2)
    work = [e for e in work if e.tokens < 28_000]
    cluster, result = rollout(spec, work, policy)
    assert result.moves > 0
    assert result.preemptions == 0, "what is admitted fits"
    assert sum(e.generated for e in cluster.engines) == sum(e.generated for e in work)
    assert not policy._levels
    assert not len(policy.live)


def test_libra_told_that_all_went_well_does_not_see_outcomes():
    family = replace(SMALL.families[0], failures=0.5)
    work = Fixed(tuple(replace(SMALL, families=(family,)).batch(0, 1)))

    def told(policy):
        heard = []
        learn = policy.remaining.observe_turn
        policy.remaining.observe_turn = lambda *given: (heard.append(given[-1]), learn(*given))
        Cluster(SPEC, work, policy, seed=0, steps=2).run()
        return set(heard)

    assert told(Libra(Layout((1, 1), 4), outcomes=False)) == {"ok"}
    assert told(Libra(Layout((1, 1), 4))) >= {"ok", "error"}


def test_the_search_finds_the_degree_and_split_that_are_best_by_construction():
    # four accelerators an engine are free speed, and training is the bottleneck unless it has 4 of 8
    class Fast(LinearTimes):
        def decode_s(self, tp, sequences, context_tokens):
            return 0.02 / tp**3

    spec = replace(SPEC, times=Fast())
    question = search.Question(spec, SMALL, steps=7, first=2)
    found = search.best(search.homogeneous_layouts(spec), question, here)
    assert found.layout == Layout((4,), 4)
    assert found.tried == len(search.homogeneous_layouts(spec)) + search.FINALISTS
    assert search.score(search._Try(Layout((8,), 4), question, Policy)) == 0.0


def test_the_search_looks_between_the_coarse_splits():
    spec = ClusterSpec(LinearTimes(), LinearTraining(least=4))
    assert search.splits(spec) == [4, 12, 20, 32, 40]
    near = search.neighbours(spec, [Layout((4,) * 7, 20), Layout((8,) * 5, 8 + 4)])
    assert near == [Layout((4,) * n, 48 - 4 * n) for n in (8, 7, 6, 5)] + [
        Layout((8,) * 5, 8),
        Layout((8,) * 4, 12),
        Layout((8,) * 4, 16),
    ]


def test_candidates_of_searches_are_bounded_and_fit():
    spec = ClusterSpec(LinearTimes(), LinearTraining())
    every = search.homogeneous_layouts(spec)
    assert len(every) <= 4 * search.SPLITS
    assert all(c.rollout + c.training <= 48 for c in every)
    mixed = search.mixed_layouts(spec, Layout((2,) * 12, 24))
    assert mixed[0] == Layout((2,) * 12, 24)
    assert all(c.rollout <= 24 and len(set(c.engines)) <= 2 for c in mixed)
