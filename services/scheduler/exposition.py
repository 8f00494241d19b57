"""What the scheduler shows at /metrics: counts of committed events, and the live state in numbers (figures.py).

Counters begin at zero with the process; gauges are right from the first scrape after a restart (`restore`).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import prometheus_client as prometheus
from prometheus_client.metrics_core import Metric

from services.common.metrics import LATENCY_BUCKETS, Exposition, counter, gauge, short
from services.scheduler import figures
from services.scheduler.control.cycle import Cycle
from services.scheduler.control.observe import Step, step_of
from services.scheduler.core.lifecycle import REASSIGNMENT, TRAJECTORY
from services.scheduler.core.model import Event, Run
from services.scheduler.store.store import Store
from services.scheduler.store.writer import Writer

REASSIGNMENT_CAUSES = ("planner", "bootstrap", "operator")
DIRECTIONS = ("rollout", "trainer")
OUTCOMES = tuple(sorted(s.lower() for s in REASSIGNMENT.terminal))
PREEMPTION_CAUSES = ("cmlfq", "handover", "operator")
HANDOVER_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
"""Upper ends, seconds."""
MEMBERS_AT_ONCE = 1_000
ENDED_STATES = tuple(sorted(TRAJECTORY.terminal))


class SchedulerExposition:
    """A listener of committed events and the exposition of what it counts."""

    def __init__(self, cycle: Cycle, writer: Writer) -> None:
        self._cycle = cycle
        self._fleet = cycle.ledger.fleet
        self._restored: dict[str, Step] = {}
        self._asked: dict[str, str] = {}
        """Who asked for a running trajectory's preemption; an entry goes with the lease."""
        self._ended: Counter[tuple[str, str]] = Counter()
        self._steps: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()
        self._events = prometheus.Counter(
            "libra_events_total", "Committed events by kind of resource.", ["kind"], registry=None
        )
        self._preemptions = prometheus.Counter(
            "libra_preemptions_total", "Preemptions that took effect, by who asked.", ["cause"], registry=None
        )
        self._moves = prometheus.Counter(
            "libra_reassignments_total", "Hand-overs that ended; cause bootstrap is the layout's repair.",
            ["to", "outcome", "cause"], registry=None,
        )  # fmt: skip
        self._seconds = prometheus.Histogram(
            "libra_reassignment_seconds", "Time of a hand-over from its start to its end.", ["to", "outcome"],
            buckets=HANDOVER_BUCKETS, registry=None,
        )  # fmt: skip
        passes = prometheus.Histogram(
            "libra_cycle_seconds", "Time of one pass of decisions.", buckets=LATENCY_BUCKETS, registry=None
        )
        commits = prometheus.Histogram(
            "libra_commit_seconds", "Time of one transaction of the database.", buckets=LATENCY_BUCKETS, registry=None
        )
        # a series that begins with its first event would hide that event from increase()
        for cause in PREEMPTION_CAUSES:
            self._preemptions.labels(cause)
        for to, outcome in itertools.product(DIRECTIONS, OUTCOMES):
            self._seconds.labels(to, outcome)
            for cause in REASSIGNMENT_CAUSES:
                self._moves.labels(to, outcome, cause)
        cycle.ledger.listeners.append(self)
        cycle.timed.append(passes.observe)
        writer.timed.append(commits.observe)
        self.exposition = Exposition(
            "scheduler", self._figures,
            (self._events, self._preemptions, self._moves, self._seconds, passes, commits),
        )  # fmt: skip

    async def restore(self, store: Store) -> None:
        """Reads what is shown of the newest steps and is in memory only."""
        for run in figures.shown_runs(self._fleet, self._cycle.ledger.clock.wall()):
            head = (run.name, run.lineage, run.head)
            made = (v.manifest for v in self._fleet.versions.values() if (v.run, v.lineage, v.number) == head)
            manifest = await store.manifest(next(made, ""))
            if manifest is None:
                continue
            named = set(manifest.members)
            members = []
            for group in manifest.groups:
                members += await store.trajectories(group=group, limit=MEMBERS_AT_ONCE)
            self._restored[run.name] = step_of(manifest, [m for m in members if m.name in named], 0.0, 0)

    # ---- events

    def committed(self, revision: int, events: tuple[Event, ...]) -> None:
        """Counts what was committed; called on the loop, in order."""
        del revision
        for kind, count in Counter(e.kind for e in events).items():
            self._events.labels(kind.lower()).inc(count)
        for event in events:
            if event.kind == "TRAJECTORY":
                self._trajectory(event)
            elif event.kind == "COMMAND" and not event.from_state and len(event.related) > 1:
                subject, cause = event.related[:2]
                if cause in PREEMPTION_CAUSES:
                    self._asked[subject] = cause
            elif event.kind == "MANIFEST" and (event.from_state, event.to_state) == ("TAKEN", "COMMITTED"):
                run = event.name.partition("/manifests/")[0]
                self._steps[run] += 1
                self._trained[run] += int(dict(event.numbers).get("trainable_tokens", 0))
            elif event.kind == "REASSIGNMENT" and event.from_state != event.to_state:
                self._reassignment(event)

    def _trajectory(self, event: Event) -> None:
        if event.from_state == "LEASED":
            cause = self._asked.pop(event.name, "")
            # a command that came too late preempted nothing
            if cause and (event.to_state, event.reason_code) == ("QUEUED", "PREEMPTED"):
                self._preemptions.labels(cause).inc()
        if event.to_state in TRAJECTORY.terminal and event.from_state != event.to_state:
            self._ended[event.name.partition("/trajectories/")[0], event.to_state] += 1

    def _reassignment(self, event: Event) -> None:
        item = self._fleet.reassignments.get(event.name)
        if event.to_state not in REASSIGNMENT.terminal or item is None or not item.targets:
            return
        to, outcome = item.targets[0].role.lower(), event.to_state.lower()
        self._moves.labels(to, outcome, item.cause).inc()
        self._seconds.labels(to, outcome).observe(max(0.0, event.time - item.create_time))

    # ---- figures

    def _figures(self) -> Iterator[Metric]:
        fleet, ledger = self._fleet, self._cycle.ledger
        runs = figures.shown_runs(fleet, ledger.clock.wall())
        self._forget({r.name for r in runs})
        yield gauge("libra_term", "Term that this scheduler leads.", rows={(): float(fleet.term)})
        yield from figures.accelerators(fleet)
        yield from figures.trajectories(fleet, runs, ledger.config.levels.values())
        yield from figures.runs(runs, self._newest())
        yield from figures.workers(fleet)
        yield from figures.planner(fleet)
        yield from self._run_counters(runs)

    def _newest(self) -> dict[str, Step]:
        return self._restored | {step.run: step for step in self._cycle.observe.steps}

    def _run_counters(self, runs: Iterable[Run]) -> Iterator[Metric]:
        by, names = ["run"], {r.name: (short(r.name),) for r in runs}
        train = {r.name: names[r.name] for r in runs if r.kind == "TRAIN"}
        yield counter(
            "libra_trajectories_ended_total", "Trajectories that ended, by how.", ["run", "state"],
            {(short(n), s.lower()): float(self._ended[n, s]) for n in names for s in ENDED_STATES},
        )  # fmt: skip
        generated = self._cycle.ledger.generated
        yield counter(
            "libra_generated_tokens_total", "Generated tokens that were registered.", by,
            {label: float(generated[name]) for name, label in names.items()},
        )  # fmt: skip
        yield counter(
            "libra_trained_tokens_total", "Trainable tokens of committed steps.", by,
            {label: float(self._trained[name]) for name, label in train.items()},
        )  # fmt: skip
        yield counter(
            "libra_steps_total", "Committed steps.", by,
            {label: float(self._steps[name]) for name, label in train.items()},
        )  # fmt: skip

    def _forget(self, shown: set[str]) -> None:
        """Counts of runs that are no longer shown go, or they would pile up."""
        for key in [k for k in self._ended if k[0] not in shown]:
            del self._ended[key]
        for counts in (self._steps, self._trained, self._cycle.ledger.generated, self._restored):
            for name in [n for n in counts if n not in shown]:
                del counts[name]
