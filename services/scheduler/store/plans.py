"""Plans, proposed or applied."""

import sqlalchemy as sa

from services.scheduler.core.model import Fleet, Plan
from services.scheduler.store import schema
from services.scheduler.store.mapping import Mapping
from services.scheduler.store.paging import page

PLANS = Mapping(Plan, schema.PLANS)

RECENT = 64
"""Newest plans that are loaded: a proposed one is kept for an hour."""


def load(connection: sa.Connection, fleet: Fleet) -> None:
    """The RECENT newest, oldest first."""
    fleet.plans = {p.name: p for p in reversed(newest_first(connection, "", RECENT))}


def newest_first(connection: sa.Connection, after: str, limit: int) -> list[Plan]:
    """A page of plans, newest first."""
    return page(connection, PLANS, [], ("create_time", "name"), after=after, limit=limit, newest_first=True)
