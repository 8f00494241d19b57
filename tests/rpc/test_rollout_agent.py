"""The agent: leases and commands from a scheduler that is played by the test, a fake engine, a toy environment."""

import asyncio
import contextlib
import hashlib

import grpc
import pytest

from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.common.history import History
from services.common.locks import GenerationLock
from services.common.rpc.channel import connect
from services.common.rpc.server import serve
from services.common.rpc.status import from_rpc_error
from services.rollout.agent import RolloutAgent
from services.rollout.api import RolloutService
from services.rollout.config import RolloutConfig
from services.rollout.engine.base import EngineLimits
from services.rollout.engine.fake import CharCodec, FakeCore
from services.rollout.engine.thread import Engine
from tests.rpc.test_rollout_episode import SCRIPT, script
from tests.support.rollout_world import RUN, TRAJECTORY, World

ACCELERATOR = "nodes/n0/accelerators/1"
REPLICA = "replicas/rollout-3"
CODEC = CharCodec()


class FakeSession:
    """Stands for FleetSession: reports go to a World, items and loads are remembered."""

    def __init__(self, world: World) -> None:
        self.epoch, self.term, self.endpoint = 1, 1, "127.0.0.1:1"
        self.report = world.report
        self.items: dict[str, tuple[int, str]] = {}
        self.load: wire.Load | None = None
        self.loaded = asyncio.Event()
        self.stopped: bool | None = None

    def put_item(self, name, fence, state):
        self.items[name] = (fence, state)

    def drop_item(self, name):
        self.items.pop(name, None)

    def set_load(self, load):
        self.load = load
        self.loaded.set()

    async def stop(self, *, abandon=False):
        self.stopped = abandon


class Fleet:
    def __init__(self, agent, session, world, folder) -> None:
        self.agent, self.session, self.world, self.folder = agent, session, world, folder
        self.sequence = 0

    async def command(self, generation=3, **action) -> wire.CommandResult:
        self.sequence += 1
        fence = wire.Fence(term=1, session_epoch=1, generation=generation, sequence=self.sequence)
        return await self.agent.on_command(wire.Command(name=f"commands/{self.sequence}", fence=fence, **action))

    async def step(self, kind, generation=3, **spec) -> wire.CommandResult:
        step = wire.HandoverStep(index=1, kind=kind, replica=REPLICA, generation=generation)
        made = wire.ReplicaSpec(
            **{"role": wire.ROLE_ROLLOUT, "accelerators": [ACCELERATOR], "concurrency_cap": 4, **spec}
        )
        return await self.command(handover=wire.HandoverCommand(step=step, spec=made), generation=generation)

    async def load(self, number=0, generation=3, run=RUN, phases=(wire.LOAD_PHASE_PREPARE, wire.LOAD_PHASE_SWITCH)):
        files = None
        if number:
            blob = self.world.blobs.put(f"r/weights/1-{number}/a.safetensors", b"weights %d" % number)
            files = wire.WeightManifest(
                format="safetensors", shards=[wire.WeightShard(name="a.safetensors", blob=blob)]
            )
        for phase in phases:
            load = wire.LoadWeightsCommand(
                replica=REPLICA, version=wire.VersionRef(lineage=1, number=number), phase=phase, run=run, model="tiny",
                files=files,
            )  # fmt: skip
            result = await self.command(load_weights=load, generation=generation)
        return result.weights

    async def ready(self):
        await self.step(wire.HANDOVER_KIND_GRANT)
        await self.load()

    def lease(self) -> wire.TrajectoryLease:
        lease = self.world.lease()
        lease.routes.add(replica=REPLICA, generation=3)
        return lease

    async def desire(self, *leases, complete=True, removed=()):
        await self.agent.on_desired(
            wire.Desired(complete=complete, trajectories=leases, removed=removed, runs=[self.world.run])
        )

    async def quiet(self):
        """Until no episode runs and every hand-back is told."""
        tasks = [r.task for r in self.agent._episodes.values()] + list(self.agent._work._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=20)

    @property
    def lock(self) -> GenerationLock:
        return GenerationLock(self.folder / "locks", ACCELERATOR)


