"""The planner of single accelerators at work: feeds the cost model of `core/planner.py`, and asks it.

For fleets of which no table of rates is known: what engines and trainers do is learnt from what is observed alone.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from services.common import wire
from services.scheduler.control import proposals
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.observe import Observe, Step
from services.scheduler.control.proposals import Proposal, Start
from services.scheduler.control.shapes import Shapes, worker_for
from services.scheduler.core import planner
from services.scheduler.core.costmodel import CostModel, Layout, Prediction
from services.scheduler.core.model import Reassignment
from services.scheduler.core.occupancy import Occupancy
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState
from services.scheduler.core.planner import AcceleratorView, MoveProposal, PlanResult

PARALLEL_PHASES = ("LOGPROBS", "TRAIN")
WINDOW_SECONDS = 3.0
SERIAL_PHASES = ("FETCH", "REDUCE", "COMMIT", "PUBLISH")


@dataclass(slots=True)
class Window:
    """A replica's work since `began_at` (monotonic seconds)."""

    began_at: float
    last_at: float
    generated: int
    leased_seconds: float = 0.0


class Splits:
    """Runs core.planner on what was observed."""

    shifted = False
    """What it reacts to is in its model alone."""

    def __init__(self, ledger: Ledger, observe: Observe, shapes: Shapes) -> None:
        self._ledger = ledger
        self._observe = observe
        self._shapes = shapes
        self.model = CostModel()
        self._phases: dict[str, list[float]] = {}
        self._fed_at = 0.0
        """Of the last step that was fed."""
        self._windows: dict[str, Window] = {}
        self._occupancy: dict[int, Occupancy] = {}
        """By level."""

    def basis(self, change: Change) -> Hashable:
        """See proposals.Planner; its rates follow every report."""
        return change.at

    # ---- feeding

    def feed(
        self,
        change: Change,
        fresh: Sequence[Step],
        *,
        settled: bool,
        expected_s: float,  # noqa: ARG002 - its model predicts for the layout of now
    ) -> None:
        """See proposals.Planner."""
        before = self._fed_at
        if fresh and before and self.model.ready and settled:
            predicted = self.model.predict(planner.layout_of(self._views(change)), self._max_versions(change))
            self.model.observe_step_seconds(predicted.step_seconds, (fresh[-1].at - before) / len(fresh))
        for step in fresh:
            self._fed_at = step.at
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

    def handed_over(self, item: Reassignment) -> None:
        """See proposals.Planner."""
        self.model.observe_handover(item.targets[0].role, item.end_time - item.create_time)

    # ---- evaluating

    def propose(
        self, change: Change, pace: Pace, steps_left: float, settings: PlannerSettings, state: PlannerState
    ) -> Proposal:
        """See proposals.Planner."""
        given = planner.PlanInput(
            now=pace.now,
            accelerators=self._views(change),
            max_versions=self._max_versions(change),
            steps_seen=pace.steps_seen,
            steps_since_move=pace.steps_since_move,
            last_moves=pace.last_moves,
            busy=pace.busy,
            steps_left=steps_left,
        )
        result = planner.plan(given, self.model, settings, state)
        starts = [s for i, move in enumerate(result.moves) if (s := self._start(change, i, move)) is not None]
        return Proposal(
            result.reason, result.chosen.label, result.present.reason.text, result.chosen.reason.text,
            result.present.prediction.step_seconds, starts[0] if starts else None, self._plan(change, result),
        )  # fmt: skip

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

    # ---- what comes of it

    def _start(self, change: Change, number: int, move: MoveProposal) -> Start | None:
        replica = change.fleet.replica_on(move.accelerator)
        session = worker_for(change, move.to_role, (move.accelerator,))
        if replica is None or session is None:
            return None
        target = self._shapes.target(change.fleet, move.to_role, (move.accelerator,), session.worker)
        return Start((replica,), (target,), number, move.gain_rate, move.reason)

    def _plan(self, change: Change, result: PlanResult) -> wire.Plan:
        message = wire.Plan(
            chosen=self._layout(result.chosen.layout, result.chosen.prediction),
            reason=proposals.reason(result.reason), profile="online",
        )  # fmt: skip
        for other in (result.present, *result.alternatives):
            if other is result.chosen or any(a.label == other.label for a in message.alternatives):
                continue
            message.alternatives.add(
                label=other.label, layout=self._layout(other.layout, other.prediction),
                reason=proposals.reason(other.reason),
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
                gain_tokens=move.gain_tokens, cost_tokens=move.cost_tokens, reason=proposals.reason(move.reason),
            )  # fmt: skip
        return message

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
