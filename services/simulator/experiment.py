"""Policies compared on one cluster and workload: every policy on the same seeds, figures with their spread."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from services.simulator import ladder
from services.simulator.cluster import Cluster
from services.simulator.layout import ClusterSpec, Failure, FailureKind, Layout, Mode
from services.simulator.parametric import CODE, SEARCH, Parametric, Shift
from services.simulator.policies import registry, search
from services.simulator.policies.base import Policy
from services.simulator.policies.clairvoyant import bound
from services.simulator.policies.static import degrees
from services.simulator.processes import Run, runner
from services.simulator.results import Figures, RunResult
from services.simulator.times import EngineTimes, TrainingTimes
from services.simulator.workload import Episode, Resampled, Workload, scaled

FIRST_STEP = 4
"""From 0: the first four steps are reported apart, as what finding the layout cost."""
CYCLE_S = 5.0
QUICK_CYCLE_S = 1.0
"""For failures and replays, which last a minute or some."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One comparison. `given`: a layout for all policies but the synchronous ones, instead of their own."""

    spec: ClusterSpec
    workload: Workload
    steps: int = 20
    first: int = FIRST_STEP
    mode: Mode = Mode.ASYNC
    given: Layout | None = None
    cycle_s: float = CYCLE_S
    """Seconds between decisions, of every policy that decides at intervals."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A policy's runs, by seed, and its figures from the first scored step on."""

    name: str
    layout: str
    runs: tuple[RunResult, ...]
    figures: tuple[Figures, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies on the same seeds."""

    policies: tuple[Compared, ...]
    cycle_s: float
    searches: tuple[tuple[str, int, int], ...] = ()
    notes: tuple[str, ...] = field(default=())


Job = tuple[Experiment, str, registry.Layouts, int]


def compare(
    experiment: Experiment, policies: str | Iterable[str], seeds: int, *, workers: int | None = None
) -> Comparison:
    """Runs every policy on seeds 1..n, on so many processes (default: one a core); they change no answer."""
    with runner(workers) as run:
        return compared(experiment, policies, seeds, run)


def compared(experiment: Experiment, policies: str | Iterable[str], seeds: int, run: Run) -> Comparison:
    """As `compare`, on processes that are there already."""
    chosen = registry.names(policies)
    notes: list[str] = []
    if experiment.mode is Mode.ROLLOUT:
        chosen, left_out = registry.without_training(chosen)
        notes += left_out
    needed = chosen if experiment.given is None else [n for n in chosen if n in registry.SYNCHRONOUS]
    if experiment.given is not None:
        notes += _of_given(experiment.given, chosen)
    question = search.Question(
        experiment.spec, experiment.workload, experiment.steps, experiment.first, experiment.mode
    )
    found = registry.layouts(needed, question, run)
    jobs = [(experiment, name, found, seed) for name in chosen for seed in range(1, seeds + 1)]
    results = run(simulate, jobs)
    rows = []
    for at, name in enumerate(chosen):
        runs = tuple(results[at * seeds : (at + 1) * seeds])
        figures = tuple(r.since(min(experiment.first, experiment.steps - 1)) for r in runs)
        rows.append(Compared(name, runs[0].steps[-1].layout, runs, figures))
    return Comparison(tuple(rows), experiment.cycle_s, found.cost, tuple(notes))


def _of_given(given: Layout, chosen: Iterable[str]) -> list[str]:
    """What rows on a layout that policies did not choose are not."""
    same = [name for name in chosen if name in registry.LEAST_LOADED]
    if not same:
        return []
    one = "is" if len(same) == 1 else "are all"
    return [f"{', '.join(same)}: on the given layout ({given.words()}) {one} least-loaded routing, and no more"]


def simulate(job: Job) -> RunResult:
    """One policy on one seed; of the variants of a bound, the best run."""
    experiment, name, found, seed = job
    synchronous = name in registry.SYNCHRONOUS
    policies = registry.build(name, found, None if synchronous else experiment.given)
    results = [carried_out(experiment, policy, seed, own_mode=synchronous) for policy in policies]
    return max(results, key=lambda r: r.since(min(experiment.first, experiment.steps - 1)).tokens_per_s)


def carried_out(experiment: Experiment, policy: Policy, seed: int, *, own_mode: bool = False) -> RunResult:
    """One run of a fresh policy at the experiment's cycle and, unless it has its `own_mode`, in its mode."""
    if policy.decide_every_s is not None:
        policy.decide_every_s = experiment.cycle_s
    if not own_mode:
        policy.mode = experiment.mode
    return Cluster(experiment.spec, experiment.workload, policy, seed=seed, steps=experiment.steps).run()


# ---- the cluster of the published evaluation


def r2e_experiment(
    times: EngineTimes, training: TrainingTimes, *, steps: int = 20, given: Layout | None = None
) -> Experiment:
    """48 accelerators in nodes of 8, 32 groups of 16 a step, mean length 2.5K -> 11.5K over 20 steps, staleness 1."""
    return Experiment(ClusterSpec(times, training), Parametric(), steps=steps, given=given)


def shift_experiments(times: EngineTimes, training: TrainingTimes, *, steps: int = 20) -> dict[str, Experiment]:
    """The same cluster with an abrupt shift halfway, and with two families of tasks in turn."""
    spec = ClusterSpec(times, training)
    still = Parametric(mean_start=2_500.0, mean_end=2_500.0)
    return {
        "shift": Experiment(spec, replace(still, shift=Shift(steps // 2)), steps=steps),
        "families": Experiment(spec, replace(still, families=(CODE, SEARCH)), steps=steps),
    }


def r2e_48(
    times: EngineTimes,
    training: TrainingTimes,
    policies: str | Iterable[str] = "all",
    seeds: int = 3,
    *,
    steps: int = 20,
    given: Layout | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """The preset as a document, see `document`; with `published`, ratios given and got, unless a layout is given: the
    published ones are of policies on layouts of their own.
    """
    asked = r2e_experiment(times, training, steps=steps, given=given)
    found = document(compare(asked, policies, seeds, workers=workers))
    return {**found, "published": ladder.rungs(found["policies"]) if given is None else []}


def shift_48(
    times: EngineTimes,
    training: TrainingTimes,
    policies: str | Iterable[str] = "all",
    seeds: int = 3,
    *,
    steps: int = 20,
    workers: int | None = None,
) -> dict[str, Any]:
    """Both workloads, each as a document under its name."""
    found = shift_experiments(times, training, steps=steps)
    return {name: document(compare(e, policies, seeds, workers=workers)) for name, e in found.items()}


def document(comparison: Comparison) -> dict[str, Any]:
    """`{"policies": [...], "searches": [...], "notes": [...], "cycle_s": ...}`.

    Figures are means over the seeds from the first scored step on; `cycle_s`: seconds between decisions.
    `spread`: (highest - lowest) / mean of tokens_per_s over the seeds; `from_start`: tokens_per_s of all steps;
    `steps_by_seed`: of each step, from the first, its layout and the seconds since the step before.
    `of_bound`: mean over the seeds of tokens_per_s over that of `clairvoyant` on the same seed, null without it.
    """
    bounds = next((p.figures for p in comparison.policies if p.name == "clairvoyant"), None)
    return {
        "policies": [_row(p, bounds) for p in comparison.policies],
        "searches": [{"for": s, "layouts": tried, "steps": steps} for s, tried, steps in comparison.searches],
        "notes": list(comparison.notes),
        "cycle_s": comparison.cycle_s,
    }


def _row(own: Compared, bounds: tuple[Figures, ...] | None) -> dict[str, Any]:
    rates = [f.tokens_per_s for f in own.figures]
    row: dict[str, Any] = {"name": own.name}
    for key in asdict(own.figures[0]):
        values = [getattr(f, key) for f in own.figures]
        row[key] = max(values) if key == "max_staleness" else statistics.fmean(values)
    row["of_bound"] = (
        None if bounds is None else statistics.fmean(r / b.tokens_per_s for r, b in zip(rates, bounds, strict=True))
    )
    row["spread"] = (max(rates) - min(rates)) / statistics.fmean(rates)
    row["by_seed"] = rates
    row["steps_by_seed"] = [_steps(r) for r in own.runs]
    row["from_start"] = statistics.fmean(r.since(0).tokens_per_s for r in own.runs)
    row["layout"] = own.layout
    row["wasted"] = statistics.fmean(r.wasted for r in own.runs)
    row["moves"] = statistics.fmean(r.moves for r in own.runs)
    row["preemptions"] = statistics.fmean(r.preemptions for r in own.runs)
    row["relayouts"] = statistics.fmean(r.relayouts for r in own.runs)
    return row


def _steps(run: RunResult) -> list[dict[str, Any]]:
    ends = [0.0, *(s.ended_at for s in run.steps)]
    return [
        {"layout": s.layout, "makespan_s": s.ended_at - before} for s, before in zip(run.steps, ends[:-1], strict=True)
    ]


# ---- failures

FAILS_AT_S = 60.0
KINDS: tuple[FailureKind, ...] = ("die", "hang", "slow")


def failures_4(
    times: EngineTimes, policies: str | Iterable[str] = "all", seeds: int = 3, *, workers: int | None = None
) -> dict[str, Any]:
    """One of four TP1 workers dies, hangs or slows to a quarter a minute after 256 episodes began.

    Rows `{name, kind, total_s, without_s, ratio, placed_late}`: seconds with the failure, with three workers from the
    start, their ratio, and trajectories placed on the worker after it should have been noticed; means over the seeds.
    """
    chosen, _ = registry.without_training(registry.names(policies))
    cases = [*(_failing(times, kind, 4) for kind in KINDS), _failing(times, None, 3)]
    jobs = [
        (case, name, registry.Layouts({}), seed) for name in chosen for case in cases for seed in range(1, seeds + 1)
    ]
    with runner(workers) as run:
        results = iter(run(simulate, jobs))
    rows = []
    for name in chosen:
        *failed, without = [[next(results) for _ in range(seeds)] for _ in cases]
        rows += [_failure_row(name, kind, runs, without) for kind, runs in zip(KINDS, failed, strict=True)]
    return {"policies": rows, "cycle_s": QUICK_CYCLE_S}


def _failing(times: EngineTimes, kind: FailureKind | None, workers: int) -> Experiment:
    failures = (Failure(workers - 1, kind, FAILS_AT_S),) if kind is not None else ()
    spec = ClusterSpec(times, None, accelerators=workers, node_size=workers, failures=failures)
    workload = Parametric(groups=16, mean_start=2_500.0, mean_end=2_500.0)
    given = Layout((1,) * workers, 0)
    return Experiment(spec, workload, steps=1, first=0, mode=Mode.ROLLOUT, given=given, cycle_s=QUICK_CYCLE_S)


def _failure_row(name: str, kind: str, runs: list[RunResult], without: list[RunResult]) -> dict[str, Any]:
    total = statistics.fmean(r.since(0).total_s for r in runs)
    least = statistics.fmean(r.since(0).total_s for r in without)
    late = statistics.fmean(r.placed_late for r in runs)
    return {
        "name": name,
        "kind": kind,
        "total_s": total,
        "without_s": least,
        "ratio": total / least,
        "placed_late": late,
    }


# ---- replay of recorded episodes


@dataclass(frozen=True, slots=True)
class Cell:
    """One condition of a replay."""

    profile: str
    latency: float
    generated: float


REPLAY_ACCELERATORS = 4
SAMPLE_EPISODES = 256
"""Episodes that a bootstrap sample aims at, in whole groups, if the file has as many."""
LATENCIES = (0.0, 1.0, 5.0)
SCALES = (1.0, 4.0, 10.0)


def replay(
    episodes: Sequence[Episode],
    profiles: Mapping[str, EngineTimes],
    policies: str | Iterable[str] = "all",
    samples: int = 5,
    *,
    latencies: Sequence[float] = LATENCIES,
    scales: Sequence[float] = SCALES,
    workers: int | None = None,
) -> dict[str, Any]:
    """Rollout of recorded episodes on four accelerators, all in flight at once, in each cell latency x scale x profile.

    Each sample draws whole groups with replacement; all policies run on the same samples, so that ratios are paired.
    `interval`: 5 % and 95 % quantiles of the makespan, and of its ratio to clairvoyant's, over the samples.
    """
    with runner(workers) as run:
        cells = [
            _replay_cell(Cell(profile, latency, scale), times, episodes, policies, samples, run)
            for profile, times in profiles.items()
            for latency in latencies
            for scale in scales
        ]
    return {
        "episodes": len(episodes),
        "accelerators": REPLAY_ACCELERATORS,
        "samples": samples,
        "cycle_s": QUICK_CYCLE_S,
        "cells": cells,
    }


def _replay_cell(
    cell: Cell,
    times: EngineTimes,
    episodes: Sequence[Episode],
    policies: str | Iterable[str],
    samples: int,
    run: Run,
) -> dict[str, Any]:
    chosen = tuple(scaled(episodes, generated=cell.generated, latency=cell.latency))
    groups = len({e.group for e in chosen})
    count = max(1, min(groups, round(SAMPLE_EPISODES * groups / len(chosen))))
    spec = ClusterSpec(times, None, accelerators=REPLAY_ACCELERATORS, node_size=REPLAY_ACCELERATORS)
    workload = Resampled(chosen, count)
    experiment = Experiment(spec, workload, steps=1, first=0, mode=Mode.ROLLOUT, cycle_s=QUICK_CYCLE_S)
    comparison = compared(experiment, policies, samples, run)
    return {
        "profile": cell.profile,
        "latency": cell.latency,
        "scale": cell.generated,
        "bound_s": statistics.fmean(
            bound(workload.batch(0, seed), spec, REPLAY_ACCELERATORS, degrees(spec)) for seed in range(1, samples + 1)
        ),
        "policies": _replay_rows(comparison),
        "notes": list(comparison.notes),
    }


def _replay_rows(comparison: Comparison) -> list[dict[str, Any]]:
    bounds = next((p.figures for p in comparison.policies if p.name == "clairvoyant"), None)
    rows = []
    for own in comparison.policies:
        spans = [f.total_s for f in own.figures]
        row: dict[str, Any] = {
            "name": own.name,
            "makespan_s": statistics.fmean(spans),
            "interval": _interval(spans),
            "tokens_per_s": statistics.fmean(f.tokens_per_s for f in own.figures),
            "migrated_ratio": statistics.fmean(f.migrated_ratio for f in own.figures),
            "layout": own.layout,
            "of_bound": None,
            "of_bound_interval": None,
        }
        if bounds is not None:
            ratios = [b.total_s / s for b, s in zip(bounds, spans, strict=True)]
            row["of_bound"], row["of_bound_interval"] = statistics.fmean(ratios), _interval(ratios)
        rows.append(row)
    return rows


def _interval(values: Sequence[float]) -> list[float]:
    return [float(q) for q in np.quantile(values, (0.05, 0.95))]
