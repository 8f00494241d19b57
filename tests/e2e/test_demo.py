"""The whole system on the main job: real model, real processes, real tools; on SQLite and on a real Postgres."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ROOT, environment

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def demo(folder: Path, *options: str, limit: float = 600) -> dict[str, object]:
    """Runs `libra demo` in a folder of its own and returns its summary."""
    command = [sys.executable, "-m", "services.ops", "demo", "--run-dir", str(folder), "--json", *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=limit, check=False, capture_output=True, text=True
    )
    logs = "".join(f"\n== {p.name}\n{p.read_text()[-1500:]}" for p in sorted(folder.glob("logs/*.log")))
    summary = folder / "summary.json"
    assert summary.exists(), f"exit {done.returncode}\n{done.stderr[-4000:]}{logs}"
    found = json.loads(summary.read_text())
    assert isinstance(found, dict)
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "checkpoint" / "model.safetensors").exists()
    return found


def plans(folder: Path) -> str:
    """What the planner thought, whenever that changed."""
    lines = (folder / "logs" / "scheduler.log").read_text().splitlines()
    return "\n".join(line for line in lines if "event='plan'" in line or "event='move'" in line)


def assert_nothing_lost(summary: dict[str, object], steps: int) -> None:
    assert summary["steps"] == steps, summary
    assert summary["trajectories_trained"] == steps * 16 * 8, summary
    for name in ("tokens_lost", "trained_twice", "segments_mismatched"):
        assert summary[name] == 0, summary
    assert 0 <= summary["max_staleness"] <= summary["staleness_bound"], summary  # type: ignore[operator]


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


def test_the_main_job_loses_nothing_on_either_database(database: str, tmp_path: Path) -> None:
    options = ["--database", database] if database else []
    summary = demo(tmp_path / "run", "--steps", "4", *options)
    assert_nothing_lost(summary, 4)


def test_the_main_job_learns_preempts_and_moves_accelerators_both_ways(tmp_path: Path) -> None:
    """The default job, as `make demo` runs it; the moves are the planner's, on a machine with little else to do."""
    summary: Any = demo(tmp_path / "run", limit=800)
    assert_nothing_lost(summary, 20)
    assert summary["eval_reward_start"] <= 0.62, summary
    assert summary["eval_reward_end"] >= 0.85, summary
    assert summary["preemptions"]["cmlfq"] >= 1, summary
    assert summary["preempted_resumed"] >= summary["preemptions"]["cmlfq"], summary
    assert summary["reassignments"]["to_training"] >= 1, plans(tmp_path / "run")
    assert summary["reassignments"]["to_rollout"] >= 1, plans(tmp_path / "run")
    moves = summary["reassignment_list"]
    assert all(m["asked_by"] == "planner" and m["predicted_gain_tokens_per_s"] > 0 for m in moves), summary
    # one that ended within two steps of the run's end has nothing to be measured by
    measured = {m["to"] for m in moves if m["observed_gain_tokens_per_s"] is not None}
    assert measured == {"TRAINER", "ROLLOUT"}, summary


def test_services_killed_in_the_middle_lose_nothing(tmp_path: Path) -> None:
    summary = demo(tmp_path / "run", "--steps", "12", "--chaos", limit=800)
    assert_nothing_lost(summary, 12)
    killed = json.loads((tmp_path / "run" / "demo.json").read_text())
    assert len(killed.get("killed", killed.get("kills", []))) >= 5, killed
