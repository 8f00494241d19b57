"""One watch, for AdminService and WatchRun alike: history from the store first, then what is committed meanwhile."""

from collections.abc import AsyncIterator, Iterable

from services.common import errors, wire
from services.common.rpc.channel import MAX_ANSWER_BYTES
from services.common.rpc.server import Context
from services.scheduler.api import render
from services.scheduler.api.resources import Resources
from services.scheduler.control.cycle import Cycle
from services.scheduler.control.watch import Overrun
from services.scheduler.core.model import Event
from services.scheduler.store.store import Store

BATCH_EVENTS = 256
MAX_REVISION_EVENTS = 100_000
"""Events of one revision; one that had more would be cut off."""
BOOKMARK_SECONDS = 10.0


async def watch(
    cycle: Cycle, store: Store, options: wire.WatchOptions, context: Context
) -> AsyncIterator[wire.WatchBatch]:
    """Events from `start_revision` on, in order, each revision whole; ends with a bookmark at the call's deadline.

    A follower that is too slow is cut off after a last bookmark, from which it resumes.
    """
    clock = cycle.ledger.clock
    remaining = context.time_remaining()
    until = clock.monotonic() + max(0.0, min(remaining if remaining is not None else 3_600.0, 86_400.0) - 0.5)
    resources = Resources(cycle, store)
    follower = cycle.stream.follow()
    try:
        horizon = cycle.stream.revision
        start = options.start_revision or horizon + 1
        if not 0 < start <= horizon + 1:
            raise errors.invalid_field(
                f"options.start_revision: {options.start_revision}; expected 1 to {horizon + 1}, or 0 for the next one"
            )
        compacted = await store.compacted_revision()
        if start <= compacted:
            raise errors.LibraError(
                "COMPACTED", f"events up to revision {compacted} are gone; list again and watch from its revision + 1",
                compacted_revision=str(compacted),
            )  # fmt: skip
        bookmark = start - 1
        while bookmark < horizon:
            events = await _whole_revisions(store, bookmark)
            events = [e for e in events if e.revision <= horizon]
            if not events:
                bookmark = horizon
                break
            before, bookmark = bookmark, events[-1].revision
            async for batch in _batches(cycle, resources, options, events, before, bookmark):
                yield batch
        yield wire.WatchBatch(bookmark=max(bookmark, horizon), term=cycle.ledger.fleet.term)
        bookmark = max(bookmark, horizon)
        while clock.monotonic() < until:
            try:
                items = await follower.next(min(BOOKMARK_SECONDS, max(0.01, until - clock.monotonic())))
            except Overrun:
                break
            fresh = [(r, e) for r, e in items if r > bookmark]
            before = bookmark
            if fresh:
                bookmark = fresh[-1][0]
            flat = [e for _, events in fresh for e in events if e.revision >= start]
            if flat or not items:
                async for batch in _batches(cycle, resources, options, flat, before, bookmark):
                    yield batch
        yield wire.WatchBatch(bookmark=bookmark, term=cycle.ledger.fleet.term)
    finally:
        cycle.stream.leave(follower)


async def _whole_revisions(store: Store, after: int) -> list[Event]:
    """A page of history that never ends in the middle of a revision."""
    events = await store.events(after, BATCH_EVENTS)
    if len(events) < BATCH_EVENTS:
        return events
    last = events[-1].revision
    whole = [e for e in events if e.revision < last]
    return whole or await store.events(after, MAX_REVISION_EVENTS, up_to_revision=last)


async def _batches(
    cycle: Cycle, resources: Resources, options: wire.WatchOptions, events: Iterable[Event], before: int, bookmark: int
) -> AsyncIterator[wire.WatchBatch]:
    """The events in one batch, or in several where their resources are large.

    The last has `bookmark`; those before it have the newest revision that is complete, `before` at first, so that a
    follower who resumes there gets a revision that was cut as a whole again.
    """
    term = cycle.ledger.fleet.term
    batch, size, complete, latest = wire.WatchBatch(term=term), 0, before, before
    for event in events:
        if event.revision != latest:
            complete, latest = latest, event.revision
        if not selected(event, options.selector):
            continue
        message = render.event(event)
        if options.with_resource:
            resource = await resources.get(event.name, missing_ok=True)
            if resource is not None:
                message.resource.CopyFrom(resource)
        size += message.ByteSize()
        if batch.events and size > MAX_ANSWER_BYTES:
            batch.bookmark = complete
            yield batch
            batch, size = wire.WatchBatch(term=term), message.ByteSize()
        batch.events.append(message)
    batch.bookmark = bookmark
    yield batch


def selected(event: Event, selector: wire.Selector) -> bool:
    """True if the event matches all that the selector states."""
    kinds = {wire.ResourceKind.Name(k).removeprefix("RESOURCE_KIND_") for k in selector.kinds if k}
    if kinds and event.kind not in kinds:
        return False
    prefix = selector.name_prefix.rstrip("/")
    if prefix and event.name != prefix and not event.name.startswith(prefix + "/"):
        return False
    return not selector.states or event.to_state in selector.states
