"""The scheduler's cycle: expire what is over, repair and move, update weights, admit, queue, plan, tell.

The naive cycle reads everything, decides everything and writes everything, each time. This one does the same on the
live state in memory and writes only what changed, as one transaction; it runs when something changed, at most every
`cycle_s` seconds, and at least every second, since deadlines pass without an event. Nothing on a worker's hot path
waits for it: a turn report is answered by its own transaction, and a worker goes on with its trajectories meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from services.common import errors, log, wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.scheduler.control import commands, nodes, runs, sessions, trajectories
from services.scheduler.control.decisions import Decisions
from services.scheduler.control.dispatcher import Dispatcher
from services.scheduler.control.handover import Handovers
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.control.observe import Observe
from services.scheduler.control.planning import Planning
from services.scheduler.control.queueing import Queueing
from services.scheduler.control.relayouts import Relayouts
from services.scheduler.control.shapes import Shapes
from services.scheduler.control.specs import spec
from services.scheduler.control.splits import Splits
from services.scheduler.control.watch import Stream
from services.scheduler.control.weights import Weights
from services.scheduler.core import admission
from services.scheduler.core.lifecycle import RUN
from services.scheduler.core.model import Run
from services.scheduler.rates import RateTable

_log = log.get(__name__)

IDLE_SECONDS = 1.0
PRUNE_SECONDS = 300.0
ADMIT_AT_ONCE = 64
"""Groups admitted in one cycle, so that one transaction stays small."""


class Prunable(Protocol):
    """The store's side of pruning."""

    async def prune(self, now: float) -> int:
        """Deletes rows over their keep; returns how many."""
        ...


