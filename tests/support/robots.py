"""Fake workers over the real wire: they speak FleetService like the real ones and do what the test tells them."""

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.common.rpc.status import from_rpc_error
from services.common.session import FleetSession, SessionLost
from services.scheduler.bootstrap import Scheduler
from services.scheduler.config import SchedulerConfig

NODE = "nodes/n0"
SHA = hashlib.sha256(b"tokens").hexdigest()


def rid() -> str:
    """A request id."""
    return str(uuid.uuid4())


async def refused(call) -> LibraError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def accelerator(index: int, node: str = NODE) -> str:
    return f"{node}/accelerators/{index}"


class Robot:
    """A worker process in miniature; subclasses answer leases and commands."""

    kind = wire.WORKER_KIND_ROLLOUT

    def __init__(self, address: str, name: str, accelerators: list[int] | None = None, node: str = NODE) -> None:
        self.name = name
        self.commands: list[wire.Command] = []
        self.desired: list[wire.Desired] = []
        self.lost: list[str] = []
        self.roster = wire.Roster()
        self.session = FleetSession(
            address,
            name,
            self.kind,
            handler=self,
            endpoint="127.0.0.1:1",
            accelerators=[accelerator(i, node) for i in accelerators or []],
        )
        self._run: asyncio.Task[None] | None = None
        self._work: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Robot":
        self._run = asyncio.create_task(self.session.run())
        await self.session.wait_begun()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Vanishes without a word, as SIGKILL would have it."""
        for task in [*self._work, self._run]:
            if task is not None:
                task.cancel()
        await asyncio.gather(*self._work, self._run, return_exceptions=True)
        await self.session.channel.close()

    async def on_desired(self, desired: wire.Desired) -> None:
        self.desired.append(desired)
        if desired.HasField("roster"):
            self.roster = desired.roster

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        self.commands.append(command)
        return wire.CommandResult()

    async def on_session_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


class NodeRobot(Robot):
    """A node agent: offers accelerators and confirms releases."""

    kind = wire.WORKER_KIND_NODE

    def __init__(self, address: str, pools: dict[int, int], node: str = NODE, type_: str = "cpu") -> None:
        super().__init__(address, f"node-{node.removeprefix('nodes/')}")
        self.confirms = True
        load = wire.NodeLoad(node=wire.Node(name=node))
        for index, pool in pools.items():
            load.accelerators.add(
                name=accelerator(index, node), type=type_, device_uuid=f"cpu-{index}", pool=pool, cpu_share=0.45
            )
        self.session.set_load(wire.Load(node=load))

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        self.commands.append(command)
        if not self.confirms:
            return wire.CommandResult(
                state=wire.COMMAND_STATE_FAILED, reason=wire.Reason(code="STILL_HELD", text="pid 1 holds 1 GiB")
            )
        return wire.CommandResult()


class RolloutRobot(Robot):
    """A rollout worker; `play(lease)` is the episode, by default one turn and reward 1."""

    def __init__(self, address: str, name: str, accelerators: list[int], node: str = NODE) -> None:
        super().__init__(address, name, accelerators, node)
        self.serving: wire.EngineWeights | None = None
        self.leases: dict[str, wire.TrajectoryLease] = {}
        self.episodes: dict[str, asyncio.Task[None]] = {}
        self.play: Callable[[wire.TrajectoryLease], Awaitable[None]] = self.one_turn
        self.refusals: list[wire.Refusal] = []

    async def on_desired(self, desired: wire.Desired) -> None:
        await super().on_desired(desired)
        for lease in desired.trajectories:
            self.leases[lease.trajectory] = lease
            self.session.put_item(lease.trajectory, lease.lease_epoch, "RUNNING")
            task = asyncio.ensure_future(self._episode(lease))
            self.episodes[lease.trajectory] = task
            self._work.add(task)
        for name in desired.removed:
            self.forget(name)

    async def _episode(self, lease: wire.TrajectoryLease) -> None:
        try:
            await self.play(lease)
        except SessionLost:
            return

    def forget(self, name: str) -> None:
        self.leases.pop(name, None)
        self.session.drop_item(name)

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        self.commands.append(command)
        result = wire.CommandResult()
        match command.WhichOneof("action"):
            case "load_weights":
                load = command.load_weights
                state = wire.ENGINE_WEIGHT_STATE_PREPARED
                if load.phase == wire.LOAD_PHASE_SWITCH:
                    state = wire.ENGINE_WEIGHT_STATE_LOADED
                checksum = f"checksum-{load.version.number}" if load.version.number else ""
                result.weights.CopyFrom(
                    wire.EngineWeights(serving=load.version, run=load.run, state=state, checksum=checksum)
                )
                self.serving = result.weights
            case "preempt":
                lease = self.leases[command.preempt.trajectory]
                task = self.episodes.pop(lease.trajectory, None)
                if task is not None:
                    task.cancel()
                await self.end(lease, interrupted=wire.INTERRUPTION_PREEMPTED)
        return result

    def version(self) -> wire.VersionRef:
        return self.serving.serving if self.serving is not None else wire.VersionRef(lineage=1, number=0)

    def turn(
        self, lease: wire.TrajectoryLease, *, tokens: int = 4, prompt: int = 3, first: int = 0, index: int = 0, part: int = 0,
        finish: int = wire.FINISH_REASON_STOP, interruption: int = 0, trainable: int | None = None, sha: str = SHA,
        version: wire.VersionRef | None = None, truncated: bool = False,
    ) -> wire.TrajectoryProgress:  # fmt: skip
        """Progress of one turn: `prompt` masked tokens, then `tokens` generated ones."""
        trained = tokens if trainable is None else trainable
        segment = wire.Segment(
            blob=wire.BlobRef(uri="file:///x", sha256=sha, size_bytes=1), first_position=first, tokens=prompt + tokens,
            trainable_tokens=trained,
            columns=[wire.Column(name=n, dtype="int32") for n in ("ids", "loss_mask", "logprob", "weight_version")],
        )  # fmt: skip
        if tokens:
            segment.versions.add(
                version=version or self.version(),
                first_position=first + prompt,
                tokens=tokens,
                trainable_tokens=trained,
            )
        return wire.TrajectoryProgress(
            trajectory=lease.trajectory, attempt=lease.attempt, lease_epoch=lease.lease_epoch,
            turns=[
                wire.Turn(
                    index=index, part=part, first_position=first + prompt, prompt_tokens=prompt, generated_tokens=tokens,
                    finish=finish, interruption=interruption, truncated=truncated,
                )
            ],
            sequences=[wire.Sequence(index=0, segments=[segment])],
        )  # fmt: skip

    async def report(self, delta: wire.Delta) -> list[wire.Refusal]:
        refusals = await self.session.report(delta)
        self.refusals += refusals
        return refusals

    async def one_turn(self, lease: wire.TrajectoryLease) -> None:
        await self.report(wire.Delta(progress=[self.turn(lease)]))
        await self.end(lease, reward=1.0)

    async def end(
        self, lease: wire.TrajectoryLease, *, reward: float | None = None, failure: int = 0, interrupted: int = 0
    ) -> list[wire.Refusal]:
        message = wire.TrajectoryEnd(trajectory=lease.trajectory, attempt=lease.attempt, lease_epoch=lease.lease_epoch)
        if reward is not None:
            message.reward.CopyFrom(wire.Reward(value=reward))
        elif failure:
            message.failure.CopyFrom(
                wire.AttemptFailure(failure=failure, reason=wire.Reason(code="TEST", text="the test said so"))
            )
        else:
            message.interrupted = interrupted
        self.forget(lease.trajectory)
        return await self.report(wire.Delta(ends=[message]))


class TrainerRobot(Robot):
    """A trainer worker; the test takes batches and commits steps itself."""

    kind = wire.WORKER_KIND_TRAINER

    def members(self) -> list[wire.RosterMember]:
        return [m for m in self.roster.members if m.worker == self.session.worker]


class Cluster:
    """An in-process scheduler on SQLite with stubs for its services."""

    def __init__(self, folder: Path, **config: object) -> None:
        self.config = SchedulerConfig.model_validate(
            {
                "listen": "127.0.0.1:0", "database": f"sqlite:///{folder / 'libra.db'}", "blobs": str(folder / "blobs"),
                "cycle_s": 0.01, **config,
            }
        )  # fmt: skip
        self.blobs = BlobStore(str(folder / "blobs"))
        self.scheduler = Scheduler(self.config)

    async def start(self) -> None:
        from services.common.rpc.channel import connect

        await self.scheduler.start()
        self.channel = connect(self.scheduler.address)
        self.trajectories = wire.TrajectoryServiceStub(self.channel)
        self.admin = wire.AdminServiceStub(self.channel)
        self.fleet = wire.FleetServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.scheduler.stop()

    async def restart(self) -> None:
        """Stops the scheduler and starts a new one on the same database and port."""
        address = self.scheduler.address
        await self.stop()
        self.config = self.config.model_copy(update={"listen": address})
        self.scheduler = Scheduler(self.config)
        await self.start()

    @property
    def address(self) -> str:
        return self.scheduler.address

    @property
    def state(self):
        return self.scheduler.cycle.ledger.fleet

    async def create_run(self, run_id: str = "r", tasks: list[str] | None = None, **fields: object) -> wire.Run:
        run = wire.Run(policies=[wire.Policy(model="model")], **fields)
        if tasks is not None:
            ref = self.blobs.put(f"tasks/{run_id}.jsonl", "\n".join(tasks).encode())
            run.tasks.file.CopyFrom(ref)
        request = wire.CreateRunRequest(request_id=rid(), run_id=run_id, run=run)
        return (await self.trajectories.CreateRun(request, timeout=5)).run

    async def submit(self, run: str, count: int) -> list[str]:
        request = wire.SubmitGroupsRequest(
            request_id=rid(), run=run, tasks=[wire.Task(json=f'{{"n": {n}}}') for n in range(count)]
        )
        return list((await self.trajectories.SubmitGroups(request, timeout=5)).groups)

    async def take(self, trainer: TrainerRobot, step: int, wait: float = 5.0, run: str = "runs/r", **size: int):
        request = wire.TakeBatchRequest(
            request_id=rid(), caller=trainer.session.caller(), run=run, step=step,
            size=wire.BatchSize(**size), wait=wire.duration(wait),
        )  # fmt: skip
        return await self.trajectories.TakeBatch(request, timeout=wait + 5)

    async def commit(self, trainer: TrainerRobot, manifest: wire.Manifest, **changes: object) -> wire.VersionRef:
        fields = {
            "base_version": manifest.base_version, "trainable_tokens": manifest.divisors.trainable_tokens,
            "members": trainer.members(), "roster_revision": trainer.roster.revision, **changes,
        }  # fmt: skip
        request = wire.CommitStepRequest(
            request_id=rid(), caller=trainer.session.caller(), manifest=manifest.name, **fields
        )
        return (await self.trajectories.CommitStep(request, timeout=5)).version

    async def reassign_to_trainer(self, index: int) -> wire.Reassignment:
        """An operator's order: the accelerator's rollout replica makes room for a trainer."""
        old = self.state.replica_on(accelerator(index))
        request = wire.ReassignRequest(
            request_id=rid(),
            sources=[wire.ReassignmentSource(replica=old.name, generation=old.generation)],
            targets=[
                wire.ReassignmentTarget(
                    spec=wire.ReplicaSpec(role=wire.ROLE_TRAINER, accelerators=[accelerator(index)])
                )
            ],
        )
        return (await self.admin.Reassign(request, timeout=5)).reassignment

    async def publish(self, trainer: TrainerRobot, version: wire.VersionRef, run: str = "runs/r") -> None:
        files = wire.WeightManifest(format="safetensors", checksum=f"checksum-{version.number}", dtype="float32")
        files.shards.add(name="model.safetensors", blob=wire.BlobRef(uri="file:///w", sha256=SHA, size_bytes=1))
        request = wire.PublishWeightsRequest(
            request_id=rid(), caller=trainer.session.caller(), run=run, version=version, files=files
        )
        await self.trajectories.PublishWeights(request, timeout=5)

    async def until(self, condition: Callable[[], object], timeout: float = 10.0) -> None:
        """Waits for a change of the live state after which the condition holds."""
        ledger = self.scheduler.cycle.ledger
        async with asyncio.timeout(timeout):
            while not condition():
                await ledger.wait_change(0.2)

    def states(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for item in self.state.trajectories.values():
            counts[item.state] = counts.get(item.state, 0) + 1
        return counts


POOLS = {0: wire.POOL_CORE_TRAINING, 1: wire.POOL_CORE_ROLLOUT, 2: wire.POOL_HYBRID}


@asynccontextmanager
async def small_fleet(cluster: Cluster):
    """A node with three accelerators, a core trainer, a core rollout worker and a hybrid pair."""
    async with (
        NodeRobot(cluster.address, POOLS) as node,
        TrainerRobot(cluster.address, "trainer-0", [0]) as trainer,
        RolloutRobot(cluster.address, "rollout-1", [1]) as core,
        RolloutRobot(cluster.address, "rollout-2", [2]) as hybrid,
        TrainerRobot(cluster.address, "trainer-2", [2]) as spare,
    ):
        await cluster.until(lambda: sum(r.state in ("ACTIVE",) for r in cluster.state.replicas.values()) == 3)
        await cluster.until(lambda: trainer.members())
        yield node, trainer, core, hybrid, spare
