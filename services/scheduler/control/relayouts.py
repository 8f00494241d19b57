"""The planner of whole layouts at work: tells `core/evidence.py` what is seen, and asks `core/relayout.py`.

It begins with a table of rates. What it learns is in memory: after a restart of the scheduler it begins with the table
again, and plans nothing until a step was committed.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from services.common import wire
from services.scheduler.control import batches, planrecords
from services.scheduler.control.fleetview import fleet_view, makeable, unrated
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.observe import Observe, Step
from services.scheduler.control.proposals import Proposal, Start, training_run
from services.scheduler.control.shapes import Shapes, free_worker, node_of
from services.scheduler.control.specs import spec
from services.scheduler.core import relayout, topology
from services.scheduler.core.costmodel import NEVER_S, Mean
from services.scheduler.core.evidence import Consumed, Evidence, Rules, Trained
from services.scheduler.core.lifecycle import REASSIGNMENT
from services.scheduler.core.model import Manifest, Reassignment, Replica, Run, Target
from services.scheduler.core.pacing import Pace, PlannerSettings, PlannerState
from services.scheduler.core.placement import Limits, Move, Progress, Safety
from services.scheduler.core.rates import EngineKind, Errors, TrainerKind
from services.scheduler.core.reason import Reason
from services.scheduler.core.relayout import Relayout, Situation
from services.scheduler.rates import RateTable


@dataclass(slots=True)
class Job:
    """What is known of the run in training."""

    run: str
    evidence: Evidence


class Relayouts:
    """Runs core.relayout on what was observed."""

    def __init__(self, ledger: Ledger, observe: Observe, shapes: Shapes, table: RateTable) -> None:
        self._ledger = ledger
        self._observe = observe
        self._shapes = shapes
        self._table = table
        self._job: Job | None = None
        self._handover: dict[str, Mean] = {}
        """Seconds, by the role that accelerators came to."""
        self._errors = Errors()
        """Of seconds of a step."""
        self._fed_at = 0.0
        observe.listeners.append(self)

    @property
    def evidence(self) -> Evidence | None:
        """What was learnt of the run in training, or of the last one; None before the first."""
        return self._job.evidence if self._job is not None else None

    # ---- what is seen

    def decoded(self, replica: Replica, engine: wire.EngineLoad) -> None:
        """See observe.Listener."""
        first = self._ledger.fleet.accelerators.get(replica.accelerators[0])
        if self._job is None or first is None or replica.role != "ROLLOUT" or engine.kv_used_tokens <= 0:
            return
        kind = EngineKind(first.type, len(replica.accelerators))
        self._job.evidence.load(kind, engine.running, engine.kv_used_tokens, engine.seconds_per_token)

    def consumed(self, manifest: Manifest, trajectories: Sequence[Consumed], seconds: float) -> None:
        """See observe.Listener. Shards are equal, so that a step is as slow as its smallest replicas."""
        fleet = self._ledger.fleet
        if self._job is None or self._job.run != manifest.run:
            return
        trainers = batches.roster_of(fleet, fleet.runs[manifest.run], manifest)
        kinds = [
            TrainerKind(fleet.accelerators[r.accelerators[0]].type, len(r.accelerators))
            for r in trainers
            if r.accelerators[0] in fleet.accelerators
        ]
        if kinds:
            least = min(kinds, key=lambda k: (k.accelerators, k.type))
            self._job.evidence.step(Trained(trajectories, len(manifest.groups), least, len(kinds), seconds))

    def feed(self, change: Change, fresh: Sequence[Step], *, settled: bool, expected_s: float) -> None:
        """See proposals.Planner."""
        name = training_run(change)
        if name is not None and (self._job is None or self._job.run != name):
            rules = _rules(change.fleet.runs[name])
            self._job = Job(name, Evidence(self._table.engines, self._table.trainers, rules))
        if fresh:
            if self._fed_at and settled and expected_s:
                self._errors.add(expected_s, (fresh[-1].at - self._fed_at) / len(fresh))
            self._fed_at = fresh[-1].at

    def handed_over(self, item: Reassignment) -> None:
        """See proposals.Planner."""
        for role in {t.role for t in item.targets}:
            self._handover.setdefault(role, Mean()).add(item.end_time - item.create_time)

    @property
    def shifted(self) -> bool:
        """See proposals.Planner."""
        return self._job is not None and self._job.evidence.history.shifted

    def basis(self, change: Change) -> Hashable:
        """See proposals.Planner: steps and replicas. A plan takes long, and reports alone seldom change one; while
        something is handed over, none is wanted.
        """
        if any(r.state not in REASSIGNMENT.terminal for r in change.fleet.reassignments.values()):
            return "handover"
        steps = self._job.evidence.steps if self._job is not None else 0
        return steps, tuple((r.name, r.state) for r in change.fleet.live_replicas())

    # ---- evaluating

    def propose(
        self, change: Change, pace: Pace, steps_left: float, settings: PlannerSettings, state: PlannerState
    ) -> Proposal:
        """See proposals.Planner."""
        view = fleet_view(change, self._observe)
        job, lacking = self._job, unrated(view, self._table)
        if lacking is not None:
            return self._unplanned(view, _no_rates(view, lacking))
        if job is None or not job.evidence.history.samples:
            text = "no step was committed since the scheduler started or the run began"
            return self._unplanned(view, Reason("NO_EVIDENCE", text))
        given = self._situation(change, view, job.evidence, pace, steps_left)
        found = relayout.plan(given, settings, state)
        return self._proposal(change, given, settings, found)

    def _situation(
        self, change: Change, view: topology.Fleet, evidence: Evidence, pace: Pace, steps_left: float
    ) -> Situation:
        kinds = makeable(change, view, self._table)
        seconds = {role: mean.value for role, mean in self._handover.items() if mean.value is not None}
        given = evidence.situation(view, pace, steps_left=steps_left, handover_s=seconds)
        return replace(
            given, engines={k: r for k, r in given.engines.items() if k in kinds},
            trainers={k: r for k, r in given.trainers.items() if k in kinds},
        )  # fmt: skip

    def _proposal(self, change: Change, given: Situation, settings: PlannerSettings, found: Relayout) -> Proposal:
        gained = planrecords.gains(given, found)
        start, refused = self._start(change, given, settings, found, gained)
        why = found.reason
        if found.moves and start is None:
            first = refused[min(refused)]
            why = Reason(first.code, f"{why.text}; but {first.text}", why.numbers)
            found = replace(found, reason=why)
        generations = {r.name: r.generation for r in change.fleet.live_replicas()}
        seconds = found.present.judged.prediction.step_seconds
        return Proposal(
            why, found.chosen.judged.layout.words(), found.present.reason.text, found.chosen.reason.text,
            seconds if seconds < NEVER_S else 0.0, start,
            planrecords.plan(found, gained, self._table, generations, refused, self._errors.median),
        )  # fmt: skip

    def _unplanned(self, view: topology.Fleet, why: Reason) -> Proposal:
        words = view.present.words()
        return Proposal(why, words, words, words, 0.0, None, planrecords.unplanned(view.present, self._table, why))

    # ---- what comes of it

    def _start(
        self, change: Change, given: Situation, settings: PlannerSettings, found: Relayout, gained: Sequence[float]
    ) -> tuple[Start | None, dict[int, Reason]]:
        """The first move that can start now, and why those before it cannot; the rest is planned anew."""
        refused: dict[int, Reason] = {}
        limits = Limits(settings.min_trainers, settings.min_rollouts, given.demand.longest_context)
        progress = Progress(given.fleet, Safety(limits, given.engines, given.trainers))
        for number, planned in enumerate(found.moves[: planrecords.MAX_MOVES]):
            # the order of moves is safe as a whole; one that is taken out of turn must be so by itself
            unsafe = progress.unsafe(planned.move) if number else None
            targets = self._targets(change, planned.move) if unsafe is None else unsafe
            if isinstance(targets, Reason):
                refused[number] = targets
                continue
            sources = tuple(change.fleet.replicas[name] for name in planned.move.sources)
            text = f"{planned.reason.text}: {found.reason.text}"[:1024]
            words = Reason(found.reason.code, text, found.reason.numbers)
            return Start(sources, targets, number, gained[number] / found.horizon_s, words), refused
        return None, refused

    def _targets(self, change: Change, move: Move) -> tuple[Target, ...] | Reason:
        """With a worker for each, none of them twice; or why there is none."""
        freed = {change.fleet.replicas[name].worker for name in move.sources}
        made: list[Target] = []
        for new in move.targets:
            if len({node_of(name) for name in new.accelerators}) > 1:
                return Reason("SPANS_NODES", f"{', '.join(new.accelerators)} lie on several nodes")
            worker = free_worker(change, new.role, new.accelerators, freed, {t.worker for t in made})
            if worker is None:
                text = f"no live {new.role} worker that holds nothing was started with {', '.join(new.accelerators)}"
                return Reason("NO_WORKER", text)
            made.append(self._shapes.target(change.fleet, new.role, new.accelerators, worker.worker))
        return tuple(made)


def _rules(run: Run) -> Rules:
    most = spec(run).limits.max_sequence_tokens
    return Rules(run.max_versions, float(most) if most > 0 else float("inf"))


def _no_rates(view: topology.Fleet, lacking: topology.Replica) -> Reason:
    kind = view.kind(lacking)
    words = f"tp {kind.tp}" if isinstance(kind, EngineKind) else f"{kind.accelerators} accelerators"
    return Reason(
        "NO_RATES",
        f"{lacking.name} is a {lacking.role} replica of type {kind.type} with {words}, which the file of rates lacks; "
        "add its kind and restart the scheduler",
    )
