"""The planner at work: feeds the cost model, evaluates now and then, starts what pays, and judges it afterwards."""

import math
import uuid
from collections import deque
from dataclasses import dataclass, replace

from services.common import log, wire
from services.scheduler.control.decisions import Decision, Decisions
from services.scheduler.control.handover import Handovers, worker_for
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.observe import Observe
from services.scheduler.core import planner
from services.scheduler.core.costmodel import CostModel, Layout, Prediction
from services.scheduler.core.lifecycle import REASSIGNMENT
from services.scheduler.core.model import Plan, Reassignment
from services.scheduler.core.occupancy import Occupancy
from services.scheduler.core.pacing import PlannerSettings, PlannerState
from services.scheduler.core.planner import AcceleratorView, PlanResult
from services.scheduler.core.reason import Reason

_log = log.get(__name__)

SETTLE_STEPS = 3
"""Steps over which a move's gain is measured, before and after it."""
PARALLEL_PHASES = ("LOGPROBS", "TRAIN")
WINDOW_SECONDS = 3.0
SERIAL_PHASES = ("FETCH", "REDUCE", "COMMIT", "PUBLISH")


@dataclass(slots=True)
class Unjudged:
    """A move whose gain is not measured yet, and the steps seen when it ended."""

    item: Reassignment
    ended_at_step: int | None = None


@dataclass(slots=True)
class Window:
    """A replica's work since `began_at` (monotonic seconds)."""

    began_at: float
    last_at: float
    generated: int
    leased_seconds: float = 0.0