class Cycle:
    """All that the scheduler decides with; the api reads it and hands it what was reported."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, rates: RateTable | None = None) -> None:
        self.ledger = ledger
        self.blobs = blobs
        self.holds = sessions.Holds()
        self.decisions = Decisions()
        self.observe = Observe(ledger)
        shapes = Shapes(ledger.config, rates)
        self.handovers = Handovers(ledger, shapes)
        self.weights = Weights(ledger)
        self.dispatcher = Dispatcher(ledger)
        self.queueing = Queueing(ledger, self.observe, self.decisions)
        planner = (
            Splits(ledger, self.observe, shapes) if rates is None else Relayouts(ledger, self.observe, shapes, rates)
        )
        self.planning = Planning(ledger, self.observe, self.handovers, self.decisions, planner)
        self.stream = Stream(ledger.fleet.revision)
        self.tasks: dict[str, runs.TaskFile] = {}
        self.unreadable: dict[str, str] = {}
        """Runs whose task file could not be read after a start, and why: they are paused, the others go on."""
        self.timed: list[Callable[[float], None]] = []
        """Told how long each pass took, seconds."""
        ledger.listeners.append(self.stream)

    async def load_tasks(self) -> None:
        """Reads the task files of active runs again after a start."""
        for run in self.ledger.fleet.runs.values():
            if run.task_blob and run.state in ("ACTIVE", "PAUSED"):
                try:
                    self.tasks[run.name] = await self.read_tasks(run)
                except LibraError as error:
                    self.unreadable[run.name] = error.message

    async def read_tasks(self, run: Run) -> runs.TaskFile:
        """A run's task file; LibraError if it is gone or differs."""
        ref = wire.BlobRef.FromString(run.task_blob)
        return await asyncio.to_thread(runs.read_tasks, self.blobs, ref)

    async def run(self) -> None:
        """Runs until cancelled. An error of the core ends it, and with it the process: a wrong state is not kept."""
        config = self.ledger.config
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await self.ledger.cycle_wanted.wait()
            self.ledger.cycle_wanted.clear()
            began = self.ledger.clock.monotonic()
            change = self.once()
            for tell in self.timed:
                tell(self.ledger.clock.monotonic() - began)
            if not change.empty:
                await self.ledger.commit(change)
                # our own commit wakes us once more: decisions follow from decisions (a release allows a grant)
            await asyncio.sleep(config.cycle_s)

    def once(self) -> Change:
        """One pass over the live state, as one change."""
        change = self.ledger.change("scheduler/cycle")
        sessions.expire(change, self.holds)
        self._expire_commands(change)
        self._expire_trajectories(change)
        self.handovers.restore_layout(change)
        self.handovers.advance(change)
        nodes.forget_left(change)
        self.weights.advance(change)
        for run in list(self.ledger.fleet.runs.values()):
            if run.state == "ACTIVE" and run.name in self.unreadable:
                run.etag += 1
                change.move(RUN, run, "pause", "TASKS_UNREADABLE", self.unreadable[run.name][:1024])
            elif run.state == "ACTIVE":
                self._admit(change, run)
                runs.finish_if_done(change, run)
        self.queueing.decide(change)
        self.planning.step(change)
        self.dispatcher.refresh(change)
        commands.forget_finished(self.ledger)
        return change

    def _expire_commands(self, change: Change) -> None:
        before = {c.name for c in self.ledger.fleet.commands.values() if c.state == "EXPIRED"}
        commands.expire(change)
        for command in list(self.ledger.fleet.commands.values()):
            if command.state != "EXPIRED" or command.name in before:
                continue
            if command.kind.startswith("load."):
                self.weights.on_silent(change, command)
            elif command.kind.startswith("handover."):
                self.handovers.on_result(change, command, False, "DEADLINE", f"{command.worker} did not answer in time")

    def _expire_trajectories(self, change: Change) -> None:
        """Leases that ran too long, of which nothing is heard, or which their holder does not have."""
        leases = self.ledger.config.leases
        for item in list(self.ledger.fleet.trajectories.values()):
            if item.state != "LEASED":
                continue
            run = self.ledger.fleet.runs[item.run]
            if item.run_seconds + change.at - item.leased_at > run.max_run_time:
                text = f"ran longer than the run's limit of {run.max_run_time:g} s"
                trajectories.fail(change, item, "DEADLINE", "MAX_RUN_TIME", text)
            elif change.at - item.progress_at > leases.trajectory_stall:
                text = f"{item.worker} reported nothing of it for {leases.trajectory_stall:g} s"
                trajectories.fail(change, item, "WORKER", "STALLED", text)
            elif change.at - item.leased_at > leases.ttl and self._not_held(item.holder, item.name, item.lease_epoch):
                trajectories.fail(change, item, "WORKER", "NOT_HELD", f"{item.worker} does not have it (any more)")

    def _not_held(self, session: str, name: str, lease_epoch: int) -> bool:
        """True if the holder's own complete list lacks this lease."""
        known = self.holds.by_session.get(session)
        if known is None or not known.complete:
            return False
        return known.items.get(name, (-1, ""))[0] != lease_epoch

    def _admit(self, change: Change, run: Run) -> None:
        tasks = self.tasks.get(run.name)
        if tasks is None or run.exhausted:
            return
        view = self.admission_view(run)
        decision = admission.groups_to_admit(view)
        if decision.count:
            runs.admit_from_file(change, run, tasks, min(decision.count, ADMIT_AT_ONCE))

    def admission_view(self, run: Run) -> admission.AdmissionView:
        """What admission knows of a run."""
        fleet = self.ledger.fleet
        mine = [g for g in fleet.groups.values() if g.run == run.name]
        return admission.AdmissionView(
            kind=run.kind,
            paused=run.state != "ACTIVE",
            max_versions=run.max_versions,
            batch_groups=run.batch_groups,
            group_size=run.group_size,
            unconsumed_groups=sum(g.state in ("OPEN", "CLOSED", "BATCHED") for g in mine),
            ready_groups=sum(g.state == "CLOSED" for g in mine),
            in_flight=runs.in_flight(self.ledger, run),
            max_in_flight=run.max_in_flight,
            tasks_left=max(0, (run.task_epochs - run.cursor_epoch) * run.task_lines - run.cursor_position),
            serving_lag=self._serving_lag(run),
        )

    def _serving_lag(self, run: Run) -> int:
        """Versions by which the slowest engine that admits work of the run is behind its head."""
        serving = [
            r.serving_number
            for r in self.ledger.fleet.live_replicas()
            if r.role == "ROLLOUT" and r.state == "ACTIVE" and r.serving_run == run.name
        ]
        return max(0, run.head - min(serving)) if serving and run.kind == "TRAIN" else 0

    def environments_of(self, run: Run, *, strict: bool = False) -> list[wire.ToolEnvRoute]:
        """Where the run's environments are: as the run says, else as configured."""
        routes = list(spec(run).tool_envs)
        named = {r.environment for r in routes}
        if run.environment and run.environment not in named:
            address = self.ledger.config.environments.get(run.environment)
            if address:
                routes.append(wire.ToolEnvRoute(environment=run.environment, endpoint=address))
            elif strict:
                known = ", ".join(sorted(self.ledger.config.environments)) or "none"
                raise errors.inconsistent(
                    f"environment {run.environment!r} is neither in the run's tool_envs nor in the scheduler's "
                    f"configuration (known there: {known})"
                )
        return routes

    async def prune(self, reads: Prunable) -> None:
        """Deletes answers and events that are over their keep, now and then."""
        while True:
            await asyncio.sleep(PRUNE_SECONDS)
            deleted = await reads.prune(self.ledger.clock.wall())
            if deleted:
                _log.info("pruned", rows=deleted)
