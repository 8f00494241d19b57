"""The live state with its one writer, and the changes to it.

A handler opens a Change, checks, mutates entities, and hands the change to `commit`; nothing waits in between, so
changes are applied one after the other and reach the database in that order. The answer to a caller goes out after
the commit. Whoever only reads waits for `barrier`, so that nobody is told what a crash could still undo.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.common import log
from services.common.clock import Clock
from services.common.errors import LibraError
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.model import Accelerator, Answer, Command, Entity, Event, Fleet, Node, Trajectory
from services.scheduler.store.unit import Unit
from services.scheduler.store.writer import Writer

_log = log.get(__name__)

STOPPING = "this scheduler is stopping; ask again in a moment"
MAX_ANSWERS = 8_192
"""Answers kept in memory for repeated request ids; older ones are read from the store."""

KINDS = {
    "Worker": "WORKER",
    "Session": "WORKER",
    "Node": "NODE",
    "Accelerator": "ACCELERATOR",
    "Replica": "REPLICA",
    "Reassignment": "REASSIGNMENT",
    "Command": "COMMAND",
    "Run": "RUN",
    "Group": "GROUP",
    "Trajectory": "TRAJECTORY",
    "Manifest": "MANIFEST",
    "WeightVersion": "WEIGHT_VERSION",
    "Lineage": "LINEAGE",
    "Plan": "PLAN",
}


@dataclass(slots=True)
class Revoked:
    """Names that sessions shall no longer have, with the desired revision that says so."""

    by_session: dict[str, list[tuple[int, str]]] = field(default_factory=dict)


class Stateful(Protocol):
    """An entity with a lifecycle."""

    name: str
    state: str


class Listener(Protocol):
    """Who wants to know of committed events."""

    def committed(self, revision: int, events: tuple[Event, ...]) -> None:
        """Called on the loop, in order, after the commit."""
        ...


class Change:
    """What one handler changes; becomes one transaction."""

    def __init__(self, ledger: "Ledger", caused_by: str, cause: str = "") -> None:
        self.ledger = ledger
        self.fleet = ledger.fleet
        self.caused_by = caused_by
        self.cause = cause
        self.unit = Unit()
        self._puts = 0
        self.now = ledger.clock.wall()
        self.at = ledger.clock.monotonic()
        self._events: list[tuple[str, str, str, str, str, str, Mapping[str, float], tuple[str, ...]]] = []

    def put(self, *entities: Entity) -> None:
        """Marks entities as changed; what is written is their state when the change is committed."""
        for entity in entities:
            if hasattr(entity, "update_time"):
                entity.update_time = self.now
            self.unit.put(entity)
            if isinstance(entity, Trajectory):
                self.ledger.touched[entity.name] = None
            elif isinstance(entity, Command) and entity.kind == "preempt":
                self.ledger.touched[entity.subject] = None
        self._puts += len(entities)

    def delete(self, *entities: Node | Accelerator) -> None:
        """Removes hardware that has left."""
        for entity in entities:
            self.unit.delete(entity)
        self._puts += len(entities)

    def move(
        self,
        lifecycle: Lifecycle,
        entity: Stateful,
        event: str,
        code: str = "",
        text: str = "",
        numbers: Mapping[str, float] | None = None,
        related: Iterable[str] = (),
    ) -> None:
        """Takes the entity through its table and records the step; IllegalTransition leaves it untouched."""
        before = entity.state
        entity.state = lifecycle.next(entity.name, before, event)
        if code and hasattr(entity, "reason_code"):
            entity.reason_code = code
            entity.reason_text = text  # type: ignore[attr-defined]
        self.put(entity)  # type: ignore[arg-type]
        self.record(KINDS[type(entity).__name__], entity.name, before, entity.state, code, text, numbers, related)

    def record(
        self,
        kind: str,
        name: str,
        from_state: str,
        to_state: str,
        code: str = "",
        text: str = "",
        numbers: Mapping[str, float] | None = None,
        related: Iterable[str] = (),
    ) -> None:
        """Records an event without a transition (creation: from_state is empty)."""
        self._events.append((kind, name, from_state, to_state, code, text, numbers or {}, tuple(related)[:256]))

    @property
    def empty(self) -> bool:
        """True if there is nothing to commit."""
        return self.unit.empty and not self._events

    @property
    def marks(self) -> int:
        """Rises with everything put or recorded."""
        return self._puts + len(self._events)

    def seal(self, revision: int, term: int) -> tuple[Event, ...]:
        """Numbers the events and freezes the unit."""
        events = tuple(
            Event(
                revision, index, self.now, term, kind, name, before, after, code, text,
                tuple(numbers.items()), self.caused_by, self.cause, related,
            )
            for index, (kind, name, before, after, code, text, numbers, related) in enumerate(self._events)
        )  # fmt: skip
        for event in events:
            self.unit.event(event)
        self.unit.counters(revision=revision, next_generation=self.fleet.next_generation)
        self.unit.seal()
        return events


class Ledger:
    """The fleet's state, the writer behind it, and who waits for changes."""

    def __init__(self, fleet: Fleet, writer: Writer, clock: Clock, config: SchedulerConfig) -> None:
        self.fleet = fleet
        self.clock = clock
        self.config = config
        self.listeners: list[Listener] = []
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._writer = writer
        self._last: asyncio.Future[None] | None = None
        self._answers: dict[str, Answer] = {}
        self.revoked = Revoked()
        self.held_since: dict[str, float] = {}
        """Runs whose trainer is held for the staleness bound, and since when (monotonic)."""
        self.generated: Counter[str] = Counter()
        """Generated tokens registered since the start, by run."""
        self.touched: dict[str, None] = {}
        """Trajectories that changes touched since the queue was last told; it empties this in every pass."""
        self.forget: list[str] = []
        """Groups that are over; dropped from memory when their change is submitted."""
        self._changed = asyncio.Event()
        self.cycle_wanted = asyncio.Event()

    def change(self, caused_by: str, cause: str = "") -> Change:
        """Opens a change; `caused_by` is an identity or "scheduler/{duty}"."""
        return Change(self, caused_by, cause)

    async def commit(self, change: Change) -> int:
        """Hands the change to the writer and waits until it is durable; returns its revision."""
        if change.empty:
            await self.barrier()
            return self.fleet.revision
        revision = self.submit(change)
        await self.barrier()
        return revision

    def submit(self, change: Change) -> int:
        """Hands the change to the writer without waiting; returns its revision."""
        if self.failed.done():
            # what is in memory is not what is stored: nothing more may be built on it
            raise LibraError("NOT_LEADER", STOPPING)
        if change.empty:
            return self.fleet.revision
        self.fleet.revision += 1
        revision = self.fleet.revision
        try:
            events = change.seal(revision, self.fleet.term)
        except Exception as error:
            self.fail(error)
            raise
        future = self._writer.submit(change.unit)
        future.add_done_callback(lambda f: self._done(f, revision, events))
        self._last = future
        self._forget_groups()
        self.cycle_wanted.set()
        self._notify()
        return revision

    def fail(self, error: BaseException) -> None:
        """Memory is ahead of what will be written: stop leading and load again."""
        if not self.failed.done():
            self.failed.set_result(error)

    @contextlib.contextmanager
    def guard(self, change: Change) -> Iterator[None]:
        """Around the code that fills `change`: an error after it touched anything must not leave memory ahead."""
        try:
            yield
        except BaseException as error:
            if not change.empty:
                _log.critical("a change was broken off half-way", caused_by=change.caused_by, error=repr(error))
                self.fail(error)
            raise

    def _done(self, future: "asyncio.Future[None]", revision: int, events: tuple[Event, ...]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None or future.cancelled():
            self.fail(error or asyncio.CancelledError())
            return
        for listener in self.listeners:
            listener.committed(revision, events)

    def _forget_groups(self) -> None:
        fleet = self.fleet
        for name in self.forget:
            group = fleet.groups.pop(name, None)
            for member in group.members if group else ():
                trajectory = fleet.trajectories.pop(member, None)
                for number in range(1, (trajectory.attempt if trajectory else 0) + 1):
                    for table in (fleet.attempts, fleet.sequences, fleet.segments, fleet.turns):
                        table.pop((member, number), None)
        self.forget.clear()

    async def barrier(self) -> None:
        """Waits until everything submitted so far is durable; NOT_LEADER if it will not be, or nobody knows."""
        if self._last is None:
            return
        try:
            await asyncio.shield(self._last)
        except Exception as error:
            # the log has the database's words; a caller can only ask again, a mutation under the same request id
            raise LibraError("NOT_LEADER", STOPPING) from error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout: float) -> None:
        """Returns at the next submitted change, or after `timeout` seconds."""
        event = self._changed
        # asyncio.timeout, here and elsewhere: wait_for of Python 3.11 can swallow a cancellation
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout)):
                await event.wait()

    def remember(self, answer: Answer) -> None:
        """Keeps an answer for a repeated request id."""
        self._answers[answer.request_id] = answer
        while len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def recall(self, request_id: str) -> Answer | None:
        """The answer given to this request id, if it is still in memory."""
        return self._answers.get(request_id)
