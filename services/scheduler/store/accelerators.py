"""Nodes and their accelerators."""

import sqlalchemy as sa

from services.scheduler.core.model import Accelerator, Fleet, Node
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping

NODES = Mapping(Node, schema.NODES)
ACCELERATORS = Mapping(Accelerator, schema.ACCELERATORS)


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """All of them."""
    fleet.nodes = {n.name: n for n in NODES.read(connection, NODES.select().order_by(schema.NODES.c.name))}
    query = ACCELERATORS.select().order_by(schema.ACCELERATORS.c.name)
    fleet.accelerators = {a.name: a for a in ACCELERATORS.read(connection, query)}
