"""The record of all changes, and answers kept for repeated requests."""

from collections.abc import Sequence

import sqlalchemy as sa

from services.common.errors import LibraError
from services.scheduler.core.model import Answer, Event
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.paging import bounded, under

EVENTS = Mapping(Event, schema.EVENTS, "revision index", once=True)
ANSWERS = Mapping(Answer, schema.ANSWERS, "request_id")

LAST_INDEX = (1 << 31) - 1
"""Above every index within a revision."""


def compacted_revision(connection: sa.Connection) -> int:
    """Newest revision whose events were pruned; 0 if none were."""
    revision: int = connection.execute(sa.select(schema.LEADER.c.compacted_revision)).scalar_one()
    return revision


def after(
    connection: sa.Connection,
    place: tuple[int, int],
    limit: int,
    *,
    up_to_revision: int,
    kinds: Sequence[str],
    name_prefix: str,
    states: Sequence[str],
) -> list[Event]:
    """Events behind `place` (revision, index), oldest first; COMPACTED if some of those were pruned."""
    compacted = compacted_revision(connection)
    if 0 < place[0] < compacted:
        raise LibraError(
            "COMPACTED",
            f"events up to revision {compacted} were pruned; those after {place[0]} are not all there: list again",
            compacted_revision=str(compacted),
        )
    t = schema.EVENTS.c
    conditions: list[sa.ColumnElement[bool]] = [sa.tuple_(t.revision, t["index"]) > sa.tuple_(*place)]
    if up_to_revision:
        conditions.append(t.revision <= up_to_revision)
    if kinds:
        conditions.append(t.kind.in_(kinds))
    if name_prefix:
        conditions.append(under(t.name, name_prefix))
    if states:
        conditions.append(t.to_state.in_(states))
    query = EVENTS.select().where(*conditions).order_by(t.revision, t["index"]).limit(bounded(limit))
    return EVENTS.read(connection, query)


def of(connection: sa.Connection, name: str, limit: int) -> list[Event]:
    """The newest events of one resource, newest first."""
    t = schema.EVENTS.c
    query = EVENTS.select().where(t.name == name).order_by(t.revision.desc(), t["index"].desc())
    return EVENTS.read(connection, query.limit(bounded(limit)))


def answer(connection: sa.Connection, request_id: str) -> Answer | None:
    """The answer given to a request."""
    found = ANSWERS.read(connection, ANSWERS.select().where(schema.ANSWERS.c.request_id == request_id))
    return found[0] if found else None


def surplus(connection: sa.Connection, keep: int) -> int:
    """The newest revision that may go while the `keep` newest events stay, their revisions whole; 0 if none may."""
    t = schema.EVENTS.c
    query = sa.select(t.revision).order_by(t.revision.desc(), t["index"].desc()).offset(keep - 1).limit(1)
    oldest_kept: int = connection.execute(query).scalar() or 1
    return oldest_kept - 1


def prune_events(connection: sa.Connection, up_to: int, at_once: int) -> tuple[int, int]:
    """Deletes whole revisions up to `up_to`, about `at_once` events; returns (events deleted, last revision gone)."""
    t = schema.EVENTS.c
    oldest = sa.select(t.revision).order_by(t.revision, t["index"]).offset(at_once - 1).limit(1)
    last = min(up_to, connection.execute(oldest).scalar() or up_to)
    deleted = connection.execute(sa.delete(schema.EVENTS).where(t.revision <= last)).rowcount
    connection.execute(sa.update(schema.LEADER).values(compacted_revision=last))
    return deleted, last


def prune_answers(connection: sa.Connection, before: float, at_once: int) -> int:
    """Deletes up to `at_once` answers older than `before` (wall clock); returns how many."""
    t = schema.ANSWERS.c
    old = sa.select(t.request_id).where(t.create_time < before).order_by(t.create_time).limit(at_once)
    return connection.execute(sa.delete(schema.ANSWERS).where(t.request_id.in_(old))).rowcount