class Planning:
    """Runs core.planner on what was observed."""

    def __init__(self, ledger: Ledger, observe: Observe, handovers: Handovers, decisions: Decisions) -> None:
        self._ledger = ledger
        self._observe = observe
        self._handovers = handovers
        self._decisions = decisions
        section = ledger.config.planner
        self._settings = PlannerSettings(
            horizon_s=section.horizon_s, cooldown_s=section.cooldown_s, hysteresis=section.hysteresis,
            confirmations=section.confirmations, max_moves_per_window=section.max_moves_per_window,
            window_s=section.window_s, min_trainers=section.min_trainers, min_rollouts=section.min_rollouts,
            min_steps=section.min_steps,
        )  # fmt: skip
        self.model = CostModel()
        self._state = PlannerState()
        self._next_at = 0.0
        self._moves: deque[float] = deque(maxlen=64)
        self._steps_fed = 0
        self._steps_seen = 0
        self._steps_at_move = 0
        self._phases: dict[str, list[float]] = {}
        self._sampled: dict[str, float] = {}
        self._windows: dict[str, Window] = {}
        self._occupancy: dict[int, Occupancy] = {}
        """By level."""
        self._unjudged: list[Unjudged] = []
        self._said: tuple[str, str] = ("", "")
        """Reason and best layout of the last evaluation that was logged."""

    # ---- the cycle's part

    def step(self, change: Change) -> None:
        """Feeds the model; evaluates every `interval_s` and starts what pays."""
        self._feed(change)
        self._judge_moves(change)
        section = self._ledger.config.planner
        if not section.enabled or change.at < self._next_at:
            return
        self._next_at = change.at + section.interval_s
        run = self._training_run()
        if run is None:
            return
        result = self._evaluate(change, self._settings)
        self._tell(result)
        note = Decision(change.now, result.reason.code, result.reason.text, result.reason.numbers)
        for accelerator in change.fleet.accelerators.values():
            if accelerator.pool == "HYBRID":
                self._decisions.add(accelerator.name, note)
        for move in result.moves:
            self._start(change, move, result)

    def _tell(self, result: PlanResult) -> None:
        """Logs an evaluation that differs from the one before: why nothing moves is asked for more often than why."""
        said = (result.reason.code, result.chosen.label)
        if said != self._said:
            self._said = said
            _log.info(
                "plan", code=result.reason.code, why=result.reason.text, steps=self._steps_seen,
                present=result.present.reason.text, best=result.chosen.reason.text,
            )  # fmt: skip

    def propose(self, change: Change, horizon: float | None) -> Plan:
        """A plan that changes nothing: the dry run of an evaluation, kept for an hour."""
        # one look is enough for somebody who asks; only the planner itself waits for confirmations
        settings = replace(self._settings, confirmations=1, horizon_s=horizon or self._settings.horizon_s)
        result = self._evaluate(change, settings, PlannerState())
        return self._record(change, result, "PROPOSED", settings.horizon_s, "")

    # ---- feeding

    def _feed(self, change: Change) -> None:
        steps = self._observe.steps
        before = self._sampled.get("steps", 0.0)
        fresh = [s for s in steps if s.at > before]
        if fresh and before and self.model.ready and self._steps_seen - self._steps_at_move > 1:
            predicted = self.model.predict(planner.layout_of(self._views(change)), self._max_versions(change))
            self.model.observe_step_seconds(predicted.step_seconds, (fresh[-1].at - before) / len(fresh))
        for step in fresh:
            self._sampled["steps"] = step.at
            self._steps_seen += 1
            self.model.observe_step(step.tokens, step.generated)
        if fresh:
            self._feed_trainers(fresh[-1].replicas, len(fresh))
            ended = [e for e in self._observe.ends if e.at > change.at - 60.0]
            if ended:
                self.model.observe_tail(max(e.engine_seconds + e.tool_seconds for e in ended))
        self._feed_engines(change)

    def _feed_engines(self, change: Change) -> None:
        """Windows of a few seconds of each serving engine: what was leased to it, and what it generated meanwhile."""
        leased: dict[str, int] = {}
        for item in change.fleet.trajectories.values():
            if item.state == "LEASED":
                leased[item.replica] = leased.get(item.replica, 0) + 1
        live = set()
        for replica in change.fleet.live_replicas():
            rate = self._observe.engines.get(replica.name)
            if replica.role != "ROLLOUT" or replica.state != "ACTIVE" or rate is None:
                continue
            live.add(replica.name)
            window = self._windows.setdefault(replica.name, Window(change.at, change.at, rate.generated))
            window.leased_seconds += leased.get(replica.name, 0) * (change.at - window.last_at)
            window.last_at = change.at
            if rate.at - window.began_at < WINDOW_SECONDS:
                continue
            known = self._occupancy.setdefault(replica.level, Occupancy())
            known.add(window.leased_seconds, rate.generated - window.generated, change.at - window.began_at)
            self._windows[replica.name] = Window(change.at, change.at, rate.generated)
            capacity = known.capacity(replica.concurrency_cap)
            if capacity is not None:
                self.model.observe_rollout(replica.level, capacity, 1.0)
        self._windows = {name: w for name, w in self._windows.items() if name in live}

    def _feed_trainers(self, replicas: int, steps: int) -> None:
        """Seconds by phase since the last step, from the trainer that has counted longest."""
        for worker, times in self._observe.trainers.items():
            before = self._phases.get(worker)
            if len(times.phase_seconds) < 2:
                continue
            self._phases[worker] = list(times.phase_seconds)
            if before is None or len(before) != len(times.phase_seconds):
                continue
            spent = [max(0.0, now - was) for now, was in zip(times.phase_seconds, before, strict=True)]

            def seconds(names: tuple[str, ...], spent: list[float] = spent) -> float:
                numbers = [wire.TrainerPhase.Value(f"TRAINER_PHASE_{n}") for n in names]
                return sum(spent[n] for n in numbers if n < len(spent)) / steps

            parallel = seconds(PARALLEL_PHASES)
            if parallel > 0:
                self.model.observe_training(parallel, seconds(SERIAL_PHASES), replicas)

    # ---- evaluating

    def _training_run(self) -> str | None:
        for run in self._ledger.fleet.runs.values():
            if run.kind == "TRAIN" and run.state == "ACTIVE":
                return run.name
        return None

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

    def _max_versions(self, change: Change) -> int:
        """The staleness bound of the run in training; 0 without one."""
        runs = (r for r in change.fleet.runs.values() if r.kind == "TRAIN" and r.state == "ACTIVE")
        return max((r.max_versions for r in runs), default=0)

    def _views(self, change: Change) -> list[AcceleratorView]:
        fleet, views = change.fleet, []
        for accelerator in fleet.accelerators.values():
            replica = fleet.replica_on(accelerator.name)
            if replica is None or replica.state not in ("ACTIVE", "SUSPECT"):
                continue
            to_role = "TRAINER" if replica.role == "ROLLOUT" else "ROLLOUT"
            movable = (
                accelerator.pool == "HYBRID"
                and len(replica.accelerators) == 1
                and worker_for(change, to_role, replica.accelerators) is not None
            )
            level = self._ledger.config.level(accelerator.name, accelerator.pool)
            views.append(
                AcceleratorView(accelerator.name, accelerator.pool, replica.role, movable, level, replica.create_time)
            )
        return views

    def _evaluate(self, change: Change, settings: PlannerSettings, state: PlannerState | None = None) -> PlanResult:
        fleet = change.fleet
        busy = any(r.state not in REASSIGNMENT.terminal for r in fleet.reassignments.values())
        given = planner.PlanInput(
            now=change.at,
            accelerators=self._views(change),
            max_versions=self._max_versions(change),
            steps_seen=self._steps_seen,
            steps_since_move=self._steps_seen - self._steps_at_move,
            last_moves=tuple(self._moves),
            busy=busy,
            steps_left=self._steps_left(change),
        )
        return planner.plan(given, self.model, settings, state or self._state)

    # ---- moving

    def _start(self, change: Change, move: planner.MoveProposal, result: PlanResult) -> None:
        replica = change.fleet.replica_on(move.accelerator)
        session = worker_for(change, move.to_role, (move.accelerator,))
        if replica is None or session is None:
            return
        plan = self._record(change, result, "APPLIED", self._settings.horizon_s, "")
        target = self._handovers.target(move.to_role, (move.accelerator,), session.worker)
        item = self._handovers.start(
            change, [replica], [target], cause="planner", code=move.reason.code, text=move.reason.text, plan=plan.name,
            predicted_gain=move.gain_rate, rate_before=self._rate(),
        )  # fmt: skip
        self._moves.append(change.at)
        self._steps_at_move = self._steps_seen
        self._unjudged.append(Unjudged(item))
        _log.info("move", accelerator=move.accelerator, to=move.to_role, why=move.reason.text)

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
                self.model.observe_handover(item.targets[0].role, item.end_time - item.create_time)
            seen = self._steps_seen - move.ended_at_step
            if seen <= SETTLE_STEPS and (self._training_run() is not None or seen < 2):
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

    def _record(self, change: Change, result: PlanResult, state: str, horizon: float, reassignment: str) -> Plan:
        message = wire.Plan(
            name=f"plans/{uuid.uuid4().hex}",
            base_revision=change.fleet.revision,
            chosen=self._layout(result.chosen.layout, result.chosen.prediction),
            horizon=wire.duration(horizon),
            reason=wire.Reason(
                code=result.reason.code, text=result.reason.text[:1024], numbers=dict(result.reason.numbers)
            ),
            profile="online",
            create_time=wire.timestamp(change.now),
        )
        for other in (result.present, *result.alternatives):
            if other is result.chosen or any(a.label == other.label for a in message.alternatives):
                continue
            message.alternatives.add(
                label=other.label, layout=self._layout(other.layout, other.prediction),
                reason=_reason(other.reason),
            )  # fmt: skip
        for move in result.moves:
            replica = change.fleet.replica_on(move.accelerator)
            if replica is None:
                continue
            message.moves.add(
                sources=[wire.ReassignmentSource(replica=replica.name, generation=replica.generation)],
                targets=[
                    wire.ReassignmentTarget(
                        spec=wire.ReplicaSpec(
                            role=wire.Role.Value(f"ROLE_{move.to_role}"), accelerators=[move.accelerator]
                        )
                    )
                ],
                gain_tokens=move.gain_tokens, cost_tokens=move.cost_tokens,
                reason=_reason(move.reason), reassignment=reassignment,
            )  # fmt: skip
        plan = Plan(message.name, state, message.SerializeToString(), change.now)
        change.fleet.plans[plan.name] = plan
        change.put(plan)
        change.record("PLAN", plan.name, "", state, result.reason.code, result.reason.text[:1024])
        return plan

    def _layout(self, layout: Layout, prediction: Prediction) -> wire.Layout:
        message = wire.Layout(
            prediction=wire.Prediction(
                trained_tokens_per_second=prediction.trained_tokens_per_second,
                rollout_seconds=prediction.rollout_seconds,
                tail_seconds=prediction.tail_seconds, train_seconds=prediction.train_seconds,
                recent_error=-1.0 if self.model.error.value is None else self.model.error.value,
            )
        )  # fmt: skip
        message.replicas.add(role=wire.ROLE_TRAINER, accelerators=1, count=layout.trainers)
        for level, count in layout.rollouts:
            message.replicas.add(role=wire.ROLE_ROLLOUT, accelerators=1, count=count, level=level)
        return message


def _reason(item: Reason) -> wire.Reason:
    return wire.Reason(code=item.code, text=item.text[:1024], numbers=dict(item.numbers))
