"""The run in numbers: summary.json, and metrics.jsonl put together from what the trainers wrote."""

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.common import wire
from services.ops import records
from services.ops.archive import SURVIVING_VERSIONS as SURVIVING
from services.ops.archive import Archive, run_of, trajectory_state, version_state

PREEMPTION_CAUSES = ("cmlfq", "handover", "operator")
JUDGED = (
    "preempted_resumed", "tokens_lost", "tokens_regenerated", "trained_twice", "max_staleness", "segments_mismatched",
)  # fmt: skip
"""Numbers taken from the checker's verdict."""


def build(archive: Archive) -> dict[str, Any]:
    """The summary's content. Rates and totals are of the training run alone; evaluations only give their two rewards.

    `wall_s` is the time from the training run's creation to its end, `tokens_generated` what its trajectories hold,
    those generated twice not counted. Needs demo.json and verdict.json in the folder.
    """
    demo, judged = archive.demo, archive.verdict.get("numbers", {})
    train = str(demo.get("train_run", ""))
    mine = [t for t in archive.trajectories if run_of(t.name) == train]
    steps = [
        v for v in archive.versions if run_of(v.name) == train and v.version.number and version_state(v) in SURVIVING
    ]
    tokens = sum(t.tokens.generated for t in mine)
    wall = run_seconds(archive, train)
    moves = reassignments(archive)
    done = [m for m in moves if m["state"] == "SUCCEEDED"]
    run = archive.runs.get(train)
    content: dict[str, Any] = {
        "eval_reward_start": mean_reward(archive, str(demo.get("eval_start_run", ""))),
        "eval_reward_end": mean_reward(archive, str(demo.get("eval_end_run", ""))),
        "steps": len(steps),
        "trajectories_trained": sum(trajectory_state(t) == "TRAINED" for t in mine),
        "tokens_generated": tokens,
        "wall_s": round(wall, 2),
        "tokens_per_s": round(tokens / wall, 1) if wall > 0 else 0.0,
        "reassignments": {
            "to_training": sum(m["to"] == "TRAINER" for m in done),
            "to_rollout": sum(m["to"] == "ROLLOUT" for m in done),
        },
        "reassignment_list": moves,
        "preemptions": preemptions(archive),
    }
    content |= {name: judged.get(name) for name in JUDGED}
    content |= {
        "staleness_bound": run.staleness.max_versions if run is not None else None,
        "seed": demo.get("seed"),
        "machine": demo.get("machine") or machine(),
    }
    return content


