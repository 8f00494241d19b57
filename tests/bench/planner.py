"""Prints what planning costs: the search for a layout, and a whole plan with its moves, 512 requests in a step.

    python -m tests.bench.planner [--accelerators 128 1024] [--repeat 5] [--profile]

A fleet of one accelerator type, and one of two; the plan starts from half of each node in training, half in engines of
one. CPU seconds of one process, median over the repetitions, each from scratch; rates of the profile a100-modelled, lengths
log-normal with a mean of 5,400 tokens. Not a test: it asserts only that a layout was found.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from services.scheduler.core import relayout
from services.scheduler.core.demand import Demand, demand_of
from services.scheduler.core.layouts import Job, search
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState
from services.scheduler.core.topology import Accelerator, Fleet, Replica
from services.simulator import priors, profiles
from services.simulator.steptimes import ModelledEngine
from services.simulator.trainingtimes import ModelledTraining

TYPES = {"a100": "a100-80gb", "h100": "h100-80gb"}
T = TypeVar("T")
SAMPLES = 4_096
NODE = 8


def demand() -> Demand:
    """512 requests a step."""
    rng = np.random.default_rng(7)
    generated = np.minimum(20_000.0, np.exp(rng.normal(np.log(5_400.0) - 0.5, 1.0, SAMPLES)))
    contexts = np.minimum(40_960.0, 1_200.0 + 1.9 * generated)
    return demand_of(
        generated, contexts, generated / 400.0, np.ones(SAMPLES), prompt_tokens=1_200.0, groups=32, samples=16,
        max_versions=1,
    )  # fmt: skip


def job(types: list[str]) -> Job:
    """Rates of these types for Qwen3-14B."""
    model = profiles.model("qwen3-14b")
    engines, trainers = {}, {}
    for name in types:
        hardware = profiles.profile(TYPES[name]).hardware
        engines |= priors.engine_rates(ModelledEngine(hardware, model), name)
        trainers |= priors.trainer_rates(ModelledTraining(hardware, model), name, (4, 8, 16), 65_536)
    return Job(demand(), engines, trainers)


def fleet(accelerators: int, types: list[str]) -> Fleet:
    """Whole nodes, the types in turn; on each a trainer of four and four engines of one."""
    made, replicas = [], []
    for at in range(accelerators // NODE):
        node = f"n{at:03d}"
        names = [f"{node}/{i}" for i in range(NODE)]
        made += [Accelerator(name, types[at % len(types)], node) for name in names]
        replicas.append(Replica(f"{node}/t", "TRAINER", tuple(names[:4])))
        replicas += [Replica(f"{name}/e", "ROLLOUT", (name,)) for name in names[4:]]
    return Fleet(tuple(made), tuple(replicas))


def main() -> None:
    """Prints a line for each fleet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accelerators", type=int, nargs="*", default=[128, 1_024])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    for types in (["a100"], ["a100", "h100"]):
        rates = job(types)
        for count in asked.accelerators:
            where = fleet(count, types)
            search_s, found = _measured(lambda where=where, rates=rates: search(where, rates), asked.repeat)
            plan_s, planned = _measured(lambda where=where, rates=rates: _plan(where, rates), asked.repeat)
            assert found.chosen is not None
            assert planned.moves
            print(
                f"{count:5} x {'+'.join(types):10} search {search_s:.3f} s ({found.tried} layouts judged), plan "
                f"{plan_s:.3f} s ({len(planned.moves)} moves): {planned.chosen.judged.layout.words()}"
            )
    if asked.profile:
        with cProfile.Profile() as profile:
            _plan(fleet(asked.accelerators[-1], ["a100"]), job(["a100"]))
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def _plan(where: Fleet, rates: Job) -> relayout.Relayout:
    given = relayout.Situation(where, rates.demand, rates.engines, rates.trainers, Pace(0.0, 100, 100), drift=0.02)
    rules = PlannerSettings(horizon_s=3_600.0, confirmations=1, max_moves_per_window=1_000)
    return relayout.plan(given, rules, PlannerState())


def _measured(call: Callable[[], T], repeat: int) -> tuple[float, T]:
    times = []
    for _ in range(repeat):
        began = time.process_time()
        found = call()
        times.append(time.process_time() - began)
    return statistics.median(times), found


if __name__ == "__main__":
    main()
