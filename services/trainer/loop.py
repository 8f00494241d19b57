"""The training thread of one granted replica: takes steps with the others until it is told to stop.

The naive loop would be: take a batch, train, commit, publish. This one, in addition, joins a quorum before each step
(which may hand it a peer's newer state), makes sure all members mean the same step before any of them computes, lets
CommitStep alone decide, redoes committed steps that nobody alive has applied, and publishes a version that its trainer
did not live to publish.
"""

import queue
import threading
import time
from concurrent.futures import Future

from services.common import failpoints, log, wire
from services.common.errors import LibraError
from services.trainer import batches, publish, step
from services.trainer.batches import Batch
from services.trainer.checkpoints import Checkpoint
from services.trainer.collective import Collective, NotJoined, Quorum, StepLost
from services.trainer.coordinator import Stopped, Taken
from services.trainer.policy import RecoveryFailed, ResidentPolicy
from services.trainer.surroundings import Grant, Surroundings
from services.trainer.version import Version

_log = log.get(__name__)

IDLE_SECONDS = 0.1
RETRY_SECONDS = 0.2
RECOVERY_RETRY_SECONDS = 2.0
JOIN_TRIES = 3
"""A replica that could not take over the group's state so often in a row stays away for a while: with each try the
others lose the step in hand."""
JOIN_PAUSE_SECONDS = (5.0, 60.0)
"""First such pause and longest; each is twice the one before."""
MAX_REFUSALS = 3
"""Refusals of one manifest's commit after which it is given back."""
MAX_REQUESTS = 16
OVER = (wire.RUN_STATE_FINISHED, wire.RUN_STATE_CANCELLED)
TAKEN_OVER = (wire.MANIFEST_STATE_COMMITTED, wire.MANIFEST_STATE_COVERED)