def write(archive: Archive) -> dict[str, Any]:
    """Writes metrics.jsonl and summary.json, each whole or not at all; returns the summary."""
    records.write_lines(archive.folder / "metrics.jsonl", archive.metrics)
    content = build(archive)
    path = archive.folder / "summary.json"
    part = path.with_name(".summary.json.part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    part.replace(path)
    return content


def mean_reward(archive: Archive, run: str) -> float | None:
    """Mean reward of a run's delivered trajectories; None if there is none."""
    rewards = [
        t.reward.value
        for t in archive.trajectories
        if run_of(t.name) == run and trajectory_state(t) == "DELIVERED" and t.reward.HasField("value")
    ]
    return round(sum(rewards) / len(rewards), 4) if rewards else None


def run_seconds(archive: Archive, run: str) -> float:
    """Seconds between the first and the last state of a run, by its events."""
    times = [e.time for e in archive.events if e.kind == "RUN" and e.name == run]
    return max(times) - min(times) if times else 0.0


def preemptions(archive: Archive) -> dict[str, int]:
    """Preemptions that took effect, by who asked: a trajectory was given back after a command that names its cause.

    A command that came too late (the episode had ended, or ended its turn first) preempted nothing and does not count.
    """
    asked: dict[str, str] = {}
    counts = dict.fromkeys(PREEMPTION_CAUSES, 0)
    for event in archive.events:
        if event.kind == "COMMAND" and not event.from_state and len(event.related) > 1:
            subject, cause = event.related[0], event.related[1]
            if cause in counts:
                asked[subject] = cause
        elif event.kind == "TRAJECTORY" and event.from_state == "LEASED" and run_of(event.name) in archive.runs:
            cause = asked.pop(event.name, "")
            if cause and event.to_state == "QUEUED" and event.code == "PREEMPTED":
                counts[cause] += 1
    return counts


def reassignments(archive: Archive) -> list[dict[str, Any]]:
    """Moves of accelerators between roles, oldest first. Repairs after a crash and the first layout take nothing from
    anyone: they are no moves.
    """
    began = {e.name: e for e in archive.events if e.kind == "REASSIGNMENT" and not e.from_state}
    origin = origin_time(archive)
    moves = []
    for item in archive.reassignments:
        if not item.sources or not item.targets:
            continue
        first = began.get(item.name)
        start = first.time if first is not None else item.create_time.ToNanoseconds() / 1e9
        if start < archive.since:
            continue
        end = item.update_time.ToNanoseconds() / 1e9
        numbers = item.reason.numbers
        predicted, observed = numbers.get("predicted_gain_tokens_per_s"), numbers.get("observed_gain_tokens_per_s")
        moves.append(
            {
                "name": item.name,
                "state": wire.ReassignmentState.Name(item.state).removeprefix("REASSIGNMENT_STATE_"),
                "accelerators": [a for t in item.targets for a in t.spec.accelerators],
                "from": _role_of(archive, item.sources[0].replica),
                "to": wire.Role.Name(item.targets[0].spec.role).removeprefix("ROLE_"),
                "at_s": round(start - origin, 2),
                "took_s": _took(archive, item.name, end - start),
                "asked_by": "planner" if item.plan else "operator",
                "reason": first.text if first is not None else item.reason.text,
                "code": first.code if first is not None else item.reason.code,
                "predicted_gain_tokens_per_s": _number(predicted),
                "observed_gain_tokens_per_s": _number(observed),
            }
        )
    return sorted(moves, key=lambda m: float(m["at_s"]))


def _took(archive: Archive, name: str, otherwise: float) -> float:
    ends = [e.numbers["seconds"] for e in archive.events if e.name == name and "seconds" in e.numbers]
    return round(ends[-1] if ends else otherwise, 2)


def _role_of(archive: Archive, replica: str) -> str:
    known = archive.replicas.get(replica)
    if known is not None and known.desired.role:
        return wire.Role.Name(known.desired.role).removeprefix("ROLE_")
    return replica.removeprefix("replicas/").rpartition("-")[0].upper()


def _number(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def origin_time(archive: Archive) -> float:
    """Second zero of the report and of the moves' times: the training run's creation, else the first event."""
    train = archive.demo.get("train_run")
    times = [e.time for e in archive.events if e.kind == "RUN" and e.name == train]
    return min(times or (e.time for e in archive.events), default=0.0)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages * size / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def text(summary: dict[str, Any], folder: Path) -> str:
    """The summary for people, at the end of a run."""
    start, end = summary["eval_reward_start"], summary["eval_reward_end"]
    moves, stops = summary["reassignments"], summary["preemptions"]
    rows: Iterable[tuple[str, str]] = (
        ("reward (held-out)", f"{_shown(start)} → {_shown(end)}"),
        ("steps", f"{summary['steps']}, {summary['trajectories_trained']} trajectories trained"),
        ("tokens", f"{summary['tokens_generated']} in {summary['wall_s']:.0f} s, {summary['tokens_per_s']:.0f} tok/s"),
        ("moved accelerators", f"{moves['to_training']} to training, {moves['to_rollout']} to rollout"),
        (
            "preemptions",
            ", ".join(f"{stops[c]} {c}" for c in PREEMPTION_CAUSES) + f"; {summary['preempted_resumed']} resumed",
        ),
        ("tokens lost", f"{summary['tokens_lost']}; {summary['tokens_regenerated']} regenerated after a crash"),
        ("trained twice", str(summary["trained_twice"])),
        ("staleness", f"{summary['max_staleness']} at most, bound {summary['staleness_bound']}"),
        ("logprob mismatches", str(summary["segments_mismatched"])),
        ("report", str(folder / "report.html")),
    )
    return "\n".join(f"  {name:<20} {value}" for name, value in rows)


def _shown(reward: float | None) -> str:
    return "not measured" if reward is None else f"{reward:.3f}"
