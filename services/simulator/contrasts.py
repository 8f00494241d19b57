"""`libra` beside variants of itself: what a mechanism brings, paired by seed, on the conditions in which it should and
should not matter. The presets `outcomes`, `kv-48` and `ablation`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.simulator.experiment import QUICK_CYCLE_S, Experiment, carried_out, r2e_experiment
from services.simulator.layout import ClusterSpec, Layout, Mode
from services.simulator.parametric import REPAIR, Family, Parametric
from services.simulator.policies import ablated, search
from services.simulator.policies.base import Policy
from services.simulator.policies.clairvoyant import Clairvoyant
from services.simulator.policies.libra import Libra
from services.simulator.policies.static import BestHomogeneous, StaticUniform, degrees, uniform
from services.simulator.processes import Run, runner
from services.simulator.results import Figures, RunResult
from services.simulator.times import EngineTimes, TrainingTimes
from services.simulator.workload import Episode, Resampled, Workload, scaled, shuffled_outcomes

WHOLE = "libra"


@dataclass(frozen=True, slots=True)
class Row:
    """A policy of a contrast. `layout` None: the case's."""

    name: str
    make: Callable[[Layout | None], Policy]
    instead: str = ""
    """What it does instead of what `libra` does."""
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One condition, and the policies that are compared on it, `libra` first."""

    name: str
    experiment: Experiment
    rows: tuple[Row, ...]
    told: tuple[tuple[str, float], ...] = ()
    """Figures of the condition itself."""


def whole() -> Row:
    """`libra` with all its mechanisms."""
    return Row(WHOLE, Libra)


def without(variant: ablated.Ablated) -> Row:
    """One mechanism off."""
    return Row(variant.policy.name, variant.policy, variant.instead)


Job = tuple[Experiment, Row, int]


def simulate(job: Job) -> RunResult:
    """One row on one seed."""
    experiment, row, seed = job
    return carried_out(experiment, row.make(row.layout or experiment.given), seed)


def contrast(cases: Sequence[Case], seeds: int, run: Run) -> list[dict[str, Any]]:
    """Each case as `{"name", ..., "steps", "scored_from", "policies": [...]}`, with its own figures.

    Of each policy: means over seeds 1..n of the steps from the first scored one on; `by_seed`: tokens per second;
    `libra_over`: those of `libra` over its own on the same seed (above 1: `libra` is faster), the mean, each seed's
    and, as `interval`, their 5 % and 95 % quantiles.
    """
    jobs = [(c.experiment, row, seed) for c in cases for row in c.rows for seed in range(1, seeds + 1)]
    results = iter(run(simulate, jobs))
    return [_case(case, {row: [next(results) for _ in range(seeds)] for row in case.rows}) for case in cases]


def _case(case: Case, runs: Mapping[Row, Sequence[RunResult]]) -> dict[str, Any]:
    asked = case.experiment
    first = min(asked.first, asked.steps - 1)
    figures = {row: [r.since(first) for r in of_row] for row, of_row in runs.items()}
    ours = figures[case.rows[0]]
    return {
        "name": case.name,
        **dict(case.told),
        "steps": asked.steps,
        "scored_from": first,
        "policies": [_row(row, runs[row], figures[row], ours) for row in case.rows],
    }


def _row(row: Row, runs: Sequence[RunResult], own: Sequence[Figures], ours: Sequence[Figures]) -> dict[str, Any]:
    rates = [f.tokens_per_s for f in own]
    ratios = [f.tokens_per_s / rate for f, rate in zip(ours, rates, strict=True)]
    return {
        "name": row.name,
        "instead": row.instead,
        "tokens_per_s": statistics.fmean(rates),
        "by_seed": rates,
        "libra_over": statistics.fmean(ratios),
        "libra_over_by_seed": ratios,
        "interval": [float(q) for q in np.quantile(ratios, (0.05, 0.95))],
        "makespan_p50_s": statistics.fmean(f.makespan_p50_s for f in own),
        "idle_rollout": statistics.fmean(f.idle_rollout for f in own),
        "idle_training": statistics.fmean(f.idle_training for f in own),
        "migrated_ratio": statistics.fmean(f.migrated_ratio for f in own),
        "stopped_by_engines": statistics.fmean(r.preemptions for r in runs),
        "moves": statistics.fmean(r.moves for r in runs),
        "relayouts": statistics.fmean(r.relayouts for r in runs),
        "layout": runs[0].steps[-1].layout,
    }


# ---- outcomes


@dataclass(frozen=True, slots=True)
class Shuffled:
    """The workload with the outcomes of calls permuted within each episode."""

    workload: Workload

    def batch(self, step: int, seed: int) -> list[Episode]:
        """Those of the step; the permutation depends on (seed, step)."""
        return shuffled_outcomes(self.workload.batch(step, seed), np.random.default_rng((seed, step, 13)))


SILENT = replace(REPAIR, name="silent", lengthening=0.0)
"""As REPAIR, but for what failures cause."""
OUTCOMES_LAYOUT = Layout((1, 1, 1, 1, 4), 0)
"""Slow and fast engines: to know early who is long is worth something."""
OUTCOMES_MEAN = 4_000.0
TRACE_EPISODES = 128
TRACE_SCALE = 10.0
"""Recorded turns are short: at their own length little is decided."""


def outcomes(
    times: EngineTimes,
    traces: Mapping[str, Sequence[Episode]],
    seeds: int = 8,
    *,
    steps: int = 6,
    workers: int | None = None,
) -> dict[str, Any]:
    """`libra` and `outcome-blind` where outcomes say nothing, cause work, or did and were permuted; and on recorded
    episodes (by name, whole groups drawn with replacement) with their outcomes and permuted ones. `clairvoyant`: what
    there is to gain.

    Rollout alone on OUTCOMES_LAYOUT, one batch of 128 after the other; all but the first are scored.
    """
    workloads: dict[str, Workload] = {
        "silent": _family(SILENT),
        "caused": _family(REPAIR),
        "caused, shuffled": Shuffled(_family(REPAIR)),
    }
    for name, episodes in traces.items():
        recorded = _recorded(episodes)
        workloads |= {name: recorded, f"{name}, shuffled": Shuffled(recorded)}
    spec = ClusterSpec(times, None, accelerators=OUTCOMES_LAYOUT.rollout)
    rows = (whole(), without(ablated.OUTCOMES), Row(Clairvoyant.name, _clairvoyant, "knows every length"))
    cases = [
        Case(
            name,
            Experiment(spec, workload, steps, first=1, mode=Mode.ROLLOUT, given=OUTCOMES_LAYOUT, cycle_s=QUICK_CYCLE_S),
            rows,
        )
        for name, workload in workloads.items()
    ]
    with runner(workers) as run:
        found = contrast(cases, seeds, run)
    return {"cases": found, "layout": OUTCOMES_LAYOUT.words(), "cycle_s": QUICK_CYCLE_S}


def _clairvoyant(layout: Layout | None) -> Policy:
    assert layout is not None
    return Clairvoyant(layout)


def _family(family: Family) -> Parametric:
    return Parametric((family,), groups=8, mean_start=OUTCOMES_MEAN, mean_end=OUTCOMES_MEAN)


def _recorded(episodes: Sequence[Episode]) -> Resampled:
    longer = tuple(scaled(episodes, generated=TRACE_SCALE))
    groups = len({e.group for e in longer})
    return Resampled(longer, max(1, min(groups, round(TRACE_EPISODES * groups / len(longer)))))


# ---- KV caches


LONG_MEAN, SHORT_MEAN = 12_000.0, 2_500.0
OVERSUBSCRIBED = 3.0
"""Times that final sequences of all in flight would fill the KV caches, at least; on average they are half as long."""
MOST_ENGINES = 24
AMPLE_LAYOUT = Layout((4,) * 6, 24)
KV_GROUPS = 16
"""Of 16 trajectories: with staleness 1 two batches of them, 512 trajectories, are in flight."""


def kv_48(
    times: EngineTimes, training: TrainingTimes, seeds: int = 3, *, steps: int = 8, workers: int | None = None
) -> dict[str, Any]:
    """`libra` with other room kept in KV caches, and with none (`uncapped`): 512 trajectories in flight on 48
    accelerators, where caches are short and ample.

    Short: long episodes on as many engines of the smallest degree, in fours and at most MOST_ENGINES, as make it
    OVERSUBSCRIBED. Ample: short ones on AMPLE_LAYOUT. `kv_demand` of a case: final sequences of its workload's first
    batches over the KV tokens of all engines. The first two steps are not scored.
    """
    spec = ClusterSpec(times, training)
    long, short = _kv_workload(LONG_MEAN), _kv_workload(SHORT_MEAN)
    cases = [
        _kv_case("oversubscribed", spec, long, short_of_room(spec, long), steps),
        _kv_case("ample", spec, short, AMPLE_LAYOUT, steps),
    ]
    with runner(workers) as run:
        found = contrast(cases, seeds, run)
    return {"cases": found, "cycle_s": cases[0].experiment.cycle_s}


def _kv_workload(mean: float) -> Parametric:
    return Parametric(groups=KV_GROUPS, mean_start=mean, mean_end=mean)


def _in_flight(spec: ClusterSpec, workload: Workload) -> list[Episode]:
    """The first batches of seed 1."""
    return [e for step in range(spec.staleness + 1) for e in workload.batch(step, 1)]


def short_of_room(spec: ClusterSpec, workload: Workload) -> Layout:
    """See `kv_48`; the other accelerators train."""
    tp = min(degrees(spec))
    demand = sum(e.tokens for e in _in_flight(spec, workload))
    count = int(demand / OVERSUBSCRIBED / spec.times.kv_tokens(tp)) // 4 * 4
    count = min(max(4, count), MOST_ENGINES // tp)
    return Layout((tp,) * count, spec.accelerators - count * tp)


def _kv_case(name: str, spec: ClusterSpec, workload: Workload, layout: Layout, steps: int) -> Case:
    room = sum(spec.times.kv_tokens(tp) for tp in layout.engines)
    in_flight = _in_flight(spec, workload)
    told = (
        ("mean_generated", statistics.fmean(e.generated for e in in_flight)),
        ("in_flight", float(len(in_flight))),
        ("kv_tokens", float(room)),
        ("kv_demand", sum(e.tokens for e in in_flight) / room),
    )
    mine = [v for v in ablated.QUEUE if v.policy in (ablated.Uncapped, ablated.Unreserved)]
    rows = (whole(), *(without(v) for v in (*mine, ablated.RESERVED)))
    return Case(name, Experiment(spec, workload, steps, first=2, given=layout), rows, told)


# ---- ablation


def ablation(
    times: EngineTimes,
    training: TrainingTimes,
    seeds: int = 3,
    *,
    steps: int = 10,
    given: Layout | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """The first steps of `r2e-48` with each mechanism off in turn, and the simplest policies that they ride on.

    `best-layout`: all but the planner, on the layout that `best-homogeneous` found. On a given layout nothing is
    planned or searched for, and the rows that differ from others by their layout alone are left out.
    """
    asked = r2e_experiment(times, training, steps=steps, given=given)
    searches: list[dict[str, Any]] = []
    with runner(workers) as run:
        rows = [whole()]
        if given is None:
            found = search.best(
                search.homogeneous_layouts(asked.spec),
                search.Question(asked.spec, asked.workload, asked.steps, asked.first, asked.mode),
                run,
                refine=lambda leaders: search.neighbours(asked.spec, leaders),
            )
            searches.append({"for": "homogeneous", "layouts": found.tried, "steps": found.steps})
            rows += _layout_rows(asked.spec, found.layout)
        rows += [without(variant) for variant in ablated.QUEUE]
        rows.append(Row(StaticUniform.name, StaticUniform, "least-loaded routing, nothing else"))
        if given is None:
            instead = "least-loaded routing on the best layout of one degree, nothing else"
            rows.append(Row(BestHomogeneous.name, _best_homogeneous, instead, found.layout))
        (case,) = contrast([Case("ablation", asked, tuple(rows))], seeds, run)
    return {**case, "searches": searches, "cycle_s": asked.cycle_s}


def _layout_rows(spec: ClusterSpec, best: Layout) -> list[Row]:
    planner = ablated.PLANNER
    return [
        Row(planner.policy.name, planner.policy, f"{planner.instead}: {uniform(spec).words()}"),
        Row("best-layout", Libra, f"the best of the searched layouts of one degree, throughout: {best.words()}", best),
    ]


def _best_homogeneous(layout: Layout | None) -> Policy:
    assert layout is not None
    return BestHomogeneous(layout)
