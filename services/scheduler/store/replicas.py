"""Replicas and the reassignments that move accelerators between them."""

from collections.abc import Sequence

import sqlalchemy as sa

from services.scheduler.core.model import Fleet, Reassignment, Replica
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.paging import page

REPLICAS = Mapping(Replica, schema.REPLICAS)
REASSIGNMENTS = Mapping(Reassignment, schema.REASSIGNMENTS)

RECENT = 256
"""Ended replicas and reassignments that are loaded too: causes and cool-downs are read from them."""


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """Those not ended, those that the fleet still names, and the RECENT newest of the others."""
    t = schema.REASSIGNMENTS.c
    recent = sa.select(t.name).order_by(t.create_time.desc(), t.name.desc()).limit(RECENT)
    kept = REASSIGNMENTS.select().where(sa.or_(sa.text(schema.LIVE_REASSIGNMENT), t.name.in_(recent)))
    rows = REASSIGNMENTS.read(connection, kept.order_by(t.create_time, t.name))
    fleet.reassignments = {r.name: r for r in rows}
    live = [r for r in rows if r.state not in ("SUCCEEDED", "ROLLED_BACK", "FAILED")]
    named = {s.replica for r in live for s in r.sources} | {x.replica for r in live for x in r.targets}
    named |= {name for a in fleet.accelerators.values() for name in a.replicas}
    c = schema.REPLICAS.c
    newest = sa.select(c.name).order_by(c.update_time.desc(), c.name.desc()).limit(RECENT)
    query = REPLICAS.select().where(sa.or_(sa.text(schema.LIVE_REPLICA), c.name.in_(newest), c.name.in_(sorted(named))))
    fleet.replicas = {r.name: r for r in REPLICAS.read(connection, query.order_by(c.generation, c.name))}


def newest_first(connection: sa.Connection, states: Sequence[str], after: str, limit: int) -> list[Reassignment]:
    """A page of reassignments, newest first."""
    t = schema.REASSIGNMENTS.c
    conditions = [t.state.in_(states)] if states else []
    order = "create_time", "name"
    return page(connection, REASSIGNMENTS, conditions, order, after=after, limit=limit, newest_first=True)
