"""One watch, for AdminService and WatchRun alike: history from the store first, then what is committed meanwhile."""

from collections.abc import AsyncIterator, Iterable

from services.common import errors, wire
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
            bookmark = events[-1].revision
            yield await _batch(cycle, resources, options, events, bookmark)
        yield await _batch(cycle, resources, options, [], max(bookmark, horizon))
        bookmark = max(bookmark, horizon)
        while clock.monotonic() < until:
            try:
                items = await follower.next(min(BOOKMARK_SECONDS, max(0.01, until - clock.monotonic())))
            except Overrun:
                break
            fresh = [(r, e) for r, e in items if r > bookmark]
            if fresh:
                bookmark = fresh[-1][0]
            flat = [e for _, events in fresh for e in events if e.revision >= start]
            if flat or not items:
                yield await _batch(cycle, resources, options, flat, bookmark)
        yield await _batch(cycle, resources, options, [], bookmark)
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


async def _batch(
    cycle: Cycle, resources: Resources, options: wire.WatchOptions, events: Iterable[Event], bookmark: int
) -> wire.WatchBatch:
    batch = wire.WatchBatch(bookmark=bookmark, term=cycle.ledger.fleet.term)
    for event in events:
        if not selected(event, options.selector):
            continue
        message = render.event(event)
        if options.with_resource:
            resource = await resources.get(event.name, missing_ok=True)
            if resource is not None:
                message.resource.CopyFrom(resource)
        batch.events.append(message)
    return batch


def selected(event: Event, selector: wire.Selector) -> bool:
    """True if the event matches all that the selector states."""
    kinds = {wire.ResourceKind.Name(k).removeprefix("RESOURCE_KIND_") for k in selector.kinds if k}
    if kinds and event.kind not in kinds:
        return False
    prefix = selector.name_prefix.rstrip("/")
    if prefix and event.name != prefix and not event.name.startswith(prefix + "/"):
        return False
    return not selector.states or event.to_state in selector.states
