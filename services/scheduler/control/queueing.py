"""Leases and preemptions: shows the multi-level queue what is waiting and running, and carries out what it decides."""

from services.common import log
from services.scheduler.control import commands
from services.scheduler.control.decisions import Decision, Decisions
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.observe import Observe
from services.scheduler.core import cmlfq
from services.scheduler.core.lifecycle import TRAJECTORY
from services.scheduler.core.model import Attempt, Replica, Trajectory

_log = log.get(__name__)

PREFILL_SPEEDUP = 20.0
"""Prefill is taken to be this much faster per token than decoding until it is measured apart."""


class Queueing:
    """Runs cmlfq.decide on the live state."""

    def __init__(self, ledger: Ledger, observe: Observe, decisions: Decisions) -> None:
        self._ledger = ledger
        self._observe = observe
        self._decisions = decisions
        section = ledger.config.queue
        self._settings = cmlfq.QueueSettings(
            quantum_tokens=tuple(section.quantum_tokens), max_wait_s=section.max_wait_s, max_moves=section.max_moves
        )

    def decide(self, change: Change) -> None:
        """Leases what should run now, and asks for what should stop."""
        view = self.view(change)
        if not view.queued and not view.running:
            return
        for action in cmlfq.decide(view, self._settings):
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

    def view(self, change: Change) -> cmlfq.QueueView:
        """What is waiting, running and serving, as the queue sees it."""
        fleet = change.fleet
        queued, running = [], []
        pending = {c.subject for c in commands.open_commands(self._ledger, kind="preempt")}
        for item in fleet.trajectories.values():
            if item.state not in ("QUEUED", "LEASED"):
                continue
            run = fleet.runs[item.run]
            if item.state == "QUEUED" and run.state != "ACTIVE":
                continue
            guess = self._observe.remaining.estimate(
                item.run, item.group, item.name, item.generated_tokens, item.turns_done
            )
            tokens = item.prompt_tokens + item.generated_tokens + item.observation_tokens
            if item.state == "QUEUED":
                queued.append(
                    cmlfq.QueuedTrajectory(
                        name=item.name, run=item.run, group=item.group, admission_number=item.admission_number,
                        priority=run.priority * 1_000 + fleet.groups[item.group].priority, level=item.level,
                        waiting_since=item.queued_at, tokens=tokens, generated=item.generated_tokens,
                        estimate_p50=guess.p50, estimate_p90=guess.p90, last_engine=item.prefer or item.replica,
                        avoid=frozenset(),
                    )
                )  # fmt: skip
            else:
                running.append(
                    cmlfq.RunningTrajectory(
                        name=item.name, run=item.run, engine=item.replica, level=item.level, since=item.leased_at,
                        generated=item.generated_tokens, quantum_used=item.generated_tokens - item.lease_generated,
                        in_tool_wait=item.in_tool_wait, estimate_p50=guess.p50, estimate_p90=guess.p90, tokens=tokens,
                        preempt_pending=item.name in pending, admission_number=item.admission_number,
                        moves=item.preempted, target=item.prefer,
                    )
                )  # fmt: skip
        return cmlfq.QueueView(
            now=change.at, queued=tuple(queued), running=tuple(running), engines=tuple(self._engines(change))
        )

    def _engines(self, change: Change) -> list[cmlfq.EngineView]:
        fleet = change.fleet
        views = []
        for replica in fleet.live_replicas():
            if replica.role != "ROLLOUT" or replica.state in ("PLANNED", "UNCONFIRMED", "QUARANTINED"):
                continue
            rate = self._observe.engines.get(replica.name)
            leased = sum(t.state == "LEASED" and t.replica == replica.name for t in fleet.trajectories.values())
            per_token = rate.seconds_per_token if rate is not None and rate.seconds_per_token > 0 else None
            views.append(
                cmlfq.EngineView(
                    name=replica.name, run=replica.serving_run, level=replica.level,
                    concurrency_cap=replica.concurrency_cap, running=leased,
                    kv_capacity_tokens=rate.kv_capacity if rate else 0, kv_used_tokens=rate.kv_used if rate else 0,
                    seconds_per_token=per_token,
                    prefill_tokens_per_second=PREFILL_SPEEDUP / per_token if per_token else None,
                    admitting=self._admitting(change, replica),
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
