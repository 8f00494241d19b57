"""The node agent on real processes, locks and memory."""

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.common import wire
from services.common.errors import LibraError
from services.common.locks import GenerationLock
from services.node.agent import NodeAgent
from services.node.config import NodeConfig
from tests.support.robots import Cluster, RolloutRobot

SLOT = "nodes/n0/accelerators/0"
MIB = 1 << 20

WORKER = textwrap.dedent("""
    # a worker in miniature: SIGUSR1 takes the lock of the generation in a file and 64 MiB, SIGUSR2 lets go of both
    import pathlib, signal, sys, time
    from services.common.locks import GenerationLock
    folder = pathlib.Path(sys.argv[1])
    lock = GenerationLock(folder / "locks", "nodes/n0/accelerators/0")
    held = []
    def done(text):
        (folder / "part").write_text(text)
        (folder / "part").replace(folder / "done")
    def take(*_):
        lock.acquire(int((folder / "generation").read_text()))
        held.append(bytearray(b"1") * (64 << 20))
        done("taken")
    def let_go(*_):
        lock.release()
        if not (folder / "leak").exists():
            held.clear()
        done("released")
    signal.signal(signal.SIGUSR1, take)
    signal.signal(signal.SIGUSR2, let_go)
    (folder / "ready").write_text("")
    while True:
        time.sleep(600)
""")


class World:
    """An agent without a scheduler, and one worker that does what the test tells it."""

    def __init__(self, folder: Path, **fields: object) -> None:
        self.folder = folder
        self.config = NodeConfig.model_validate(
            {
                "scheduler": "127.0.0.1:1", "node": "n0", "locks": str(folder / "locks"), "residue_mib": 16,
                "state_file": str(folder / "state.json"), "pids": str(folder / "pids"),
                "accelerators": [{"index": 0, "pool": "HYBRID", "cpu_share": 0.5, "memory_mib": 512}],
                "workers": [
                    {
                        "name": "w", "argv": [sys.executable, "-c", WORKER, str(folder)], "accelerators": [SLOT],
                        "ready_file": str(folder / "ready"), "log": str(folder / "w.log"),
                    }
                ],
                **fields,
            }
        )  # fmt: skip
        self.agent = NodeAgent(self.config)
        self.worker = self.agent.workers.by_name["w"]
        self.slot = self.agent.slots[SLOT]

    async def tell(self, number: signal.Signals, generation: int = 0) -> None:
        (self.folder / "done").unlink(missing_ok=True)
        (self.folder / "generation").write_text(str(generation))
        os.kill(self.worker.pid, number)
        async with asyncio.timeout(10):
            while not (self.folder / "done").exists():
                await asyncio.sleep(0.01)

    async def confirm(self, generation: int) -> wire.CommandResult:
        step = wire.HandoverStep(kind=wire.HANDOVER_KIND_CONFIRM, replica="replicas/a", generation=generation)
        spec = wire.ReplicaSpec(accelerators=[SLOT])
        return await self.agent.on_command(wire.Command(handover=wire.HandoverCommand(step=step, spec=spec)))


@asynccontextmanager
async def world(folder: Path, **fields: object) -> AsyncIterator[World]:
    item = World(folder, **fields)
    item.agent.workers.start_all()
    try:
        await asyncio.wait_for(item.worker.wait_ready(), 20)
        yield item
    finally:
        await item.agent.workers.stop_all()
        await item.agent.session.channel.close()