@pytest.fixture
async def make_fleet(tmp_path):
    made = []

    async def make(next_token=None, context=256, **config):
        world = World(tmp_path)
        await world.start()
        settings = RolloutConfig(
            worker="rollout-1", scheduler="127.0.0.1:1", accelerators=[ACCELERATOR], locks=str(tmp_path / "locks"),
            blobs=str(tmp_path / "blobs"), history=str(tmp_path / "history.jsonl"), load_interval=0.01, **config,
        )  # fmt: skip
        engine = Engine(FakeCore(next_token or script(*SCRIPT), EngineLimits(max_context=context, chunk_tokens=1)))
        engine.start()
        agent = RolloutAgent(settings, engine, BlobStore(settings.blobs), History(settings.history, "rollout-1"))
        session = FakeSession(world)
        agent.bind(session)
        made.append((agent, engine, world))
        return Fleet(agent, session, world, tmp_path)

    yield make
    for agent, engine, world in made:
        await agent.on_session_lost("the test is over")
        await agent.environments.close()
        await engine.stop()
        await world.stop()


async def test_grant_load_lease_reward(make_fleet):
    fleet = await make_fleet()
    await fleet.ready()
    assert fleet.session.items == {REPLICA: (3, "ACTIVE")}
    assert fleet.lock.probe()[0] == 3
    assert fleet.lock.probe()[2], "the generation lock is held"
    status = fleet.world.deltas[0].replicas[0]
    assert (status.replica, status.generation, status.state) == (REPLICA, 3, wire.REPLICA_STATE_ACTIVE)
    assert status.positional_seed
    await fleet.desire(fleet.lease())
    assert fleet.session.items[TRAJECTORY] == (1, "LEASED")
    await fleet.quiet()
    assert fleet.world.ends[0].reward.value == 0.5
    assert TRAJECTORY not in fleet.session.items
    history = (fleet.folder / "history.jsonl").read_text()
    for kind in ("leased", "generated", "acked", "ended", "loaded"):
        assert f'"kind":"{kind}"' in history


async def test_the_same_lease_again_changes_nothing_and_a_newer_one_replaces_it(make_fleet):
    fleet = await make_fleet()
    fleet.world.env.gate.clear()
    await fleet.ready()
    lease = fleet.lease()
    await fleet.desire(lease)
    first = fleet.agent._episodes[TRAJECTORY].episode
    await fleet.desire(lease)
    assert fleet.agent._episodes[TRAJECTORY].episode is first
    async with asyncio.timeout(10):
        await fleet.world.env.in_call.wait()
    fleet.world.env.gate.set()
    newer = fleet.lease()
    await fleet.desire(newer)
    second = fleet.agent._episodes[TRAJECTORY].episode
    assert second is not first
    await fleet.quiet()
    assert first.ended_how == "dropped"
    assert second.ended_how == "reward"
    assert [e.lease_epoch for e in fleet.world.ends] == [2]


@pytest.mark.parametrize("how", ["removed", "complete"])
async def test_what_is_no_longer_named_is_dropped(make_fleet, how):
    fleet = await make_fleet()
    fleet.world.env.gate.clear()
    await fleet.ready()
    await fleet.desire(fleet.lease())
    async with asyncio.timeout(10):
        await fleet.world.env.in_call.wait()
    if how == "removed":
        await fleet.desire(complete=False, removed=[TRAJECTORY])
    else:
        await fleet.desire()
    await fleet.quiet()
    assert fleet.world.ends == []
    assert TRAJECTORY not in fleet.session.items


async def test_incremental_answers_drop_nothing(make_fleet):
    fleet = await make_fleet()
    fleet.world.env.gate.clear()
    await fleet.ready()
    await fleet.desire(fleet.lease())
    await fleet.desire(complete=False)
    assert TRAJECTORY in fleet.agent._episodes


@pytest.mark.parametrize("why", ["no replica", "other replica", "other run", "unknown run"])
async def test_a_lease_that_cannot_be_worked_on_is_given_back(make_fleet, why):
    fleet = await make_fleet()
    lease = fleet.lease()
    if why != "no replica":
        await fleet.ready()
    if why == "other replica":
        lease.routes[0].generation = 2
    if why == "other run":
        await fleet.load(run="runs/other")
    if why == "unknown run":
        await fleet.agent.on_desired(wire.Desired(trajectories=[lease]))
    else:
        await fleet.desire(lease)
    await fleet.quiet()
    assert fleet.world.ends[0].interrupted == wire.INTERRUPTION_PREEMPTED
    assert TRAJECTORY not in fleet.session.items


