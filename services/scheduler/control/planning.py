"""The planner at work: evaluates now and then what was observed, starts what pays, and judges it afterwards.

Which planner that is, `Planner` leaves open: `splits.py` moves single accelerators by observed rates alone,
`relayouts.py` changes whole layouts, from a table of rates.
"""

import math
import uuid
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, replace

from services.common import log, wire
from services.scheduler.control.decisions import Decision, Decisions
from services.scheduler.control.handover import Handovers
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.observe import Observe
from services.scheduler.control.proposals import Planner, Proposal, Start, training_run
from services.scheduler.core.lifecycle import REASSIGNMENT
from services.scheduler.core.model import Plan, Reassignment
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState

_log = log.get(__name__)

SETTLE_STEPS = 3
"""Steps over which a move's gain is measured, before and after it."""


@dataclass(slots=True)
class Unjudged:
    """A move whose gain is not measured yet, and the steps seen when it ended."""

    item: Reassignment
    ended_at_step: int | None = None


class Planning:
    """Paces a planner and carries out what it proposes."""

    def __init__(
        self, ledger: Ledger, observe: Observe, handovers: Handovers, decisions: Decisions, planner: Planner
    ) -> None:
        self._ledger = ledger
        self._observe = observe
        self._handovers = handovers
        self._decisions = decisions
        self.planner = planner
        section = ledger.config.planner
        self._settings = PlannerSettings(
            horizon_s=section.horizon_s, cooldown_s=section.cooldown_s, hysteresis=section.hysteresis,
            confirmations=section.confirmations, max_moves_per_window=section.max_moves_per_window,
            window_s=section.window_s, min_trainers=section.min_trainers, min_rollouts=section.min_rollouts,
            min_steps=section.min_steps, min_gain=section.min_gain,
        )  # fmt: skip
        self._state = PlannerState()
        self._next_at = 0.0
        self._moves: deque[float] = deque(maxlen=64)
        self._fed_at = 0.0
        """Of the last step that was counted."""
        self._steps_seen = 0
        self._steps_at_move = 0
        self._unjudged: list[Unjudged] = []
        self._basis: Hashable = None
        """Of the last evaluation."""
        self._expected_s = 0.0
        """Seconds of a step by that."""
        self._said: tuple[str, str] = ("", "")
        """Reason and best layout of the last evaluation that was logged."""

    # ---- the cycle's part

    def step(self, change: Change) -> None:
        """Feeds the planner; evaluates every `interval_s` and starts what pays."""
        self._feed(change)
        self._judge_moves(change)
        section = self._ledger.config.planner
        if not section.enabled or change.at < self._next_at:
            return
        self._next_at = change.at + section.interval_s
        basis = self.planner.basis(change)
        if training_run(change) is None or basis == self._basis:
            return
        self._basis = basis
        found = self._evaluate(change, self._settings, self._state)
        self._expected_s = found.step_s
        self._tell(found)
        note = Decision(change.now, found.reason.code, found.reason.text, found.reason.numbers)
        for accelerator in change.fleet.accelerators.values():
            if accelerator.pool == "HYBRID":
                self._decisions.add(accelerator.name, note)
        if found.start is not None:
            self._start(change, found.start, found)

    def _feed(self, change: Change) -> None:
        fresh = [s for s in self._observe.steps if s.at > self._fed_at]
        settled = self._steps_seen - self._steps_at_move > 1
        self.planner.feed(change, fresh, settled=settled, expected_s=self._expected_s)
        self._steps_seen += len(fresh)
        if fresh:
            self._fed_at = fresh[-1].at

    def _tell(self, found: Proposal) -> None:
        """Logs an evaluation that differs from the one before: why nothing moves is asked for more often than why."""
        said = (found.reason.code, found.label)
        if said != self._said:
            self._said = said
            _log.info(
                "plan", code=found.reason.code, why=found.reason.text, steps=self._steps_seen, present=found.present,
                best=found.best,
            )  # fmt: skip

    def propose(self, change: Change, horizon: float | None) -> Plan:
        """A plan that changes nothing: the dry run of an evaluation, kept for an hour."""
        # one look is enough for somebody who asks; only the planner itself waits for confirmations
        settings = replace(self._settings, confirmations=1, horizon_s=horizon or self._settings.horizon_s)
        found = self._evaluate(change, settings, PlannerState())
        return self._record(change, found, "PROPOSED", settings.horizon_s)

    # ---- evaluating

    def _steps_left(self, change: Change) -> float:
        """Steps that the task files of the runs in training still hold; infinite where groups come from clients."""
        left = 0.0
        for run in change.fleet.runs.values():
            if run.kind != "TRAIN" or run.state != "ACTIVE":
                continue
            if not run.task_lines:
                return math.inf
            tasks = (run.task_epochs - run.cursor_epoch) * run.task_lines - run.cursor_position
            open_groups = sum(
                g.run == run.name and g.state in ("OPEN", "CLOSED", "BATCHED") for g in change.fleet.groups.values()
            )
            left += (max(0, tasks) + open_groups) / max(1, run.batch_groups)
        return left

    def _evaluate(self, change: Change, settings: PlannerSettings, state: PlannerState) -> Proposal:
        busy = any(r.state not in REASSIGNMENT.terminal for r in change.fleet.reassignments.values())
        pace = Pace(
            change.at, self._steps_seen, self._steps_seen - self._steps_at_move, tuple(self._moves), busy,
            self.planner.shifted,
        )  # fmt: skip
        return self.planner.propose(change, pace, self._steps_left(change), settings, state)

    # ---- moving

    def _start(self, change: Change, start: Start, found: Proposal) -> None:
        plan = self._record(change, found, "APPLIED", self._settings.horizon_s)
        item = self._handovers.start(
            change, start.sources, start.targets, cause="planner", code=start.reason.code, text=start.reason.text,
            plan=plan.name, predicted_gain=start.gain_rate, rate_before=self._rate(),
        )  # fmt: skip
        found.plan.moves[start.move].reassignment = item.name
        plan.record = found.plan.SerializeToString()
        self._moves.append(change.at)
        self._steps_at_move = self._steps_seen
        self._unjudged.append(Unjudged(item))
        accelerators = ", ".join(sorted(a for t in start.targets for a in t.accelerators))
        roles = ", ".join(sorted({t.role for t in start.targets}))
        _log.info("move", accelerator=accelerators, to=roles, why=start.reason.text)

    def _rate(self, commits: int = SETTLE_STEPS + 1) -> float:
        """Trained tokens per second between the first and the last of the newest `commits` commits."""
        recent = list(self._observe.steps)[-commits:]
        if len(recent) < 2:
            return 0.0
        return sum(s.tokens for s in recent[1:]) / max(1e-6, recent[-1].at - recent[0].at)

    def _judge_moves(self, change: Change) -> None:
        """Records the observed rate over SETTLE_STEPS steps after the move ended, or what the run had left of them."""
        left = []
        for move in self._unjudged:
            item = move.item
            if item.state not in REASSIGNMENT.terminal:
                left.append(move)
                continue
            if item.state != "SUCCEEDED":
                continue
            if move.ended_at_step is None:
                move.ended_at_step = self._steps_seen
                self.planner.handed_over(item)
            seen = self._steps_seen - move.ended_at_step
            if seen <= SETTLE_STEPS and (training_run(change) is not None or seen < 2):
                left.append(move)
                continue
            item.rate_after = self._rate(min(seen, SETTLE_STEPS + 1))
            change.put(item)
            gain = item.rate_after - item.rate_before
            change.record(
                "REASSIGNMENT", item.name, item.state, item.state, "GAIN_OBSERVED",
                f"{item.rate_before:.0f} tokens/s before, {item.rate_after:.0f} after; {item.predicted_gain:+.0f} was "
                f"predicted, {gain:+.0f} observed",
                {"predicted_gain": item.predicted_gain, "observed_gain": gain},
            )  # fmt: skip
        self._unjudged = left

    # ---- records

    def _record(self, change: Change, found: Proposal, state: str, horizon: float) -> Plan:
        message = found.plan
        message.name = f"plans/{uuid.uuid4().hex}"
        message.base_revision = change.fleet.revision
        message.horizon.CopyFrom(wire.duration(horizon))
        message.create_time.CopyFrom(wire.timestamp(change.now))
        plan = Plan(message.name, state, message.SerializeToString(), change.now)
        change.fleet.plans[plan.name] = plan
        change.put(plan)
        change.record("PLAN", plan.name, "", state, found.reason.code, found.reason.text[:1024])
        return plan
