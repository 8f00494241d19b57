"""The one row that says whose term it is."""

import sqlalchemy as sa

from services.scheduler.store import schema


class Deposed(Exception):
    """A newer term has begun: nothing that this leader writes takes effect any more."""

    def __init__(self, term: int, newer: int) -> None:
        super().__init__(f"term {term} is over, the database says {newer}; this scheduler must stop leading")
        self.term, self.newer = term, newer


def acquire(connection: sa.Connection) -> int:
    """Begins a new term and returns it. On Postgres it waits for a transaction of the old leader to end."""
    t = schema.LEADER
    term: int = connection.execute(sa.update(t).values(term=t.c.term + 1).returning(t.c.term)).scalar_one()
    return term


def hold(connection: sa.Connection, term: int) -> None:
    """Keeps the term from ending until this transaction has; Deposed if it has ended already."""
    newest = connection.execute(sa.select(schema.LEADER.c.term).with_for_update()).scalar_one()
    if newest != term:
        raise Deposed(term, newest)


def counters(connection: sa.Connection) -> tuple[int, int, int]:
    """(term, revision, next generation)."""
    t = schema.LEADER.c
    row = connection.execute(sa.select(t.term, t.revision, t.next_generation)).one()
    return row.term, row.revision, row.next_generation


def count(connection: sa.Connection, revision: int, next_generation: int) -> None:
    """Notes where the live state stands after this transaction."""
    connection.execute(sa.update(schema.LEADER).values(revision=revision, next_generation=next_generation))
