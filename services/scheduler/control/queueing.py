"""Leases and preemptions: tells the live queue what changed, and carries out what it decides.

What changed is what changes touched (`Ledger.touched`), the groups of which the estimator learnt, runs that were paused
or resumed, and engines, which are few and compared each time. After a start everything counts as touched, so the queue
is loaded from the state.
"""

from dataclasses import dataclass, replace

from services.common import log
from services.scheduler.control import commands
from services.scheduler.control.decisions import Decision, Decisions
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.observe import Observe
from services.scheduler.core import cmlfq
from services.scheduler.core.lifecycle import TRAJECTORY
from services.scheduler.core.livequeue import LiveQueue
from services.scheduler.core.model import Attempt, Replica, Trajectory

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class _Told:
    """What the live queue was last told of a trajectory: that it waits, or its lease."""

    leased: bool
    epoch: int
    attempt: int
    level: int
    """That it waits in, or in which its lease began."""
    queued_at: float = 0.0
    generated: int = 0
    asked: tuple[int, str] | None = None
    """Level and target of a pending preemption."""


class Queueing:
    """Keeps the live queue in step with the fleet and does what it decides."""

    def __init__(self, ledger: Ledger, observe: Observe, decisions: Decisions) -> None:
        self._ledger = ledger
        self._observe = observe
        self._decisions = decisions
        section = ledger.config.queue
        self._settings = cmlfq.QueueSettings(
            quantum_tokens=tuple(section.quantum_tokens), max_wait_s=section.max_wait_s, max_moves=section.max_moves
        )
        self.live = LiveQueue(self._settings, self._estimate)
        self._told: dict[str, _Told] = {}
        self._run_states: dict[str, str] = {}
        self._engines_told: set[str] = set()
        ledger.touched.update(dict.fromkeys(ledger.fleet.trajectories))

    def decide(self, change: Change) -> None:
        """Leases what should run now, and asks for what should stop."""
        self.follow(change)
        for action in self.live.decide(change.at):
            item = change.fleet.trajectories[action.trajectory]
            note = Decision(change.now, action.reason.code, action.reason.text, action.reason.numbers, action.engine)
            self._decisions.add(item.name, note)
            if isinstance(action, cmlfq.Assign):
                self._lease(change, item, change.fleet.replicas[action.engine], action.level, action.reason.code)
            else:
                item.level, item.prefer = action.level, action.target_engine
                change.put(item)
                commands.preempt(
                    change, item, cause="cmlfq", at_turn_end=action.at_turn_end, code=action.reason.code,
                    text=action.reason.text,
                )  # fmt: skip

    # ---- the live queue follows the fleet

    def follow(self, change: Change) -> None:
        """Tells the live queue what happened since it was last told."""
        fleet, touched = change.fleet, self._ledger.touched
        for run in fleet.runs.values():
            if self._run_states.get(run.name, "ACTIVE") != run.state:
                touched.update(dict.fromkeys(t.name for t in fleet.trajectories.values() if t.run == run.name))
            self._run_states[run.name] = run.state
        engines = {view.name: view for view in self._engines(change)}
        for name in self._engines_told - engines.keys():
            self.live.drop_engine(name)
        for view in engines.values():
            self.live.engine(view)
        self._engines_told = set(engines)
        pending = {c.subject for c in commands.open_commands(self._ledger, kind="preempt")} if touched else set()
        for name in touched:
            item = fleet.trajectories.get(name)
            active = item is not None and (item.state == "LEASED" or self._waits(change, item))
            if item is not None and active:
                self._tell(change, item, name in pending)
            elif name in self.live:
                self.live.ended(name)
                del self._told[name]
        touched.clear()
        for group in self._observe.learnt:
            self.live.group_learnt(group)
        self._observe.learnt.clear()

    @staticmethod
    def _waits(change: Change, item: Trajectory) -> bool:
        return item.state == "QUEUED" and change.fleet.runs[item.run].state == "ACTIVE"

    def _tell(self, change: Change, item: Trajectory, pending: bool) -> None:
        """One trajectory as it is now."""
        told = self._told.get(item.name)
        if item.state == "QUEUED":
            waits = _Told(False, item.lease_epoch, item.attempt, item.level, item.queued_at, item.generated_tokens)
            if told != waits:
                self._tell_waits(change, item)
                self._told[item.name] = waits
            return
        if told is None or not told.leased or (told.epoch, told.attempt) != (item.lease_epoch, item.attempt):
            # a lease that followed its decision finds it waiting; one of which only the end is seen is told whole
            if told is None or told.leased or (told.epoch, told.attempt) != (item.lease_epoch - 1, item.attempt):
                self._tell_waits(change, item)
            self.live.leased(
                item.name, engine=item.replica, level=item.level, since=item.leased_at, base=item.lease_generated
            )
            told = _Told(True, item.lease_epoch, item.attempt, item.level)
        self.live.turned(
            item.name, generated=item.generated_tokens, tokens=_tokens(item), in_tool_wait=item.in_tool_wait
        )
        asked = (item.level, item.prefer) if pending else None
        if asked is not None and asked != told.asked:
            self.live.preempting(item.name, level=item.level, target=item.prefer)
        elif asked is None:
            if told.asked is not None:
                self.live.going_on(item.name)
            if (item.level, item.prefer) != (told.level, ""):
                # where it was to move is over, perhaps before the queue was told of it: a later preemption by somebody
                # else leads nowhere in particular
                item.level, item.prefer = told.level, ""
                change.put(item)
        self._told[item.name] = replace(told, asked=asked)

    def _tell_waits(self, change: Change, item: Trajectory) -> None:
        self.live.queued(
            item.name, run=item.run, group=item.group, admission_number=item.admission_number,
            priority=self._priority(change, item), level=item.level, waiting_since=item.queued_at,
            tokens=_tokens(item), generated=item.generated_tokens, last_engine=item.prefer or item.replica,
            moves=item.preempted,
        )  # fmt: skip

    @staticmethod
    def _priority(change: Change, item: Trajectory) -> int:
        return change.fleet.runs[item.run].priority * 1_000 + change.fleet.groups[item.group].priority

    def _estimate(self, name: str) -> tuple[float, float]:
        item = self._ledger.fleet.trajectories[name]
        guess = self._observe.remaining.estimate(
            item.run, item.group, item.name, item.generated_tokens, item.turns_done
        )
        return guess.p50, guess.p90

    def _engines(self, change: Change) -> list[cmlfq.EngineView]:
        """All that serve, as last reported. What is leased to them the live queue counts itself."""
        fleet = change.fleet
        views = []
        for replica in fleet.live_replicas():
            if replica.role != "ROLLOUT" or replica.state in ("PLANNED", "UNCONFIRMED", "QUARANTINED"):
                continue
            rate = self._observe.engines.get(replica.name)
            per_token = rate.seconds_per_token if rate is not None and rate.seconds_per_token > 0 else None
            load = rate.measured_load if rate is not None else 0.0
            views.append(
                cmlfq.EngineView(
                    name=replica.name, run=replica.serving_run, level=replica.level,
                    concurrency_cap=replica.concurrency_cap, running=0,
                    kv_capacity_tokens=rate.kv_capacity if rate else 0, kv_used_tokens=rate.kv_used if rate else 0,
                    seconds_per_token=per_token,
                    prefill_tokens_per_second=cmlfq.PREFILL_SPEEDUP / per_token if per_token else None,
                    admitting=self._admitting(change, replica), measured_load=load,
                    reported_at=rate.at if rate else 0.0,
                    seconds_per_sequence=rate.speed.slope_at(load, per_token) if rate and per_token else None,
                )
            )  # fmt: skip
        return views

    def _admitting(self, change: Change, replica: Replica) -> bool:
        session = change.fleet.sessions.get(replica.owner_session)
        if session is None or session.state != "ALIVE" or replica.state != "ACTIVE" or replica.serving_number < 0:
            return False
        run = change.fleet.runs.get(replica.serving_run)
        # what it would generate must still be trainable at the next step
        return run is not None and (run.kind != "TRAIN" or run.head - replica.serving_number <= run.max_versions)

    def _lease(self, change: Change, item: Trajectory, replica: Replica, level: int, code: str) -> None:
        session = change.fleet.sessions[replica.owner_session]
        key = (item.name, item.attempt)
        attempt = change.fleet.attempts.get(key)
        if attempt is None:
            attempt = Attempt(item.name, item.attempt, start_time=change.now)
            change.fleet.attempts[key] = attempt
        attempt.leases += 1
        item.lease_epoch += 1
        item.holder, item.replica, item.generation = session.name, replica.name, replica.generation
        item.worker, item.level, item.prefer = session.worker, level, ""
        item.lease_generated = item.generated_tokens
        item.queued_seconds += change.at - item.queued_at
        item.leased_at = item.progress_at = change.at
        session.desired_revision += 1
        item.lease_revision = session.desired_revision
        change.put(session, attempt)
        change.move(
            TRAJECTORY, item, "lease", code, f"{replica.name} ({session.worker})",
            {"lease_epoch": item.lease_epoch, "kept_tokens": item.generated_tokens, "level": level},
            related=[replica.name, session.worker],
        )  # fmt: skip


def _tokens(item: Trajectory) -> int:
    """Length of its sequence."""
    return item.prompt_tokens + item.generated_tokens + item.observation_tokens
