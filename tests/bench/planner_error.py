"""Prints what the planner predicts of a layout beside what the event simulation makes of it.

    python -m tests.bench.planner_error [--profiles a100-modelled a800-paper] [--mean 5400] [--steps 9]

48 accelerators, Qwen3-14B, 512 trajectories a step, K = 1, our own queue on a layout that stays. Seconds of a step from
the third on; the demand is what the workload's generator draws. Not a test: it asserts only that all steps were taken.
"""

import argparse
import statistics

import numpy as np

from services.scheduler.core.demand import Demand, demand_of
from services.scheduler.core.layouts import Job, Judge
from services.scheduler.core.rates import EngineKind, TrainerKind
from services.scheduler.core.topology import layout_of
from services.simulator import priors, profiles
from services.simulator.cluster import Cluster
from services.simulator.layout import ClusterSpec, Layout
from services.simulator.parametric import CAP_TOKENS, Parametric
from services.simulator.policies.libra import Libra
from services.simulator.steptimes import ModelledEngine
from services.simulator.trainingtimes import ModelledTraining

LAYOUTS = (
    Layout((1,) * 24, 24), Layout((2,) * 12, 24), Layout((4,) * 6, 24), Layout((8,) * 3, 24), Layout((4,) * 4, 32),
    Layout((4,) * 7, 20), Layout((4,) * 8, 16), Layout((8,) * 4, 16), Layout((8,) * 2, 32), Layout((2,) * 8 + (8,), 24),
)  # fmt: skip
REPLICA = 4
FIRST = 2
CYCLE_S = 5.0
PILOT = 4
"""Steps that the demand is drawn from."""


def demand(workload: Parametric) -> Demand:
    """What a step of the workload asks for."""
    drawn = [e for step in range(PILOT) for e in workload.batch(step, 1)]
    return demand_of(
        np.array([float(e.generated) for e in drawn]), np.array([float(e.tokens) for e in drawn]),
        np.array([sum(t.latency_s for t in e.turns[:-1]) for e in drawn]), np.ones(len(drawn)),
        prompt_tokens=statistics.fmean(e.prompt for e in drawn), groups=workload.groups, samples=workload.members,
        max_versions=1, max_context=CAP_TOKENS,
    )  # fmt: skip


def simulated(spec: ClusterSpec, workload: Parametric, layout: Layout, steps: int) -> float:
    """Seconds of a step."""
    policy = Libra(layout)
    policy.decide_every_s = CYCLE_S
    ends = [s.ended_at for s in Cluster(spec, workload, policy, seed=1, steps=steps).run().steps]
    assert len(ends) == steps
    return (ends[-1] - ends[FIRST]) / (steps - 1 - FIRST)


def main() -> None:
    """Prints a line for each layout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profiles", nargs="*", default=["a100-modelled", "a800-paper"])
    parser.add_argument("--mean", type=float, default=5_400.0)
    parser.add_argument("--steps", type=int, default=9)
    asked = parser.parse_args()
    model, workload = profiles.model("qwen3-14b"), Parametric(mean_start=asked.mean, mean_end=asked.mean)
    for name in asked.profiles:
        hardware = profiles.profile(name).hardware
        times, training = ModelledEngine(hardware, model), ModelledTraining(hardware, model)
        engines = priors.engine_rates(times, "a")
        trainers = priors.trainer_rates(training, "a", (REPLICA,), CAP_TOKENS)
        judge, errors = Judge(Job(demand(workload), engines, trainers)), []
        for layout in LAYOUTS:
            counts = {EngineKind("a", tp): layout.engines.count(tp) for tp in set(layout.engines)}
            judged = judge.judged(layout_of({TrainerKind("a", REPLICA): layout.training // REPLICA, **counts}))
            seconds = simulated(ClusterSpec(times, training), workload, layout, asked.steps)
            predicted = judged.prediction.step_seconds
            errors.append(predicted / seconds - 1)
            print(
                f"{name:14} {layout.words():32} predicted {predicted:5.0f} s (bound by {judged.bound}), simulated "
                f"{seconds:5.0f} s, {errors[-1]:+.0%}"
            )
        print(f"{name:14} median error {statistics.median(abs(e) for e in errors):.0%}")


if __name__ == "__main__":
    main()
