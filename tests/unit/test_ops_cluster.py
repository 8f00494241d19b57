"""The launcher with a real scheduler and a real node agent (no workers: those are for the end-to-end tests)."""

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from services.client import LibraClient
from services.common import wire
from services.common.errors import ConfigError
from services.common.processes import is_alive
from services.ops.cluster import Cluster
from services.ops.clusterfile import ClusterConfig
from tests.support.cluster import ROOT, environment

NODE = {"name": "n0", "accelerators": [{"index": 0, "pool": "HYBRID", "cpu_share": 0.5, "memory_mib": 64}]}


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


def config(folder: Path, **changes: object) -> ClusterConfig:
    content = {"name": "t", "run_dir": str(folder / "run"), "scheduler": {"listen": "127.0.0.1:0"}, "nodes": [NODE]}
    return ClusterConfig.model_validate(content | changes)


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[LibraClient]:
    await cluster.start()
    try:
        async with LibraClient(cluster.scheduler) as client:
            yield client
    finally:
        await cluster.stop()


async def test_it_starts_in_order_keeps_the_address_over_a_restart_and_leaves_nothing(tmp_path: Path) -> None:
    states: list[tuple[str, str]] = []
    cluster = Cluster(config(tmp_path), on_change=lambda name, state, _: states.append((name, state)))
    async with running(cluster) as client:
        await cluster.wait_workers(1.0)
        assert states == [
            ("scheduler", "STARTING"),
            ("scheduler", "READY"),
            ("node-n0", "STARTING"),
            ("node-n0", "READY"),
        ]
        address, pids = cluster.scheduler, {n: cluster.pid(n) for n in ("scheduler", "node-n0")}
        os.kill(pids["scheduler"], signal.SIGKILL)
        async with asyncio.timeout(30):
            while states[-1] != ("scheduler", "READY") or cluster.pid("scheduler") == pids["scheduler"]:
                await asyncio.sleep(0.02)
        assert cluster.scheduler == address
        assert [
            r.accelerator.name for r in (await client.list_resources(wire.RESOURCE_KIND_ACCELERATOR)).resources
        ] == ["nodes/n0/accelerators/0"]
        pids["new"] = cluster.pid("scheduler")
        assert (tmp_path / "current").resolve() == tmp_path / "run"
    assert [s for s in states if s[1] == "STOPPED"] == [("node-n0", "STOPPED"), ("scheduler", "STOPPED")]
    assert not any(is_alive(pid) for pid in pids.values())
    assert not (tmp_path / "run" / "cluster.json").exists()


async def test_two_launchers_do_not_share_a_run_folder(tmp_path: Path) -> None:
    async with running(Cluster(config(tmp_path))):
        with pytest.raises(ConfigError, match=rf"a cluster runs here already \(launcher process {os.getpid()}\)"):
            await Cluster(config(tmp_path)).start()


async def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        cluster = Cluster(config(tmp_path, scheduler={"listen": f"127.0.0.1:{port}"}))
        with pytest.raises(ConfigError, match=f"scheduler.listen: port {port}"):
            await cluster.start()
        assert cluster.processes == {}


async def test_case_68_the_failing_services_own_message_is_the_launchers(tmp_path: Path) -> None:
    database = tmp_path / "newer.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table libra_schema (version_num varchar(32) not null)")
        connection.execute("insert into libra_schema values ('from_the_future')")
    connection.close()
    cluster = Cluster(config(tmp_path, scheduler={"listen": "127.0.0.1:0", "database": f"sqlite:///{database}"}))
    with pytest.raises(
        ConfigError, match=r"(?s)scheduler ended with exit code 2: .*newer\.db.*from_the_future"
    ) as failure:
        await cluster.start()
    assert "Traceback" not in str(failure.value)
    assert cluster.processes == {}


def test_ctrl_c_ends_everything_with_code_0_and_sigkill_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path).model_dump(exclude_unset=True)))
    command = [sys.executable, "-m", "services.ops", "up", str(file)]
    for number in (signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if "Ctrl-C stops it" in line:
                break
        children = [int(p.read_text()) for p in (tmp_path / "run" / "pids").glob("*.pid")]
        assert len(children) == 2, output
        ends = [os.pidfd_open(pid) for pid in children]
        process.send_signal(number)
        rest = process.communicate(timeout=30)[0]
        assert process.returncode == (0 if number == signal.SIGINT else -signal.SIGKILL), rest
        assert "Traceback" not in rest
        for pid, end in zip(children, ends, strict=True):
            import select

            assert select.select([end], [], [], 10.0)[0], f"{pid} outlived the launcher"
            os.close(end)
