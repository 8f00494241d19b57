"""Hand-overs of accelerators between replicas: every release confirmed before any grant, or all rolled back.

One mechanism serves planned moves, the first layout and the return of crashed owners alike. A replica that must go is
driven by `_settle_release` (RELEASE to the owner, then CONFIRM to the node agent, which measures); a replica that must
come by `_settle_grant` (GRANT, then weights, then it admits). A reassignment only orders these: no target is created
before every source is RELEASED. After a roll-back the accelerator's role is what it was, and the ordinary repair of the
layout (`restore_layout`) brings its replica back under a new generation.
"""

import uuid
from collections.abc import Sequence

from services.common import log, wire
from services.scheduler.control import commands
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.shapes import Shapes
from services.scheduler.core.lifecycle import REASSIGNMENT, REPLICA
from services.scheduler.core.model import Command, Reassignment, Replica, Session, Source, Target

_log = log.get(__name__)

DRAINABLE = ("ACTIVE", "CORDONED", "SUSPECT")
KEEP_FINISHED = 256
"""Reassignments and replicas that are over and stay in memory."""
MAX_RETRY_SECONDS = 60.0


class Handovers:
    """Drives replicas and reassignments; remembers only when to try again."""

    def __init__(self, ledger: Ledger, shapes: Shapes) -> None:
        self._ledger = ledger
        self.shapes = shapes
        self._retry_at: dict[str, float] = {}
        self._tries: dict[str, int] = {}
        self._unconfirmed_since: dict[str, float] = {}

    # ---- starting

    def start(
        self,
        change: Change,
        sources: Sequence[Replica],
        targets: Sequence[Target],
        *,
        cause: str,
        code: str,
        text: str,
        plan: str = "",
        predicted_gain: float = 0.0,
        rate_before: float = 0.0,
    ) -> Reassignment:
        """Records a reassignment; the next cycles carry it out."""
        timeout = self._ledger.config.handover.total_s
        reassignment = Reassignment(
            name=f"reassignments/{uuid.uuid4().hex}",
            sources=[Source(r.name, r.generation) for r in sources],
            targets=list(targets),
            cause=cause, plan=plan, predicted_gain=predicted_gain, rate_before=rate_before, timeout=timeout,
            reason_code=code, reason_text=text, create_time=change.now, deadline_at=change.at + timeout,
        )  # fmt: skip
        change.fleet.reassignments[reassignment.name] = reassignment
        for replica in sources:
            replica.reassignment = reassignment.name
            change.put(replica)
        for target in targets:
            for name in target.accelerators:
                accelerator = change.fleet.accelerators[name]
                accelerator.role = target.role
                change.put(accelerator)
        change.put(reassignment)
        related = [a for t in targets for a in t.accelerators]
        change.record(
            "REASSIGNMENT", reassignment.name, "", "PENDING", code, text,
            {"predicted_gain_tokens_per_s": predicted_gain}, related,
        )  # fmt: skip
        return reassignment

    def restore_layout(self, change: Change) -> None:
        """Gives every accelerator without a live replica one of the role and shape that it should serve."""
        fleet = change.fleet
        busy = {
            a
            for r in fleet.reassignments.values()
            if r.state in ("PENDING", "DRAINING", "RELEASING", "GRANTING", "LOADING")
            for a in [*(x for t in r.targets for x in t.accelerators), *self._accelerators_of(r.sources)]
        }
        for accelerator in fleet.accelerators.values():
            serving = fleet.replica_on(accelerator.name)
            if serving is not None and serving.state == "ACTIVE":
                self._tries.pop(accelerator.name, None)
        for role, accelerators in self.shapes.idle(fleet, busy):
            if all(change.at >= self._retry_at.get(name, 0.0) for name in accelerators):
                self._restore(change, role, accelerators)

    def _restore(self, change: Change, role: str, accelerators: tuple[str, ...]) -> None:
        worker = self.shapes.worker_for(change, role, accelerators)
        if worker is None:
            return
        # a grant that always fails (a foreign process holds the device) must not be tried at full speed for ever
        for name in accelerators:
            tries = self._tries[name] = self._tries.get(name, 0) + 1
            self._retry_at[name] = change.at + min(MAX_RETRY_SECONDS, 2.0**tries)
        self.start(
            change, [], [self.shapes.target(change.fleet, role, accelerators, worker.worker)],
            cause="bootstrap", code="RESTORE_LAYOUT",
            text=f"{', '.join(accelerators)} serves {role} and has no replica",
        )  # fmt: skip

    def _accelerators_of(self, sources: Sequence[Source]) -> list[str]:
        replicas = (self._ledger.fleet.replicas.get(s.replica) for s in sources)
        return [a for r in replicas if r is not None for a in r.accelerators]

    # ---- driving

    def advance(self, change: Change) -> None:
        """One look at everything under way."""
        self._forget_old(change)
        for replica in list(change.fleet.live_replicas()):
            if replica.state in ("RELEASING", "UNCONFIRMED", "QUARANTINED"):
                self._settle_release(change, replica)
            elif replica.state == "STARTING" and not replica.granted:
                self._settle_grant(change, replica)
            elif replica.state == "STARTING" and self._ready(change, replica):
                change.move(REPLICA, replica, "admit", "READY", f"{replica.worker} serves")
                self._bump_owner(change, replica)
        for reassignment in list(change.fleet.reassignments.values()):
            if reassignment.state not in REASSIGNMENT.terminal:
                self._advance_one(change, reassignment)

    @staticmethod
    def _forget_old(change: Change) -> None:
        """Drops the oldest of what is over from memory; the store has all of it."""
        fleet = change.fleet
        over = [r.name for r in fleet.reassignments.values() if r.state in REASSIGNMENT.terminal]
        for name in over[: max(0, len(over) - KEEP_FINISHED)]:
            del fleet.reassignments[name]
        gone = [r.name for r in fleet.replicas.values() if r.state in REPLICA.terminal]
        for name in gone[: max(0, len(gone) - KEEP_FINISHED)]:
            del fleet.replicas[name]

    def _ready(self, change: Change, replica: Replica) -> bool:
        """A rollout replica serves what it should, or nothing is there to serve; a trainer is ready when granted."""
        if replica.role != "ROLLOUT":
            return True
        if replica.serving_number >= 0 and replica.target_number < 0:
            return True
        return not any(r.state == "ACTIVE" for r in change.fleet.runs.values())

    def _advance_one(self, change: Change, item: Reassignment) -> None:
        fleet = change.fleet
        sources = [fleet.replicas[s.replica] for s in item.sources if s.replica in fleet.replicas]
        targets = [fleet.replicas[t.replica] for t in item.targets if t.replica in fleet.replicas]
        if item.state != "ROLLING_BACK" and change.at > item.deadline_at:
            self.fail(change, item, "DEADLINE", f"{item.state} did not end within {item.timeout:.0f} s")
            return
        if item.state == "PENDING":
            for replica in sources:
                if replica.state in DRAINABLE:
                    change.move(REPLICA, replica, "drain", item.reason_code, item.reason_text)
                    self._bump_owner(change, replica)
            change.move(REASSIGNMENT, item, "start", item.reason_code, item.reason_text)
        if item.state == "DRAINING":
            drained = [self._drained(change, replica, item.reason_text) for replica in sources]
            if all(drained):
                for replica in sources:
                    if REPLICA.allows(replica.state, "release"):
                        change.move(REPLICA, replica, "release", "DRAINED", "no work is left on it")
                change.move(REASSIGNMENT, item, "drained", "DRAINED", f"{len(sources)} sources hold no work")
        if item.state == "RELEASING":
            for source in item.sources:
                replica = fleet.replicas[source.replica]
                source.released, source.confirmed = replica.release_acked, replica.state == "RELEASED"
            if all(s.confirmed for s in item.sources):
                change.move(REASSIGNMENT, item, "all_confirmed", "CONFIRMED", "every source is proven free")
                for target in item.targets:
                    self._create_target(change, item, target)
                targets = [fleet.replicas[t.replica] for t in item.targets]
        if item.state == "GRANTING":
            if any(r.state not in ("STARTING", "ACTIVE") for r in targets):
                self.fail(change, item, "TARGET_LOST", f"a target is {targets[0].state}: {targets[0].reason_text}")
            elif all(r.granted for r in targets):
                for target in item.targets:
                    target.granted = True
                change.move(REASSIGNMENT, item, "all_granted", "GRANTED", "every target holds its grant")
        if item.state == "LOADING":
            if any(r.state not in ("STARTING", "ACTIVE", "SUSPECT") for r in targets):
                self.fail(change, item, "TARGET_LOST", f"a target is {targets[0].state}: {targets[0].reason_text}")
            elif all(r.state == "ACTIVE" for r in targets):
                item.end_time = change.now
                for replica in targets:
                    replica.reassignment = ""
                    change.put(replica)
                seconds = change.now - item.create_time
                change.move(
                    REASSIGNMENT, item, "all_loaded", "DONE", f"hand-over took {seconds:.2f} s", {"seconds": seconds}
                )
        if item.state == "ROLLING_BACK":
            self._advance_rollback(change, item, sources, targets)

    def _drained(self, change: Change, replica: Replica, why: str) -> bool:
        """True once nothing runs on a draining rollout replica; asks for what still runs to be given back."""
        if replica.role != "ROLLOUT" or replica.state != "DRAINING":
            return replica.role != "ROLLOUT" or replica.state in ("RELEASING", "RELEASED", "UNCONFIRMED", "QUARANTINED")
        left = [t for t in change.fleet.trajectories.values() if t.state == "LEASED" and t.replica == replica.name]
        for trajectory in left:
            if not commands.open_commands(self._ledger, subject=trajectory.name, kind="preempt"):
                commands.preempt(
                    change, trajectory, cause="handover", at_turn_end=False, code="HANDOVER",
                    text=f"{replica.name} is handed over: {why}"[:512],
                )  # fmt: skip
        return not left

    def _create_target(self, change: Change, item: Reassignment, target: Target) -> None:
        fleet = change.fleet
        target.generation = fleet.next_generation
        fleet.next_generation += 1
        target.replica = f"replicas/{target.role.lower()}-{target.generation}"
        session = fleet.session_of(target.worker)
        width = len(target.accelerators)
        replica = Replica(
            name=target.replica, generation=target.generation, role=target.role, accelerators=target.accelerators,
            tp=width if target.role == "ROLLOUT" else 1, dp_shard=width if target.role == "TRAINER" else 1,
            worker=target.worker, owner_session=session.name if session else "", runs=target.runs, level=target.level,
            concurrency_cap=target.concurrency_cap, reassignment=item.name, create_time=change.now,
            endpoint=session.endpoint if session else "",
        )  # fmt: skip
        fleet.replicas[replica.name] = replica
        for name in target.accelerators:
            accelerator = fleet.accelerators[name]
            accelerator.generation, accelerator.replicas = target.generation, (replica.name,)
            change.put(accelerator)
        change.put(item)
        change.record(
            "REPLICA", replica.name, "", "PLANNED", item.reason_code, item.reason_text, related=target.accelerators
        )
        change.move(REPLICA, replica, "grant", "GRANT", f"generation {replica.generation} to {replica.worker}")
        self._bump_owner(change, replica)

    def fail(self, change: Change, item: Reassignment, code: str, text: str) -> None:
        """Begins the roll-back: sources that still hold go on, the others come back under new generations."""
        fleet = change.fleet
        _log.warning("hand-over fails", reassignment=item.name, code=code, text=text)
        for source in item.sources:
            replica = fleet.replicas.get(source.replica)
            if replica is None:
                continue
            for name in replica.accelerators:
                fleet.accelerators[name].role = replica.role
                change.put(fleet.accelerators[name])
            if replica.state == "DRAINING":
                replica.reassignment = ""
                change.move(REPLICA, replica, "undrain", code, text)
                self._bump_owner(change, replica)
        for target in item.targets:
            replica = fleet.replicas.get(target.replica)
            if replica is not None and REPLICA.allows(replica.state, "release") and replica.state != "RELEASING":
                change.move(REPLICA, replica, "release", code, text)
            for name in target.accelerators:
                self._retry_at[name] = change.at + 1.0
        item.deadline_at = change.at + item.timeout
        change.move(REASSIGNMENT, item, "fail", code, text)

    def _advance_rollback(
        self, change: Change, item: Reassignment, sources: list[Replica], targets: list[Replica]
    ) -> None:
        back = all(
            any(
                r.state == "ACTIVE" and r.role == source.role and set(r.accelerators) == set(source.accelerators)
                for r in change.fleet.live_replicas()
            )
            for source in sources
        )
        gone = all(r.state in ("RELEASED", "RETIRED", "ACTIVE") for r in targets)
        if back and gone:
            item.end_time = change.now
            change.move(REASSIGNMENT, item, "restored", item.reason_code, f"rolled back: {item.reason_text}"[:1024])
        elif change.at > item.deadline_at:
            item.end_time = change.now
            change.move(
                REASSIGNMENT, item, "not_restored", item.reason_code, f"not restored: {item.reason_text}"[:1024]
            )

    # ---- single replicas

    def _settle_grant(self, change: Change, replica: Replica) -> None:
        session = change.fleet.sessions.get(replica.owner_session)
        if session is None or session.state != "ALIVE":
            return
        if commands.open_commands(self._ledger, subject=replica.name, kind="handover.grant"):
            return
        if change.at < self._retry_at.get(replica.name, 0.0):
            return
        self._retry_at[replica.name] = change.at + self._ledger.config.handover.confirm_retry_s
        commands.handover(change, session, replica, wire.HANDOVER_KIND_GRANT, text=f"grant {replica.name}")

    def _settle_release(self, change: Change, replica: Replica) -> None:
        fleet = change.fleet
        if replica.state == "RELEASING" and not replica.release_acked:
            owner = fleet.sessions.get(replica.owner_session)
            if owner is None or owner.state not in ("ALIVE", "RECOVERING"):
                change.move(REPLICA, replica, "owner_lost", "OWNER_LOST", f"{replica.owner_session} is over")
            elif not commands.open_commands(self._ledger, subject=replica.name, kind="handover.release"):
                if change.at >= self._retry_at.get(replica.name, 0.0):
                    self._retry_at[replica.name] = change.at + self._ledger.config.handover.confirm_retry_s
                    commands.handover(
                        change, owner, replica, wire.HANDOVER_KIND_RELEASE, text=f"release {replica.name}"
                    )
            return
        since = self._unconfirmed_since.setdefault(replica.name, change.at)
        if replica.state == "UNCONFIRMED" and change.at - since > self._ledger.config.handover.quarantine_s:
            change.move(
                REPLICA, replica, "cannot_confirm", "NOT_CONFIRMED",
                f"nobody could prove {', '.join(replica.accelerators)} free: {replica.reason_text}; "
                "AdminService.ConfirmReleased states it by hand",
            )  # fmt: skip
        if commands.open_commands(self._ledger, subject=replica.name, kind="handover.confirm"):
            return
        if change.at < self._retry_at.get(replica.name + "/confirm", 0.0):
            return
        agent = self._agent_of(change, replica)
        if agent is None:
            return
        self._retry_at[replica.name + "/confirm"] = change.at + self._ledger.config.handover.confirm_retry_s
        commands.handover(change, agent, replica, wire.HANDOVER_KIND_CONFIRM, text=f"prove {replica.name} free")

    def _agent_of(self, change: Change, replica: Replica) -> Session | None:
        node = change.fleet.nodes.get(replica.accelerators[0].partition("/accelerators/")[0])
        session = change.fleet.sessions.get(node.agent_session) if node else None
        return session if session is not None and session.state in ("ALIVE", "RECOVERING") else None

    def on_result(self, change: Change, command: Command, succeeded: bool, code: str, text: str) -> None:
        """A participant answered a step."""
        replica = change.fleet.replicas.get(command.subject)
        if replica is None or replica.generation != command.generation:
            return
        step = command.kind.removeprefix("handover.")
        if succeeded:
            if step == "grant" and replica.state == "STARTING":
                replica.granted = True
                change.put(replica)
            elif step == "release" and replica.state == "RELEASING":
                replica.release_acked = True
                change.put(replica)
            elif step == "confirm":
                self.confirmed(change, replica, "CONFIRMED", f"{command.worker} found it free")
            return
        replica.reason_code, replica.reason_text = code, text
        change.put(replica)
        if step == "release" and replica.state == "RELEASING":
            # the owner could not let go in order; only a measurement can still prove the accelerator free
            change.move(REPLICA, replica, "owner_lost", code or "RELEASE_FAILED", text)
        item = change.fleet.reassignments.get(replica.reassignment)
        if step == "grant" and item is not None and item.state in ("GRANTING", "LOADING"):
            self.fail(change, item, code or "GRANT_FAILED", f"{replica.worker} could not take {replica.name}: {text}")

    def confirmed(self, change: Change, replica: Replica, code: str, text: str) -> None:
        """The holder is proven gone and the memory free: the replica's life ends."""
        if not REPLICA.allows(replica.state, "confirmed"):
            return
        change.move(REPLICA, replica, "confirmed", code, text)
        self._unconfirmed_since.pop(replica.name, None)
        for name in replica.accelerators:
            accelerator = change.fleet.accelerators[name]
            accelerator.replicas = tuple(r for r in accelerator.replicas if r != replica.name)
            self._retry_at.pop(name, None)
            change.put(accelerator)
        self._bump_owner(change, replica)

    def _bump_owner(self, change: Change, replica: Replica) -> None:
        session = change.fleet.sessions.get(replica.owner_session)
        if session is not None and session.state in ("ALIVE", "RECOVERING"):
            session.desired_revision += 1
            change.put(session)
