"""Conditions and pages that all nouns share. A page begins after a row that is named, not at an offset."""

from collections.abc import Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from services.scheduler.store.mapping import Mapping

E = TypeVar("E")

MAX_PAGE = 100_000
"""Rows that one read returns at most."""


def bounded(limit: int) -> int:
    """`limit` within 1 and MAX_PAGE."""
    return max(1, min(limit, MAX_PAGE))


def under(column: sa.ColumnElement[str], prefix: str) -> sa.ColumnElement[bool]:
    """Names that are `prefix` or lie below it: "runs/a" has "runs/a/groups/1" and not "runs/ab"."""
    stem = prefix.rstrip("/")
    below = sa.and_(column >= f"{stem}/", column < f"{stem}0")  # "0" is the character after "/"
    return below if prefix.endswith("/") else sa.or_(column == stem, below)


def page(
    connection: sa.Connection,
    mapping: Mapping[E],
    conditions: Sequence[sa.ColumnElement[bool]],
    order: Sequence[str],
    *,
    after: str = "",
    limit: int,
    newest_first: bool = False,
) -> list[E]:
    """At most `limit` entities in the order of columns `order`, which end with the name, after the one named `after`.

    An `after` that is gone (a deleted command) ends the listing.
    """
    columns: list[sa.Column[Any]] = [mapping.table.c[name] for name in order]
    query = mapping.select().where(*conditions)
    if after:
        row = connection.execute(sa.select(*columns).where(mapping.table.c.name == after)).first()
        if row is None:
            return []
        place, mark = sa.tuple_(*columns), sa.tuple_(*row)
        query = query.where(place < mark if newest_first else place > mark)
    query = query.order_by(*(c.desc() if newest_first else c for c in columns)).limit(bounded(limit))
    return mapping.read(connection, query)


def named(connection: sa.Connection, mapping: Mapping[E], name: str) -> E | None:
    """The entity of that name."""
    found = mapping.read(connection, mapping.select().where(mapping.table.c.name == name))
    return found[0] if found else None


def by_name(
    connection: sa.Connection, mapping: Mapping[E], prefix: str, states: Sequence[str], *, after: str, limit: int
) -> list[E]:
    """A page of the entities at or below `prefix` in one of `states`, by name, after the name `after`."""
    t = mapping.table.c
    conditions: list[sa.ColumnElement[bool]] = [t.name > after]
    if prefix:
        conditions.append(under(t.name, prefix))
    if states:
        state = t.get("state", t.get("health"))
        conditions.append(sa.false() if state is None else state.in_(states))
    return page(connection, mapping, conditions, ("name",), limit=limit)
