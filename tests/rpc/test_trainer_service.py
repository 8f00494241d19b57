"""Trainer workers against a scheduler that obeys: steps, redo after a kill, joining, leaving, refusals, bad blobs."""

import asyncio
import hashlib
import json
import os
import signal
import sys
import uuid
from pathlib import Path

import grpc
import numpy as np
import pytest
import safetensors.numpy
import transformers
import yaml

from services.common import wire
from services.common.blobs import BlobStore
from services.common.locks import GenerationLock
from services.common.rpc.channel import connect
from services.common.rpc.status import from_rpc_error
from services.trainer import algorithm, batches, bootstrap, publish, step
from services.trainer.collective import SoloCollective
from services.trainer.config import Config
from services.trainer.engine.torch import TorchEngine
from services.trainer.metrics import Phases
from tests.support.tiny_model import write_tiny_model
from tests.support.trainer_lighthouse import Lighthouse
from tests.support.trainer_scheduler import FakeScheduler
from tests.support.trainer_steps import UNEQUAL, make_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
SETTINGS = {"learning_rate": 0.01, "decay_steps": 9, "checkpoint_every": 2, "micro_batch_tokens": 150}
"""The rate falls with every step: whoever redoes or joins must find the same one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=2, heads=2, kv_heads=1)


class World:
    """Scheduler, lighthouse and trainer processes of one test."""

    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        self.store = BlobStore(str(folder / "blobs"))
        self.steps = [make_step(self.store, n, lengths) for n, lengths in enumerate(UNEQUAL, 1)]
        self.scheduler = None
        self.processes, self.running, self.exits = [], [], []
        self.lights = Lighthouse(folder)

    async def start(self, settings=SETTINGS):
        self.scheduler = FakeScheduler(self.steps, self.model, settings)
        self.address = await self.scheduler.start()
        self.lighthouse = await asyncio.to_thread(self.lights.start)

    def _config(self, name, accelerator):
        return {
            "worker": name, "scheduler": self.address, "ready_file": str(self.folder / f"ready-{name}"),
            "accelerators": [f"nodes/n0/accelerators/{accelerator}"], "lock_dir": str(self.folder / "locks"),
            "blobs": str(self.folder / "blobs"), "dtype": "float64", "publish_grace_s": 0.5, "take_wait_s": 5.0,
            "history_path": str(self.folder / f"history-{name}"), "metrics_path": str(self.folder / "metrics"),
            "collective": {"lighthouse": self.lighthouse},
        }  # fmt: skip

    async def process(self, name, *, accelerator=0, failpoints=""):
        """Starts a worker as a process; returns once it serves."""
        (self.folder / f"ready-{name}").unlink(missing_ok=True)
        self.scheduler.sessions.pop(name, None)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self._config(name, accelerator)))
        process = await self._spawn(name, "services.trainer", path, LIBRA_FAILPOINTS=failpoints)
        await self.appears(self.folder / f"ready-{name}", process)
        return process

    async def trainer(self, name, *, accelerator=0):
        """Starts a worker in this process."""
        self.scheduler.sessions.pop(name, None)
        config = Config.model_validate(self._config(name, accelerator))
        running = await bootstrap.start(config, TorchEngine("float64"), self.exits.append)
        self.running.append(running)
        return running

    async def _spawn(self, name, module, config, **environment):
        log = (self.folder / f"{name}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, "--config", str(config), cwd=ROOT,
            env={**os.environ, **environment}, stdout=log, stderr=log,
        )  # fmt: skip
        self.processes.append(process)
        return process

    @staticmethod
    async def appears(path, process=None):
        async with asyncio.timeout(90):
            while not path.exists():
                assert process is None or process.returncode is None
                await asyncio.sleep(0.02)

    def history(self, name, kind):
        lines = (self.folder / f"history-{name}").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]

    def metrics(self):
        return [json.loads(line) for line in (self.folder / "metrics").read_text().splitlines()]

    def weights(self, number):
        return publish.read(self.store, self.scheduler.files[number])

    async def stop(self):
        for running in self.running:
            await running.stop()
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        self.lights.stop()
        if self.scheduler:
            await self.scheduler.stop()


@pytest.fixture
async def world(tmp_path, model):
    world = World(tmp_path, model)
    yield world
    await world.stop()


def alone(world, steps, settings=SETTINGS):
    """The same steps without any service; weights after the last."""
    grpo = algorithm.from_settings(settings)
    engine = TorchEngine("float64")
    engine.load(world.model, grpo)
    for number, (manifest, members) in enumerate(world.steps[:steps], start=1):
        laid = batches.batch(manifest, members, grpo)
        worker = step.Worker(engine, world.store, Phases(), lambda: None, lambda: None)
        reduced = step.reduce(worker, laid, laid.shard(0, 1), grpo, SoloCollective())
        engine.apply(reduced.gradient, grpo.rate_of(number))
    return engine.weights()


def remove(blob):
    Path(blob.uri.removeprefix("file://")).unlink()


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float(np.abs(a[k] - b[k]).max()) for k in a)


async def test_a_killed_trainer_redoes_committed_steps_and_ends_as_if_nothing_had_happened(world):
    """Killed between CommitStep and the optimizer step; then again, after a checkpoint and one step more."""
    await world.start()
    scheduler = world.scheduler
    first = await world.process("t0", failpoints="trainer.after_commit=kill")
    await scheduler.grant("t0", 1)
    await asyncio.wait_for(first.wait(), 90)
    assert first.returncode == -signal.SIGKILL
    assert (scheduler.head, scheduler.versions[1]) == (1, wire.VERSION_STATE_COMMITTED)
    assert not scheduler.files

    scheduler.limit = 3
    second = await world.process("t0")
    await scheduler.grant("t0", 2)
    await scheduler.until(lambda: 3 in scheduler.files)
    assert list(scheduler.checkpoints) == [2]
    second.kill()
    await second.wait()

    scheduler.limit = 5
    await world.process("t0")
    await scheduler.grant("t0", 3)
    export = world.folder / "blobs" / "r" / "export" / "1-5"
    await world.appears(export / "model.safetensors")
    assert sorted(scheduler.files) == [1, 2, 3, 4, 5]
    assert [c[0] for c in scheduler.commits] == [1, 2, 3, 4, 5]
    for number in (1, 3, 5):
        assert largest_difference(world.weights(number), alone(world, number)) < 1e-12
    trained = [(entry["version"][1], entry["redo"]) for entry in world.history("t0", "trained")]
    # version 1 redone from the base model, later 3 from checkpoint 2
    assert trained == [(1, True), (2, False), (3, False), (3, True), (4, False), (5, False)]
    # the second may have died between the answer and its note of it
    assert [e["version"][1] for e in world.history("t0", "published") if e["version"][1] != 3] == [1, 2, 4, 5]
    exported = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert exported.num_parameters() == sum(w.size for w in alone(world, 0).values())
    transformers.AutoTokenizer.from_pretrained(export)


async def test_the_last_version_is_published_though_its_trainer_died_and_the_run_is_over(world):
    world.steps = world.steps[:1]
    await world.start()
    scheduler = world.scheduler
    first = await world.process("t0", failpoints="trainer.after_commit=kill")
    await scheduler.grant("t0", 1)
    await asyncio.wait_for(first.wait(), 90)
    assert scheduler.run.state == wire.RUN_STATE_FINISHED
    await world.trainer("t0")
    await scheduler.grant("t0", 2)
    await scheduler.until(lambda: 1 in scheduler.files)
    assert largest_difference(world.weights(1), alone(world, 1)) < 1e-12
    await world.appears(world.folder / "blobs" / "r" / "export" / "1-1" / "model.safetensors")


async def test_hybrid_trainer_joins_and_leaves_and_the_result_is_the_same(world):
    world.steps = [make_step(world.store, n, UNEQUAL[n % 5]) for n in range(1, 13)]
    await world.start()
    scheduler = world.scheduler
    scheduler.limit = 2
    await world.trainer("t0", accelerator=0)
    await world.trainer("t2", accelerator=2)
    assert (await scheduler.grant("t0", 1)).state == wire.COMMAND_STATE_SUCCEEDED
    await scheduler.until(lambda: 2 in scheduler.files)
    lock = GenerationLock(world.folder / "locks", "nodes/n0/accelerators/2")
    granted = await scheduler.grant("t2", 2, "nodes/n0/accelerators/2")
    assert granted.state == wire.COMMAND_STATE_SUCCEEDED
    generation, _, held = lock.probe()
    assert (generation, held) == (2, True)
    # a refused commit is applied by neither, and the same manifest is trained again
    scheduler.refuse_commits = 2
    for number in range(3, 12):
        # steps here are far shorter than the pause of a replica that lost the group; it shall be back for the last one
        scheduler.limit = number
        await scheduler.touch()
        await scheduler.until(lambda number=number: number in scheduler.files)
        await asyncio.sleep(0.5)
    await scheduler.release("t2")
    assert not lock.probe()[2]
    assert not world.running[1].agent.loop
    scheduler.limit = 12
    await scheduler.touch()
    await scheduler.until(lambda: 12 in scheduler.files)
    by_step = {number: members for number, _, members in scheduler.commits}
    assert (by_step[2], by_step[11], by_step[12]) == ((1,), (1, 2), (1,))
    assert sorted(by_step) == list(range(1, 13))
    # the joiner got its state from the core: it redid nothing. It may have been refused where the core was not; then it
    # did not apply that step and got the result from the core as well
    visits = world.history("t2", "trained")
    taken_part = {n for n, members in by_step.items() if 2 in members}
    assert {v["version"][1] for v in visits} <= taken_part
    assert visits[-1]["version"][1] == 11
    assert not any(v["redo"] for v in visits)
    assert largest_difference(world.weights(12), alone(world, 12)) < 1e-9
    assert not world.exits
    line = world.metrics()[10]
    assert (line["step"], line["replicas"]) == (11, 2)
    assert line["tokens"] == world.steps[10][0].divisors.trainable_tokens
    assert {"loss", "kl", "clip_share", "grad_norm", "reward_mean", "staleness_max", "seconds"} <= line.keys()
    assert {"wait_batch", "train", "publish"} <= line["phase_seconds"].keys()


async def test_a_trainer_that_cannot_fetch_the_state_leaves_the_others_alone(world):
    world.steps = [make_step(world.store, n, UNEQUAL[n % 5]) for n in range(1, 9)]
    await world.start()
    scheduler = world.scheduler
    scheduler.limit = 2
    await world.trainer("t0", accelerator=0)
    await world.process("t2", accelerator=2, failpoints="trainer.fetch_state=error")
    await scheduler.grant("t0", 1)
    await scheduler.until(lambda: 2 in scheduler.files)
    await scheduler.grant("t2", 2, "nodes/n0/accelerators/2")
    scheduler.limit = 8
    await scheduler.touch()
    await scheduler.until(lambda: 8 in scheduler.files)
    assert {members for number, _, members in scheduler.commits if number > 2} == {(1,)}
    assert largest_difference(world.weights(8), alone(world, 8)) < 1e-9
    if scheduler.incidents:  # it may have come when little was left to lose
        assert "could not join the group 3 times, stays away" in scheduler.incidents[0].reason.text


async def test_a_version_whose_trainer_died_before_publishing_is_published_by_a_peer(world):
    await world.start()
    scheduler = world.scheduler
    scheduler.limit = 0
    speaker = await world.process("t0", failpoints="trainer.before_publish=kill")
    await world.trainer("t2", accelerator=2)
    await scheduler.grant("t0", 1)
    await scheduler.grant("t2", 2, "nodes/n0/accelerators/2")
    scheduler.limit = 5
    await scheduler.touch()
    await asyncio.wait_for(speaker.wait(), 90)
    assert scheduler.head >= 1
    scheduler.roster.pop("t0")
    scheduler.roster_revision += 1
    await scheduler.until(lambda: 5 in scheduler.files)
    assert largest_difference(world.weights(5), alone(world, 5)) < 1e-9


async def test_unreadable_segments_return_the_manifest_with_their_trajectory_named(world):
    await world.start()
    scheduler = world.scheduler
    broken = world.steps[1][1][3]
    remove(broken.sequences[0].segments[0].blob)
    manifest, members = make_step(world.store, 2, [9, 9, 9, 9], seed=7)
    manifest.name += "-again"
    scheduler.replacement = (manifest, members)
    await world.trainer("t0")
    await scheduler.grant("t0", 1)
    await scheduler.until(lambda: 3 in scheduler.files)
    assert [list(r.broken) for r in scheduler.returned] == [[broken.trajectory]]
    assert scheduler.returned[0].reason.code == "BLOB_MISMATCH"


async def test_direct_calls_show_progress_save_checkpoints_and_stream_weights(world):
    await world.start(SETTINGS | {"checkpoint_every": 100})
    scheduler = world.scheduler
    scheduler.limit = 1
    await world.trainer("t0")
    await scheduler.grant("t0", 7)
    await scheduler.until(lambda: 1 in scheduler.files)
    async with connect(world.running[0].address) as channel:
        stub = wire.TrainerServiceStub(channel)
        progress = await stub.GetProgress(wire.GetProgressRequest(run="runs/r"), timeout=10)
        assert progress.versions[0].number == 1
        assert progress.load.generation == 7
        assert progress.metrics["tokens"] == world.steps[0][0].divisors.trainable_tokens
        saved = await stub.Checkpoint(
            wire.CheckpointRequest(request_id=str(uuid.uuid4()), fence=wire.Fence(generation=7)), timeout=30
        )
        assert saved.checkpoint.version.number == 1
        world.store.get(saved.checkpoint.index)
        assert scheduler.checkpoints[1] == saved.checkpoint.index
        ask = wire.ReadWeightsRequest(
            version=wire.VersionRef(lineage=1, number=1), fence=wire.Fence(generation=7), shard="model.safetensors"
        )
        data = b"".join([part.data async for part in stub.ReadWeights(ask, timeout=30)])
        assert hashlib.sha256(data).hexdigest() == scheduler.files[1].shards[0].blob.sha256
        assert safetensors.numpy.load(data).keys() == world.weights(1).keys()
        ask.offset = len(data) - 5
        assert b"".join([p.data async for p in stub.ReadWeights(ask, timeout=30)]) == data[-5:]
        ask.fence.generation = 6
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [p async for p in stub.ReadWeights(ask, timeout=30)]
        assert from_rpc_error(caught.value).reason == "STALE_FENCE"
    result = await scheduler.command("t0", checkpoint=wire.CheckpointCommand())
    assert result.checkpoint.version.number == 1


async def test_case_53_a_run_with_an_unknown_setting_is_reported_and_the_worker_lives(world):
    await world.start({"learning_rte": 1.0})
    await world.trainer("t0")
    granted = await world.scheduler.grant("t0", 1)
    assert granted.state == wire.COMMAND_STATE_SUCCEEDED
    await world.scheduler.until(lambda: world.scheduler.incidents)
    incident = world.scheduler.incidents[0]
    assert incident.resource == "runs/r"
    assert "did you mean 'learning_rate'" in incident.reason.text
    assert not world.exits


async def test_a_second_grant_is_refused_while_one_is_held_and_a_stale_release_too(world):
    await world.start()
    scheduler = world.scheduler
    scheduler.limit = 0
    await world.trainer("t0")
    await scheduler.grant("t0", 5)
    again = await scheduler.grant("t0", 6)
    assert (again.state, again.reason.code) == (wire.COMMAND_STATE_FAILED, "ENGINE_STATE")
    scheduler.roster["t0"].generation = 4
    stale = await scheduler.handover("t0", 4, wire.HANDOVER_KIND_CORDON, wire.ReplicaSpec())
    assert stale.state == wire.COMMAND_STATE_FAILED
