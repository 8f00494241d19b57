"""The store: the leader's term, the state to start from, and reads of what is committed.

Writing goes through `writer.Writer`. Reads run in threads on connections of their own: they never wait for the writer
and see only what is committed.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from services.common import log
from services.common.errors import LibraError
from services.scheduler.core import model
from services.scheduler.store import (
    accelerators,
    commands,
    database,
    events,
    leadership,
    manifests,
    plans,
    replicas,
    runs,
    trajectories,
    workers,
)
from services.scheduler.store.manifests import Consumption
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.paging import by_name, named

_log = log.get(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Named = (
    model.Worker
    | model.Session
    | model.Node
    | model.Accelerator
    | model.Replica
    | model.Reassignment
    | model.Command
    | model.Run
    | model.Lineage
    | model.WeightVersion
    | model.Group
    | model.Trajectory
    | model.Manifest
    | model.Plan
)

KINDS: dict[str, Mapping[Any]] = {
    "NODE": accelerators.NODES,
    "ACCELERATOR": accelerators.ACCELERATORS,
    "REPLICA": replicas.REPLICAS,
    "REASSIGNMENT": replicas.REASSIGNMENTS,
    "WORKER": workers.WORKERS,
    "SESSION": workers.SESSIONS,
    "COMMAND": commands.COMMANDS,
    "RUN": runs.RUNS,
    "GROUP": trajectories.GROUPS,
    "TRAJECTORY": trajectories.TRAJECTORIES,
    "MANIFEST": manifests.MANIFESTS,
    "WEIGHT_VERSION": runs.VERSIONS,
    "LINEAGE": runs.LINEAGES,
    "PLAN": plans.PLANS,
}
"""By the contract's name of the kind."""

READERS = 4
"""Reads under way at once; further ones wait."""
MAX_EVENTS = 1_000_000
"""Events kept; older ones are pruned, and a watch from before them starts anew."""
ANSWER_SECONDS = 86_400.0
"""How long the answer to a request id is kept."""
PRUNE_AT_ONCE = 5_000
"""Rows deleted in one transaction, so that commits wait for milliseconds only."""


