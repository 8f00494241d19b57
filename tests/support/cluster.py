"""A real local cluster for end-to-end tests, started and stopped by the launcher as users do."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "services" / "ops" / "assets" / "demo"
START_SECONDS = 150.0
STOP_SECONDS = 40.0

SMALL = {
    "name": "test",
    "scheduler": {"listen": "127.0.0.1:0", "planner": {"enabled": False}},
    "nodes": [
        {
            "name": "n0",
            "accelerators": [
                {"index": 0, "pool": "CORE_ROLLOUT", "cpu_share": 0.9, "memory_mib": 2048},
                {"index": 1, "pool": "CORE_ROLLOUT", "cpu_share": 0.9, "memory_mib": 2048},
            ],
        }
    ],
    "workers": [
        {"name": "rollout-0", "kind": "rollout", "node": "n0", "accelerators": [0], "concurrency_cap": 8},
        {"name": "rollout-1", "kind": "rollout", "node": "n0", "accelerators": [1], "level": 1, "concurrency_cap": 4},
    ],
    "toolenvs": [{"environment": "calculator", "listen": "127.0.0.1:0"}],
}
"""Two rollout workers and the calculator: enough for EVAL runs."""


@dataclass
class LocalCluster:
    """A running cluster: its launcher's process, its folder, the scheduler's address, a model that it can load."""

    process: subprocess.Popen[bytes]
    folder: Path
    scheduler: str
    model: Path

    def pid(self, name: str) -> int:
        return int((self.folder / "pids" / f"{name}.pid").read_text())

    def logs(self) -> str:
        return "\n".join(
            f"--- {p.name}\n{p.read_text()[-2_000:]}" for p in sorted((self.folder / "logs").glob("*.log"))
        )


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "proto" / "gen"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def start(folder: Path, content: dict[str, object], model: Path) -> LocalCluster:
    """Starts the launcher and returns once every worker is ready; fails with the launcher's output."""
    folder.mkdir(parents=True, exist_ok=True)
    file, output = folder / "cluster.yaml", folder / "launcher.log"
    file.write_text(yaml.safe_dump({**content, "run_dir": str(folder / "run")}))
    command = [sys.executable, "-m", "services.ops", "up", str(file), "--json"]
    with output.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment())
    try:
        ready = _wait_ready(process, output)
    except BaseException:
        stop(process)
        raise
    return LocalCluster(process, folder / "run", ready["scheduler"], model)


def _wait_ready(process: "subprocess.Popen[bytes]", output: Path) -> dict[str, str]:
    """The launcher's line that says that the cluster is up."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for line in output.read_text().splitlines():
            if line.startswith('{"process": "cluster", "state": "READY"'):
                found: dict[str, str] = json.loads(line)
                return found
        time.sleep(0.1)
    raise RuntimeError(f"the cluster did not start (exit code {process.poll()}): {output.read_text()}")


def stop(process: "subprocess.Popen[bytes]") -> int:
    """Ctrl-C, then SIGKILL; everything that the launcher started is tethered to it."""
    if process.poll() is not None:
        return process.returncode
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(5.0)


@pytest.fixture
def local_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A small cluster with the demo's model (a tiny random one where that is not there)."""
    model = DEMO_MODEL
    if not (model / "config.json").exists():
        from tests.support.tiny_model import write_tiny_model

        model = write_tiny_model(tmp_path / "model")
    cluster = start(tmp_path / "cluster", SMALL, model)
    try:
        yield cluster
    finally:
        code = stop(cluster.process)
        if code != 0:
            print(cluster.logs())
    assert code == 0, f"the launcher ended with {code}"
