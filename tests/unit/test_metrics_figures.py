"""The scheduler's figures as functions of its state."""

import time

from services.scheduler import figures
from services.scheduler.control.observe import step_of
from services.scheduler.core.model import (
    Accelerator,
    Fleet,
    Manifest,
    MaskedSpan,
    Reassignment,
    Replica,
    Run,
    Trajectory,
)

SECONDS_EACH = 0.25
"""Bound of one look at 20,000 trajectories; it takes a tenth of it where nothing else runs."""


def rows(families, name):
    return {tuple(s.labels.values()): s.value for f in families for s in f.samples if s.name == name}


def test_twenty_thousand_trajectories_are_looked_at_quickly():
    fleet = Fleet(runs={f"runs/{n}": Run(f"runs/{n}", "TRAIN", b"") for n in range(4)})
    for n in range(20_000):
        name = f"runs/{n % 4}/trajectories/{n}"
        fleet.trajectories[name] = Trajectory(
            name, f"runs/{n % 4}", "g", 0, n, state=("QUEUED", "LEASED")[n % 3 == 0], level=n % 2
        )
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        families = list(figures.trajectories(fleet, fleet.runs.values(), [0, 1]))
        best = min(best, time.perf_counter() - began)
    assert best < SECONDS_EACH, f"{best:.3f} s"
    total = sum(s.value for f in families for s in f.samples if f.name == "libra_trajectories")
    assert total == 20_000


def test_an_accelerator_counts_as_what_the_replica_on_it_does_now():
    fleet = Fleet()
    for n, (pool, state) in enumerate(
        [("HYBRID", "ACTIVE"), ("HYBRID", "RELEASING"), ("HYBRID", "RELEASED"), ("CORE_TRAINING", "")]
    ):
        name = f"nodes/n0/accelerators/{n}"
        fleet.accelerators[name] = Accelerator(
            name, pool=pool, role="TRAINER", replicas=(f"replicas/{n}",) if state else ()
        )
        if state:
            fleet.replicas[f"replicas/{n}"] = Replica(f"replicas/{n}", n, "ROLLOUT", (name,), "w", state)
    found = list(figures.accelerators(fleet))
    counts = {key: count for key, count in rows(found, "libra_accelerators").items() if count}
    assert counts == {
        ("hybrid", "rollout", "active"): 1, ("hybrid", "rollout", "releasing"): 1, ("hybrid", "none", "free"): 1,
        ("core_training", "none", "free"): 1,
    }  # fmt: skip
    assert sum(counts.values()) == len(fleet.accelerators)
    assert rows(found, "libra_accelerator_role") == {
        ("n0/0", "hybrid", "rollout"): 1, ("n0/1", "hybrid", "rollout"): 1, ("n0/2", "hybrid", "none"): 1,
        ("n0/3", "core_training", "none"): 1,
    }  # fmt: skip


def test_a_step_in_numbers():
    manifest = Manifest("runs/r/manifests/9-1", "runs/r", "", 9, 1, 8, trainable_tokens=30, max_versions=2)
    members = [
        Trajectory(f"t{n}", "runs/r", "g", n, 0, generated_tokens=10 * n, reward=reward, oldest_version=oldest)
        for n, (reward, oldest) in enumerate([(1.0, 8), (0.25, 5), (None, -1)])
    ]
    step = step_of(manifest, members, 1.0, 3)
    assert (step.number, step.tokens, step.replicas, step.generated, step.run) == (9, 30, 3, 30, "runs/r")
    assert step.reward == 1.25 / 3
    assert step.staleness == 3
    manifest.masked = [MaskedSpan("t1", 0, 0, 4)]
    assert step_of(manifest, members, 1.0, 3).staleness == 2, "what is too old is masked"
    assert (step_of(manifest, [], 1.0, 3).reward, step_of(manifest, [], 1.0, 3).staleness) == (0.0, 0)


def test_the_planners_newest_gain():
    def move(number, cause, predicted, before=100.0, after=0.0):
        name = f"reassignments/{number}"
        fleet.reassignments[name] = Reassignment(
            name, cause=cause, predicted_gain=predicted, rate_before=before, rate_after=after
        )

    fleet = Fleet()
    move(0, "bootstrap", 0.0)
    assert rows(figures.planner(fleet), "libra_planner_gain_tokens_per_second") == {}
    move(1, "planner", 50.0, after=130.0)
    move(2, "operator", 0.0, after=900.0)
    move(3, "planner", 70.0)
    gains = rows(figures.planner(fleet), "libra_planner_gain_tokens_per_second")
    assert gains == {("predicted",): 70, ("observed",): 30}