async def test_a_bad_task_fails_that_item_alone(make_fleet):
    fleet = await make_fleet()
    await fleet.ready()
    lease = fleet.lease()
    lease.task.json = "[1]"
    await fleet.desire(lease)
    await fleet.quiet()
    assert fleet.world.ends[0].failure.failure == wire.FAILURE_CLASS_EPISODE
    assert "object" in fleet.world.ends[0].failure.reason.text


async def test_preempt_keeps_tokens_and_says_so(make_fleet):
    fleet = await make_fleet(script(("a",)), context=1 << 18)
    fleet.world.budget = 100_000
    await fleet.ready()
    lease = fleet.lease()
    await fleet.desire(lease)
    episode = fleet.agent._episodes[TRAJECTORY].episode
    async with asyncio.timeout(10):
        while episode.generated < 5:
            await asyncio.sleep(0)
    stale = wire.PreemptCommand(trajectory=TRAJECTORY, attempt=1, lease_epoch=9)
    with pytest.raises(LibraError, match="STALE_ATTEMPT"):
        await fleet.command(preempt=stale)
    command = wire.PreemptCommand(trajectory=TRAJECTORY, attempt=1, lease_epoch=1)
    result = (await fleet.command(preempt=command)).preempt
    assert not result.already_ended
    assert result.kept_tokens == fleet.world.generated >= 5
    assert fleet.world.turns[-1].interruption == wire.INTERRUPTION_PREEMPTED
    assert (await fleet.command(preempt=command)).preempt.already_ended


async def test_named_as_gone_while_its_end_is_told_the_preemption_still_counts(make_fleet):
    """The scheduler's next answer may overtake the one to the end report; both follow the same commit."""
    fleet = await make_fleet(script(("a",)), context=1 << 18)
    fleet.world.budget = 100_000
    await fleet.ready()
    await fleet.desire(fleet.lease())
    episode = fleet.agent._episodes[TRAJECTORY].episode
    report = fleet.session.report

    async def overtaken(delta):
        refusals = await report(delta)
        if delta.ends:
            await fleet.agent.on_desired(wire.Desired(removed=[TRAJECTORY]))
            await asyncio.sleep(0)
        return refusals

    fleet.world.report = fleet.session.report = overtaken
    object.__setattr__(episode._place, "report", overtaken)
    async with asyncio.timeout(10):
        while episode.generated < 3:
            await asyncio.sleep(0)
        command = wire.PreemptCommand(trajectory=TRAJECTORY, attempt=1, lease_epoch=1)
        result = (await fleet.command(preempt=command)).preempt
    assert not result.already_ended
    assert result.kept_tokens == fleet.world.generated


async def test_cancel_says_nothing_more_and_closes_the_session(make_fleet):
    fleet = await make_fleet()
    fleet.world.env.gate.clear()
    await fleet.ready()
    await fleet.desire(fleet.lease())
    async with asyncio.timeout(10):
        await fleet.world.env.in_call.wait()
    command = wire.CancelCommand(trajectory=TRAJECTORY, attempt=1, lease_epoch=1, close_tool_sessions=True)
    result = await fleet.command(cancel=command)
    assert result.preempt.kept_tokens == 5
    assert fleet.world.ends == []
    assert fleet.world.env.closed


async def test_weights_prepare_switch_and_checksum(make_fleet):
    fleet = await make_fleet()
    await fleet.ready()
    prepared = await fleet.load(2, phases=[wire.LOAD_PHASE_PREPARE])
    assert (prepared.serving.number, prepared.target.number) == (0, 2)
    assert prepared.state == wire.ENGINE_WEIGHT_STATE_PREPARED
    loaded = await fleet.load(2, phases=[wire.LOAD_PHASE_SWITCH])
    assert loaded.serving.number == 2
    assert loaded.state == wire.ENGINE_WEIGHT_STATE_LOADED
    assert loaded.run == RUN
    sha = hashlib.sha256(b"weights 2").hexdigest()
    assert loaded.checksum == hashlib.sha256(f"a.safetensors {sha}\n".encode()).hexdigest()
    with pytest.raises(LibraError, match="was not prepared"):
        await fleet.load(3, phases=[wire.LOAD_PHASE_SWITCH])
    with pytest.raises(LibraError, match="older than"):
        await fleet.load(1)
    with pytest.raises(LibraError, match="STALE_FENCE"):
        await fleet.load(3, generation=2)
    await fleet.load(3, phases=[wire.LOAD_PHASE_PREPARE, wire.LOAD_PHASE_ABANDON])
    with pytest.raises(LibraError, match="was not prepared"):
        await fleet.load(3, phases=[wire.LOAD_PHASE_SWITCH])
    assert fleet.agent.engine.version.number == 2


