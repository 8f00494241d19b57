"""Series for the report, from a run's archive: who held what when, rewards, lengths, ages, speeds, time spent."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from services.common import wire
from services.ops.archive import SURVIVING_MANIFESTS, Archive, manifest_state, run_of, trajectory_state
from services.ops.checks.ownership import FREE
from services.ops.summary import origin_time

SETTLED = frozenset({"ACTIVE", "CORDONED", "SUSPECT"})
"""States of a replica that does its work; in the others it comes or goes."""
BIN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in which an accelerator was held; seconds since the training run's creation."""

    accelerator: str
    replica: str
    role: str
    start: float
    end: float
    settled: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One training step, from its manifest."""

    number: int
    reward: float
    trained_tokens: int
    ages: dict[int, int]
    """Trained tokens by age in versions."""
    start: float
    end: float
    longest: int
    """Generated tokens of its longest trajectory."""


def spans(archive: Archive) -> list[Span]:
    """Who held each accelerator, by replica events; a change between coming, working and going starts a new span."""
    origin = origin_time(archive)
    last = max((e.time for e in archive.events), default=origin) - origin
    first = archive.since - origin
    placed: dict[str, tuple[str, ...]] = {}
    since: dict[str, tuple[float, str]] = {}
    found: list[Span] = []

    def close(name: str, end: float) -> None:
        begun = since.pop(name, None)
        if begun is None or end <= max(first, begun[0]):
            return
        role = name.removeprefix("replicas/").rpartition("-")[0].upper()
        settled = begun[1] in SETTLED
        start = max(first, begun[0])
        found.extend(Span(a, name, role, start, end, settled) for a in placed.get(name, ()))

    for event in archive.events:
        if event.kind != "REPLICA":
            continue
        if not event.from_state:
            placed[event.name] = event.related
        if event.to_state == event.from_state:
            continue
        t = event.time - origin
        close(event.name, t)
        if event.to_state not in FREE:
            since[event.name] = (t, event.to_state)
    for name in list(since):
        close(name, last)
    return sorted(found, key=lambda s: (s.accelerator, s.start))


def steps(archive: Archive) -> list[Step]:
    """The surviving steps of the training run."""
    train, origin = archive.demo.get("train_run"), origin_time(archive)
    members: dict[str, list[wire.ManifestMember]] = defaultdict(list)
    for row in archive.members:
        members[row.manifest].append(row.member)
    found = []
    for name, manifest in archive.manifests.items():
        if manifest_state(manifest) not in SURVIVING_MANIFESTS or (train and run_of(name) != train):
            continue
        mine = members[name]
        rewards = [m.reward.value for m in mine]
        found.append(
            Step(
                number=manifest.step,
                reward=sum(rewards) / len(rewards) if rewards else 0.0,
                trained_tokens=manifest.divisors.trainable_tokens,
                ages=_ages(manifest, mine),
                start=manifest.create_time.ToNanoseconds() / 1e9 - origin,
                end=manifest.end_time.ToNanoseconds() / 1e9 - origin,
                longest=max((m.tokens.generated for m in mine), default=0),
            )
        )
    return sorted(found, key=lambda s: s.number)


def _ages(manifest: wire.Manifest, members: list[wire.ManifestMember]) -> dict[int, int]:
    ages: dict[int, int] = defaultdict(int)
    for member in members:
        for sequence in member.sequences:
            for segment in sequence.segments:
                for span in segment.versions:
                    ages[manifest.base_version.number - span.version.number] += span.trainable_tokens
    return dict(ages)


def lengths(archive: Archive) -> tuple[list[int], list[int]]:
    """Generated tokens of the training run's ended trajectories: the first and the second half by admission."""
    train = archive.demo.get("train_run")
    mine = [
        t
        for t in archive.trajectories
        if (not train or run_of(t.name) == train)
        and trajectory_state(t) not in ("VOID", "CANCELLED")
        and t.tokens.generated
    ]
    groups = sorted({_number(t.group) for t in mine})
    middle = groups[len(groups) // 2] if groups else 0
    early = [t.tokens.generated for t in mine if _number(t.group) < middle]
    late = [t.tokens.generated for t in mine if _number(t.group) >= middle]
    return early, late


def _number(name: str) -> int:
    tail = name.rpartition("/")[2]
    return int(tail) if tail.isdigit() else 0


def generation_speed(archive: Archive) -> tuple[list[float], dict[str, list[float]]]:
    """Tokens/s of each rollout worker in bins of BIN_SECONDS, from the totals that they wrote as they went."""
    origin = origin_time(archive)
    kept: dict[tuple[str, int, int], int] = {}
    added: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for fact in archive.facts_of("leased", "generated"):
        key = (fact["trajectory"], int(fact["attempt"]), int(fact["lease_epoch"]))
        if fact.kind == "leased":
            kept[key] = int(fact.get("kept_tokens", 0))
            continue
        before = kept.get(key, 0)
        added[fact.who][int((fact.t - origin) // BIN_SECONDS)] += max(0, int(fact["generated"]) - before)
        kept[key] = max(before, int(fact["generated"]))
    bins = {b for rows in added.values() for b in rows}
    if not bins:
        return [], {}
    axis = range(min(bins), max(bins) + 1)
    series = {who: [rows[b] / BIN_SECONDS for b in axis] for who, rows in sorted(added.items())}
    return [b * BIN_SECONDS for b in axis], series


def queue(archive: Archive) -> tuple[list[float], dict[str, list[float]]]:
    """Waiting trajectories by level over time, from what the live view saw."""
    origin = origin_time(archive)
    levels = sorted({level for s in archive.samples for level in s.get("queue", {})})
    times = [float(s["t"]) - origin for s in archive.samples]
    return times, {level: [float(s.get("queue", {}).get(level, 0)) for s in archive.samples] for level in levels}


def time_split(archive: Archive) -> dict[str, dict[str, float]]:
    """Seconds by phase of each worker, from the counters that the live view read while it ran.

    Trainers count their phases themselves; a counter that falls belongs to a restarted process and counts anew.
    Rollout workers are judged at each sample: asleep, idle, switching weights, or generating.
    """
    total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    before: dict[str, list[float]] = {}
    last_t: float | None = None
    for sample in archive.samples:
        t = float(sample["t"])
        passed = min(10.0, t - last_t) if last_t is not None else 0.0
        last_t = t
        for worker, load in sample.get("trainers", {}).items():
            _add_phases(total[worker], load, before.get(worker))
            before[worker] = load
        for worker, engine in sample.get("engines", {}).items():
            total[worker][_doing(engine)] += passed
    return {worker: dict(rows) for worker, rows in sorted(total.items()) if rows}


def _add_phases(total: dict[str, float], load: list[float], before: list[float] | None) -> None:
    for phase, seconds in enumerate(load):
        earlier = before[phase] if before and phase < len(before) and before[phase] <= seconds else 0.0
        if before is None:
            continue  # what it did before the first sample is not of this run
        if seconds > earlier:
            total[phase_name(phase)] += seconds - earlier


def _doing(engine: dict[str, Any]) -> str:
    activity = str(engine.get("activity", ""))
    if activity in ("SLEEPING", "STARTING", "FAILED", ""):
        return "asleep"
    if activity == "SWITCHING":
        return "switching"
    return "generating" if engine.get("running") else "idle"


def phase_name(number: int) -> str:
    """A trainer phase in words."""
    try:
        return wire.TrainerPhase.Name(wire.TrainerPhase.ValueType(number)).removeprefix("TRAINER_PHASE_").lower()
    except ValueError:
        return f"phase {number}"