class Store:
    """An open database. Built by `engine.open_store`."""

    def __init__(self, engine: sa.Engine, lock: database.FileLock | None) -> None:
        self.engine = engine
        self.term = 0
        self._lock = lock
        self._readers = ThreadPoolExecutor(READERS, "store-reader")

    def close(self) -> None:
        """Closes all connections and lets go of the database file."""
        self._readers.shutdown()
        self.engine.dispose()
        if self._lock is not None:
            self._lock.release()

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A snapshot: all reads on the connection see the same committed state."""
        with self.engine.connect() as connection:
            if connection.dialect.name == "postgresql":
                connection = connection.execution_options(isolation_level="REPEATABLE READ")  # noqa: PLW2901
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction that keeps other writers out (SQLite) or may wait for their rows (Postgres)."""
        with self.engine.connect().execution_options(**database.WRITES) as connection, connection.begin():
            yield connection

    def acquire_term(self) -> int:
        """Begins a new term: whoever led before can commit nothing any more."""
        with self.writing() as connection:
            self.term = leadership.acquire(connection)
        return self.term

    def load(self) -> model.Fleet:
        """The state to start from: what is not ended, and what is needed beside it. Monotonic times are 0."""
        fleet = model.Fleet()
        with self.reading() as connection:
            fleet.term, fleet.revision, fleet.next_generation = leadership.counters(connection)
            for noun in (workers, accelerators, replicas, commands, runs, manifests, trajectories, plans):
                noun.load(connection, fleet)
        return fleet

    async def prune(self, now: float, max_events: int = MAX_EVENTS) -> int:
        """Deletes answers older than a day before `now` (wall clock) and events beyond `max_events`; returns how many.

        Deposed if the term of `acquire_term` is over.
        """
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._prune, now, max_events)

    def _prune(self, now: float, max_events: int) -> int:
        total = 0
        with self.reading() as connection:
            up_to = events.surplus(connection, max_events)
            last = events.compacted_revision(connection)
        while last < up_to:
            with self.writing() as connection:
                leadership.hold(connection, self.term)
                deleted, last = events.prune_events(connection, up_to, PRUNE_AT_ONCE)
            total += deleted
        deleted = PRUNE_AT_ONCE
        while deleted == PRUNE_AT_ONCE:
            with self.writing() as connection:
                leadership.hold(connection, self.term)
                deleted = events.prune_answers(connection, now - ANSWER_SECONDS, PRUNE_AT_ONCE)
            total += deleted
        return total

    async def _read(self, read: Callable[Concatenate[sa.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        def run() -> T:
            try:
                with self.reading() as connection:
                    return read(connection, *args, **kwargs)
            except (sa.exc.OperationalError, sa.exc.InterfaceError) as error:
                _log.warning("the database could not be read", error=str(error.orig))
                raise LibraError("NOT_LEADER", "the database does not answer; ask again in a moment") from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    async def get_entity(self, kind: str, name: str) -> Named | None:
        """One entity of a kind of the contract ("REPLICA", "RUN" ...), None if there is none."""
        return await self._read(named, KINDS[kind], name)

    async def list_entities(
        self, kind: str, name_prefix: str = "", states: Sequence[str] = (), after: str = "", limit: int = 100
    ) -> list[Named]:
        """A page of entities of a kind, by name, after the name `after` (which need not exist).

        `name_prefix` ends at a path boundary: "runs/a" has "runs/a/groups/1", not "runs/ab". `states` picks by state
        (workers: by health); kinds that have none are not picked.
        """
        return await self._read(by_name, KINDS[kind], name_prefix, states, after=after, limit=limit)

    async def trajectory(self, name: str) -> model.Trajectory | None:
        """One trajectory, also an ended one."""
        return await self._read(named, trajectories.TRAJECTORIES, name)

    async def trajectories(
        self, *, run: str = "", group: str = "", states: Sequence[str] = (), after: str = "", limit: int = 100
    ) -> list[model.Trajectory]:
        """A page of trajectories of a run or a group, in admission order, after the one named `after`."""
        return await self._read(trajectories.in_admission_order, run, group, states, after=after, limit=limit)

    async def terminal_counts(self, run: str) -> dict[str, int]:
        """How many trajectories of a run ended in each state."""
        return await self._read(trajectories.terminal_counts, run)

    async def attempts(self, trajectory: str) -> list[model.Attempt]:
        """Attempts of a trajectory, first one first."""
        return await self._read(trajectories.attempts, trajectory)

    async def sequences(self, trajectory: str, attempt: int) -> list[model.Sequence]:
        """Sequences of an attempt, in the order of registration."""
        return await self._read(trajectories.registered, trajectories.SEQUENCES, trajectory, attempt)

    async def segments(self, trajectory: str, attempt: int) -> list[model.Segment]:
        """Segments of an attempt, in the order of registration."""
        return await self._read(trajectories.registered, trajectories.SEGMENTS, trajectory, attempt)

    async def turns(self, trajectory: str, attempt: int) -> list[model.Turn]:
        """Turns of an attempt, in the order of registration."""
        return await self._read(trajectories.registered, trajectories.TURNS, trajectory, attempt)

    async def manifest(self, name: str) -> model.Manifest | None:
        """One manifest, whatever became of it."""
        return await self._read(named, manifests.MANIFESTS, name)

    async def manifests(self, run: str, *, after: str = "", limit: int = 100) -> list[model.Manifest]:
        """A page of a run's manifests by step, after the one named `after`."""
        return await self._read(manifests.in_order, run, after, limit)

    async def consumptions(self, run: str, trajectory: str) -> list[Consumption]:
        """Versions that a trajectory went into: one for each policy and lineage."""
        return await self._read(manifests.consumed, run, trajectory)

    async def commands(
        self, *, worker: str = "", subject: str = "", after: str = "", limit: int = 100
    ) -> list[model.Command]:
        """A page of commands, newest first, after the one named `after`."""
        return await self._read(commands.newest_first, after, limit, worker, subject)

    async def reassignments(
        self, *, states: Sequence[str] = (), after: str = "", limit: int = 100
    ) -> list[model.Reassignment]:
        """A page of reassignments, newest first, after the one named `after`."""
        return await self._read(replicas.newest_first, states, after, limit)

    async def plans(self, *, after: str = "", limit: int = 100) -> list[model.Plan]:
        """A page of plans, newest first, after the one named `after`."""
        return await self._read(plans.newest_first, after, limit)

    async def events(
        self,
        after_revision: int,
        limit: int,
        *,
        after_index: int = events.LAST_INDEX,
        up_to_revision: int = 0,
        kinds: Sequence[str] = (),
        name_prefix: str = "",
        states: Sequence[str] = (),
    ) -> list[model.Event]:
        """At most `limit` events behind (after_revision, after_index), oldest first.

        The last revision of a full page may go on in the next one. `up_to_revision` 0 has no end; `states` picks by
        the state after the event. after_revision 0 begins with the oldest event there is; any other one is COMPACTED
        (LibraError) if events behind it were pruned.
        """
        return await self._read(
            events.after,
            (after_revision, after_index),
            limit,
            up_to_revision=up_to_revision,
            kinds=kinds,
            name_prefix=name_prefix,
            states=states,
        )

    async def events_of(self, name: str, limit: int) -> list[model.Event]:
        """The newest events of one resource, newest first."""
        return await self._read(events.of, name, limit)

    async def compacted_revision(self) -> int:
        """Newest revision whose events were pruned; 0 if none were."""
        return await self._read(events.compacted_revision)

    async def answer(self, request_id: str) -> model.Answer | None:
        """The answer given to a request id within the last day."""
        return await self._read(events.answer, request_id)