async def test_a_changed_file_is_refused(make_fleet):
    fleet = await make_fleet()
    await fleet.ready()
    blob = fleet.world.blobs.put("r/weights/1-1/a", b"good")
    blob.sha256 = "0" * 64
    files = wire.WeightManifest(format="safetensors", shards=[wire.WeightShard(name="a", blob=blob)])
    load = wire.LoadWeightsCommand(
        replica=REPLICA, version=wire.VersionRef(lineage=1, number=1), phase=wire.LOAD_PHASE_PREPARE, run=RUN,
        model="tiny", files=files,
    )  # fmt: skip
    with pytest.raises(LibraError, match="BLOB_MISMATCH"):
        await fleet.command(load_weights=load)


async def test_release_gives_back_frees_and_unlocks(make_fleet):
    fleet = await make_fleet(script(("a",)), context=1 << 18)
    fleet.world.budget = 100_000
    await fleet.ready()
    lease = fleet.lease()
    await fleet.desire(lease)
    episode = fleet.agent._episodes[TRAJECTORY].episode
    async with asyncio.timeout(10):
        while episode.generated < 3:
            await asyncio.sleep(0)
    await fleet.step(wire.HANDOVER_KIND_CORDON)
    assert fleet.session.items[REPLICA] == (3, "CORDONED")
    other = wire.TrajectoryLease()
    other.CopyFrom(lease)
    other.trajectory = f"{RUN}/trajectories/0-1"
    await fleet.desire(other, complete=False)
    assert list(fleet.agent._episodes) == [TRAJECTORY], "no new work on a cordoned replica"
    result = await fleet.step(wire.HANDOVER_KIND_RELEASE)
    assert result.handover.state == wire.HANDOVER_STEP_STATE_DONE
    assert list(result.handover.observations) == []
    assert fleet.world.turns[-1].generated_tokens >= 3
    assert fleet.agent.engine.version is None
    assert not fleet.lock.probe()[2], "the generation lock is free"
    assert REPLICA not in fleet.session.items
    await fleet.step(wire.HANDOVER_KIND_RELEASE)  # again: that is what was asked for
    with pytest.raises(LibraError, match="STALE_FENCE"):
        await fleet.step(wire.HANDOVER_KIND_GRANT, generation=2)  # the lock file remembers
    await fleet.step(wire.HANDOVER_KIND_GRANT, generation=4)
    assert fleet.agent.holding.generation == 4


async def test_a_grant_of_foreign_accelerators_is_refused(make_fleet):
    fleet = await make_fleet()
    with pytest.raises(LibraError, match="was started with"):
        await fleet.step(wire.HANDOVER_KIND_GRANT, accelerators=["nodes/n0/accelerators/9"])
    with pytest.raises(LibraError, match="ROLE_ROLLOUT"):
        await fleet.step(wire.HANDOVER_KIND_GRANT, role=wire.ROLE_TRAINER)
    other = fleet.lock
    other.acquire(2)
    with pytest.raises(LibraError, match="locked by another process"):
        await fleet.step(wire.HANDOVER_KIND_GRANT)
    other.release()
    assert fleet.agent.holding is None


async def test_a_lost_session_drops_everything(make_fleet):
    fleet = await make_fleet()
    fleet.world.env.gate.clear()
    await fleet.ready()
    await fleet.desire(fleet.lease())
    async with asyncio.timeout(10):
        await fleet.world.env.in_call.wait()
    told = len(fleet.world.deltas)
    await fleet.agent.on_session_lost("the lease ran out")
    assert len(fleet.world.deltas) == told, "nothing is said under a lost lease"
    assert fleet.session.items == {}
    assert not fleet.lock.probe()[2]
    assert fleet.agent.engine.version is None


async def test_shut_down_gives_back_with_tokens(make_fleet):
    fleet = await make_fleet(script(("a",)), context=1 << 18)
    fleet.world.budget = 100_000
    await fleet.ready()
    await fleet.desire(fleet.lease())
    episode = fleet.agent._episodes[TRAJECTORY].episode
    async with asyncio.timeout(10):
        while episode.generated < 3:
            await asyncio.sleep(0)
    await fleet.agent.shut_down()
    assert fleet.world.ends[-1].interrupted == wire.INTERRUPTION_PREEMPTED
    assert fleet.world.generated >= 3
    assert fleet.session.stopped is True
    assert not fleet.lock.probe()[2]


