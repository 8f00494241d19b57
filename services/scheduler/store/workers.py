"""Workers and their sessions."""

import sqlalchemy as sa

from services.scheduler.core.model import Fleet, Session, Worker
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping

WORKERS = Mapping(Worker, schema.WORKERS)
SESSIONS = Mapping(Session, schema.SESSIONS)


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """All of them: ended sessions stay until they are deleted, so that a fenced worker is told what it is."""
    fleet.workers = {w.name: w for w in WORKERS.read(connection, WORKERS.select())}
    order = schema.SESSIONS.c.worker, schema.SESSIONS.c.epoch
    fleet.sessions = {s.name: s for s in SESSIONS.read(connection, SESSIONS.select().order_by(*order))}