class TrainingLoop:
    """Runs in one thread. Other threads call `stop`, `cordon`, `request_checkpoint` and read the public attributes."""

    def __init__(self, grant: Grant, around: Surroundings) -> None:
        self.grant = grant
        self.policy: ResidentPolicy | None = None
        self.manifest = ""
        self.roster_revision = 0
        self.ready: Future[None] = Future()
        """Set once the replica is loaded and can take part, or has nothing to load; carries the failure otherwise."""
        self.done: Future[None] = Future()
        """Set once the thread has let go of everything; carries the failure that ended it."""
        self._around = around
        self._phases = around.phases
        self._collective: Collective | None = None
        self._stop = threading.Event()
        self._abandon = threading.Event()
        self._cordoned = threading.Event()
        self._requests: queue.Queue[Future[Checkpoint]] = queue.Queue(MAX_REQUESTS)
        self._finished: set[str] = set()
        self._head = Version(1, 0)
        self._roster: wire.Roster = wire.Roster()
        self._looked = False
        self._ended_run: wire.Run | None = None
        self._speaks = False
        self._committed_at = 0.0
        self._refusals: dict[str, int] = {}
        self._failed_joins = 0
        self._desk = around.desk(self._stop.is_set, self._abandon.is_set)
        self._worker = step.Worker(around.engine, around.store, around.phases, around.pay, self._check)
        self._thread = threading.Thread(target=self._main, name="trainer", daemon=True)

    # ---- from other threads

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, *, abandon: bool = False) -> None:
        """Asks the thread to end: after the step in hand, or at the next micro-batch if `abandon`."""
        if abandon:
            self._abandon.set()
        self._stop.set()

    def cordon(self, cordoned: bool) -> None:
        """Takes no new step while cordoned, and leaves the group."""
        if cordoned:
            self._cordoned.set()
        else:
            self._cordoned.clear()

    @property
    def between_steps(self) -> bool:
        """True while no manifest is in hand."""
        return not self.manifest

    @property
    def finished(self) -> frozenset[str]:
        """Runs that are over, or cannot be trained here."""
        return frozenset(self._finished)

    def stopping(self) -> bool:
        """True once the thread should end."""
        return self._stop.is_set()

    def request_checkpoint(self) -> Future[Checkpoint]:
        """Has the thread save its newest state at the next pause. CAPACITY if too many ask at once."""
        future: Future[Checkpoint] = Future()
        try:
            self._requests.put_nowait(future)
        except queue.Full:
            raise LibraError("CAPACITY", "too many checkpoint requests wait already", retry_after_s="1") from None
        return future

    # ---- the thread

    def _check(self) -> None:
        if self._abandon.is_set():
            raise Stopped

    def _main(self) -> None:
        failure: BaseException | None = None
        try:
            while not self.stopping():
                self._turn()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread must reach the agent
            _log.error("training thread ends", error=repr(error), exc_info=error)
            failure = error
        try:
            self._let_go()
        except Exception as error:  # noqa: BLE001 - as above
            failure = failure or error
        for future in (self.ready, self.done):
            if not future.done():
                if failure is not None:
                    future.set_exception(failure)
                else:
                    future.set_result(None)

    def _let_go(self) -> None:
        if self._collective is not None:
            self._collective.close()
            self._collective = None
        self.policy = None
        self._worker.engine.free()
        self._desk.close()
        while not self._requests.empty():
            self._requests.get_nowait().set_exception(
                LibraError("ENGINE_STATE", "the replica was released before the checkpoint was saved")
            )

    def _turn(self) -> None:
        """One look at what there is to do, and at most one step."""
        run = self._around.next_run() or self._unpublished_run()
        if run is None or run.name in self._finished or self._cordoned.is_set():
            self._leave_group()
            self._set_ready()
            self._between()
            self._stop.wait(IDLE_SECONDS)
            return
        try:
            if self.policy is None or self.policy.run.name != run.name:
                self._begin(run)
            self._set_ready()
            self._between()
            self._one_step()
        except StepLost as error:
            _log.warning("step lost", error=str(error))
            self._discard()
            self._stop.wait(RETRY_SECONDS)
            if isinstance(error, NotJoined):
                self._stay_away(run, error)
        except step.Unreadable as error:
            self._discard()
            self._return_unreadable(error)
        except LibraError as error:
            self._discard()
            self._on_refusal(run, error)
        except RecoveryFailed as error:
            # another try may find a peer or a checkpoint that is written meanwhile
            self._leave_group()
            self.policy = None
            self._around.incident(run.name, LibraError("INTERNAL", str(error)))
            self._stop.wait(RECOVERY_RETRY_SECONDS)
        finally:
            self.manifest = ""

    def _stay_away(self, run: wire.Run, error: NotJoined) -> None:
        """A member that is behind and cannot get the state leaves the others alone, longer each time."""
        if self.policy is None or not self.policy.version < self._head:
            return
        self._failed_joins += 1
        if self._failed_joins < JOIN_TRIES:
            return
        first, longest = JOIN_PAUSE_SECONDS
        pause = min(longest, first * 2.0 ** (self._failed_joins - JOIN_TRIES))
        text = f"could not join the group {self._failed_joins} times, stays away for {pause:.0f} s: {error}"
        _log.warning("stays away from the group", tries=self._failed_joins, pause_s=pause)
        self._around.incident(run.name, LibraError("INTERNAL", text))
        self._leave_group()
        self._stop.wait(pause)

    def _unpublished_run(self) -> wire.Run | None:
        """A run that ended while its last version was committed and its trainer died before publishing it."""
        if self._looked:
            return self._ended_run
        self._looked = True
        try:
            over = [
                r for r in self._desk.runs() if r.state == wire.RUN_STATE_FINISHED and r.kind == wire.RUN_KIND_TRAIN
            ]
            for run in over:
                heads = {Version.of(p.head) for p in run.policies if not p.frozen}
                committed = [v for v in self._desk.versions(run.name) if v.state == wire.VERSION_STATE_COMMITTED]
                if any(Version.of(v.version) in heads for v in committed):
                    self._ended_run = run
        except LibraError as error:
            _log.warning("runs could not be looked through", error=str(error))
        return self._ended_run

    def _set_ready(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def _begin(self, run: wire.Run) -> None:
        self._leave_group()
        self.policy = None
        with self._phases.phase(wire.TRAINER_PHASE_RECOVER):
            policy = ResidentPolicy(
                run, self._worker, self._desk, self._around.history, self.grant.worker,
                self.grant.spec.micro_batch_tokens,
            )  # fmt: skip
            self._head = policy.head()
            policy.restore(self._head)
        self._collective = self._around.collective(self._worker.engine.state, policy.take_state)
        self.policy = policy
        self._committed_at = time.monotonic()

    def _leave_group(self) -> None:
        if self._collective is not None:
            self._collective.close()

    def _discard(self) -> None:
        """The step in hand is not taken; what the engine holds stays."""
        if self._collective is not None and self.policy is not None:
            self._collective.finish(self.policy.version, committed=False)

    # ---- between steps

    def _between(self) -> None:
        while not self._requests.empty():
            future = self._requests.get_nowait()
            try:
                future.set_result(self._checkpoint_now())
            except LibraError as error:
                future.set_exception(error)

    def _checkpoint_now(self) -> Checkpoint:
        if self.policy is None:
            raise LibraError("ENGINE_STATE", "no policy is loaded; there is nothing to save")
        with self._phases.phase(wire.TRAINER_PHASE_RECOVER):
            saved = self.policy.save_checkpoint()
        if self.policy.version.number > 0 and self.policy.version == self.policy.published:
            self.policy.publish(checkpoint=True)
        return saved

    def _while_waiting(self) -> None:
        """Called about every 100 ms while TakeBatch waits."""
        self._between()
        policy = self.policy
        if policy is None or self._cordoned.is_set():
            raise Stopped if policy is None else LibraError("CANCELLED", "cordoned while waiting for a batch")
        if self._head == policy.published or time.monotonic() - self._committed_at < self._around.publish_grace:
            return
        self._publish_orphan(policy)
        self._committed_at = time.monotonic()

    def _publish_orphan(self, policy: ResidentPolicy) -> None:
        """Publishes the head if its trainer did not live to do it; without it no fresh batch may ever come."""
        self._head = max(self._head, policy.head())
        record = policy.record(self._head)
        if record is None or record.state != wire.VERSION_STATE_COMMITTED:
            if record is not None and policy.version == self._head:
                policy.published = self._head
            return
        if policy.version < self._head:
            self._recover(policy)
        else:
            _log.info("publishing for a replica that did not", version=str(policy.version))
            policy.publish(checkpoint=self._checkpoint_due(policy))

    def _recover(self, policy: ResidentPolicy) -> None:
        """From a checkpoint and the redo log to the head, then publishes it if nobody has."""
        self._leave_group()
        policy.recover(self._head, lambda version, metrics: self._record(policy, version, metrics, 1, redo=True))
        if policy.version.number > 0 and policy.version != policy.published:
            policy.publish(checkpoint=self._checkpoint_due(policy))

    @staticmethod
    def _checkpoint_due(policy: ResidentPolicy) -> bool:
        return policy.version.number % policy.grpo.checkpoint_every == 0

    # ---- a step

    def _one_step(self) -> None:
        policy, collective = self.policy, self._collective
        assert policy is not None
        assert collective is not None
        if policy.grpo.steps and self._head.number >= policy.grpo.steps:
            self._finish_run(policy)
            return
        if policy.version < self._head and not self._has_peers():
            self._recover(policy)
        with self._phases.phase(wire.TRAINER_PHASE_WAIT_BATCH):
            step_number = self._head.number + 1
            taken = self._desk.take(policy.run, policy.id, step_number, self._around.take_wait, self._while_waiting)
        self._roster, self.roster_revision = taken.roster, taken.roster.revision
        if taken.manifest.state in TAKEN_OVER:
            self._head = policy.head()
            return
        if not any(m.generation == self.grant.generation for m in taken.roster.members):
            # not ours to take part in, and a silent member would hold up the others
            self._leave_group()
            self._stop.wait(IDLE_SECONDS)
            return
        self.manifest = taken.manifest.name
        self._around.history.write("taken", manifest=taken.manifest.name, step=taken.manifest.step)
        laid_out = batches.batch(taken.manifest, self._desk.members(taken.manifest.name), policy.grpo)
        with self._phases.phase(wire.TRAINER_PHASE_REDUCE):
            # what this replica must hold to take part; the head that it knew may be older
            self._head = max(self._head, Version.of(taken.manifest.base_version))
            quorum = collective.quorum(policy.claimed())
            self._failed_joins = 0
            policy.provisional = False
            agreed = self._agree(collective, policy, taken, quorum)
        base = Version.of(taken.manifest.base_version)
        if not agreed or policy.version != base:
            collective.finish(policy.version, committed=False)
            self._head = policy.head()
            if agreed and policy.version < base:
                # nobody in the quorum has the newest state, or it would have been handed over
                self._recover(policy)
            else:
                self._stop.wait(IDLE_SECONDS)
            return
        self._train(policy, collective, taken, laid_out, quorum)

    def _has_peers(self) -> bool:
        """True if the newest roster known here names other replicas, or none is known yet."""
        known = max(self._roster, self._around.roster(), key=lambda r: r.revision)
        return not known.members or any(m.generation != self.grant.generation for m in known.members)

    def _agree(self, collective: Collective, policy: ResidentPolicy, taken: Taken, quorum: Quorum) -> bool:
        """True, on all members, if they mean the same step from the same state under a roster that holds them all."""
        allowed = {m.generation for m in taken.roster.members}
        inside = set(quorum.generations) <= allowed
        if not inside:
            _log.info("quorum outside the roster", quorum=quorum.generations, roster=sorted(allowed))
        marks = [
            int(inside),
            int(taken.manifest.members_sha256[:15], 16),
            taken.manifest.step,
            taken.roster.revision,
            policy.version.counter(),
        ]
        return collective.agree(marks) and inside

    def _train(
        self, policy: ResidentPolicy, collective: Collective, taken: Taken, laid_out: Batch, quorum: Quorum
    ) -> None:
        started = time.monotonic()
        places = laid_out.shard(quorum.rank, quorum.count)
        reduced = step.reduce(self._worker, laid_out, places, policy.grpo, collective, policy.micro_batch_tokens)
        policy.expect_tokens(taken.manifest, reduced.trainable_tokens)
        with self._phases.phase(wire.TRAINER_PHASE_COMMIT):
            members = [m for g in quorum.generations for m in taken.roster.members if m.generation == g]
            made = self._desk.commit(taken, policy.version.ref(policy.id), members, reduced.trainable_tokens)
            version = Version.of(made)
            if version != policy.version.next():
                raise LibraError("INTERNAL", f"the step from {policy.version} was committed as {version}")
            self._around.history.write(
                "committed", manifest=taken.manifest.name, version=[version.lineage, version.number]
            )
            failpoints.hit("trainer.after_commit")
            norm = self._worker.engine.apply(reduced.gradient, policy.grpo.rate_of(version.number))
            policy.version = self._head = version
            self._committed_at = time.monotonic()
            collective.finish(version, committed=True)
            self._worker.pay()
        self._phases.trained_tokens += sum(p.tokens for p in places)
        self._phases.steps += 1
        self._phases.participants = quorum.count
        self._around.history.write(
            "trained", manifest=taken.manifest.name, version=[version.lineage, version.number],
            worker=self.grant.worker, members=len(laid_out.members), replicas=quorum.count, redo=False,
            trainable_tokens=reduced.trainable_tokens,
        )  # fmt: skip
        metrics = step.metrics(reduced, policy.grpo, version.number, norm, batches.statistics(laid_out))
        policy.metrics = metrics
        self._speaks = quorum.rank == 0
        if self._speaks:
            failpoints.hit("trainer.before_publish")
            policy.publish(checkpoint=self._checkpoint_due(policy))
            metrics = {**metrics, "seconds": time.monotonic() - started}
            self._record(policy, version, metrics, quorum.count, redo=False)

    def _record(
        self, policy: ResidentPolicy, version: Version, metrics: dict[str, float], replicas: int, *, redo: bool
    ) -> None:
        """One line of the metrics file. A redo repeats the line of a step that may have one already."""
        policy.metrics = metrics
        self._around.metrics.step(
            policy.run.name, (version.lineage, version.number), self.grant.worker, replicas, metrics,
            self._phases.since_mark(), redo=redo,
        )  # fmt: skip
        self._phases.mark()

    # ---- ends

    def _return_unreadable(self, error: step.Unreadable) -> None:
        if error.broken is None:
            self._stop.wait(RETRY_SECONDS)
            return
        _log.warning("manifest is returned", manifest=self.manifest, trajectories=error.broken.names)
        try:
            self._desk.give_back(self.manifest, error.broken.names, "BLOB_MISMATCH", str(error)[:1024])
        except LibraError as refused:
            _log.info("the manifest could not be returned", error=str(refused))

    def _on_refusal(self, run: wire.Run, error: LibraError) -> None:
        """What the scheduler (or a check of ours) refused. Errors about the run itself end it here, not the worker."""
        policy = self.policy
        if policy is None:
            self._finished.add(run.name)
            self._around.incident(run.name, error)
            return
        if error.reason in ("SESSION_FENCED", "SESSION_EXPIRED"):
            # the agent hears of it too, and stops this thread
            self._stop.wait(RETRY_SECONDS)
            return
        if error.reason in ("RUN_NOT_ACTIVE", "NO_PROGRESS", "NOT_FOUND"):
            if error.reason != "RUN_NOT_ACTIVE":
                _log.debug("no batch", error=str(error))
            if self._desk.run(run.name).state in OVER:
                self._finish_run(policy)
            else:
                self._stop.wait(RETRY_SECONDS)
            return
        if self.manifest and error.reason in ("COMMIT_REFUSED", "INTERNAL"):
            _log.warning("step refused", manifest=self.manifest, error=str(error))
            count = self._refusals[self.manifest] = self._refusals.get(self.manifest, 0) + 1
            if count >= MAX_REFUSALS:
                self._refusals.pop(self.manifest)
                self._give_back(error)
        elif error.reason != "CANCELLED":
            _log.info("not taken", error=str(error))
        self._head = policy.head()
        self._stop.wait(RETRY_SECONDS)

    def _give_back(self, error: LibraError) -> None:
        try:
            self._desk.give_back(self.manifest, [], error.reason, error.message[:1024])
        except LibraError as refused:
            _log.info("the manifest could not be returned", error=str(refused))

    def _finish_run(self, policy: ResidentPolicy) -> None:
        """No more steps: the replica that speaks writes a last checkpoint and the model; the policy stays resident."""
        self._leave_group()
        self._finished.add(policy.run.name)
        self._head = policy.head()
        first = min((m.generation for m in self._roster.members), default=self.grant.generation)
        if not self._speaks and first != self.grant.generation:
            return
        if policy.version < self._head:
            self._recover(policy)
        if policy.version.number > 0:
            policy.publish(checkpoint=True)
        with self._phases.phase(wire.TRAINER_PHASE_PUBLISH):
            refs = publish.export(self._worker.store, policy.run.name, policy.folder, policy.files())
        _log.info("run is finished", run=policy.run.name, version=str(policy.version), files=len(refs))
        self._around.history.write("exported", version=[policy.version.lineage, policy.version.number], files=len(refs))
