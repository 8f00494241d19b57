"""What a rollout worker does with what the scheduler says: leases become episodes, commands take effect, load is told.

The agent holds at most one replica. Leases are level-based: the newest word counts, an episode whose trajectory is no
longer named is dropped. Commands take effect between two tokens of the engine. Nothing here waits for the scheduler
while tokens are made; a lost session drops everything, since somebody else may own it already.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass

from services.common import errors, log, wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.common.history import History
from services.common.session import FleetSession, SessionLost
from services.common.supervise import Tasks
from services.rollout import weights
from services.rollout.config import RolloutConfig
from services.rollout.dialect import Dialect, open_dialect
from services.rollout.engine.base import EngineStats, Interruption, Version
from services.rollout.engine.thread import Engine
from services.rollout.environment import Environments
from services.rollout.episode import Episode, Place
from services.rollout.exposition import Tally
from services.rollout.holding import Holding, take
from services.rollout.tasks import TaskReader

_log = log.get(__name__)

MAX_RUNS = 64
"""Runs whose settings are kept."""


@dataclass(slots=True)
class Running:
    """An episode and its task."""

    episode: Episode
    task: "asyncio.Task[None]"


class RolloutAgent:
    """The FleetHandler of a rollout worker. All methods run on the event loop."""

    def __init__(self, config: RolloutConfig, engine: Engine, blobs: BlobStore, history: History) -> None:
        self.config = config
        self.engine = engine
        self.history = history
        self.blobs = blobs
        self.environments = Environments()
        self.holding: Holding | None = None
        self.session: FleetSession | None = None
        self.drained = asyncio.Event()
        """Set once a Drain command is done: the process should end."""
        self.cordoned = False
        self.stats = EngineStats()
        """The engine's newest load; its counters go on while no replica is held."""
        self.tally = Tally()
        self._tasks_of = TaskReader(blobs)
        self._runs: dict[str, wire.Run] = {}
        self._episodes: dict[str, Running] = {}
        self._dialect: Dialect | None = None
        self._work = Tasks()

    def bind(self, session: FleetSession) -> None:
        """The session that reports go to."""
        self.session = session

    @property
    def episodes(self) -> int:
        """How many are under way."""
        return len(self._episodes)

    # ---- what it should have

    async def on_desired(self, desired: wire.Desired) -> None:
        """Starts what is new, drops what is no longer its own."""
        for run in desired.runs:
            self._runs.pop(run.name, None)
            self._runs[run.name] = run
            while len(self._runs) > MAX_RUNS:
                self._runs.pop(next(iter(self._runs)))
        for replica in desired.replicas:
            held = self.holding
            if held is not None and (held.replica, held.generation) == (replica.replica, replica.generation):
                self.cordoned = replica.state == wire.REPLICA_STATE_CORDONED
                if replica.spec.concurrency_cap and replica.spec.concurrency_cap != held.spec.concurrency_cap:
                    held.spec.concurrency_cap = replica.spec.concurrency_cap
                    self.engine.set_concurrency(held.spec.concurrency_cap)
        named = {lease.trajectory for lease in desired.trajectories}
        gone = set(desired.removed)
        if desired.complete and not desired.more:
            gone |= self._episodes.keys() - named
        for name in gone - named:
            self._drop(name)
        for lease in desired.trajectories:
            self._take_lease(lease)

    def _take_lease(self, lease: wire.TrajectoryLease) -> None:
        known = self._episodes.get(lease.trajectory)
        if known is not None:
            old = known.episode.lease
            if (old.attempt, old.lease_epoch) >= (lease.attempt, lease.lease_epoch):
                return
            self._drop(lease.trajectory)
        self.history.write(
            "leased",
            trajectory=lease.trajectory,
            attempt=lease.attempt,
            lease_epoch=lease.lease_epoch,
            kept_tokens=sum(t.generated_tokens for t in lease.turns),
        )
        assert self.session is not None
        self.session.put_item(lease.trajectory, lease.lease_epoch, "LEASED")
        refusal = self._refusal(lease)
        if refusal is not None:
            self._work.start(f"give back {lease.trajectory}", self._give_back(lease, refusal))
            return
        try:
            episode = self._make(lease)
        except LibraError as error:
            self._work.start(f"fail {lease.trajectory}", self._give_back(lease, error))
            return
        task = self._work.start(lease.trajectory, self._play(episode))
        self._episodes[lease.trajectory] = Running(episode, task)

    def _refusal(self, lease: wire.TrajectoryLease) -> str | None:
        """Why this lease cannot be worked on here; None if it can."""
        held = self.holding
        if held is None or not held.admits or self.cordoned:
            return "no replica admits work here"
        if any(r.replica != held.replica or r.generation != held.generation for r in lease.routes[:1]):
            return f"the lease is for {lease.routes[0].replica}, {held.replica} is held"
        run = lease.trajectory.partition("/trajectories/")[0]
        if run not in self._runs:
            return f"the settings of {run} are not known"
        if self._dialect is None or held.run != run:
            return f"the engine serves {held.run or 'nothing'} now"
        if len(self._episodes) >= self.config.episodes.max_episodes:
            return f"{len(self._episodes)} episodes run, the limit"
        return None

    def _make(self, lease: wire.TrajectoryLease) -> Episode:
        run = self._runs[lease.trajectory.partition("/trajectories/")[0]]
        held, dialect, session = self.holding, self._dialect, self.session
        assert held is not None
        assert dialect is not None
        assert session is not None
        settings = self.config.episodes
        place = Place(
            replica=held.replica,
            generation=held.generation,
            engine=self.engine,
            environments=self.environments,
            blobs=self.blobs,
            report=session.report,
            history=self.history,
            session_epoch=session.epoch,
            call_seconds=settings.call_s,
            score_seconds=settings.score_s,
            session_seconds=settings.session_s,
            called=self.tally.called,
        )
        return Episode(lease, run, self._tasks_of.read(lease.task, run), dialect, place)

    async def _play(self, episode: Episode) -> None:
        try:
            await episode.run()
        finally:
            self.tally.ended(episode.ended_how)
            mine = self._episodes.get(episode.name)
            if mine is not None and mine.episode is episode:
                del self._episodes[episode.name]
                if self.session is not None:
                    self.session.drop_item(episode.name)

    async def _give_back(self, lease: wire.TrajectoryLease, why: str | LibraError) -> None:
        """Ends a lease that no episode was made for."""
        assert self.session is not None
        end = wire.TrajectoryEnd(trajectory=lease.trajectory, attempt=lease.attempt, lease_epoch=lease.lease_epoch)
        if isinstance(why, LibraError):
            end.failure.failure = wire.FAILURE_CLASS_EPISODE
            end.failure.reason.CopyFrom(wire.Reason(code=why.reason, text=why.message[:1024]))
        else:
            end.interrupted = wire.INTERRUPTION_PREEMPTED
        _log.warning("lease given back", trajectory=lease.trajectory, why=str(why))
        with contextlib.suppress(SessionLost):
            await self.session.report(wire.Delta(ends=[end]))
            self.history.write(
                "ended", trajectory=lease.trajectory, attempt=lease.attempt, lease_epoch=lease.lease_epoch,
                how="given back",
            )  # fmt: skip
        if lease.trajectory not in self._episodes:
            self.session.drop_item(lease.trajectory)

    def _drop(self, name: str) -> None:
        running = self._episodes.pop(name, None)
        # a trajectory given back is named as gone before the answer to its end report is here: that may still come
        if running is not None and not running.episode.ending:
            running.task.cancel()
        if self.session is not None:
            self.session.drop_item(name)

    async def on_session_lost(self, reason: str) -> None:
        """Somebody else may own all of it: stop, and let the replica go."""
        _log.warning("dropping all work", reason=reason, episodes=len(self._episodes))
        tasks = [running.task for running in self._episodes.values()]
        for name in list(self._episodes):
            self._drop(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._let_go()

    # ---- commands

    async def on_command(self, command: wire.Command) -> wire.CommandResult:
        """Carries a command out; its fence and time were checked, the replica's generation is checked here."""
        result = wire.CommandResult(command=command.name, state=wire.COMMAND_STATE_SUCCEEDED)
        action = command.WhichOneof("action")
        if action == "preempt":
            result.preempt.CopyFrom(await self._preempt(command.preempt))
        elif action == "cancel":
            result.preempt.CopyFrom(await self._cancel(command.cancel))
        elif action == "load_weights":
            result.weights.CopyFrom(await self._load(command.load_weights, command.fence.generation))
        elif action == "handover":
            result.handover.CopyFrom(await self._handover(command.handover))
        elif action == "drain":
            if command.drain.finish_running:
                self.cordoned = True
                await asyncio.gather(*(r.task for r in self._episodes.values()), return_exceptions=True)
            await self.interrupt_all(Interruption.PREEMPTED)
            self.drained.set()
        else:
            raise errors.unimplemented(f"command {action} on a rollout worker")
        return result

    def _find(self, name: str, attempt: int, lease_epoch: int) -> Episode:
        running = self._episodes.get(name)
        if running is None:
            raise errors.not_found(name)
        lease = running.episode.lease
        if (lease.attempt, lease.lease_epoch) != (attempt, lease_epoch):
            raise errors.stale_attempt(
                f"{name}: attempt {attempt}, lease {lease_epoch}; here runs {lease.attempt}, {lease.lease_epoch}"
            )
        return running.episode

    async def _preempt(self, command: wire.PreemptCommand) -> wire.PreemptResult:
        try:
            episode = self._find(command.trajectory, command.attempt, command.lease_epoch)
        except LibraError as error:
            if error.reason == "NOT_FOUND":
                return wire.PreemptResult(already_ended=True)
            raise
        episode.interrupt(Interruption.PREEMPTED, at_turn_end=command.at_turn_end)
        try:
            await asyncio.wait({self._episodes[episode.name].task})
        except asyncio.CancelledError:
            episode.withdraw_turn_end()
            raise
        return wire.PreemptResult(
            kept_tokens=episode.registered, already_ended=episode.ended_how != Interruption.PREEMPTED.name
        )

    async def _cancel(self, command: wire.CancelCommand) -> wire.PreemptResult:
        try:
            episode = self._find(command.trajectory, command.attempt, command.lease_epoch)
        except LibraError as error:
            if error.reason == "NOT_FOUND":
                return wire.PreemptResult(already_ended=True)
            raise
        task = self._episodes[episode.name].task
        self._drop(episode.name)
        await asyncio.wait({task})
        if command.close_tool_sessions:
            await episode.close_environment()
        return wire.PreemptResult(kept_tokens=episode.registered)

    async def interrupt_all(self, why: Interruption) -> None:
        """Stops every episode at its next token and waits until all have handed in what they have."""
        tasks = [running.task for running in self._episodes.values()]
        for running in list(self._episodes.values()):
            running.episode.interrupt(why)
        if tasks:
            await asyncio.wait(tasks)

    # ---- weights

    def engine_weights(self, target: wire.VersionRef | None = None, state: int = 0) -> wire.EngineWeights:
        """What the engine serves."""
        held = self.holding
        message = wire.EngineWeights(state=wire.EngineWeightState.ValueType(state))
        if held is not None and self.engine.version is not None:
            version = self.engine.version
            message.serving.CopyFrom(wire.VersionRef(lineage=version.lineage, number=version.number))
            message.checksum, message.run = held.checksum, held.run
            message.cache_salt = f"{held.generation}-{held.loads}-{version.lineage}-{version.number}"
        if target is not None:
            message.target.CopyFrom(target)
        return message

    async def _load(self, command: wire.LoadWeightsCommand, generation: int) -> wire.EngineWeights:
        held = self.holding
        if held is None or held.replica != command.replica or held.generation != generation:
            here = f"{held.replica} under {held.generation}" if held else "nothing"
            raise errors.stale_fence(f"{command.replica} under generation {generation}; held here: {here}")
        version = Version(command.version.lineage, command.version.number)
        key = (version.lineage, version.number)
        if command.phase == wire.LOAD_PHASE_PREPARE:
            fetched, checksum = await asyncio.to_thread(weights.fetch, command, self.blobs)
            await self.engine.prepare(version, fetched)
            held.fetched = {key: checksum}
            return self.engine_weights(command.version, wire.ENGINE_WEIGHT_STATE_PREPARED)
        if command.phase == wire.LOAD_PHASE_ABANDON:
            await self.engine.abandon(version)
            held.fetched.pop(key, None)
            return self.engine_weights(None, wire.ENGINE_WEIGHT_STATE_LOADED)
        if command.phase != wire.LOAD_PHASE_SWITCH:
            raise errors.invalid_field(f"phase {command.phase}: expected PREPARE, SWITCH or ABANDON")
        if key not in held.fetched:
            raise errors.engine_state(
                f"version {version.lineage}-{version.number} was not prepared; send PREPARE first"
            )
        if held.run and held.run != command.run:
            await self.interrupt_all(Interruption.PREEMPTED)  # an engine serves one run at a time
        served = self.engine.version
        if held.run == command.run and served is not None and served.lineage == version.lineage and version < served:
            raise errors.stale_fence(
                f"{version.lineage}-{version.number} is older than {served.number}, which is served"
            )
        await self.engine.switch(version)
        held.checksum, held.run = held.fetched.pop(key), command.run
        held.loads += 1
        assert self.engine.codec is not None
        self._dialect = open_dialect(self.config.episodes.dialect, self.engine.codec)
        self.history.write("loaded", run=command.run, version=[version.lineage, version.number], checksum=held.checksum)
        return self.engine_weights(None, wire.ENGINE_WEIGHT_STATE_LOADED)

    # ---- hand-over

    async def _handover(self, command: wire.HandoverCommand) -> wire.HandoverStep:
        step = wire.HandoverStep()
        step.CopyFrom(command.step)
        step.state = wire.HANDOVER_STEP_STATE_DONE
        if step.kind == wire.HANDOVER_KIND_GRANT:
            await self._grant(command)
            return step
        held = self.holding
        if held is None or (held.replica, held.generation) != (step.replica, step.generation):
            if step.kind == wire.HANDOVER_KIND_RELEASE and (held is None or held.generation > step.generation):
                return step  # gone already: that is what was asked for
            raise errors.stale_fence(f"{step.replica} under generation {step.generation} is not held here")
        if step.kind == wire.HANDOVER_KIND_CORDON:
            await self._set_state("CORDONED")
        elif step.kind == wire.HANDOVER_KIND_DRAIN:
            await self._set_state("DRAINING")
            await self.interrupt_all(Interruption.PREEMPTED)
        elif step.kind == wire.HANDOVER_KIND_RELEASE:
            held.state = "RELEASING"
            await self.interrupt_all(Interruption.PREEMPTED)
            await self._let_go()
        elif step.kind == wire.HANDOVER_KIND_ADMIT:
            self.cordoned = False
            await self._set_state("ACTIVE")
        elif step.kind == wire.HANDOVER_KIND_LOAD:
            step.weights.append(self.engine_weights(None, wire.ENGINE_WEIGHT_STATE_LOADED))
        else:
            raise errors.invalid_field(f"step {wire.HandoverKind.Name(step.kind)} is not for a rollout worker")
        return step

    async def _grant(self, command: wire.HandoverCommand) -> None:
        step, held = command.step, self.holding
        if held is not None:
            if (held.replica, held.generation) == (step.replica, step.generation):
                return
            raise errors.illegal_transition(f"{held.replica} is held under {held.generation}; release it first")
        self.holding = held = take(self.config.locks, step, command.spec, self.config.accelerators)
        self.cordoned = False
        self.engine.set_concurrency(held.spec.concurrency_cap or self.config.engine.max_sequences)
        _log.info("replica granted", replica=held.replica, generation=held.generation)
        await self._set_state("ACTIVE")

    async def _set_state(self, state: str) -> None:
        held, session = self.holding, self.session
        assert held is not None
        assert session is not None
        held.state = state
        session.put_item(held.replica, held.generation, state)
        await session.report(wire.Delta(replicas=[self.status()]))

    def status(self) -> wire.ReplicaStatus:
        """The held replica as reports show it."""
        held = self.holding
        assert held is not None
        assert self.session is not None
        return wire.ReplicaStatus(
            replica=held.replica,
            generation=held.generation,
            state=wire.ReplicaState.Value(f"REPLICA_STATE_{held.state}"),
            weights=[self.engine_weights()],
            endpoint=self.session.endpoint,
            engine_build=self.engine.build,
            positional_seed=self.engine.core.positional_seed,
        )

    async def _let_go(self) -> None:
        """Frees model and cache, then the locks: what the node agent will measure."""
        await self.engine.release()
        self._dialect = None
        held, self.holding = self.holding, None
        if held is not None:
            held.release()
            if self.session is not None:
                self.session.drop_item(held.replica)
            _log.info("replica released", replica=held.replica, generation=held.generation)

    # ---- load

    async def report_load(self) -> None:
        """Sends load for ever; dies if the engine did, which changes the health of the service."""
        while True:
            await asyncio.sleep(self.config.load_interval)
            held, session = self.holding, self.session
            if session is None:
                continue
            if held is None:
                session.set_load(wire.Load(rollout=wire.RolloutLoad()))
                continue
            session.set_load(wire.Load(rollout=wire.RolloutLoad(engines=[await self.engine_load(held)])))
            if self.engine.failure:
                raise RuntimeError(f"the engine is broken: {self.engine.failure}")

    async def engine_load(self, held: Holding) -> wire.EngineLoad:
        """The engine's load."""
        load = wire.EngineLoad(replica=held.replica, generation=held.generation, activity=self.activity())
        if not self.engine.failure:
            self.stats = stats = await self.engine.stats()
            load.running, load.waiting = stats.running, stats.waiting
            load.kv_capacity_tokens, load.kv_used_tokens = stats.kv_capacity_tokens, stats.kv_used_tokens
            load.generated_tokens, load.prefilled_tokens = stats.generated_tokens, stats.prefilled_tokens
            load.engine_preemptions, load.paused_seconds = stats.engine_preemptions, stats.paused_seconds
            load.seconds_per_token = stats.seconds_per_token
        return load

    def activity(self) -> "wire.EngineActivity.ValueType":
        """What the engine does."""
        if self.engine.failure:
            return wire.ENGINE_ACTIVITY_FAILED
        if self.engine.switching:
            return wire.ENGINE_ACTIVITY_SWITCHING
        return wire.ENGINE_ACTIVITY_STARTING if self.engine.version is None else wire.ENGINE_ACTIVITY_SERVING

    async def shut_down(self) -> None:
        """Gives everything back with its tokens (bounded by drain_s), lets the replica go, ends the session."""
        self.cordoned = True
        deadline = time.monotonic() + self.config.drain_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                await self.interrupt_all(Interruption.PREEMPTED)
        await self._work.stop()
        held = self.holding is not None
        await self._let_go()
        if self.session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                    await self.session.stop(abandon=held)
        await self.environments.close()
