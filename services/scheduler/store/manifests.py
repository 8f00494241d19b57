"""Manifests of steps, and which version each trajectory went into."""

from dataclasses import dataclass

import sqlalchemy as sa

from services.scheduler.core.model import Fleet, Manifest
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.paging import page


@dataclass(frozen=True, slots=True)
class Consumption:
    """A trajectory's entry into a version. There is one for each (run, policy, lineage, trajectory), never two."""

    run: str
    policy: str
    lineage: int
    trajectory: str
    number: int
    manifest: str


MANIFESTS = Mapping(
    Manifest, schema.MANIFESTS, fixed="run policy step lineage base groups members attempts masked create_time"
)
CONSUMPTIONS = Mapping(Consumption, schema.CONSUMPTIONS, "run policy lineage trajectory", once=True)


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """Those of steps under way and those that no checkpoint covers: the redo log."""
    t = schema.MANIFESTS.c
    query = MANIFESTS.select().where(sa.text(schema.LIVE_MANIFEST)).order_by(t.run, t.step, t.name)
    fleet.manifests = {m.name: m for m in MANIFESTS.read(connection, query)}


def in_order(connection: sa.Connection, run: str, after: str, limit: int) -> list[Manifest]:
    """A page of a run's manifests by step."""
    conditions = [schema.MANIFESTS.c.run == run]
    return page(connection, MANIFESTS, conditions, ("run", "step", "name"), after=after, limit=limit)


def consumed(connection: sa.Connection, run: str, trajectory: str) -> list[Consumption]:
    """Versions that a trajectory went into, one for each policy and lineage."""
    t = schema.CONSUMPTIONS.c
    query = CONSUMPTIONS.select().where(t.run == run, t.trajectory == trajectory)
    return CONSUMPTIONS.read(connection, query.order_by(t.policy, t.lineage))
