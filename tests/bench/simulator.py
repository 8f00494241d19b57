"""Prints what a simulated step costs: 48 accelerators, 512 multi-turn trajectories, least-loaded routing and ours.

    python -m tests.bench.simulator [--steps 3] [--repeat 3] [--profile]

Mean lengths as in the middle of the r2e-48 preset; the episodes are drawn beforehand. CPU seconds of one process for
each training step, median over the repetitions. Not a test: it asserts only that all steps were taken.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

from services.simulator import profiles
from services.simulator.cluster import Cluster
from services.simulator.layout import ClusterSpec, Layout
from services.simulator.parametric import Parametric
from services.simulator.policies.base import Policy
from services.simulator.policies.libra import Libra
from services.simulator.steptimes import ModelledEngine
from services.simulator.trainingtimes import ModelledTraining

LAYOUTS = (Layout((1,) * 24, 24), Layout((4,) * 6, 24))


def ours(layout: Layout) -> Policy:
    """With the cycle of the presets."""
    policy = Libra(layout)
    policy.decide_every_s = 5.0
    return policy


def step_s(
    spec: ClusterSpec, workload: Parametric, make: Callable[[Layout], Policy], layout: Layout, steps: int
) -> float:
    """CPU seconds for each step."""
    cluster = Cluster(spec, workload, make(layout), seed=1, steps=steps)
    began = time.process_time()
    assert len(cluster.run().steps) == steps
    return (time.process_time() - began) / steps


def main() -> None:
    """Prints a line for each layout and policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    hardware, model = profiles.profile("a100-modelled").hardware, profiles.model("qwen3-14b")
    spec = ClusterSpec(ModelledEngine(hardware, model), ModelledTraining(hardware, model))
    workload = Parametric(mean_start=5_400.0, mean_end=5_400.0)
    for step in range(asked.steps + spec.staleness + 1):
        workload.batch(step, 1)
    if asked.profile:
        with cProfile.Profile() as profile:
            step_s(spec, workload, Policy, LAYOUTS[0], asked.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    for name, make in (("least-loaded", Policy), ("libra", ours)):
        for layout in LAYOUTS:
            times = [step_s(spec, workload, make, layout, asked.steps) for _ in range(asked.repeat)]
            print(f"{name:14} {layout.words():24} {statistics.median(times):.3f} s a step")


if __name__ == "__main__":
    main()
