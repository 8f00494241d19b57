"""The trainer worker: takes replicas over and gives them up as the scheduler says, and runs the training thread."""

import asyncio
import os
from collections.abc import Callable, Mapping

from services.common import errors, log, wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.common.history import History
from services.common.locks import GenerationLock
from services.common.session import FleetSession, SessionLost
from services.common.share import CpuShare
from services.trainer.checkpoints import Checkpoint
from services.trainer.collective import Collective, Times, TorchftCollective
from services.trainer.config import Config
from services.trainer.coordinator import Coordinator
from services.trainer.engine.base import Array, Engine
from services.trainer.loop import TrainingLoop
from services.trainer.metrics import MetricsFile, Phases, peak_memory_bytes
from services.trainer.surroundings import Grant, Surroundings

_log = log.get(__name__)

LOAD_SECONDS = 0.5
STOP_SECONDS = 30.0
"""Longest wait for the step in hand when a replica is released; then it is abandoned."""
MAX_RUNS = 64
ENGINE_BUILD = "libra-torch"


class TrainerAgent:
    """Handler of the worker's session. Holds at most one replica at a time."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        store: BlobStore,
        history: History,
        *,
        secret: bytes = b"",
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` is called in the event loop when the training thread dies."""
        self.phases = Phases()
        self.loop: TrainingLoop | None = None
        self._config, self._engine, self._store, self._history = config, engine, store, history
        self._secret, self._on_failure = secret, on_failure
        self._metrics = MetricsFile(config.metrics_path)
        self._locks = {a: GenerationLock(config.lock_dir, a) for a in config.accelerators}
        self._runs: dict[str, wire.Run] = {}
        self._session: FleetSession | None = None
        self._busy = asyncio.Lock()
        self._event_loop = asyncio.get_running_loop()
        self._roster = wire.Roster()
        self._tasks: set[asyncio.Task[object]] = set()

    def attach(self, session: FleetSession) -> None:
        """The session that this agent handles; made after it."""
        self._session = session

    @property
    def session(self) -> FleetSession:
        """The session."""
        assert self._session is not None
        return self._session

    # ---- what the session calls

    async def on_desired(self, desired: wire.Desired) -> None:
        """Keeps runs and roster; replicas are taken and given up by commands alone."""
        if desired.complete:
            self._runs.clear()
        for run in desired.runs:
            self._runs[run.name] = run
        for name in desired.removed:
            self._runs.pop(name, None)
        while len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        if desired.roster.revision >= self._roster.revision:
            self._roster = desired.roster

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        """Steps of a hand-over, checkpoints, drain."""
        action = command.WhichOneof("action")
        result = wire.CommandResult(state=wire.COMMAND_STATE_SUCCEEDED)
        if action == "handover":
            await self._handover(command)
            result.handover.CopyFrom(command.handover.step)
            result.handover.state = wire.HANDOVER_STEP_STATE_DONE
        elif action == "checkpoint":
            saved = await self.checkpoint()
            policy = self.loop.policy if self.loop else None
            version = saved.version.ref(policy.id if policy else "")
            if saved.version.number < command.checkpoint.at_least.number:
                raise errors.engine_state(f"the newest state here is {saved.version}, which is older than asked for")
            result.checkpoint.CopyFrom(wire.CheckpointResult(version=version, index=saved.index))
        elif action == "drain":
            if self.loop is not None:
                await self._quiet(self.loop)
        else:
            raise errors.engine_state(f"a trainer does not carry out {action} commands")
        return result

    async def on_session_lost(self, reason: str) -> None:
        """Nothing may be held any longer: the step in hand is abandoned."""
        _log.warning("letting go of the replica", reason=reason)
        async with self._busy:
            await self._let_go(abandon=True)

    # ---- hand-over

    async def _handover(self, command: wire.Command) -> None:
        step = command.handover.step
        if step.kind == wire.HANDOVER_KIND_GRANT:
            async with self._busy:
                await self._grant(step.replica, step.generation, command.handover.spec)
            return
        loop = self.loop
        if loop is None or loop.grant.replica != step.replica:
            if step.kind == wire.HANDOVER_KIND_RELEASE:
                return  # nothing is held, which is what was asked for
            raise errors.engine_state(f"{step.replica} is not held here", resource=step.replica)
        if loop.grant.generation != step.generation:
            raise errors.stale_fence(
                f"{step.replica} is held by generation {loop.grant.generation}, the command is for {step.generation}",
                expected=str(loop.grant.generation), actual=str(step.generation),
            )  # fmt: skip
        if step.kind == wire.HANDOVER_KIND_CORDON:
            loop.cordon(True)
            await self._report(loop.grant, wire.REPLICA_STATE_CORDONED)
        elif step.kind == wire.HANDOVER_KIND_DRAIN:
            await self._quiet(loop)
        elif step.kind == wire.HANDOVER_KIND_RELEASE:
            async with self._busy:
                await self._let_go(abandon=False)
        elif step.kind == wire.HANDOVER_KIND_ADMIT:
            loop.cordon(False)
            await self._report(loop.grant, wire.REPLICA_STATE_ACTIVE)

    async def _grant(self, replica: str, generation: int, spec: wire.ReplicaSpec) -> None:
        held = self.loop
        if held is not None:
            if (held.grant.replica, held.grant.generation) == (replica, generation):
                return
            raise errors.engine_state(
                f"{held.grant.replica} (generation {held.grant.generation}) is still held; release it first",
                resource=held.grant.replica,
            )
        unknown = [a for a in spec.accelerators if a not in self._locks]
        if unknown:
            raise errors.invalid_field(f"{', '.join(unknown)}: this worker was not started with it", resource=replica)
        taken: list[GenerationLock] = []
        try:
            for accelerator in spec.accelerators:
                self._locks[accelerator].acquire(generation)
                taken.append(self._locks[accelerator])
            grant = Grant(self.session.worker, replica, generation, spec)
            loop = self._make_loop(grant)
            self.loop = loop
            loop.start()
            await self._report(grant, wire.REPLICA_STATE_STARTING)
            await asyncio.shield(asyncio.wrap_future(loop.ready))
        except BaseException:
            await self._let_go(abandon=True)
            for lock in taken:
                lock.release()
            raise
        self._watch(loop)
        await self._report(grant, wire.REPLICA_STATE_ACTIVE)
        _log.info("replica granted", replica=replica, generation=generation)

    def _make_loop(self, grant: Grant) -> TrainingLoop:
        session, config = self.session, self._config

        def incident(resource: str, error: LibraError) -> None:
            _log.error("incident", resource=resource, error=str(error))
            self._event_loop.call_soon_threadsafe(self._incident, resource, error)

        around = Surroundings(
            desk=lambda stopping, abandoned: Coordinator(config.scheduler, session.caller, stopping, abandoned),
            engine=self._engine,
            store=self._store,
            # a fresh one: the time before the grant is nobody's debt
            pay=CpuShare(config.cpu_share).pay,
            phases=self.phases,
            history=self._history,
            metrics=self._metrics,
            next_run=lambda: self._next_run(grant.spec),
            roster=lambda: self._roster,
            collective=lambda state, load: self._seat(grant, state, load),
            incident=incident,
            take_wait=config.take_wait_s,
            publish_grace=config.publish_grace_s,
        )
        return TrainingLoop(grant, around)

    def _seat(
        self, grant: Grant, state: Callable[[], dict[str, Array]], load: Callable[[Mapping[str, Array], int], None]
    ) -> Collective:
        settings = self._config.collective
        times = Times(
            settings.timeout_s, settings.quorum_timeout_s, settings.connect_timeout_s,
            settings.heartbeat_interval_ms / 1000, settings.rejoin_s,
        )  # fmt: skip
        return TorchftCollective(
            settings.lighthouse, grant.worker, grant.generation,
            state=state, load_state=load, host=settings.host, secret=self._secret, times=times,
        )  # fmt: skip

    def _next_run(self, spec: wire.ReplicaSpec) -> wire.Run | None:
        """The run to train: of those allowed, active and trainable, the one with the highest priority, then oldest."""
        candidates = [
            r
            for r in list(self._runs.values())
            if r.kind in (wire.RUN_KIND_TRAIN, wire.RUN_KIND_UNSPECIFIED)
            and r.state in (wire.RUN_STATE_ACTIVE, wire.RUN_STATE_PAUSED)
            and (not spec.runs or r.name in spec.runs)
        ]
        if not candidates:
            return None
        finished = self.loop.finished if self.loop else frozenset()
        open_ = [r for r in candidates if r.name not in finished] or candidates
        return min(open_, key=lambda r: (-r.priority, r.create_time.seconds, r.create_time.nanos, r.name))

    def _watch(self, loop: TrainingLoop) -> None:
        def ended() -> None:
            error = loop.done.exception()
            if error is not None and self.loop is loop:
                self._on_failure(error)

        loop.done.add_done_callback(lambda _: self._event_loop.call_soon_threadsafe(ended))

    async def _quiet(self, loop: TrainingLoop) -> None:
        """Cordons, and returns once no step is in hand."""
        loop.cordon(True)
        while not loop.between_steps and not loop.done.done():
            await asyncio.sleep(0.02)

    async def _let_go(self, *, abandon: bool) -> None:
        """Ends the thread (which leaves the group and frees the model), then lets the accelerators go."""
        loop, self.loop = self.loop, None
        if loop is not None:
            loop.stop(abandon=abandon)
            done = asyncio.wrap_future(loop.done)
            try:
                await asyncio.wait_for(asyncio.shield(done), STOP_SECONDS)
            except TimeoutError:
                loop.stop(abandon=True)
                await asyncio.wait_for(asyncio.shield(done), STOP_SECONDS)
            except Exception as error:  # noqa: BLE001 - it is being let go; what ended it is in the log already
                _log.warning("the training thread had failed", error=repr(error))
            self.session.drop_item(loop.grant.replica)
        for lock in self._locks.values():
            lock.release()

    async def _report(self, grant: Grant, state: "wire.ReplicaState.ValueType") -> None:
        session = self.session
        name = wire.ReplicaState.Name(state).removeprefix("REPLICA_STATE_")
        session.put_item(grant.replica, grant.generation, name)
        status = wire.ReplicaStatus(
            replica=grant.replica, generation=grant.generation, state=state, endpoint=session.endpoint,
            engine_build=ENGINE_BUILD,
        )  # fmt: skip
        await session.report(wire.Delta(replicas=[status]))

    def _incident(self, resource: str, error: LibraError) -> None:
        async def send() -> None:
            reason = wire.Reason(code=error.reason, text=error.message[:1024])
            try:
                await self.session.report(wire.Delta(incidents=[wire.Incident(resource=resource, reason=reason)]))
            except SessionLost:
                _log.warning("an incident could not be reported", resource=resource)

        task: asyncio.Task[object] = asyncio.create_task(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- what others ask

    async def checkpoint(self) -> Checkpoint:
        """Saves the newest state now. ENGINE_STATE if no replica is held."""
        if self.loop is None:
            raise errors.engine_state("no replica is held here; there is nothing to save")
        return await asyncio.wrap_future(self.loop.request_checkpoint())

    def load(self) -> wire.TrainerLoad:
        """How busy the worker is."""
        loop, phases = self.loop, self.phases
        load = wire.TrainerLoad(
            phase=phases.current if loop else wire.TRAINER_PHASE_UNSPECIFIED,
            trained_tokens=phases.trained_tokens,
            micro_batches=phases.micro_batches,
            phase_seconds=phases.seconds(),
            peak_memory_bytes=peak_memory_bytes(),
            roster_revision=loop.roster_revision if loop else self._roster.revision,
        )
        if loop is not None:
            load.replica, load.generation, load.manifest = loop.grant.replica, loop.grant.generation, loop.manifest
            policy = loop.policy
            if policy is not None:
                load.run = policy.run.name
                # engines are not told apart in the manifest yet: one gap over all of them
                if "mismatch_kl" in policy.metrics:
                    load.engine_mismatch["all"] = policy.metrics["mismatch_kl"]
        return load

    async def report_load(self) -> None:
        """Hands the newest load to the session, for ever."""
        while True:
            self.session.set_load(wire.Load(trainer=self.load()))
            await asyncio.sleep(LOAD_SECONDS)

    async def stop(self) -> None:
        """Finishes the step in hand and lets go of the replica."""
        async with self._busy:
            await self._let_go(abandon=False)


def read_secret(path: str) -> bytes:
    """The trainer group's secret; "" reads nothing. ConfigError if it is readable by others or missing."""
    if not path:
        return b""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - fstat of the very file that is read
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read().strip()
    except OSError as error:
        raise errors.ConfigError(f"{path}: cannot read the secret: {error.strerror}") from None
    if mode & 0o077:
        raise errors.ConfigError(f"{path}: others may read the secret (mode {mode & 0o777:o}); chmod 600 it")
    if len(secret) < 16:
        raise errors.ConfigError(f"{path}: the secret has {len(secret)} bytes; expected at least 16")
    return secret
