"""Small workloads and a policy that does everything it may, for the simulator's tests."""

import random

import pytest

from services.simulator.cluster import Cluster
from services.simulator.layout import Mode
from services.simulator.policies.base import Assign, Move, Policy
from services.simulator.trajectory import NOWHERE
from services.simulator.workload import Episode, Fixed, Turn


def episode(name, *turns, prompt=10, group=None, latency=1.0, observation=5):
    """Turns by their token counts; a tool call after all but the last."""
    last = len(turns) - 1
    calls = [
        Turn(t, "tool" if i < last else "", "ok", latency if i < last else 0.0, observation if i < last else 0)
        for i, t in enumerate(turns)
    ]
    return Episode(name, group or name, prompt, tuple(calls))


def random_episodes(rng: random.Random, groups=6, members=3):
    return [
        episode(
            f"g{g}/{m}",
            *(rng.choice([0, 1, 7, 50, 300]) for _ in range(rng.randint(1, 5))),
            prompt=rng.randint(1, 200),
            group=f"g{g}",
            latency=rng.choice([0.0, 0.1, 3.0]),
            observation=rng.randint(0, 60),
        )
        for g in range(groups)
        for m in range(members)
    ]


class Restless(Policy):
    """Queues, assigns and moves at random: to other engines and to the queue, at once and at the turn's end."""

    name = "restless"
    decide_every_s = 0.7
    mode = Mode.ROLLOUT

    def __init__(self, layout, rng):
        super().__init__(layout)
        self._rng = rng

    def place(self, view, trajectory):
        able = view.admitting()
        return self._rng.choice(able).index if able and self._rng.random() < 0.5 else NOWHERE

    def resume(self, view, trajectory):
        stays = view.engines[trajectory.engine].admitting and self._rng.random() < 0.8
        return trajectory.engine if stays else self.place(view, trajectory)

    def decide(self, view):
        able = view.admitting()
        actions = []
        for item in list(view.live.values()) if able else ():
            target = self._rng.choice(able).index
            if item.index in view.queued:
                actions.append(Assign(item, target))
            elif item.engine != NOWHERE and self._rng.random() < 0.1 and view.now < 500:
                where = NOWHERE if self._rng.random() < 0.2 else target
                actions.append(Move(item, where, at_turn_end=self._rng.random() < 0.5))
        return actions


class Watched(Cluster):
    """Checks after every event that no engine holds more than its KV cache, runs more than it may, or miscounts."""

    def _settle(self):
        touched = list(self._touched)
        super()._settle()
        for index in touched:
            engine = self.engines[index]
            state = engine.state
            held = engine._held()
            assert state.cached == sum(engine._cached.values())
            assert len(engine._running) <= state.max_running
            assert held + state.cached <= state.kv_capacity + 1e-3, (held, state.cached)
            expected = sum(s.seen.context + engine.progress - s.mark for s in engine._running)
            assert held == pytest.approx(expected, abs=1e-3)
        homes = [0] * len(self.engines)
        for sequence in self._sequences.values():
            if sequence.seen.engine != NOWHERE:
                homes[sequence.seen.engine] += 1
        assert homes == [e.state.assigned for e in self.engines]


def rollout(spec, episodes, policy, *, steps=1, seed=0, kind=Watched):
    """Runs episodes with nothing trained; the cluster and its result."""
    policy.mode = Mode.ROLLOUT
    cluster = kind(spec, Fixed(tuple(episodes)), policy, seed=seed, steps=steps)
    return cluster, cluster.run()