async def test_load_reports(make_fleet):
    fleet = await make_fleet(script(("a",)), context=1 << 18)
    fleet.world.budget = 100_000
    task = asyncio.create_task(fleet.agent.report_load())
    try:
        await fleet.ready()
        await fleet.desire(fleet.lease())
        async with asyncio.timeout(10):
            while True:
                fleet.session.loaded.clear()
                await fleet.session.loaded.wait()
                engines = fleet.session.load.rollout.engines
                if engines and engines[0].running:
                    break
        assert engines[0].activity == wire.ENGINE_ACTIVITY_SERVING
        assert engines[0].generated_tokens > 0
        assert engines[0].kv_used_tokens > 0
        assert (engines[0].replica, engines[0].generation) == (REPLICA, 3)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def direct(make_fleet):
    fleet = await make_fleet(script(("abcdefghij",)))
    await fleet.ready()
    server = await serve(
        [(wire.add_RolloutServiceServicer_to_server, RolloutService(fleet.agent))], "127.0.0.1:0",
        service_names=["libra.v1.RolloutService"],
    )  # fmt: skip
    channel = connect(server.address)
    yield fleet, wire.RolloutServiceStub(channel)
    await channel.close()
    await server.stop(0)


def _generate(**changes):
    return wire.GenerateRequest(
        **{
            "request_id": "a", "replica": REPLICA, "fence": wire.Fence(generation=3), "prompt_ids": [1, 65],
            "max_tokens": 10, **changes,
        }
    )  # fmt: skip


async def test_direct_generation_and_joining_it_again(direct):
    _, stub = direct
    engines = (await stub.DescribeEngine(wire.DescribeEngineRequest(), timeout=5)).engines
    assert engines[0].max_sequence_tokens == 256
    messages = [m async for m in stub.Generate(_generate(), timeout=10)]
    assert CODEC.decode([i for m in messages for i in m.ids]) == "abcdefghij"
    assert messages[-1].last
    assert messages[-1].total_tokens == 10
    assert messages[-1].finish == wire.FINISH_REASON_LENGTH
    spans = [(v.first_position, v.tokens) for m in messages for v in m.versions]
    assert spans == [(n, 1) for n in range(10)]
    again = [m async for m in stub.Generate(_generate(resume_from=7), timeout=10)]
    assert CODEC.decode([i for m in again for i in m.ids]) == "hij"
    assert again[-1].total_tokens == 10


async def test_direct_abort_keeps_tokens(direct):
    fleet, stub = direct
    fleet.agent.engine.set_concurrency(0)
    call = stub.Generate(_generate(request_id="b"), timeout=10)
    reading = asyncio.create_task(call.read())
    async with asyncio.timeout(10):
        while (await fleet.agent.engine.stats()).waiting == 0:
            await asyncio.sleep(0)
    abort = wire.AbortRequest(
        target_request_id="b", replica=REPLICA, fence=wire.Fence(generation=3),
        interruption=wire.INTERRUPTION_PREEMPTED,
    )  # fmt: skip
    answer = await stub.Abort(abort, timeout=5)
    assert (answer.total_tokens, answer.already_finished) == (0, False)
    last = await reading
    assert last.last
    assert last.interruption == wire.INTERRUPTION_PREEMPTED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replica": "replicas/x"}, "NOT_FOUND"),
        ({"fence": wire.Fence(generation=2)}, "STALE_FENCE"),
        ({"version": wire.VersionRef(lineage=1, number=4)}, "VERSION_UNUSABLE"),
        ({"request_id": ""}, "INVALID_FIELD"),
    ],
)
async def test_direct_refusals(direct, changes, reason):
    _, stub = direct
    with pytest.raises(grpc.aio.AioRpcError) as error:
        [m async for m in stub.Generate(_generate(**changes), timeout=5)]
    assert from_rpc_error(error.value).reason == reason


async def test_read_kv_is_not_implemented(direct):
    _, stub = direct
    with pytest.raises(grpc.aio.AioRpcError) as error:
        [m async for m in stub.ReadKv(wire.ReadKvRequest(), timeout=5)]
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
