"""Runs, and the lineages and versions of their weights."""

import sqlalchemy as sa

from services.scheduler.core.model import Fleet, Lineage, Run, WeightVersion
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping

RUNS = Mapping(Run, schema.RUNS, fixed="kind seed task_blob create_time")
LINEAGES = Mapping(Lineage, schema.LINEAGES, fixed="run policy number")
VERSIONS = Mapping(WeightVersion, schema.WEIGHT_VERSIONS, fixed="run policy lineage number")


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """All of them."""
    fleet.runs = {r.name: r for r in RUNS.read(connection, RUNS.select().order_by(schema.RUNS.c.create_time))}
    t = schema.LINEAGES.c
    query = LINEAGES.select().order_by(t.run, t.policy, t.number)
    fleet.lineages = {x.name: x for x in LINEAGES.read(connection, query)}
    v = schema.WEIGHT_VERSIONS.c
    query = VERSIONS.select().order_by(v.run, v.policy, v.lineage, v.number)
    fleet.versions = {x.name: x for x in VERSIONS.read(connection, query)}
