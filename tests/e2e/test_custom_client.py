"""The documented custom client against a real local cluster."""

import subprocess
import sys

import pytest

from tests.support.cluster import ROOT, LocalCluster, environment, local_cluster

__all__ = ["local_cluster"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_custom_client_submits_watches_and_preempts(local_cluster: LocalCluster) -> None:
    command = [
        sys.executable, "docs/examples/custom_client.py", "--scheduler", local_cluster.scheduler,
        "--model", str(local_cluster.model), "--timeout", "150",
    ]  # fmt: skip
    answer = subprocess.run(
        command, cwd=ROOT, env=environment(), timeout=180, check=False, capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr + local_cluster.logs()
    assert "submitted 4 groups" in answer.stdout
    assert "8 of 8 trajectories were delivered" in answer.stdout, answer.stdout
    preempted = next(line for line in answer.stdout.splitlines() if line.endswith("was preempted"))
    assert "in 1 leases" not in preempted, f"it never went back to the queue: {preempted}\n{answer.stdout}"
