"""Commands to workers."""

import sqlalchemy as sa

from services.scheduler.core.model import Command, Fleet
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.paging import page

COMMANDS = Mapping(
    Command, schema.COMMANDS, fixed="session worker kind subject payload sequence generation cause create_time"
)


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """Those not ended, in the order of issue."""
    t = schema.COMMANDS.c
    query = COMMANDS.select().where(sa.text(schema.LIVE_COMMAND)).order_by(t.session, t.sequence, t.name)
    fleet.commands = {c.name: c for c in COMMANDS.read(connection, query)}


def newest_first(
    connection: sa.Connection, after: str, limit: int, worker: str = "", subject: str = ""
) -> list[Command]:
    """A page of commands, newest first, of one worker or about one thing if named."""
    t = schema.COMMANDS.c
    conditions = [c == v for c, v in ((t.worker, worker), (t.subject, subject)) if v]
    return page(connection, COMMANDS, conditions, ("create_time", "name"), after=after, limit=limit, newest_first=True)
