"""The worker as a process: configuration errors end it with code 2; a scheduler played here drives it to a reward."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from services.common import wire
from services.common.rpc.server import serve
from tests.support.rollout_world import RUN, TRAJECTORY, World
from tests.support.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
ACCELERATOR = "nodes/n0/accelerators/1"
REPLICA = "replicas/rollout-3"


class PlayedScheduler(wire.FleetServiceServicer):
    """Grants, loads, leases one trajectory, and takes every report into a World."""

    def __init__(self, world: World, model: str) -> None:
        self.world = world
        self.commands = [
            self._handover(1, wire.HANDOVER_KIND_GRANT),
            self._load(2, model, wire.LOAD_PHASE_PREPARE),
            self._load(3, model, wire.LOAD_PHASE_SWITCH),
        ]
        self.results: list[wire.CommandResult] = []
        self.lease: wire.TrajectoryLease | None = None
        self.ended = asyncio.Event()
        self.session_ended = asyncio.Event()
        self.abandoned = False

    def _command(self, sequence, **action):
        fence = wire.Fence(term=1, session_epoch=1, generation=3, sequence=sequence)
        valid = wire.duration(60)
        return wire.Command(name=f"commands/{sequence}", fence=fence, valid_for=valid, **action)

    def _handover(self, sequence, kind):
        step = wire.HandoverStep(kind=kind, replica=REPLICA, generation=3)
        spec = wire.ReplicaSpec(role=wire.ROLE_ROLLOUT, accelerators=[ACCELERATOR], concurrency_cap=4)
        return self._command(sequence, handover=wire.HandoverCommand(step=step, spec=spec))

    def _load(self, sequence, model, phase):
        load = wire.LoadWeightsCommand(
            replica=REPLICA, version=wire.VersionRef(lineage=1, number=0), phase=phase, run=RUN, model=model
        )
        return self._command(sequence, load_weights=load)

    async def BeginSession(self, request, context):
        session = wire.Session(name=f"{request.worker}/sessions/1", epoch=1)
        terms = wire.LeaseTerms(ttl=wire.duration(20), margin=wire.duration(1), report_interval=wire.duration(0.1))
        return wire.BeginSessionResponse(stamp=wire.Stamp(term=1), session=session, lease=terms)

    async def Report(self, request, context):
        refusals = await self.world.report(request.delta) if request.HasField("delta") else []
        self.results += request.delta.results
        if request.delta.ends:
            self.ended.set()
        return wire.ReportResponse(stamp=wire.Stamp(term=1), acked_seq=request.seq, refusals=refusals)

    async def Await(self, request, context):
        answer = wire.AwaitResponse(stamp=wire.Stamp(term=1))
        done = sum(r.state == wire.COMMAND_STATE_SUCCEEDED for r in self.results)
        if request.command_sequence < len(self.commands) and done >= request.command_sequence:
            answer.commands.append(self.commands[request.command_sequence])
        elif done == len(self.commands) and request.desired_revision < 1:
            answer.desired.revision, answer.desired.complete = 1, True
            answer.desired.runs.append(self.world.run)
            answer.desired.trajectories.append(self.lease)
        else:
            await asyncio.sleep(0.05)
        return answer

    async def EndSession(self, request, context):
        self.abandoned = request.abandon
        self.session_ended.set()
        return wire.EndSessionResponse(stamp=wire.Stamp(term=1))


def _config(folder: Path, scheduler: str) -> Path:
    path = folder / "rollout.yaml"
    path.write_text(f"""
worker: rollout-1
scheduler: {scheduler}
accelerators: [{ACCELERATOR}]
locks: {folder}/locks
blobs: {folder}/blobs
history: {folder}/history.jsonl
ready_file: {folder}/ready
engine: {{max_sequences: 4, max_context: 256}}
""")
    return path


async def _start(config: Path) -> asyncio.subprocess.Process:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}", "OMP_NUM_THREADS": "1"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.rollout", "--config", str(config),
        cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_case_53_an_unknown_key_ends_it_with_code_2(tmp_path):
    config = _config(tmp_path, "127.0.0.1:1")
    config.write_text(config.read_text().replace("locks:", "lokcs:"))
    process = await _start(config)
    _, err = await process.communicate()
    assert process.returncode == 2
    assert "rollout.yaml:5: unknown key 'lokcs'; did you mean 'locks'?" in err.decode()
    assert "Traceback" not in err.decode()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_from_start_to_reward_to_sigterm(tmp_path):
    world = World(tmp_path, budget=20)
    await world.start()
    model = write_tiny_model(tmp_path / "model")
    scheduler = PlayedScheduler(world, str(model))
    server = await serve(
        [(wire.add_FleetServiceServicer_to_server, scheduler)], "127.0.0.1:0", service_names=["libra.v1.FleetService"]
    )
    lease = world.lease()
    lease.routes.add(replica=REPLICA, generation=3)
    scheduler.lease = lease
    process = await _start(_config(tmp_path, server.address))
    try:
        async with asyncio.timeout(240):
            await scheduler.ended.wait()
            process.send_signal(signal.SIGTERM)
            await scheduler.session_ended.wait()
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        await server.stop(0)
        await world.stop()
    assert process.returncode == 0, err.decode()[-2000:]
    assert scheduler.abandoned
    assert world.ends[0].trajectory == TRAJECTORY
    assert world.ends[0].WhichOneof("end") == "reward"
    assert world.generated == world.columns()["loss_mask"].sum() > 0
    assert [r.state for r in scheduler.results] == [wire.COMMAND_STATE_SUCCEEDED] * 3
    assert scheduler.results[-1].weights.state == wire.ENGINE_WEIGHT_STATE_LOADED
    assert len(scheduler.results[-1].weights.checksum) == 64
    assert (tmp_path / "ready").read_text().startswith("127.0.0.1:")