async def test_a_holder_shows_with_generation_and_memory_and_is_gone_after_release(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        idle = w.slot.observe()
        assert (idle.locked_generation, list(idle.holders)) == (0, [])
        assert idle.free_memory_bytes == pytest.approx(512 * MIB, abs=8 * MIB)
        await w.tell(signal.SIGUSR1, 7)
        seen = w.slot.observe()
        assert seen.locked_generation == 7
        assert [(h.pid, h.worker, h.generation) for h in seen.holders] == [(w.worker.pid, "workers/w", 7)]
        assert seen.holders[0].memory_bytes == pytest.approx(64 * MIB, abs=8 * MIB)
        assert seen.free_memory_bytes == pytest.approx(448 * MIB, abs=8 * MIB)
        await w.tell(signal.SIGUSR2)
        result = await w.confirm(7)
        assert result.state == wire.COMMAND_STATE_SUCCEEDED
        assert result.handover.state == wire.HANDOVER_STEP_STATE_DONE
        assert list(result.handover.observations[0].holders) == []


async def test_confirm_fails_with_numbers_while_the_lock_is_held(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.tell(signal.SIGUSR1, 7)
        result = await w.confirm(7)
        assert result.state == wire.COMMAND_STATE_FAILED
        assert result.reason.code == "RELEASE_UNCONFIRMED"
        assert f"process {w.worker.pid} (w) still holds the lock of generation 7" in result.reason.text
        assert result.reason.numbers["locked_generation"] == 7
        assert [h.pid for h in result.handover.observations[0].holders] == [w.worker.pid]
        # an older generation is proven gone by a newer owner's lock
        assert (await w.confirm(6)).state == wire.COMMAND_STATE_SUCCEEDED


async def test_case_45_memory_that_did_not_come_back_is_no_release(tmp_path: Path) -> None:
    (tmp_path / "leak").touch()
    async with world(tmp_path) as w:
        await w.tell(signal.SIGUSR1, 3)
        w.slot.observe()
        await w.tell(signal.SIGUSR2)
        result = await w.confirm(3)
        assert result.state == wire.COMMAND_STATE_FAILED
        assert "above its idle memory; expected at most 16 MiB" in result.reason.text
        assert result.reason.numbers["excess_bytes"] == pytest.approx(64 * MIB, abs=8 * MIB)
        assert result.handover.observations[0].holders[0].generation == 3


async def test_what_does_not_let_go_is_killed_and_restarted(tmp_path: Path) -> None:
    async with world(tmp_path, kill_after_s=0.05) as w:
        await w.tell(signal.SIGUSR1, 4)
        frozen = w.worker.pid
        os.kill(frozen, signal.SIGSTOP)
        assert "killed" not in (await w.confirm(4)).reason.text
        await asyncio.sleep(0.06)
        assert f"killed w ({frozen})" in (await w.confirm(4)).reason.text
        async with asyncio.timeout(20):
            while (await w.confirm(4)).state != wire.COMMAND_STATE_SUCCEEDED:
                await asyncio.sleep(0.02)
            while w.worker.state != "READY":
                await asyncio.sleep(0.02)
        assert w.worker.pid != frozen


async def test_a_foreign_holder_is_reported_and_never_killed(tmp_path: Path) -> None:
    async with world(tmp_path, kill_after_s=0.001) as w:
        lock = GenerationLock(tmp_path / "locks", SLOT)
        lock.acquire(9)
        await w.confirm(9)
        await asyncio.sleep(0.01)
        result = await w.confirm(9)
        assert result.state == wire.COMMAND_STATE_FAILED
        assert "not one of ours" in result.reason.text
        assert "end it by hand" in result.reason.text
        assert [(h.pid, h.worker) for h in result.handover.observations[0].holders] == [(os.getpid(), "")]
        lock.release()


async def test_stop_and_start_on_command(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.tell(signal.SIGUSR1, 5)
        stop = wire.StopWorkerCommand(worker="workers/w", up_to_generation=4, grace=wire.duration(5))
        with pytest.raises(LibraError, match="holds generation 5") as refusal:
            await w.agent.on_command(wire.Command(stop_worker=stop))
        assert refusal.value.reason == "STALE_FENCE"
        stop.up_to_generation = 5
        result = await w.agent.on_command(wire.Command(stop_worker=stop))
        assert list(result.stopped.observations[0].holders) == []
        assert w.worker.state == "STOPPED"
        start = wire.StartWorkerCommand(worker="workers/w", template="w", accelerators=[SLOT], generation=4)
        with pytest.raises(LibraError, match="held under generation 5"):
            await w.agent.on_command(wire.Command(start_worker=start))
        start.generation = 6
        await w.agent.on_command(wire.Command(start_worker=start))
        await asyncio.wait_for(w.worker.wait_ready(), 20)


def handover(kind: "wire.HandoverKind.ValueType") -> wire.Command:
    return wire.Command(handover=wire.HandoverCommand(step=wire.HandoverStep(kind=kind)))


def start_worker(template: str) -> wire.Command:
    return wire.Command(start_worker=wire.StartWorkerCommand(worker="workers/x", template=template))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (wire.Command(preempt=wire.PreemptCommand()), "INVALID_FIELD"),
        (handover(wire.HANDOVER_KIND_GRANT), "INVALID_FIELD"),
        (handover(wire.HANDOVER_KIND_CONFIRM), "NOT_FOUND"),
        (start_worker("x"), "NOT_FOUND"),
        (start_worker("w"), "INVALID_FIELD"),
        (wire.Command(stop_worker=wire.StopWorkerCommand(worker="workers/x")), "NOT_FOUND"),
    ],
)
async def test_commands_that_are_not_for_it_are_refused(tmp_path: Path, command: wire.Command, reason: str) -> None:
    w = World(tmp_path)
    with pytest.raises(LibraError) as refusal:
        await w.agent.on_command(command)
    assert refusal.value.reason == reason
    await w.agent.session.channel.close()


async def test_the_scheduler_learns_the_hardware_and_the_crashes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    await cluster.start()
    w = World(tmp_path, scheduler=cluster.address, measure_s=0.02)
    session = asyncio.create_task(w.agent.session.run())
    w.agent.workers.start_all()
    measuring = asyncio.create_task(w.agent.measure_forever())
    try:
        await cluster.until(lambda: SLOT in cluster.state.accelerators)
        found = cluster.state.accelerators[SLOT]
        assert (found.pool, found.cpu_share, found.memory_bytes) == ("HYBRID", 0.5, 512 * MIB)
        assert cluster.state.nodes["nodes/n0"].agent_session == w.agent.session.name
        await asyncio.wait_for(w.worker.wait_ready(), 20)
        w.worker.kill()
        events = wire.ListEventsRequest(selector=wire.Selector(name_prefix="workers/w"))
        async with asyncio.timeout(20):
            while True:
                seen = (await cluster.admin.ListEvents(events, timeout=5)).events
                if any(e.reason.code == "WORKER_CRASHED" and "SIGKILL" in e.reason.text for e in seen):
                    break
                await asyncio.sleep(0.05)
    finally:
        for task in (measuring, session):
            task.cancel()
        await asyncio.gather(measuring, session, return_exceptions=True)
        await w.agent.workers.stop_all()
        await w.agent.session.channel.close()
        await cluster.stop()


async def test_an_agent_that_leaves_proves_first_what_its_workers_held(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, cycle_s=0.05)
    await cluster.start()
    w = World(tmp_path, scheduler=cluster.address, measure_s=0.02)
    session = asyncio.create_task(w.agent.session.run())
    w.agent.workers.start_all()
    measuring = asyncio.create_task(w.agent.measure_forever())
    holder = RolloutRobot(cluster.address, "w", [0])
    try:
        await asyncio.wait_for(w.worker.wait_ready(), 20)
        await cluster.until(lambda: SLOT in cluster.state.accelerators)
        async with holder:
            await cluster.until(lambda: cluster.state.replica_on(SLOT) is not None)
            replica = cluster.state.replica_on(SLOT)
            await w.tell(signal.SIGUSR1, replica.generation)
            await holder.session.stop(abandon=True)
        measuring.cancel()
        await asyncio.wait_for(w.agent.leave(), 20)
        assert replica.state == "RELEASED"
        await cluster.until(lambda: SLOT not in cluster.state.accelerators)
    finally:
        for task in (measuring, session):
            task.cancel()
        await asyncio.gather(measuring, session, return_exceptions=True)
        await w.agent.workers.stop_all()
        await cluster.stop()
